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
use super::{DeviceArg, Failure, OrFail, log_line, print, training_shape};
use crate::html::chart::drawing;
use anyhow::{Context, anyhow};
use serde::Serialize;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use ulysses::config::{
    Config, MachineProfile, Overrides, ParameterGroup, PartitionAxes, RawConfig, ZeroStage,
};
use ulysses::data::Tokenizer;
use ulysses::device::DeviceKind;
use ulysses::engine::check_offload_device;
use ulysses::estimate::scaling::{self as traffic, ModelScaling};
use ulysses::estimate::{Alternative, Criteria, MemoryBudget, MeshChoice, RankPlan, StepTime, Workload};
use ulysses::model::{LlamaConfig, PRESETS, shape};

const GIB: f64 = (1_u64 << 30) as f64;

/// Default number of ranks per node, as on common GPU nodes.
const RANKS_PER_NODE: usize = 8;

#[derive(clap::Args)]
pub(super) struct PlanArgs {
    /// DeepSpeed-style JSON config.
    #[arg(required_unless_present = "scaling", conflicts_with = "scaling")]
    config: Option<PathBuf>,
    /// Preset (nano, tiny, small, base), published shape (llama2-7b, llama3-8b, llama3-70b, llama3-405b), or Hugging
    /// Face config.json or a directory with one. Needs no weights.
    #[arg(long)]
    model: Option<String>,
    #[command(flatten)]
    flags: ConfigFlags,
    /// Available memory per rank in GiB: reports whether the run fits, and the longest sequence that fits.
    #[arg(long, visible_alias = "gib-per-rank")]
    memory_gib: Option<f64>,
    /// Available host memory per node in GiB, for what ranks on GPUs offload [default: not limited].
    #[arg(long, requires = "memory_gib")]
    host_memory_gib: Option<f64>,
    /// Tokens per sequence, over all sp ranks [default: the config's longest, else the longest that fits].
    #[arg(long)]
    seq_len: Option<usize>,
    /// Mesh: `DPxSP`, `dp=2,sp=2` or `dp_replicate=2,dp_shard=2,sp=2`. Must agree with the config.
    #[arg(long, allow_hyphen_values = true)]
    mesh: Option<String>,
    /// Device of the ranks [default: cuda if the backend is nccl, else cpu].
    ///
    /// Decides where offloaded tensors go: host memory on GPUs, files on CPUs.
    #[arg(long, conflicts_with = "scaling")]
    device: Option<DeviceArg>,
    /// Consecutive ranks per node [default: the value of --machine, else 8].
    #[arg(long, value_parser = at_least_1::<usize>)]
    ranks_per_node: Option<usize>,
    /// Machine profile, from `ulysses bench profile` or configs/machines: predicts the step time of the config, of every
    /// change and of every mesh.
    #[arg(long, value_name = "FILE", conflicts_with = "scaling")]
    machine: Option<PathBuf>,
    /// Tokens per document in packed sequences [default: one document per sequence].
    #[arg(long, value_parser = at_least_1::<usize>)]
    document_len: Option<usize>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Write a self-contained HTML page with charts of memory and traffic.
    #[arg(long, value_name = "FILE", conflicts_with = "scaling")]
    html: Option<PathBuf>,
    /// Print a scaling study instead of a plan.
    ///
    /// Bytes sent per rank and layer on 8 to 1024 ranks with constant tokens per rank, for Ulysses, Megatron sequence
    /// parallelism and ring attention.
    #[arg(long, conflicts_with_all = ["model", "memory_gib", "seq_len", "mesh", "set", "lr", "batch_size", "zero_stage", "zero_partition_axes"])]
    scaling: bool,
    /// Tokens per rank in the scaling study.
    #[arg(long, default_value_t = 8192, value_parser = at_least_1::<usize>, requires = "scaling")]
    tokens_per_rank: usize,
    /// Write a chart of the memory over a step, or of the scaling study, as SVG.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// The content of a plan.
#[derive(Serialize)]
struct Report {
    device: &'static str,
    model: ModelReport,
    mesh: MeshReport,
    /// Number of ranks that share one copy of ZeRO's partitions, if the config sets it.
    shard_size: Option<usize>,
    zero_stage: ZeroStage,
    zero_partition_axes: PartitionAxes,
    /// Why the stage partitions nothing, if so.
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
    /// Host memory of a node that its ranks on GPUs offload to.
    host_bytes_per_node: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    step_time: Option<StepTime>,
    budget: Option<Budget>,
    alternatives: Vec<Alternative>,
    meshes: Vec<MeshChoice>,
    /// For charts only.
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

/// Memory-saving features of the config.
#[derive(Serialize)]
struct Features {
    activation_checkpointing_interval: usize,
    offload_checkpoints: bool,
    /// As configured, or decided by `--memory-gib`.
    save_attention_output: bool,
    #[serde(skip)]
    is_save_decided: bool,
    offload_optimizer: &'static str,
    offload_param: &'static str,
    tile_tokens: Option<NonZero<usize>>,
    head_chunks: usize,
    frozen_parameters: usize,
}

#[derive(Serialize)]
struct Budget {
    bytes: u64,
    host_bytes_per_node: Option<u64>,
    fits: bool,
    max_seq_len: Option<usize>,
}

pub(super) fn run(args: PlanArgs) -> Result<(), Failure> {
    match &args.config {
        None => scaling::run(args.tokens_per_rank, args.svg.as_deref(), args.json),
        Some(path) => {
            let report = report(path, &args)?;
            if let Some(file) = &args.html {
                write_file(file, "--html", html::page_of(&report))?;
            }
            if let Some(file) = &args.svg {
                let memory = pictures::memory(&report.rank.timeline, &[]);
                write_file(file, "--svg", drawing(&[memory], 1))?;
            }
            if args.json {
                return print(format_args!("{}\n", serde_json::to_string_pretty(&report).or_run()?));
            }
            print(text::Text(&report))
        }
    }
}

/// Writes the output file of a flag.
fn write_file(path: &Path, flag: &str, content: String) -> Result<(), Failure> {
    std::fs::write(path, content)
        .with_context(|| format!("{flag}: cannot write {}", path.display()))
        .or_run()?;
    log_line(format_args!("written to {}", path.display()));
    Ok(())
}

fn report(path: &Path, args: &PlanArgs) -> Result<Report, Failure> {
    let config = resolve(path, args)?;
    let (name, model) = model(&config)?;
    check_model(&model, &config)?;
    let machine = args.machine.as_deref().map(MachineProfile::from_file);
    let machine = machine.transpose().context("--machine").or_usage()?;
    let ranks_per_node = args.ranks_per_node.or(machine.as_ref().map(|machine| machine.ranks_per_node));
    let (document_len, ranks_per_node) = (args.document_len, ranks_per_node.unwrap_or(RANKS_PER_NODE));
    let budget = memory_budget(args.memory_gib, args.host_memory_gib)?;
    let device = args.device.map_or_else(|| config.ulysses.backend.device(), DeviceKind::from);
    check_offload_device(&config, device).or_usage()?;
    let workload = Workload { config, model, document_len, ranks_per_node, device };
    let max_seq_len = budget.map(|budget| workload.max_seq_len(budget)).transpose().or_usage()?.flatten();
    let workload = match (workload.config.ulysses.seq_len, max_seq_len) {
        (None, Some(longest)) => workload.with_seq_len(longest),
        (None, None) if budget.is_some() => {
            let error =
                "no sequence fits: even one token per rank needs more than --memory-gib or --host-memory-gib";
            return Err(Failure::Run(anyhow!(error)));
        }
        _ => workload,
    };
    Report::new(name, workload, Criteria { budget, machine: machine.as_ref() }, max_seq_len)
}

/// Resolves the config with the sequence length to plan for.
fn resolve(path: &Path, args: &PlanArgs) -> Result<Config, Failure> {
    let shape = args.mesh.as_deref().map(training_shape).transpose()?;
    let overrides = Overrides {
        mesh: shape.map(|shape| (shape.dp, shape.sp)),
        shard_size: shape.and_then(|shape| shape.shard_size),
        seq_len: args.seq_len,
        model: args.model.clone(),
        ..Overrides::default()
    };
    let raw = RawConfig::from_file_with(path, &args.flags.settings()).or_usage()?;
    let mut config = raw.resolve(&overrides).or_usage()?;
    if args.seq_len.is_none() {
        use_longest_sequences(&mut config);
    }
    match config.ulysses.seq_len.filter(|&seq_len| u32::try_from(seq_len).is_err()) {
        Some(seq_len) => Err(Failure::Usage(anyhow!(
            "`ulysses.seq_len` (--seq-len): expected at most {} tokens, found {seq_len}",
            u32::MAX
        ))),
        None => Ok(config),
    }
}

/// Checks that the config fits the model, as training does.
fn check_model(model: &LlamaConfig, config: &Config) -> Result<(), Failure> {
    check_config(model, config)?;
    let seq_len = config.ulysses.seq_len.unwrap_or(config.mesh.sp_size);
    check_exchange(model, config.micro_batch_size, seq_len, config)
}

impl Report {
    /// Plans a workload. `name` is the model's, `max_seq_len` the longest sequence that fits the budget.
    fn new(
        name: String,
        workload: Workload,
        criteria: Criteria<'_>,
        max_seq_len: Option<usize>,
    ) -> Result<Self, Failure> {
        let decided = workload.decided(criteria.budget).or_usage()?;
        let rank = decided.plan().or_usage()?;
        let step_time = criteria.machine.map(|machine| decided.step_time(machine)).transpose().or_usage()?;
        let host_bytes_per_node = workload.host_bytes_per_node(&rank);
        let budget = criteria.budget.map(|budget| Budget {
            bytes: budget.rank_bytes,
            host_bytes_per_node: budget.host_bytes_per_node,
            fits: workload.fits(&rank, budget),
            max_seq_len,
        });
        let alternatives = workload.alternatives(criteria).or_usage()?;
        let meshes = workload.meshes(criteria).or_usage()?;
        let Workload { config, model, ranks_per_node, device, .. } = workload;
        let seq_len = config.require_seq_len().or_usage()?;
        let scaling = scaling_of(&name, &model, seq_len.div_ceil(config.mesh.sp_size))?;
        Ok(Self {
            device: device.name(),
            features: Features::new(&config, &decided.config, &model),
            model: ModelReport::new(name, &model),
            mesh: MeshReport { dp: config.mesh.dp_size, sp: config.mesh.sp_size, ranks_per_node },
            shard_size: config.zero.mics_shard_size,
            zero_stage: config.zero.stage,
            zero_partition_axes: config.zero_axes(),
            zero_note: config.zero_partition_note(),
            dtype: config.precision.dtype().as_str().to_owned(),
            activation_checkpointing: config.ulysses.activation_checkpointing,
            micro_batch_size: config.micro_batch_size,
            gradient_accumulation_steps: config.gradient_accumulation_steps,
            seq_len,
            tokens_per_step: config.train_batch_size * seq_len,
            rank,
            host_bytes_per_node,
            step_time,
            budget,
            alternatives,
            meshes,
            scaling,
        })
    }
}

impl Features {
    /// The features of a config, and of the same with everything decided.
    fn new(config: &Config, decided: &Config, model: &LlamaConfig) -> Self {
        let is_frozen = |name: &str| ParameterGroup::is_frozen(&config.ulysses.parameter_groups, name);
        Self {
            activation_checkpointing_interval: config.ulysses.activation_checkpointing_interval,
            offload_checkpoints: config.activation_checkpointing.cpu_checkpointing,
            save_attention_output: decided.saves_attention_output(),
            is_save_decided: config.ulysses.save_attention_output.is_none(),
            offload_optimizer: config.zero.offload_optimizer.device(),
            offload_param: config.zero.offload_param.device(),
            tile_tokens: config.ulysses.tile_tokens,
            head_chunks: config.ulysses.head_chunks,
            frozen_parameters: model.num_parameters_where(is_frozen),
        }
    }
}

impl ModelReport {
    fn new(name: String, model: &LlamaConfig) -> Self {
        Self {
            name,
            parameters: model.num_parameters(),
            num_layers: model.num_layers,
            hidden_size: model.hidden_size,
            num_heads: model.num_heads,
            num_kv_heads: model.num_kv_heads,
            vocab_size: model.vocab_size,
        }
    }
}

/// Sets the sequence length to the longest of the schedule, which needs the most memory.
pub(super) fn use_longest_sequences(config: &mut Config) {
    let scheduled = config.ulysses.seq_len_schedule.iter().map(|change| change.seq_len);
    config.ulysses.seq_len = scheduled.chain(config.ulysses.seq_len).max();
}

/// Returns the traffic of a model from two ranks to four times its number of heads.
pub(super) fn scaling_of(
    name: &str,
    model: &LlamaConfig,
    tokens_per_rank: usize,
) -> Result<ModelScaling, Failure> {
    let max_ranks = (4 * model.num_heads).next_power_of_two();
    let ranks: Vec<usize> = std::iter::successors(Some(2), |ranks| Some(2 * ranks))
        .take_while(|ranks| *ranks <= max_ranks)
        .collect();
    traffic::of_model(name.to_owned(), model, tokens_per_rank, &ranks).or_usage()
}

/// Returns the memory that the flags allow, if `--memory-gib` is given.
pub(super) fn memory_budget(
    memory_gib: Option<f64>,
    host_memory_gib: Option<f64>,
) -> Result<Option<MemoryBudget>, Failure> {
    let bytes = |flag: &str, gib: Option<f64>| match gib {
        Some(gib) if !(gib.is_finite() && gib > 0.0) => {
            Err(Failure::Usage(anyhow!("--{flag} {gib}: expected a number above 0")))
        }
        gib => Ok(gib.map(|gib| (gib * GIB) as u64)),
    };
    let host_bytes_per_node = bytes("host-memory-gib", host_memory_gib)?;
    let rank_bytes = bytes("memory-gib", memory_gib)?;
    Ok(rank_bytes.map(|rank_bytes| MemoryBudget { rank_bytes, host_bytes_per_node }))
}

/// Returns the model's name and shape. Presets use the vocabulary of the config's tokenizer, as in training.
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
