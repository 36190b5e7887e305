//! `ulysses plan`.

mod choices;
mod html;
pub(crate) mod pictures;
mod scaling;
pub(crate) mod table;
mod text;

use super::arguments::at_least_1;
use super::config_flags::ConfigFlags;
use super::model::{check_config, check_exchange, describe};
use super::{DeviceArg, Failure, OrFail, note, print, training_shape};
use crate::html::chart::drawing;
use anyhow::{Context, anyhow};
use serde::Serialize;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use ulysses::config::{Config, MachineProfile, Overrides, ParameterGroup, RawConfig};
use ulysses::data::Tokenizer;
use ulysses::device::DeviceKind;
use ulysses::engine::check_offload_device;
use ulysses::estimate::scaling::{self as traffic, ModelScaling};
use ulysses::estimate::{Alternative, Criteria, MeshChoice, RankPlan, StepTime, Workload};
use ulysses::model::{LlamaConfig, PRESETS, shape};

const GIB: f64 = (1_u64 << 30) as f64;

/// Of a usual machine with GPUs.
const RANKS_PER_NODE: usize = 8;

#[derive(clap::Args)]
pub(super) struct PlanArgs {
    /// DeepSpeed-style JSON config.
    #[arg(required_unless_present = "scaling", conflicts_with = "scaling")]
    config: Option<PathBuf>,
    /// Preset (nano, tiny, small, base), published shape (llama2-7b, llama3-8b, llama3-70b, llama3-405b),
    /// or Hugging Face config.json or a directory with one; no weights are needed.
    #[arg(long)]
    model: Option<String>,
    #[command(flatten)]
    flags: ConfigFlags,
    /// Memory of a rank in GiB: what fits, and how long a sequence.
    #[arg(long, visible_alias = "gib-per-rank")]
    memory_gib: Option<f64>,
    /// Tokens in a row, over all sp ranks; without it the config's longest, and without that the longest that fits.
    #[arg(long)]
    seq_len: Option<usize>,
    /// Ranks: `DPxSP`, `dp=2,sp=2` or `dp_replicate=2,dp_shard=2,sp=2`. Must not contradict the config.
    #[arg(long, allow_hyphen_values = true)]
    mesh: Option<String>,
    /// What ranks compute on, and so where what is offloaded waits: without it a GPU where the backend is nccl, else the CPU.
    #[arg(long, conflicts_with = "scaling")]
    device: Option<DeviceArg>,
    /// Consecutive ranks that share a node: those of --machine without it, or 8.
    #[arg(long, value_parser = at_least_1::<usize>)]
    ranks_per_node: Option<usize>,
    /// Profile of a machine, from `ulysses bench profile` or configs/machines: predicts the time of a step, here and
    /// with every change and mesh, and says which mesh is fastest.
    #[arg(long, value_name = "FILE", conflicts_with = "scaling")]
    machine: Option<PathBuf>,
    /// Tokens of the documents that rows are packed with; without it a row is one document.
    #[arg(long, value_parser = at_least_1::<usize>)]
    document_len: Option<usize>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Draw the memory over a step and the growth of the traffic, as a page of HTML that needs no other file.
    #[arg(long, value_name = "FILE", conflicts_with = "scaling")]
    html: Option<PathBuf>,
    /// Instead of a plan: bytes that a rank sends in a layer when 8 to 1024 ranks and their tokens grow together,
    /// for Ulysses, Megatron sequence parallelism and ring attention.
    #[arg(long, conflicts_with_all = ["model", "memory_gib", "seq_len", "mesh", "set", "lr", "batch_size", "zero_stage"])]
    scaling: bool,
    /// Tokens of each rank in the scaling study.
    #[arg(long, default_value_t = 8192, value_parser = at_least_1::<usize>, requires = "scaling")]
    tokens_per_rank: usize,
    /// Draw the memory over a step, or the scaling study, to this file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// Everything that is told.
#[derive(Serialize)]
struct Report {
    device: &'static str,
    model: ModelReport,
    mesh: MeshReport,
    /// Ranks that are to share ZeRO's partitions, where that is stated.
    shard_size: Option<usize>,
    zero_stage: u8,
    /// Why the stage partitions nothing, where it does not.
    #[serde(skip_serializing_if = "Option::is_none")]
    zero_note: Option<String>,
    dtype: String,
    activation_checkpointing: bool,
    features: Features,
    micro_batch_size: usize,
    gradient_accumulation_steps: usize,
    seq_len: usize,
    tokens_per_step: usize,
    rank: RankPlan,
    #[serde(skip_serializing_if = "Option::is_none")]
    step_time: Option<StepTime>,
    budget: Option<Budget>,
    alternatives: Vec<Alternative>,
    meshes: Vec<MeshChoice>,
    /// For pictures; `--scaling` tells it of well-known models.
    #[serde(skip)]
    scaling: ModelScaling,
}

#[derive(Serialize)]
struct ModelReport {
    name: String,
    parameters: usize,
    num_layers: usize,
    hidden_size: usize,
    num_heads: usize,
    num_kv_heads: usize,
    vocab_size: usize,
}

#[derive(Serialize)]
struct MeshReport {
    dp: usize,
    sp: usize,
    ranks_per_node: usize,
}

/// What bounds the memory of a step.
#[derive(Serialize)]
struct Features {
    activation_checkpointing_interval: usize,
    offload_checkpoints: bool,
    offload_optimizer: &'static str,
    offload_param: &'static str,
    tile_tokens: Option<NonZero<usize>>,
    head_chunks: usize,
    frozen_parameters: usize,
}

#[derive(Serialize)]
struct Budget {
    bytes: u64,
    fits: bool,
    max_seq_len: Option<usize>,
}

pub(super) fn run(args: PlanArgs) -> Result<(), Failure> {
    match &args.config {
        None => scaling::run(args.tokens_per_rank, args.svg.as_deref(), args.json),
        Some(path) => {
            let report = report(path, &args)?;
            if let Some(file) = &args.html {
                write_drawing(file, "--html", html::page_of(&report))?;
            }
            if let Some(file) = &args.svg {
                let memory = pictures::memory(&report.rank.timeline, &[]);
                write_drawing(file, "--svg", drawing(&[memory], 1))?;
            }
            if args.json {
                return print(format_args!("{}\n", serde_json::to_string_pretty(&report).or_run()?));
            }
            print(text::Text(&report))
        }
    }
}

/// Writes what the flag asks for.
fn write_drawing(path: &Path, flag: &str, drawing: String) -> Result<(), Failure> {
    std::fs::write(path, drawing)
        .with_context(|| format!("{flag}: cannot write {}", path.display()))
        .or_run()?;
    note(format_args!("drawn to {}", path.display()));
    Ok(())
}

fn report(path: &Path, args: &PlanArgs) -> Result<Report, Failure> {
    let shape = args.mesh.as_deref().map(training_shape).transpose()?;
    let overrides = Overrides {
        mesh: shape.map(|shape| (shape.dp, shape.sp)),
        shard_size: shape.and_then(|shape| shape.shard_size),
        seq_len: args.seq_len,
        model: args.model.clone(),
        ..Overrides::default()
    };
    let mut config =
        RawConfig::from_file_with(path, &args.flags.settings()).or_usage()?.resolve(&overrides).or_usage()?;
    if args.seq_len.is_none() {
        longest_rows(&mut config);
    }
    if let Some(seq_len) = config.ulysses.seq_len.filter(|&seq_len| u32::try_from(seq_len).is_err()) {
        let message =
            format!("`ulysses.seq_len` (--seq-len): rows have at most {} tokens, found {seq_len}", u32::MAX);
        return Err(Failure::Usage(anyhow!(message)));
    }
    let (name, model) = model(&config)?;
    // As training does.
    check_config(&model, &config)?;
    let seq_len = config.ulysses.seq_len.unwrap_or(config.mesh.sp_size);
    check_exchange(&model, (config.micro_batch_size, seq_len), &config, config.mesh.sp_size)?;
    let machine =
        args.machine.as_deref().map(MachineProfile::from_file).transpose().context("--machine").or_usage()?;
    let ranks_per_node = args.ranks_per_node.or(machine.as_ref().map(|machine| machine.ranks_per_node));
    let (document_len, ranks_per_node) = (args.document_len, ranks_per_node.unwrap_or(RANKS_PER_NODE));
    let budget = budget_bytes(args.memory_gib)?;
    let device = args.device.map_or_else(|| config.ulysses.backend.device(), DeviceKind::from);
    check_offload_device(&config, device).or_usage()?;
    let workload = Workload { config, model, document_len, ranks_per_node, device };
    let longest = budget.map(|bytes| workload.max_seq_len(bytes)).transpose().or_usage()?.flatten();
    let workload = match (workload.config.ulysses.seq_len, longest) {
        (None, Some(longest)) => workload.with_seq_len(longest),
        (None, None) if budget.is_some() => {
            let error = "no sequence fits: even one token for each rank needs more than --memory-gib";
            return Err(Failure::Run(anyhow!(error)));
        }
        _ => workload,
    };
    let rank = workload.plan().or_usage()?;
    let step_time = machine.as_ref().map(|machine| workload.step_time(machine)).transpose().or_usage()?;
    let budget = budget.map(|bytes| Budget { bytes, fits: rank.peak_bytes <= bytes, max_seq_len: longest });
    let budget_bytes = budget.as_ref().map(|budget| budget.bytes);
    let criteria = Criteria { budget_bytes, machine: machine.as_ref() };
    let alternatives = workload.alternatives(criteria).or_usage()?;
    let meshes = workload.meshes(criteria).or_usage()?;
    let Workload { config, model, .. } = workload;
    let is_frozen = |name: &str| ParameterGroup::is_frozen(&config.ulysses.parameter_groups, name);
    let features = Features {
        activation_checkpointing_interval: config.ulysses.activation_checkpointing_interval,
        offload_checkpoints: config.activation_checkpointing.cpu_checkpointing,
        offload_optimizer: config.zero.offload_optimizer.device(),
        offload_param: config.zero.offload_param.device(),
        tile_tokens: config.ulysses.tile_tokens,
        head_chunks: config.ulysses.head_chunks,
        frozen_parameters: model.num_parameters_where(is_frozen),
    };
    let seq_len = config.require_seq_len().or_usage()?;
    let scaling = scaling_of(&name, &model, seq_len.div_ceil(config.mesh.sp_size))?;
    Ok(Report {
        device: device.name(),
        model: ModelReport {
            name,
            parameters: model.num_parameters(),
            num_layers: model.num_layers,
            hidden_size: model.hidden_size,
            num_heads: model.num_heads,
            num_kv_heads: model.num_kv_heads,
            vocab_size: model.vocab_size,
        },
        mesh: MeshReport { dp: config.mesh.dp_size, sp: config.mesh.sp_size, ranks_per_node },
        shard_size: config.zero.mics_shard_size,
        zero_stage: config.zero.stage.into(),
        zero_note: config.zero_partition_note(),
        dtype: config.precision.dtype().as_str().to_owned(),
        activation_checkpointing: config.ulysses.activation_checkpointing,
        features,
        micro_batch_size: config.micro_batch_size,
        gradient_accumulation_steps: config.gradient_accumulation_steps,
        seq_len,
        tokens_per_step: config.train_batch_size * seq_len,
        rank,
        step_time,
        budget,
        alternatives,
        meshes,
        scaling,
    })
}

/// What the longest rows need is what the run needs.
pub(super) fn longest_rows(config: &mut Config) {
    let scheduled = config.ulysses.seq_len_schedule.iter().map(|change| change.seq_len);
    config.ulysses.seq_len = scheduled.chain(config.ulysses.seq_len).max();
}

/// The traffic of a model from two ranks to all that it has heads for, and some more.
pub(super) fn scaling_of(
    name: &str,
    model: &LlamaConfig,
    tokens_per_rank: usize,
) -> Result<ModelScaling, Failure> {
    let most = (4 * model.num_heads).next_power_of_two();
    let ranks: Vec<usize> =
        std::iter::successors(Some(2), |ranks| Some(2 * ranks)).take_while(|ranks| *ranks <= most).collect();
    traffic::of_model(name.to_owned(), model, tokens_per_rank, &ranks).or_usage()
}

pub(super) fn budget_bytes(memory_gib: Option<f64>) -> Result<Option<u64>, Failure> {
    match memory_gib {
        Some(gib) if !(gib.is_finite() && gib > 0.0) => {
            Err(Failure::Usage(anyhow!("--memory-gib {gib}: it must be a number above 0")))
        }
        gib => Ok(gib.map(|gib| (gib * GIB) as u64)),
    }
}

/// The model's name and shape. A preset takes the vocabulary of the config's tokenizer, as in training.
pub(super) fn model(config: &Config) -> Result<(String, LlamaConfig), Failure> {
    let name = config.require_model().or_usage()?;
    let path = Path::new(name);
    let model = if path.is_file() || path.is_dir() && !PRESETS.contains(&name) {
        describe(path)?
    } else {
        let model = shape(name).or_usage()?;
        match config.ulysses.tokenizer.as_deref().filter(|_| PRESETS.contains(&name)) {
            Some(tokenizer) => {
                let vocab_size = Tokenizer::from_file(Path::new(tokenizer)).or_usage()?.vocab_size();
                LlamaConfig { vocab_size, ..model }
            }
            None => model,
        }
    };
    Ok((name.to_owned(), model))
}
