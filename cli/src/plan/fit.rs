//! `ulysses plan --fit`: the cheapest settings that fit, and their config.

use super::budget::Available;
use super::json::{choice, joined, memory};
use super::{Inputs, PlanArgs, assumed};
use crate::failure::{Failure, OrFail};
use crate::output::print;
use crate::template::render;
use anyhow::{Context, anyhow};
use serde_json::{Value, json};
use ulysses::config::{Backend, Config};
use ulysses::device::DeviceKind;
use ulysses::estimate::{Candidate, FIT_CRITERION, Fit};
use ulysses::monitor::counted;

/// The result of a search, with its inputs.
struct FitReport {
    head: String,
    available: Available,
    has_times: bool,
    fit: Fit,
    /// The configs of the choices, as JSON.
    configs: Vec<Value>,
}

pub(super) fn run(args: &PlanArgs) -> Result<(), Failure> {
    let Inputs { name, workload, machine, available, seq_len } = Inputs::read(args)?;
    let available = available.ok_or_else(|| Failure::Usage(anyhow!("--fit needs --memory-gib")))?;
    let config = &workload.config;
    let ranks = config.world_size();
    let longest = config.require_seq_len().or_usage()?;
    let assumption = if args.config.is_none() { "assumed " } else { "" };
    let head = format!(
        "{name}, {}, {} per node, sequences of {longest} tokens\n\
         {assumption}train_batch_size {}, {}",
        counted(ranks, "rank"),
        workload.ranks_per_node,
        config.train_batch_size,
        assumed::basics(config, workload.device)
    );
    let fit = workload.fit(available.budget, machine.as_ref()).or_usage()?;
    if fit.tried == 0 {
        return Err(Failure::Usage(anyhow!(
            "no mesh of {} divides train_batch_size {} and the {} tokens of a sequence: give another --batch-size or --seq-len",
            counted(ranks, "rank"),
            config.train_batch_size,
            config.require_seq_len().or_usage()?
        )));
    }
    let configs = fit.choices.iter().map(|choice| written(choice, args, seq_len)).collect::<Result<_, _>>();
    let (has_times, configs) = (machine.is_some(), configs.or_run()?);
    let report = FitReport { head, available, has_times, fit, configs };
    if args.json {
        print(format_args!("{:#}\n", report.json()))?;
    } else {
        print(report.text().or_run()?)?;
    }
    match (report.configs.first(), &args.output) {
        (Some(config), Some(file)) => super::write_file(file, "--output", format!("{config:#}\n")),
        (None, Some(file)) => {
            Err(Failure::Run(anyhow!("--output: nothing fits, so {} is not written", file.display())))
        }
        (Some(config), None) if !args.json => print(format_args!("\nconfig of the first:\n{config:#}\n")),
        _ => Ok(()),
    }
}

/// Returns the config of a choice with the sequence lengths of the original one. Its backend implies the device.
fn written(choice: &Candidate, args: &PlanArgs, seq_len: Option<usize>) -> anyhow::Result<Value> {
    let mut config: Config = choice.workload.config.clone();
    config.ulysses.seq_len = seq_len;
    if args.seq_len.is_some() {
        config.ulysses.seq_len_schedule.clear();
    }
    if choice.workload.device == DeviceKind::Cuda {
        config.ulysses.backend = Backend::Nccl;
    }
    serde_json::to_value(&config).context("cannot write the config")
}

impl FitReport {
    fn json(&self) -> Value {
        let nearest = self.fit.nearest.as_ref();
        let nearest =
            nearest.map(|nearest| joined([choice(nearest), json!({ "max_seq_len": nearest.max_seq_len })]));
        let choices = self.fit.choices.iter().zip(&self.configs);
        let choices = choices.map(|(found, config)| joined([choice(found), json!({ "config": config })]));
        json!({
            "criterion": self.criterion(),
            "budget": memory(self.available),
            "tried": self.fit.tried,
            "combinations": self.fit.combinations,
            "choices": choices.collect::<Vec<_>>(),
            "config": self.configs.first(),
            "nearest": nearest,
        })
    }

    fn criterion(&self) -> String {
        if self.has_times { format!("step time, then {FIT_CRITERION}") } else { FIT_CRITERION.to_owned() }
    }

    fn text(&self) -> anyhow::Result<String> {
        let shown = json!({
            "head": self.head,
            "has_times": self.has_times,
            "available": self.available.per_rank(),
            "excess": self.fit.nearest.as_ref().and_then(|nearest| nearest.excess),
        });
        render("fit.txt", joined([self.json(), shown]))
    }
}
