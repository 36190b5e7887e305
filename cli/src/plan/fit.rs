//! `ulysses plan --fit`: the cheapest settings that fit, and their config.

use super::budget::{Available, per_rank};
use super::choices::{ring, times};
use super::table::{bytes, flops, write_table};
use super::{Inputs, PlanArgs, assumed};
use crate::{Failure, OrFail, print};
use anyhow::{Context, anyhow};
use serde_json::{Value, json};
use std::fmt::{self, Display, Formatter};
use ulysses::config::{Backend, Config, PartitionAxes};
use ulysses::device::DeviceKind;
use ulysses::estimate::{Criteria, FIT_CRITERION, Fit, FitChoice, MemoryBudget};
use ulysses::memory::Category;
use ulysses::monitor::counted;

/// The result of a search, with its inputs.
struct FitReport {
    head: String,
    available: Available,
    has_times: bool,
    fit: Fit,
    /// The longest sequence that fits on the nearest configuration.
    max_seq_len: Option<usize>,
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
    let criteria = Criteria { budget: Some(available.budget), machine: machine.as_ref() };
    let fit = workload.fit(criteria, available.budget).or_usage()?;
    if fit.tried == 0 {
        return Err(Failure::Usage(anyhow!(
            "no mesh of {} divides train_batch_size {} and the {} tokens of a sequence: give another --batch-size or --seq-len",
            counted(ranks, "rank"),
            config.train_batch_size,
            config.require_seq_len().or_usage()?
        )));
    }
    let max_seq_len = match &fit.nearest {
        Some(nearest) => nearest.workload.max_seq_len(available.budget).or_usage()?,
        None => None,
    };
    let configs = fit.choices.iter().map(|choice| written(choice, args, seq_len)).collect::<Result<_, _>>();
    let report = FitReport {
        head,
        available,
        has_times: machine.is_some(),
        fit,
        max_seq_len,
        configs: configs.or_run()?,
    };
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
fn written(choice: &FitChoice, args: &PlanArgs, seq_len: Option<usize>) -> anyhow::Result<Value> {
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
        let Available { budget, reserve_bytes } = self.available;
        let nearest = self.fit.nearest.as_ref().map(|choice| {
            let mut json = choice_json(choice);
            json["max_seq_len"] = json!(self.max_seq_len);
            json
        });
        let choices = self.fit.choices.iter().zip(&self.configs).map(|(choice, config)| {
            let mut json = choice_json(choice);
            json["config"] = config.clone();
            json
        });
        json!({
            "criterion": self.criterion(),
            "budget": {
                "bytes": budget.rank_bytes, "reserve_bytes": reserve_bytes,
                "host_bytes_per_node": budget.host_bytes_per_node,
            },
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
        let mut head = vec![
            "dp × sp",
            "micro batch × accumulation",
            "ZeRO stage",
            "recomputed layers",
            "saved attention output",
            "tile tokens",
            "head chunks",
            "offloaded",
            "peak per rank",
            "offloaded per rank",
            "host memory per node",
            "recomputed per rank and step",
            "sent per rank and step",
        ];
        if self.has_times {
            head.extend(["step time (s)", "tokens/s"]);
        }
        let mut rows = vec![head.into_iter().map(str::to_owned).collect::<Vec<_>>()];
        rows.extend(self.fit.choices.iter().map(|choice| {
            let mut cells = settings(choice);
            let plan = &choice.plan;
            let host = choice.workload.host_bytes_per_node(plan);
            cells.extend([plan.peak_bytes, plan.offloaded_bytes, host].map(|amount| bytes(amount as f64)));
            cells.extend([flops(plan.recompute_flops), bytes(plan.sent.total() as f64)]);
            if self.has_times {
                cells.extend(times(choice.throughput.as_ref()));
            }
            cells
        }));
        write_table(f, &rows)?;
        writeln!(f, "  cheapest: {}", self.criterion())?;
        let needs_host = |choice: &FitChoice| choice.workload.host_bytes_per_node(&choice.plan) > 0;
        match self.available.budget.host_bytes_per_node {
            Some(host) => writeln!(f, "  host memory: at most {} per node", bytes(host as f64)),
            None if self.fit.choices.iter().any(needs_host) => {
                writeln!(f, "  host memory: not checked; set --host-memory-gib")
            }
            None => Ok(()),
        }
    }

    fn nearest(&self, f: &mut Formatter<'_>, choice: &FitChoice) -> fmt::Result {
        let (plan, size) = (&choice.plan, |amount: u64| bytes(amount as f64));
        let MemoryBudget { rank_bytes, host_bytes_per_node } = self.available.budget;
        let [mesh, micro_batch, stage, layers, attention, tiles, chunks, offloaded] =
            settings(choice).try_into().unwrap_or_default();
        writeln!(
            f,
            "\nNOTHING FITS into {}; nearest of those planned: dp × sp {mesh}, micro batch × accumulation {micro_batch}, ZeRO stage {stage}, recomputed \
             layers: {layers}, saved attention output: {attention}, tile tokens: {tiles}, head chunks: {chunks}, offloaded: {offloaded}",
            per_rank(rank_bytes, self.available.reserve_bytes)
        )?;
        if plan.peak_bytes > rank_bytes {
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
                size(plan.peak_bytes - rank_bytes),
                plan.peak_at,
                parts.join(", ")
            )?;
        }
        let host = choice.workload.host_bytes_per_node(plan);
        if let Some(limit) = host_bytes_per_node.filter(|limit| host > *limit) {
            let lacking = size(host - limit);
            writeln!(
                f,
                "limit   host memory of a node: {} exceeds the available {} by {lacking}",
                size(host),
                size(limit)
            )?;
        }
        let longest = self.max_seq_len.map_or("none".to_owned(), |tokens| format!("{tokens} tokens"));
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

/// Describes the settings of a choice, in the order of the table.
fn settings(choice: &FitChoice) -> Vec<String> {
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
    let sharding = ring(config.mesh.sp_size, ulysses.ring_size);
    let offloaded: Vec<&str> =
        offloaded.into_iter().filter(|(is_on, _)| *is_on).map(|(_, what)| what).collect();
    vec![
        format!("{} × {}{sharding}", config.mesh.dp_size, config.mesh.sp_size),
        format!("{} × {}", config.micro_batch_size, config.gradient_accumulation_steps),
        config.zero_axes().with_stage(config.zero.stage),
        layers,
        if config.saves_attention_output() { "yes" } else { "no" }.to_owned(),
        ulysses.tile_tokens.map_or("all".to_owned(), |tokens| tokens.to_string()),
        ulysses.head_chunks.to_string(),
        if offloaded.is_empty() { "nothing".to_owned() } else { offloaded.join(" + ") },
    ]
}

fn choice_json(choice: &FitChoice) -> Value {
    let (config, plan) = (&choice.workload.config, &choice.plan);
    let ulysses = &config.ulysses;
    let axes: PartitionAxes = config.zero_axes();
    let mut json = json!({
        "dp": config.mesh.dp_size, "sp": config.mesh.sp_size, "ring_size": ulysses.ring_size,
        "micro_batch_size": config.micro_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "zero_stage": config.zero.stage, "zero_partition_axes": axes,
        "activation_checkpointing": ulysses.activation_checkpointing,
        "activation_checkpointing_interval": ulysses.activation_checkpointing_interval,
        "save_attention_output": config.saves_attention_output(),
        "offload_checkpoints": config.activation_checkpointing.cpu_checkpointing,
        "offload_optimizer": config.zero.offload_optimizer.device(),
        "offload_param": config.zero.offload_param.device(),
        "tile_tokens": ulysses.tile_tokens, "head_chunks": ulysses.head_chunks,
        "rank": plan, "host_bytes_per_node": choice.workload.host_bytes_per_node(plan),
    });
    let throughput = serde_json::to_value(&choice.throughput).unwrap_or_default();
    if let (Some(json), Value::Object(throughput)) = (json.as_object_mut(), throughput) {
        json.extend(throughput);
    }
    json
}
