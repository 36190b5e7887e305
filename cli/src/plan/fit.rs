//! `ulysses plan --fit`: the cheapest settings that fit, and their config.

use super::budget::{Available, per_rank};
use super::choices::notation;
use super::json::{choice, joined, memory};
use super::table::{Table, bytes, flops};
use super::{Inputs, PlanArgs, assumed};
use crate::{Failure, OrFail, print};
use anyhow::{Context, anyhow};
use serde_json::{Value, json};
use std::fmt::{self, Display, Formatter};
use ulysses::config::{Backend, Config};
use ulysses::device::DeviceKind;
use ulysses::estimate::{Candidate, FIT_CRITERION, Fit, MemoryBudget};
use ulysses::memory::Category;
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
        print(&report)?;
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

    fn choices(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let budget = per_rank(self.available.budget.rank_bytes, self.available.reserve_bytes);
        writeln!(f, "\nsettings that fit into {budget}, cheapest first")?;
        let choices = &self.fit.choices;
        let mut table = Table::new(SETTINGS, choices.iter().map(|choice| (choice, settings(choice))));
        table.push_bytes("peak per rank", |choice| choice.plan.peak_bytes);
        table.push_bytes("offloaded per rank", |choice| choice.plan.offloaded_bytes);
        table.push_host();
        table.push("recomputed per rank and step", |choice| flops(choice.plan.recompute_flops));
        table.push_bytes("sent per rank and step", |choice| choice.plan.sent.total());
        table.push_times();
        table.write(f)?;
        writeln!(f, "  cheapest: {}", self.criterion())?;
        match self.available.budget.host_bytes_per_node {
            Some(host) => writeln!(f, "  host memory: at most {} per node", bytes(host as f64)),
            None if choices.iter().any(|choice| choice.host_bytes_per_node > 0) => {
                writeln!(f, "  host memory: not checked; set --host-memory-gib")
            }
            None => Ok(()),
        }
    }

    fn nearest(&self, f: &mut Formatter<'_>, nearest: &Candidate) -> fmt::Result {
        let (plan, size) = (&nearest.plan, |amount: u64| bytes(amount as f64));
        let MemoryBudget { rank_bytes, host_bytes_per_node } = self.available.budget;
        let [mesh, micro_batch, stage, layers, attention, tiles, chunks, offloaded] = settings(nearest);
        writeln!(
            f,
            "\nNOTHING FITS into {}; nearest of those planned: dp × sp {mesh}, micro batch × accumulation {micro_batch}, ZeRO stage {stage}, recomputed \
             layers: {layers}, saved attention output: {attention}, tile tokens: {tiles}, head chunks: {chunks}, offloaded: {offloaded}",
            per_rank(rank_bytes, self.available.reserve_bytes)
        )?;
        let excess = nearest.excess.unwrap_or_default();
        if excess.rank_bytes > 0 {
            let mut parts: Vec<(Category, u64)> =
                Category::ALL.into_iter().zip(plan.peak_by_category).filter(|(_, part)| *part > 0).collect();
            parts.sort_by_key(|(_, part)| std::cmp::Reverse(*part));
            let parts: Vec<String> =
                parts.iter().map(|(category, part)| format!("{} {}", category.name(), size(*part))).collect();
            writeln!(
                f,
                "limit   rank {}: peak {} exceeds the available memory by {}, during {}: {}",
                plan.rank,
                size(plan.peak_bytes),
                size(excess.rank_bytes),
                plan.peak_at,
                parts.join(", ")
            )?;
        }
        if let Some(limit) = host_bytes_per_node.filter(|_| excess.host_bytes_per_node > 0) {
            let [needed, limit, lacking] =
                [nearest.host_bytes_per_node, limit, excess.host_bytes_per_node].map(size);
            writeln!(
                f,
                "limit   host memory of a node: {needed} exceeds the available {limit} by {lacking}"
            )?;
        }
        let longest = nearest.max_seq_len.map_or("none".to_owned(), |tokens| format!("{tokens} tokens"));
        writeln!(f, "longest sequence that fits with these settings: {longest}")
    }
}

impl Display for FitReport {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Fit { choices, nearest, tried, combinations } = &self.fit;
        writeln!(f, "{}", self.head)?;
        writeln!(f, "planned {tried} of {combinations} combinations of settings; these rule out the others")?;
        match nearest {
            Some(nearest) => self.nearest(f, nearest),
            None if choices.is_empty() => {
                writeln!(f, "\nNOTHING FITS: every step is too large to be planned")
            }
            None => self.choices(f),
        }
    }
}

/// The columns of [`settings`].
const SETTINGS: [&str; 8] = [
    "dp × sp",
    "micro batch × accumulation",
    "ZeRO stage",
    "recomputed layers",
    "saved attention output",
    "tile tokens",
    "head chunks",
    "offloaded",
];

/// Describes the settings of a choice.
fn settings(choice: &Candidate) -> [String; SETTINGS.len()] {
    let config = &choice.workload.config;
    let ulysses = &config.ulysses;
    let layers = match (ulysses.activation_checkpointing, ulysses.activation_checkpointing_interval) {
        (false, _) => "none".to_owned(),
        (true, 1) => "all".to_owned(),
        (true, interval) => format!("1 in {interval}"),
    };
    let offloaded = [
        (config.zero.offload_optimizer.device() != "none", "optimizer"),
        (config.zero.offload_param.device() != "none", "parameters"),
        (config.activation_checkpointing.cpu_checkpointing, "checkpoints"),
    ];
    let offloaded: Vec<&str> =
        offloaded.into_iter().filter(|(is_on, _)| *is_on).map(|(_, what)| what).collect();
    [
        notation(choice),
        format!("{} × {}", config.micro_batch_size, config.gradient_accumulation_steps),
        config.zero_axes().with_stage(config.zero.stage),
        layers,
        if config.saves_attention_output() { "yes" } else { "no" }.to_owned(),
        ulysses.tile_tokens.map_or("all".to_owned(), |tokens| tokens.to_string()),
        ulysses.head_chunks.to_string(),
        if offloaded.is_empty() { "nothing".to_owned() } else { offloaded.join(" + ") },
    ]
}
