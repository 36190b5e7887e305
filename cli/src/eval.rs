//! `ulysses eval`: loss and perplexity of a model on a dataset, without training.

use super::DeviceArg;
use super::sources::{parse_choice, tokenizer_file};
use crate::failure::{Failure, OrFail};
use crate::mesh_flag::unreplicated;
use crate::output::{LOG, print};
use anyhow::anyhow;
use serde_json::json;
use ulysses::comm::MeshGroups;
use ulysses::config::{Config, DataSource, Overrides, Packing, PartitionAxes, RawConfig};
use ulysses::data::{Dataset, Tokenizer, predicted_text_bytes};
use ulysses::trainer::job::{
    JobRanks, ModelSource, Sources, check_memory, config_launch_options, fit_model, open_tokenizer,
};
use ulysses::trainer::{Evaluation, evaluate};

#[derive(clap::Args)]
pub(super) struct EvalArgs {
    /// Model directory (config.json, model.safetensors), or preset (nano, tiny, small, base).
    model: String,
    /// Text, JSONL or token file, directory, or glob pattern. Repeatable.
    #[arg(long, required = true, value_name = "PATH")]
    data: Vec<String>,
    /// Hugging Face tokenizer.json [default: the model's own, else bytes].
    #[arg(long)]
    tokenizer: Option<String>,
    /// Mesh: `DPxSP`, `DPxSPxTP` or `pp=2,dp=2,sp=2,tp=2`.
    #[arg(long, default_value = "1x1", allow_hyphen_values = true)]
    mesh: String,
    /// Tokens per sequence, over all sp ranks: the longest context of a prediction.
    #[arg(long, default_value_t = 1024)]
    seq_len: usize,
    /// Sequences per forward pass and dp rank.
    #[arg(long, default_value_t = 1)]
    batch_size: usize,
    /// Packing of documents into sequences: `greedy`, `cut` or `concat`.
    #[arg(long, default_value = "greedy", value_parser = |name: &str| parse_choice(Packing::CHOICES, name))]
    packing: Packing,
    /// CPU threads per rank [default: an equal share of the cores].
    #[arg(long)]
    threads_per_rank: Option<usize>,
    /// Device of the ranks' tensors.
    #[arg(long, default_value = "auto")]
    device: DeviceArg,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: EvalArgs, ranks: &mut JobRanks) -> Result<(), Failure> {
    let mut config = config(&args)?;
    let world_size = config.world_size();
    ranks.place(args.device.kind(), world_size)?;
    let tokenizer = open_tokenizer(&mut config.ulysses, tokenizer_file, LOG.line)?;
    let source = ModelSource::open(&args.model, config.seed, tokenizer.vocab_size(), LOG.line)?;
    source.warn_of_length(args.seq_len, LOG.line);
    fit_model(&source.config, &mut config, args.seq_len)?;
    check_memory(&config, &source.config, args.seq_len, world_size)?;
    let mesh = config.mesh.shape().row_major().or_usage()?;
    let options = config_launch_options(&config, world_size)?;
    let sources = Sources::read(&config, &tokenizer, source.config.vocab_size, LOG.line)?;
    let data = sources.training(args.seq_len)?;
    let evaluation = ranks.run(world_size, &options, |rank, device| {
        let groups = MeshGroups::new(&mesh, rank.group.clone())?.on(device);
        anyhow::Ok(evaluate(&mut source.engine(&config, &groups)?, &data, None)?)
    })?;
    let bytes = text_bytes(&tokenizer, &data, &evaluation).or_run()?;
    print(if args.json {
        as_json(&args, &data, evaluation, bytes)
    } else {
        as_text(&data, evaluation, bytes)
    })?;
    match evaluation.loss() {
        loss if loss.is_finite() => Ok(()),
        loss => Err(Failure::Run(anyhow!("the loss of {} is not finite: {loss}", args.model))),
    }
}

/// Returns a config whose engine stores as little as possible apart from the parameters.
fn config(args: &EvalArgs) -> Result<Config, Failure> {
    let at_least_1 = |name: &str, value: usize| match value {
        0 => Err(Failure::Usage(anyhow!("--{name}: expected at least 1, found 0"))),
        _ => Ok(()),
    };
    at_least_1("seq-len", args.seq_len)?;
    at_least_1("batch-size", args.batch_size)?;
    let mesh = unreplicated(&args.mesh)?;
    // Divided layers allow partitions over dp only.
    let is_divided = mesh.sizes.divides_model();
    let axes = if is_divided { PartitionAxes::Dp } else { PartitionAxes::DpSp };
    let text = json!({
        "train_micro_batch_size_per_gpu": args.batch_size,
        "optimizer": { "type": "SGD", "params": {} },
        "zero_optimization": { "stage": 3 },
        "ulysses": { "zero_partition_axes": axes },
    });
    let overrides = Overrides {
        mesh: Some(mesh.sizes),
        ring_size: mesh.ring_size,
        seq_len: Some(args.seq_len),
        threads_per_rank: args.threads_per_rank,
        model: Some(args.model.clone()),
        data: args.data.iter().map(DataSource::from).collect(),
        packing: Some(args.packing),
        tokenizer: args.tokenizer.clone(),
        ..Overrides::default()
    };
    RawConfig::from_json_str(&text.to_string(), "eval").or_usage()?.resolve(&overrides).or_usage()
}

/// Returns the number of predicted text bytes; `None` if unknown, because some tokens are context only.
fn text_bytes(tokenizer: &Tokenizer, data: &Dataset, evaluation: &Evaluation) -> anyhow::Result<Option<u64>> {
    let predicted: usize = data.sources().iter().map(|sequences| sequences.num_predicted_tokens()).sum();
    if predicted as u64 != evaluation.sum.valid_tokens {
        return Ok(None);
    }
    let bytes = data.sources().iter().map(|sequences| predicted_text_bytes(sequences, tokenizer));
    Ok(Some(bytes.sum::<Result<u64, _>>()?))
}

/// Describes the bytes that [`text_bytes`] counts.
fn counted_bytes(data: &Dataset) -> &'static str {
    match data.sources().iter().all(|sequences| sequences.packing() == Packing::Concat) {
        true => "decoded text, without special tokens and the first token",
        false => "decoded text, without special tokens and each document's first token",
    }
}

fn bits_per_byte(evaluation: Evaluation, bytes: Option<u64>) -> Option<f64> {
    Some(evaluation.sum.sum / std::f64::consts::LN_2 / bytes.filter(|&bytes| bytes > 0)? as f64)
}

fn as_json(args: &EvalArgs, data: &Dataset, evaluation: Evaluation, bytes: Option<u64>) -> String {
    let all = json!({
        "loss": evaluation.loss(), "perplexity": evaluation.perplexity(),
        "bits_per_byte": bits_per_byte(evaluation, bytes), "tokens": evaluation.sum.valid_tokens,
        "bytes": bytes, "bytes_counted": counted_bytes(data), "sequences": data.num_sequences(),
        "seq_len": data.seq_len(),
        "padding_share": data.padding_share(), "mesh": args.mesh,
    });
    format!("{all}\n")
}

fn as_text(data: &Dataset, evaluation: Evaluation, bytes: Option<u64>) -> String {
    let bits = match (bits_per_byte(evaluation, bytes), bytes) {
        (Some(bits), Some(bytes)) => format!("{bits:.4} over {bytes} bytes of {}", counted_bytes(data)),
        _ => "not available: some tokens have no labels, or no text".to_owned(),
    };
    format!(
        "loss           {:.6} nats per token over {} tokens\nperplexity     {:.4}\nbits per byte  {bits}\nsequences      \
         {}, of {} tokens each\n",
        evaluation.loss(),
        evaluation.sum.valid_tokens,
        evaluation.perplexity(),
        data.num_sequences(),
        data.seq_len(),
    )
}
