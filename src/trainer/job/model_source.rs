//! The model of a job: a preset by name, or a directory in Hugging Face's layout.

use super::options::{JobError, OrJobError};
use crate::checkpoint::{MANIFEST, read_pointer, saved_steps};
use crate::comm::MeshGroups;
use crate::config::Config;
use crate::engine::{Engine, EngineError, check_parameter_groups, initialize, layers_of_stages};
use crate::estimate::{check_tensor_parallel, layers_of_tp_ranks, ulysses_limits};
use crate::kernels::rope::Scaling;
use crate::mesh::{SeqSharding, TrainingShape};
use crate::model::{
    HfDescription, HfModel, HfSource, Model, ModelConfig, ModelError, PRESETS, RandomWeights, WeightSource,
    max_positions, preset, shape,
};
use crate::sequence_parallel::{AttentionShape, ExchangePlan, SequenceParallelError};
use std::path::{Path, PathBuf};

/// A model's shape and the source of its weights.
pub struct ModelSource {
    /// The shape.
    pub config: ModelConfig,
    /// The source of the weights.
    pub weights: Box<dyn WeightSource>,
    /// Files of a model directory that an export copies.
    pub hf_source: Option<HfSource>,
    /// `max_position_embeddings` of a model directory, if it has one.
    max_positions: Option<usize>,
}

/// Returns the shape of a preset or a published model; `None` for a directory.
///
/// # Errors
/// An unknown name.
pub fn named_shape(model: &str) -> Result<Option<ModelConfig>, JobError> {
    match directory(model) {
        Some(_) => Ok(None),
        None => shape(model).map(Some).map_err(|error| unknown(model, error)),
    }
}

/// Explains an unknown model name.
fn unknown(name: &str, error: ModelError) -> JobError {
    let ModelError::UnknownPreset { presets, .. } = error else { return JobError::usage(error) };
    if let Err(unsupported @ ModelError::UnsupportedModel { .. }) = shape(name) {
        return JobError::usage(unsupported);
    }
    let hint = match max_positions(name).is_some() {
        true => "; only `ulysses plan` knows this shape: give a directory with weights",
        false => "",
    };
    JobError::usage(format!("`{name}` is neither a directory nor a preset ({}){hint}", presets.join(", ")))
}

/// Returns the tokenizer in the model's directory, if any.
pub(super) fn own_tokenizer(model: &str) -> Option<PathBuf> {
    directory(model).map(|dir| dir.join("tokenizer.json")).filter(|path| path.exists())
}

/// Returns why the model's own tokenizer is not read, if its directory has one in another format only.
pub(super) fn unread_tokenizer(model: &str) -> Option<String> {
    const FILES: [&str; 6] = [
        "tokenizer.model",
        "tekken.json",
        "vocab.json",
        "vocab.txt",
        "spiece.model",
        "tokenizer_config.json",
    ];
    let dir = directory(model).filter(|dir| !dir.join("tokenizer.json").exists())?;
    let found = FILES.iter().find(|name| dir.join(name).exists())?;
    Some(format!(
        "{}: {found} is not read, only tokenizer.json; write one with Python's transformers, \
         `AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)`, or give one with `ulysses.tokenizer`",
        dir.display()
    ))
}

/// Returns whether `dir` is a checkpoint or contains one.
fn holds_checkpoints(dir: &Path) -> bool {
    read_pointer(dir).is_some()
        || dir.join(MANIFEST).exists()
        || saved_steps(dir).is_ok_and(|steps| !steps.is_empty())
}

/// Returns the directory that `model` names, unless it names a preset.
fn directory(model: &str) -> Option<&Path> {
    let dir = Path::new(model);
    (!PRESETS.contains(&model) && dir.exists()).then_some(dir)
}

impl ModelSource {
    /// Opens a model. Presets get random weights from `seed` and the tokenizer's vocabulary size; a directory has its own.
    /// `log` receives what the user should know about it.
    ///
    /// # Errors
    /// An unknown name, or a directory that cannot be read.
    pub fn open(model: &str, seed: u64, vocab_size: usize, log: fn(&str)) -> Result<Self, JobError> {
        let Some(dir) = directory(model) else {
            let config = ModelConfig { vocab_size, ..preset(model).map_err(|error| unknown(model, error))? };
            config.validate(&format!("preset {model} with this tokenizer")).or_usage()?;
            if Path::new(model).is_dir() {
                log(&format!("note: the model is the preset `{model}`; for the directory give ./{model}"));
            }
            return Ok(Self::random(config, seed));
        };
        let description = HfDescription::from_dir(dir).map_err(|error| match holds_checkpoints(dir) {
            _ if dir.is_file() && read_pointer(dir).is_none() => JobError::usage(format!(
                "{model}: expected a model directory with config.json and weights, found a file"
            )),
            true => JobError::usage(format!(
                "{model}: expected a model, found a checkpoint or an output directory; convert it with `ulysses checkpoint \
                 export {model} --output DIR`"
            )),
            false => JobError::usage(error),
        });
        let description = description?;
        let max_positions = description.max_position_embeddings();
        let HfModel { config, weights, notes, source } =
            HfModel::with_weights(description, dir).or_usage()?;
        notes.iter().for_each(|text| log(&format!("note: {text}")));
        Ok(Self { config, weights: Box::new(weights), hf_source: Some(source), max_positions })
    }

    /// Creates a model with random weights.
    pub fn random(config: ModelConfig, seed: u64) -> Self {
        Self { config, weights: Box::new(RandomWeights { seed }), hf_source: None, max_positions: None }
    }

    /// Initializes the engine of a rank, as [`initialize`]. Collective.
    ///
    /// # Errors
    /// As for [`initialize`].
    pub fn engine(&self, config: &Config, groups: &MeshGroups) -> Result<Engine, EngineError> {
        initialize(Model::new(&self.config)?, &*self.weights, config, groups)
    }

    /// Warns of sequences of `seq_len` tokens if the model was made for shorter ones.
    pub fn warn_of_length(&self, seq_len: usize, log: fn(&str)) {
        if let Some(warning) = self.length_warning(seq_len) {
            log(&format!("warning: {warning}"));
        }
    }

    fn length_warning(&self, seq_len: usize) -> Option<String> {
        let max_positions = self.max_positions.filter(|max_positions| seq_len > *max_positions)?;
        let remedy = match self.config.rope().map(|rope| rope.scaling) {
            // Scales whatever is longer.
            Some(Scaling::Dynamic { .. }) => return None,
            None | Some(Scaling::None) => "set `rope_scaling` in its config.json",
            _ => "its `rope_scaling` is for that length: raise the factor in its config.json",
        };
        Some(format!(
            "sequences of {seq_len} tokens exceed the model's `max_position_embeddings`, {max_positions}: {remedy}, or it must \
             learn the positions beyond"
        ))
    }
}

/// Rejects settings for layers or parameters that the model does not have.
///
/// # Errors
/// [`JobError::Usage`], which names the setting.
pub fn check_layers(model: &ModelConfig, config: &Config) -> Result<(), JobError> {
    let (interval, layers) = (config.ulysses.activation_checkpointing_interval, model.num_layers());
    if interval > layers {
        return Err(JobError::usage(format!(
            "`ulysses.activation_checkpointing_interval` is {interval}, but the model has {layers} layers: expected at \
             most {layers}"
        )));
    }
    let model = Model::new(model).or_usage()?;
    layers_of_stages(&model, config).or_usage()?;
    check_parameter_groups(&config.ulysses.parameter_groups, &model.units()).or_usage()
}

/// Sets a ring size of `"auto"` for the model, on nodes of `ranks_per_node` ranks.
pub fn resolve_ring(model: &ModelConfig, config: &mut Config, ranks_per_node: usize) {
    config.resolve_ring(ulysses_limits(model, config, ranks_per_node));
}

/// Checks before ranks start that each rank of sp and tp gets a head and a token.
///
/// # Errors
/// [`JobError::Usage`] with the numbers.
pub fn check_exchange(
    model: &ModelConfig,
    batch: usize,
    seq_len: usize,
    config: &Config,
) -> Result<(), JobError> {
    let (chunks, sharding, tp_size) =
        (config.ulysses.head_chunks, config.seq_sharding(), config.mesh.tp_size);
    check_tensor_parallel(model, config).or_usage()?;
    let layers = layers_of_tp_ranks(model, tp_size).or_usage()?.concat();
    let max_chunks = layers.iter().map(|layer| layer.max_head_chunks()).min().unwrap_or(0);
    if chunks > max_chunks {
        let owner = match tp_size {
            1 => "the model".to_owned(),
            _ => format!("one of tp = {tp_size} ranks"),
        };
        let reason = match model.attention_layers().any(|layer| layer.max_head_chunks() < layer.num_kv_heads)
        {
            true => "normalizes queries over all heads, or has latent attention".to_owned(),
            false => format!("has {max_chunks} KV heads"),
        };
        return Err(JobError::usage(format!(
            "`ulysses.head_chunks` is {chunks}, but {owner} {reason}: expected at most {max_chunks}"
        )));
    }
    for layer in layers {
        for chunk in layer.heads().chunks(chunks) {
            // Of the ring rank with the fewest tokens.
            let tokens = seq_len / sharding.ring_size;
            let shape = AttentionShape::new(&layer, chunk.num_heads(), batch, tokens);
            let plan = ExchangePlan::grouped(shape, sharding.ulysses_size, 0);
            plan.map_err(|error| refusal(error.within(sharding, seq_len), config))?;
        }
    }
    let shards = (0..sharding.sp_size()).map(|rank| sharding.tokens(seq_len, rank).len());
    match shards.min().filter(|tokens| *tokens < tp_size) {
        Some(tokens) => Err(EngineError::TooFewTokens { tokens, tp_size }).or_usage(),
        None => Ok(()),
    }
}

/// The refusal of an exchange. For too few heads it says which ranks have them, and the mesh with a ring that works.
fn refusal(error: SequenceParallelError, config: &Config) -> JobError {
    let (SequenceParallelError::TooFewHeads { num_heads, .. }
    | SequenceParallelError::TooFewHeadsInRing { num_heads, .. }) = error
    else {
        return JobError::usage(error);
    };
    let (chunks, sizes) = (config.ulysses.head_chunks, config.mesh.shape());
    let heads = match (chunks, sizes.tp) {
        (1, 1) => String::new(),
        (1, tp) => format!("on a rank of tp = {tp}: "),
        (chunks, 1) => format!("in a chunk of the heads (`ulysses.head_chunks` = {chunks}): "),
        (chunks, tp) => {
            format!("in a chunk of the heads (`ulysses.head_chunks` = {chunks}) on a rank of tp = {tp}: ")
        }
    };
    let ring_size = Some(SeqSharding::for_heads(sizes.sp, num_heads).ring_size);
    let mesh = TrainingShape { sizes, ring_size, shard_size: None };
    JobError::usage(format!("{heads}{error}, or `--mesh {}`", mesh.notation()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Overrides, RawConfig};

    #[test]
    fn a_model_with_scaled_positions_is_not_advised_to_scale_them() {
        let config = preset("nano").unwrap();
        let with = |scaling| {
            let config = config.clone().with_rope(|rope| rope.scaling = scaling);
            ModelSource { max_positions: Some(64), ..ModelSource::random(config, 0) }
        };
        let (plain, scaled) = (with(Scaling::None), with(Scaling::Linear { factor: 2.0 }));
        assert_eq!((plain.length_warning(64), scaled.length_warning(64)), (None, None));
        assert_eq!(with(Scaling::Dynamic { factor: 2.0, original_len: 64 }).length_warning(65), None);
        assert!(plain.length_warning(65).unwrap().contains("64: set `rope_scaling`"));
        assert!(scaled.length_warning(65).unwrap().contains("raise the factor"));
    }

    #[test]
    fn a_sequence_too_short_for_a_ring_is_refused_with_its_own_length() {
        let text = r#"{"train_batch_size": 1, "mesh_param": [1, 8], "ulysses": {"ring_size": 4}}"#;
        let mut config =
            RawConfig::from_json_str(text, "c.json").unwrap().resolve(&Overrides::default()).unwrap();
        let model = preset("nano").unwrap();
        assert!(check_exchange(&model, 1, 8, &config).is_ok());
        let Err(JobError::Usage(refusal)) = check_exchange(&model, 1, 7, &config) else {
            panic!("7 tokens on 8 ranks")
        };
        assert!(refusal.to_string().contains("seq_len = 7 cannot be split over sp = 8 ranks"), "{refusal}");
        config.mesh.tp_size = 2;
        let Err(JobError::Usage(refusal)) = check_exchange(&model, 1, 7, &config) else {
            panic!("7 tokens on 8 ranks")
        };
        assert!(refusal.to_string().starts_with("seq_len = 7 "), "{refusal}");
    }

    #[test]
    fn a_tp_that_heads_or_tokens_do_not_allow_is_refused() {
        let refusal = |tp: usize, chunks: usize, seq_len: usize| {
            let text = format!(
                r#"{{"train_batch_size": 1, "mesh_param": [1, 2], "tensor_parallel_size": {tp},
                    "ulysses": {{"head_chunks": {chunks}}}}}"#
            );
            let config = Config::from_json_str(&text, "c.json").unwrap();
            match check_exchange(&preset("nano").unwrap(), 1, seq_len, &config) {
                Err(JobError::Usage(refusal)) => refusal.to_string(),
                outcome => format!("{outcome:?}"),
            }
        };
        // 4 query heads, 2 KV heads: each of two tp ranks has 2 and 1, which two sp ranks share.
        assert_eq!(refusal(2, 1, 8), "Ok(())");
        assert!(refusal(5, 1, 64).contains("cannot be divided over tp = 5 ranks; tp of 1 to 4 is valid"));
        let few_heads = refusal(4, 1, 64);
        assert!(few_heads.starts_with("on a rank of tp = 4: num_heads = 1 "), "{few_heads}");
        assert!(
            few_heads.ends_with("`ulysses.ring_size` 2, or `--mesh dp=1,ring=2,ulysses=1,tp=4`"),
            "{few_heads}"
        );
        assert!(refusal(2, 2, 64).contains("one of tp = 2 ranks has 1 KV heads: expected at most 1"));
        assert!(refusal(2, 1, 3).contains("1 tokens per sequence and sp rank cannot be shared by tp = 2"));
        assert!(refusal(2, 1, 3).contains("the largest valid tp is 1"));
    }
}
