//! `ulysses plan`.

mod assumed;
mod budget;
mod fit;
mod inputs;
mod json;
pub(crate) mod pictures;
mod view;

use super::DeviceArg;
use super::arguments::at_least_1;
use super::config_flags::ConfigFlags;
use crate::failure::{Failure, OrFail};
use crate::output::{log_line, print};
use anyhow::{Context, anyhow};
use budget::{Available, MemoryFlags};
pub(crate) use inputs::model;
use inputs::{check_model, resolve};
use std::path::{Path, PathBuf};
use ulysses::config::MachineProfile;
use ulysses::engine::check_offload_device;
use ulysses::estimate::{Alternative, Candidate, CopiedBytes, Criteria, MeshChoice, StagePlan, Workload};
use ulysses::trainer::job::{check_layers, config_warnings, likely_device, resolve_ring};

/// The error where there is no sequence length to plan.
const NO_SEQUENCE_FITS: &str =
    "no sequence fits: even one token per rank needs more than --memory-gib or --host-memory-gib";

/// Default number of ranks per node, as on common GPU nodes.
const RANKS_PER_NODE: usize = 8;

#[derive(clap::Args)]
pub(super) struct PlanArgs {
    /// DeepSpeed-style JSON config [default with --model: bf16, AdamW, ZeRO stage 3, activation checkpointing, one
    /// sequence per dp rank, with --fit one per rank].
    config: Option<PathBuf>,
    /// Preset (nano, tiny, small, base), published model (llama3-8b, Llama-3.1-70B, Qwen3-8B, Mistral-7B-v0.3, …), or
    /// Hugging Face config.json or a directory with one. Needs no weights.
    #[arg(long)]
    model: Option<String>,
    #[command(flatten)]
    flags: ConfigFlags,
    /// Search the cheapest settings that fit --memory-gib, and print them as a config.
    ///
    /// Searches mesh, micro batch, ZeRO stage and its axes, activation checkpointing, tiles, head chunks and offload for
    /// the same number of ranks and the same global batch. Everything else is as in CONFIG.
    #[arg(long, requires = "memory_gib", conflicts_with = "html")]
    fit: bool,
    /// Number of ranks for --fit [default: those of the mesh].
    #[arg(long, conflicts_with = "mesh", value_parser = at_least_1::<usize>)]
    ranks: Option<usize>,
    /// Write the cheapest config of --fit to a file instead of printing it.
    #[arg(long, requires = "fit", value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    memory: MemoryFlags,
    /// Tokens per sequence, over all sp ranks [default: the config's longest, else the longest that fits
    /// --memory-gib].
    #[arg(long, value_parser = at_least_1::<usize>)]
    seq_len: Option<usize>,
    /// Mesh: `DPxSP`, `DPxSPxTP`, `pp=2,dp=2,sp=2,tp=2` or `dp_replicate=2,dp_shard=2,sp=2`. Replaces sizes of the config.
    #[arg(long, allow_hyphen_values = true)]
    mesh: Option<String>,
    /// Device of the ranks: `cpu`, `cuda` or `auto`, which is cuda if the backend is nccl, else as in `ulysses train` on
    /// this machine.
    ///
    /// Decides where offloaded tensors go: host memory on GPUs, files on CPUs.
    #[arg(long, default_value = "auto", hide_possible_values = true)]
    device: DeviceArg,
    /// Consecutive ranks per node [default: the value of --machine, else 8].
    #[arg(long, value_parser = at_least_1::<usize>)]
    ranks_per_node: Option<usize>,
    /// Machine profile, from `ulysses bench profile` or configs/machines: predicts the step time of the config, of every
    /// change and of every mesh.
    #[arg(long, value_name = "FILE")]
    machine: Option<PathBuf>,
    /// Tokens per document in packed sequences [default: one document per sequence].
    #[arg(long, value_parser = at_least_1::<usize>)]
    document_len: Option<usize>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Write a self-contained HTML page with a chart of the memory over a step.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// The content of a plan.
struct Report {
    /// The settings that are assumed without a config.
    assumed: Option<String>,
    /// The model's name.
    name: String,
    available: Option<Available>,
    /// The workload as configured, which is also the first of the alternatives.
    planned: Candidate,
    /// The plans of its pipeline stages, if there are several.
    stages: Vec<StagePlan>,
    seq_len: usize,
    /// Host memory of copies of checkpoints, if the config wants them.
    copies_in_memory: Option<CopiedBytes>,
    alternatives: Vec<Alternative>,
    meshes: Vec<MeshChoice>,
}

pub(super) fn run(args: PlanArgs) -> Result<(), Failure> {
    // Started by its first use, which panics if it fails.
    rayon::ThreadPoolBuilder::new()
        .build_global()
        .context("cannot start the threads of the plan")
        .or_run()?;
    if args.config.is_none() && args.model.is_none() {
        return Err(Failure::Usage(anyhow!("give a CONFIG, or --model for a plan without one")));
    }
    if args.fit {
        return fit::run(&args);
    }
    let report = report(&args)?;
    if let Some(file) = &args.html {
        write_file(file, "--html", view::page(&report).or_run()?)?;
    }
    if args.json {
        return print(format_args!("{:#}\n", json::plan(&report)));
    }
    print(view::text(&report).or_run()?)
}

/// Writes the output file of a flag.
pub(super) fn write_file(path: &Path, flag: &str, content: String) -> Result<(), Failure> {
    ulysses::regular_file::write(path, content)
        .with_context(|| format!("{flag}: cannot write {}", path.display()))
        .or_run()?;
    log_line(format_args!("written to {}", path.display()));
    Ok(())
}

/// The workload, machine and memory that the arguments describe.
struct Inputs {
    /// The model's name.
    name: String,
    workload: Workload,
    machine: Option<MachineProfile>,
    available: Option<Available>,
    /// The sequence length of the config; the workload's is the longest of its schedule.
    seq_len: Option<usize>,
}

impl Inputs {
    fn read(args: &PlanArgs) -> Result<Self, Failure> {
        let mut config = resolve(args)?;
        let seq_len = config.ulysses.seq_len;
        if args.seq_len.is_none() {
            config.ulysses.seq_len = config.longest_seq_len();
        }
        let model = model(&config)?;
        let name = config.ulysses.model.clone().unwrap_or_default();
        let machine = args.machine.as_deref().map(MachineProfile::from_file);
        let machine = machine.transpose().context("--machine").or_usage()?;
        let stated = config.ulysses.mesh.as_ref().and_then(|mesh| mesh.mesh().ok()?.ranks_per_node);
        let ranks_per_node =
            args.ranks_per_node.or(stated).or(machine.as_ref().map(|machine| machine.ranks_per_node));
        let (document_len, ranks_per_node) = (args.document_len, ranks_per_node.unwrap_or(RANKS_PER_NODE));
        resolve_ring(&model, &mut config, ranks_per_node);
        match args.fit {
            true => check_layers(&model, &config)?,
            false => check_model(&model, &config)?,
        }
        let device = likely_device(args.device.kind(), Some(config.ulysses.backend));
        let available = args.memory.available(device)?;
        check_offload_device(&config, device).or_usage()?;
        if let Some(path) = &args.config {
            config_warnings(&config, path, device).iter().for_each(log_line);
        }
        let workload = Workload { config, model, document_len, ranks_per_node, device };
        Ok(Self { name, workload, machine, available, seq_len })
    }
}

fn report(args: &PlanArgs) -> Result<Report, Failure> {
    let Inputs { name, workload, machine, available, .. } = Inputs::read(args)?;
    let budget = available.map(|available| available.budget);
    let workload = match (workload.config.ulysses.seq_len, budget) {
        (None, Some(budget)) => {
            let longest = workload.max_seq_len(budget).or_usage()?;
            workload.with_seq_len(longest.context(NO_SEQUENCE_FITS).or_run()?)
        }
        _ => workload,
    };
    let criteria = Criteria { budget, machine: machine.as_ref() };
    if let Some(machine) = criteria.machine {
        // Before the search, which takes long: without a rate that the config needs there is no plan.
        workload.candidate(budget).or_usage()?.decided.step_time(machine).or_usage()?;
    }
    let assumed = args.config.is_none().then(|| assumed::settings(&workload.config, workload.device));
    let alternatives = workload.alternatives(criteria).or_usage()?;
    let planned = alternatives[0].candidate.clone();
    let stages = match planned.decided.config.mesh.pp_size {
        1 => Vec::new(),
        _ => planned.decided.stage_plans().or_usage()?,
    };
    let seq_len = workload.config.require_seq_len().or_usage()?;
    Ok(Report {
        assumed,
        copies_in_memory: workload.copied_bytes().or_usage()?,
        meshes: workload.meshes(criteria).or_usage()?,
        name,
        available,
        planned,
        stages,
        seq_len,
        alternatives,
    })
}
