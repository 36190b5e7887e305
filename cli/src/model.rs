//! `--model`: a preset by name or a directory in Hugging Face's layout.

use super::{Failure, OrFail, note};
use anyhow::{Context, anyhow};
use std::path::{Path, PathBuf};
use ulysses::checkpoint::{MANIFEST, read_pointer, saved_steps};
use ulysses::config::Config;
use ulysses::engine::check_parameter_groups;
use ulysses::kernels::attention::grouped_heads;
use ulysses::model::{
    HfDescription, HfModel, HfSource, HfWeights, LlamaConfig, Model, ModelError, PRESETS, PUBLISHED,
    RandomWeights, WeightSource, preset,
};
use ulysses::sequence_parallel::{AttentionShape, ExchangePlan};

/// A model's description and where its weights come from.
pub(super) struct ModelSource {
    pub(super) config: LlamaConfig,
    pub(super) weights: Box<dyn WeightSource>,
    /// Of a model directory: the files that an export keeps.
    pub(super) hf_source: Option<HfSource>,
}

/// Presets start from random weights made from `seed` and take the tokenizer's vocabulary;
/// a directory brings weights and vocabulary.
pub(super) fn open(model: &str, seed: u64, vocab_size: usize) -> Result<ModelSource, Failure> {
    let Some(dir) = directory(model) else {
        let config =
            LlamaConfig { vocab_size, ..preset(model).map_err(|error| unknown(model, error)).or_usage()? };
        config.validate(&format!("preset {model} with this tokenizer")).or_usage()?;
        return Ok(ModelSource { config, weights: Box::new(RandomWeights { seed }), hf_source: None });
    };
    let description = HfDescription::from_dir(dir).map_err(|error| match holds_checkpoints(dir) {
        _ if dir.is_file() && read_pointer(dir).is_none() => anyhow!("{model}: this is a file; a model is a directory with config.json and weights"),
        true => anyhow!(
            "{model}: this is a checkpoint or a run's output directory, not a model: `ulysses checkpoint export {model} \
             --output DIR` makes one of it"
        ),
        false => error.into(),
    });
    let HfModel { config, weights, notes, source } =
        HfModel::with_weights(description.or_usage()?, dir).or_usage()?;
    print_notes(&notes);
    Ok(ModelSource { config, weights: Box::new(weights), hf_source: Some(source) })
}

/// The description in a directory or a file, for commands that need no weights. Weights that are there decide whether
/// the head is tied, as in training.
pub(super) fn describe(path: &Path) -> Result<LlamaConfig, Failure> {
    let mut description = match path.is_file() {
        true => HfDescription::from_file(path),
        false => HfDescription::from_dir(path),
    }
    .or_usage()?;
    if let Ok(weights) = HfWeights::open(path) {
        description.untie_if_weights_differ(&weights).or_usage()?;
    }
    print_notes(&description.notes);
    Ok(description.config)
}

fn print_notes(notes: &[String]) {
    notes.iter().for_each(|text| note(format_args!("note: {text}")));
}

/// Why there is no such model: most often a directory is called otherwise.
fn unknown(model: &str, error: ModelError) -> anyhow::Error {
    let ModelError::UnknownPreset { presets, .. } = error else { return error.into() };
    let hint = match PUBLISHED.contains(&model) {
        true => "; only its shape is known, for `ulysses plan`: give a directory with its weights",
        false => "",
    };
    anyhow!("`{model}` is neither a directory nor a preset ({}){hint}", presets.join(", "))
}

/// The tokenizer that comes with the model, if one does.
pub(super) fn own_tokenizer(model: &str) -> Option<PathBuf> {
    directory(model).map(|dir| dir.join("tokenizer.json")).filter(|path| path.exists())
}

/// Whether a run has written `dir`, or a checkpoint of one.
fn holds_checkpoints(dir: &Path) -> bool {
    read_pointer(dir).is_some()
        || dir.join(MANIFEST).exists()
        || saved_steps(dir).is_ok_and(|steps| !steps.is_empty())
}

/// The directory that `model` names, unless it names a preset.
fn directory(model: &str) -> Option<&Path> {
    let dir = Path::new(model);
    (!PRESETS.contains(&model) && dir.exists()).then_some(dir)
}

impl ModelSource {
    /// As [`check_config`].
    pub(super) fn check_config(&self, config: &Config) -> Result<(), Failure> {
        check_config(&self.config, config)
    }

    /// As [`check_exchange`].
    pub(super) fn check_exchange(
        &self,
        batch: usize,
        seq_len: usize,
        config: &Config,
        sp_size: usize,
    ) -> Result<(), Failure> {
        check_exchange(&self.config, (batch, seq_len), config, sp_size)
    }
}

/// Refuses what the config asks of other layers and parameters than the model has.
pub(super) fn check_config(model: &LlamaConfig, config: &Config) -> Result<(), Failure> {
    let (interval, layers) = (config.ulysses.activation_checkpointing_interval, model.num_layers);
    if interval > layers {
        return Err(Failure::Usage(anyhow!(
            "`ulysses.activation_checkpointing_interval` is {interval}, the model has {layers} layers: at most \
             {layers} makes a difference"
        )));
    }
    let units = Model::llama(model).or_usage()?.units();
    check_parameter_groups(&config.ulysses.parameter_groups, &units).or_usage()
}

/// Every sp rank needs a head and a token: better said before a rank starts.
pub(super) fn check_exchange(
    model: &LlamaConfig,
    (batch, seq_len): (usize, usize),
    config: &Config,
    sp_size: usize,
) -> Result<(), Failure> {
    let LlamaConfig { num_kv_heads, head_dim, .. } = *model;
    let chunks = config.ulysses.head_chunks;
    if chunks > num_kv_heads {
        return Err(Failure::Usage(anyhow!(
            "`ulysses.head_chunks` is {chunks}, the model has {num_kv_heads} KV heads: at most \
                 {num_kv_heads} chunks of whole heads are possible"
        )));
    }
    for chunk in model.head_chunks(chunks) {
        let (num_heads, num_kv_heads) = (chunk.q.len(), chunk.kv.len());
        let shape = AttentionShape { batch, seq_len, num_heads, num_kv_heads, head_dim };
        let plan = ExchangePlan::new(shape, &grouped_heads(num_heads, num_kv_heads), sp_size, 0);
        let of_chunks = || format!("with `ulysses.head_chunks` of {chunks}");
        if chunks > 1 {
            plan.with_context(of_chunks).or_usage()?
        } else {
            plan.or_usage()?
        };
    }
    Ok(())
}
