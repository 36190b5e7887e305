//! `ulysses plan`.

mod html;
mod scaling;
pub(in crate::cli) mod table;
mod text;

use super::model::{check_config, check_exchange};
use super::{Failure, OrFail, print, training_shape};
use anyhow::anyhow;
use serde::Serialize;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use ulysses::config::{Config, Overrides, ParameterGroup, RawConfig};
use ulysses::data::Tokenizer;
use ulysses::engine::plan::{Alternative, MeshChoice, RankPlan, Workload};
use ulysses::model::{LlamaConfig, PRESETS, shape};

const GIB: f64 = (1_u64 << 30) as f64;

#[derive(clap::Args)]
pub(super) struct PlanArgs {
    /// DeepSpeed-style JSON config.
    #[arg(required_unless_present = "scaling", conflicts_with = "scaling")]
    config: Option<PathBuf>,
    /// Preset (nano, tiny, small, base), published shape (llama2-7b, llama3-8b, llama3-70b, llama3-405b),
    /// or Hugging Face config.json or a directory with one; no weights are needed.
    #[arg(long)]
    model: Option<String>,
    /// Memory of a rank in GiB: what fits, and how long a sequence.
    #[arg(long, visible_alias = "gib-per-rank", allow_negative_numbers = true)]
    memory_gib: Option<f64>,
    /// Tokens in a row, over all sp ranks; without it the config's longest, and without that the longest that fits.
    #[arg(long, allow_negative_numbers = true)]
    seq_len: Option<usize>,
    /// Ranks: `DPxSP` or `dp=2,sp=2`. Must not contradict the config.
    #[arg(long, allow_hyphen_values = true)]
    mesh: Option<String>,
    /// Consecutive ranks that share a node.
    #[arg(long, default_value_t = 8, value_parser = at_least_1)]
    ranks_per_node: usize,
    /// Tokens of the documents that rows are packed with; without it a row is one document.
    #[arg(long, value_parser = at_least_1)]
    document_len: Option<usize>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Draw the memory over a step, as a page of HTML that needs no other file.
    #[arg(long, value_name = "FILE", conflicts_with = "scaling")]
    html: Option<PathBuf>,
    /// Instead of a plan: bytes that a rank sends in a layer when 8 to 1024 ranks and their tokens grow together,
    /// for Ulysses, Megatron sequence parallelism and ring attention.
    #[arg(long, conflicts_with_all = ["model", "memory_gib", "seq_len", "mesh"])]
    scaling: bool,
    /// Tokens of each rank in the scaling study.
    #[arg(long, default_value_t = 8192, value_parser = at_least_1, requires = "scaling")]
    tokens_per_rank: usize,
    /// Draws the scaling study to this file.
    #[arg(long, value_name = "FILE", requires = "scaling")]
    svg: Option<PathBuf>,
}

fn at_least_1(text: &str) -> Result<usize, String> {
    text.parse()
        .ok()
        .filter(|number| *number > 0)
        .ok_or_else(|| "it must be a whole number from 1".to_owned())
}

/// Everything that is told.
#[derive(Serialize)]
struct Report {
    model: ModelReport,
    mesh: MeshReport,
    /// Ranks that are to share ZeRO's partitions, where that is stated.
    shard_size: Option<usize>,
    zero_stage: u8,
    dtype: String,
    activation_checkpointing: bool,
    features: Features,
    micro_batch_size: usize,
    gradient_accumulation_steps: usize,
    seq_len: usize,
    tokens_per_step: usize,
    rank: RankPlan,
    budget: Option<Budget>,
    alternatives: Vec<Alternative>,
    meshes: Vec<MeshChoice>,
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
                html::write(file, &report)?;
            }
            if args.json {
                return print(format_args!("{}\n", serde_json::to_string_pretty(&report).or_run()?));
            }
            print(text::Text(&report))
        }
    }
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
    let mut config = RawConfig::from_file(path).or_usage()?.resolve(&overrides).or_usage()?;
    if args.seq_len.is_none() {
        // What the longest rows need is what the run needs.
        let scheduled = config.seq_len_schedule.iter().map(|change| change.seq_len);
        config.seq_len = scheduled.chain(config.seq_len).max();
    }
    if let Some(seq_len) = config.seq_len.filter(|&seq_len| u32::try_from(seq_len).is_err()) {
        let message =
            format!("`ulysses.seq_len` (--seq-len): rows have at most {} tokens, found {seq_len}", u32::MAX);
        return Err(Failure::Usage(anyhow!(message)));
    }
    let (name, model) = model(&config)?;
    // As training does.
    check_config(&model, &config)?;
    let seq_len = config.seq_len.unwrap_or(config.sp_size);
    check_exchange(&model, (config.micro_batch_size, seq_len), &config, config.sp_size)?;
    let PlanArgs { document_len, ranks_per_node, .. } = *args;
    let budget = budget_bytes(args.memory_gib)?;
    let workload = Workload { config, model, document_len, ranks_per_node };
    let longest = budget.map(|bytes| workload.longest(bytes)).transpose().or_usage()?.flatten();
    let workload = match (workload.config.seq_len, longest) {
        (None, Some(longest)) => workload.with_seq_len(longest),
        (None, None) if budget.is_some() => {
            let error = "no sequence fits: even one token for each rank needs more than --memory-gib";
            return Err(Failure::Run(anyhow!(error)));
        }
        _ => workload,
    };
    let rank = workload.plan().or_usage()?;
    let budget = budget.map(|bytes| Budget { bytes, fits: rank.peak_bytes <= bytes, max_seq_len: longest });
    let budget_bytes = budget.as_ref().map(|budget| budget.bytes);
    let alternatives = workload.alternatives(budget_bytes).or_usage()?;
    let meshes = workload.meshes(budget_bytes).or_usage()?;
    let Workload { config, model, .. } = workload;
    let is_frozen = |name: &str| ParameterGroup::is_frozen(&config.parameter_groups, name);
    let features = Features {
        activation_checkpointing_interval: config.memory.checkpointing_interval,
        offload_checkpoints: config.memory.offload_checkpoints,
        offload_optimizer: config.memory.offload_optimizer.device(),
        offload_param: config.memory.offload_parameters.device(),
        tile_tokens: config.memory.tile_tokens,
        head_chunks: config.memory.head_chunks,
        frozen_parameters: model.num_parameters_where(is_frozen),
    };
    let seq_len = config.require_seq_len().or_usage()?;
    Ok(Report {
        model: ModelReport {
            name,
            parameters: model.num_parameters(),
            num_layers: model.num_layers,
            hidden_size: model.hidden_size,
            num_heads: model.num_heads,
            num_kv_heads: model.num_kv_heads,
            vocab_size: model.vocab_size,
        },
        mesh: MeshReport { dp: config.dp_size, sp: config.sp_size, ranks_per_node },
        shard_size: config.stated_shard_size,
        zero_stage: config.zero_stage.into(),
        dtype: config.precision.dtype().as_str().to_owned(),
        activation_checkpointing: config.activation_checkpointing,
        features,
        micro_batch_size: config.micro_batch_size,
        gradient_accumulation_steps: config.gradient_accumulation_steps,
        seq_len,
        tokens_per_step: config.train_batch_size * seq_len,
        rank,
        budget,
        alternatives,
        meshes,
    })
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
    let model = if path.is_file() {
        LlamaConfig::from_hf_file(path).or_usage()?
    } else if path.is_dir() && !PRESETS.contains(&name) {
        LlamaConfig::from_hf_dir(path).or_usage()?
    } else {
        let model = shape(name).or_usage()?;
        match config.tokenizer.as_deref().filter(|_| PRESETS.contains(&name)) {
            Some(tokenizer) => {
                let vocab_size = Tokenizer::from_file(Path::new(tokenizer)).or_usage()?.vocab_size();
                LlamaConfig { vocab_size, ..model }
            }
            None => model,
        }
    };
    Ok((name.to_owned(), model))
}
