//! Fields of a `config.json` that all families read in the same way.

use super::config::MAX_LAYERS;
use super::hf::{FULL, WINDOWED};
use super::{FAMILIES, Family, HfConfig, ModelConfig, ModelError, family, listed};
use crate::nn::{AttentionConfig, Mamba2Config, MixerConfig};
use serde_json::{Value, json};
use ulysses_kernels::rope::Rope;

const LAYER_TYPES: &str = "layer_types";
const WINDOW: &str = "sliding_window";
const TIME_STEP_LIMIT: &str = "time_step_limit";

/// Another name for [`FULL`], which transformers also accepts.
const FULL_BEFORE: &str = "attention";

/// Infinity, as transformers 5 writes it.
fn infinity() -> Value {
    json!({ "__float__": "Infinity" })
}

/// The inverse of [`HfConfig::time_step_limits`].
pub(super) fn write_time_step_limits(mamba: &Mamba2Config, json: &mut Value) {
    let limit = |limit: f64| if limit.is_infinite() { infinity() } else { json!(limit) };
    json[TIME_STEP_LIMIT] = mamba.time_step_limits.map(limit).into_iter().collect();
}

/// The inverse of [`HfConfig::windowed_layers`], with the window.
pub(super) fn write_windows(config: &ModelConfig, json: &mut Value) {
    let layer_type = |layer: &AttentionConfig| if layer.window.is_some() { WINDOWED } else { FULL };
    json[LAYER_TYPES] = config.attention_layers().map(layer_type).collect();
    json[WINDOW] = json!(config.attention_layers().find_map(|layer| layer.window));
}

/// The inverse of [`HfConfig::layers_of_type`].
pub(super) fn write_layer_types(config: &ModelConfig, json: &mut Value, other: &str) {
    let layer_type = |layer: &MixerConfig| if layer.attention().is_some() { FULL } else { other };
    json[LAYER_TYPES] = config.layers.iter().map(layer_type).collect();
}

/// Removes fields that a family does not have, or has by other names.
pub(super) fn remove_fields(json: &mut Value, keys: &[&str]) {
    if let Some(fields) = json.as_object_mut() {
        keys.iter().for_each(|key| drop(fields.shift_remove(*key)));
    }
}

/// Why a field may not be left out whose default is the size of the family's first model.
pub(super) const MUST_BE_GIVEN: &str = "it must be given for this model_type";

/// Reads a `config.json`, by the family that it names.
pub(crate) fn read_config(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    let Some(family) = file.get("model_type").and_then(Value::as_str).and_then(family) else {
        let known = listed(FAMILIES.iter().map(|family| format!("{:?}", family.model_type)), "or");
        return Err(file.error("model_type", &format!("this version loads {known}, and no other family")));
    };
    let (class, classes) = (family.class, file.get("architectures").and_then(Value::as_array));
    if classes.is_some_and(|classes| !classes.iter().any(|known| known == class)) {
        return Err(file.error("architectures", &format!("this version computes {class:?} of this type")));
    }
    (family.read)(file)
}

impl HfConfig<'_> {
    /// A decoder of equal layers, with the epsilon of its norms if the file has none.
    pub(crate) fn decoder(
        &self,
        family: &'static Family,
        layer: AttentionConfig,
        default_eps: f64,
    ) -> Result<ModelConfig, ModelError> {
        self.decoder_with_mlp(family, layer, default_eps, self.size("intermediate_size")?)
    }

    /// As [`decoder`](Self::decoder), with the width of its MLPs, if that is not `intermediate_size`.
    pub(crate) fn decoder_with_mlp(
        &self,
        family: &'static Family,
        layer: AttentionConfig,
        default_eps: f64,
        mlp_size: usize,
    ) -> Result<ModelConfig, ModelError> {
        let AttentionConfig { num_heads, num_kv_heads, .. } = layer;
        let (hidden_size, num_layers) = (self.size("hidden_size")?, self.num_layers("num_hidden_layers")?);
        let sizes = [hidden_size, num_layers, num_heads, num_kv_heads, mlp_size];
        Ok(ModelConfig {
            vocab_size: self.size("vocab_size")?,
            layers: vec![layer.into(); num_layers],
            rms_norm_eps: self.number("rms_norm_eps", default_eps)?,
            initializer_range: self
                .get("initializer_range")
                .map_or(Ok(0.02), |_| self.number("initializer_range", 0.02))?,
            tie_word_embeddings: self.flag("tie_word_embeddings")?,
            ..ModelConfig::with_sizes(family, sizes)
        })
    }

    /// The number of layers, before any is described.
    pub(crate) fn num_layers(&self, key: &'static str) -> Result<usize, ModelError> {
        match self.size(key)? {
            num_layers if num_layers > MAX_LAYERS => {
                Err(self.error(key, &format!("it must be from 1 to {MAX_LAYERS}")))
            }
            num_layers => Ok(num_layers),
        }
    }

    /// The epsilon of the norms, if its key is not that of [`decoder`](Self::decoder).
    pub(crate) fn eps(&self, key: &'static str, default: f64) -> Result<f64, ModelError> {
        match self.number(key, default)? {
            eps if eps.is_finite() && eps >= 0.0 => Ok(eps),
            _ => Err(self.error(key, "it must be at least 0")),
        }
    }

    /// Whether a field is set, which it is unless the file says otherwise.
    pub(crate) fn flag_or_set(&self, key: &'static str) -> Result<bool, ModelError> {
        Ok(!self.has(key) || self.flag(key)?)
    }

    /// The attention of a layer that sees the whole document.
    pub(crate) fn attention(&self) -> Result<AttentionConfig, ModelError> {
        Ok(AttentionConfig { rope: Some(self.rope()?), ..self.heads()? })
    }

    /// The heads of a layer. What is absent is a function of the other sizes.
    pub(crate) fn heads(&self) -> Result<AttentionConfig, ModelError> {
        let num_heads = self.size("num_attention_heads")?;
        let num_kv_heads = self.optional_size("num_key_value_heads")?.unwrap_or(num_heads);
        let head_dim = match self.optional_size("head_dim")? {
            Some(head_dim) => head_dim,
            None => self.size("hidden_size")? / num_heads.max(1),
        };
        Ok(AttentionConfig::with_heads(num_heads, num_kv_heads, head_dim))
    }

    /// Refuses other MLPs than SwiGLU, and biases.
    pub(crate) fn check_block(&self) -> Result<(), ModelError> {
        self.check_activation("hidden_act", "silu")?;
        self.check_biases()
    }

    /// Refuses another activation.
    pub(crate) fn check_activation(&self, key: &'static str, known: &str) -> Result<(), ModelError> {
        match self.get(key) {
            Some(activation) if activation != known => {
                Err(self.error(key, &format!("this version computes {known:?} for this model_type")))
            }
            _ => Ok(()),
        }
    }

    /// Refuses biases that the block of Llama does not have.
    pub(crate) fn check_biases(&self) -> Result<(), ModelError> {
        for key in ["attention_bias", "mlp_bias"] {
            if self.flag(key)? {
                return Err(self.error(
                    key,
                    "must be false or absent: this version has no such biases for this model_type",
                ));
            }
        }
        Ok(())
    }

    /// Refuses windows. A `sliding_window` that is not used has no effect.
    pub(crate) fn check_full_attention(&self, config: &ModelConfig) -> Result<(), ModelError> {
        self.accept(&[WINDOW]);
        if self.flag("use_sliding_window")? {
            return Err(self.error("use_sliding_window", "this version has no windows for this model_type"));
        }
        match self.windowed_layers(config.num_layers(), |_| false)?.contains(&true) {
            true => Err(self.error("layer_types", "this version has no windows in this model")),
            false => Ok(()),
        }
    }

    /// `sliding_window`; absent means the window of the family's first model, `null` none.
    pub(crate) fn window_or(&self, first: usize) -> Result<Option<usize>, ModelError> {
        match self.has(WINDOW) {
            true => self.optional_size(WINDOW),
            false => Ok(Some(first)),
        }
    }

    /// The model with the window in some of its layers, which have another rotary embedding if it is given.
    pub(crate) fn with_windows(
        &self,
        config: ModelConfig,
        windowed: &[bool],
        window: Option<usize>,
        rope: Option<Rope>,
    ) -> Result<ModelConfig, ModelError> {
        match window {
            Some(window) => Ok(config.with_windows(windowed, window, rope)),
            None if windowed.contains(&true) => {
                Err(self.error(WINDOW, "there are layers with a window: it must be given"))
            }
            None => Ok(config),
        }
    }

    /// Every how many layers one differs, from 1.
    pub(crate) fn interval(&self, key: &'static str, default: usize) -> Result<usize, ModelError> {
        match self.optional_size(key)? {
            Some(0) => Err(self.error(key, "it must be a positive integer")),
            interval => Ok(interval.unwrap_or(default)),
        }
    }

    /// All layers but every [`interval`](Self::interval)-th have a rotary embedding.
    pub(crate) fn rotating_layers_by_interval(&self, num_layers: usize) -> Result<Vec<bool>, ModelError> {
        let interval = self.interval("no_rope_layer_interval", 4)?;
        Ok((1..=num_layers).map(|layer| layer % interval != 0).collect())
    }

    /// Which layers have a rotary embedding: by `no_rope_layers`, or else by the interval.
    pub(crate) fn rotating_layers(&self, num_layers: usize) -> Result<Vec<bool>, ModelError> {
        const LAYERS: &str = "no_rope_layers";
        let by_interval = self.rotating_layers_by_interval(num_layers)?;
        let Some(layers) = self.get(LAYERS) else { return Ok(by_interval) };
        let rotates =
            |layer: &Value| layer.as_u64().filter(|rotates| *rotates < 2).map(|rotates| rotates == 1);
        let layers = layers.as_array().map_or(&[][..], Vec::as_slice);
        let layers: Option<Vec<bool>> = layers.iter().take(num_layers).map(rotates).collect();
        let expected = "it must be a list of 1 and 0 (no position embedding) for each layer";
        layers.filter(|layers| layers.len() == num_layers).ok_or_else(|| self.error(LAYERS, expected))
    }

    /// Which layers have a window: by `layer_types`, or else by index.
    pub(crate) fn windowed_layers(
        &self,
        num_layers: usize,
        by_default: impl Fn(usize) -> bool,
    ) -> Result<Vec<bool>, ModelError> {
        let Some(types) = self.get(LAYER_TYPES) else { return Ok((0..num_layers).map(by_default).collect()) };
        let is_windowed = |layer_type: &Value| match layer_type.as_str() {
            Some(FULL) => Ok(false),
            Some(WINDOWED) => Ok(true),
            _ => Err(self.error(LAYER_TYPES, &format!("a layer is {FULL:?} or {WINDOWED:?}"))),
        };
        let types = types.as_array().map_or(&[][..], Vec::as_slice);
        if types.len() != num_layers {
            return Err(self.error(LAYER_TYPES, &format!("it must be a list of {num_layers} layers")));
        }
        types.iter().map(is_windowed).collect()
    }

    /// Which layers are of a type that is not attention, by `layer_types`; `None` if the file does not say it. The type may have
    /// several names.
    pub(crate) fn layers_of_type(
        &self,
        others: &[&str],
        num_layers: usize,
    ) -> Result<Option<Vec<bool>>, ModelError> {
        let Some(types) = self.get(LAYER_TYPES) else { return Ok(None) };
        let is_other = |layer_type: &Value| match layer_type.as_str() {
            Some(FULL | FULL_BEFORE) => Some(false),
            Some(name) if others.contains(&name) => Some(true),
            _ => None,
        };
        let types: Option<Vec<bool>> =
            types.as_array().and_then(|types| types.iter().map(is_other).collect());
        let types = types.filter(|types| types.len() == num_layers);
        let expected = format!("it must be a list of {num_layers} layers, {FULL:?} or {:?}", others[0]);
        types.map(Some).ok_or_else(|| self.error(LAYER_TYPES, &expected))
    }

    /// As [`attention`](Self::attention), with the head size of a family's first model if the file does not have the key.
    pub(crate) fn attention_with_head_dim(&self, head_dim: usize) -> Result<AttentionConfig, ModelError> {
        Ok(AttentionConfig { rope: Some(self.rope()?), ..self.heads_with_head_dim(head_dim)? })
    }

    /// As [`heads`](Self::heads), with the head size of a family's first model if the file does not have the key.
    pub(crate) fn heads_with_head_dim(&self, head_dim: usize) -> Result<AttentionConfig, ModelError> {
        let heads = self.heads()?;
        let head_dim = if self.has("head_dim") { heads.head_dim } else { head_dim };
        Ok(AttentionConfig { head_dim, ..heads })
    }

    /// The head of a family that ties it to the embedding unless the file says otherwise.
    pub(crate) fn tied_by_default(&self, config: ModelConfig) -> ModelConfig {
        let tie_word_embeddings = self.get("tie_word_embeddings").is_none() || config.tie_word_embeddings;
        ModelConfig { tie_word_embeddings, ..config }
    }

    /// The smallest and the largest time step of Mamba 2, by default all numbers from 0.
    pub(crate) fn time_step_limits(&self) -> Result<[f64; 2], ModelError> {
        let Some(limits) = self.get(TIME_STEP_LIMIT) else { return Ok([0.0, f64::INFINITY]) };
        let limit = |limit: &Value| if *limit == infinity() { Some(f64::INFINITY) } else { limit.as_f64() };
        match limits.as_array().map(|limits| limits.iter().map(limit).collect::<Vec<_>>()).as_deref() {
            Some(&[Some(least), Some(most)]) if 0.0 <= least && least < most => Ok([least, most]),
            _ => Err(self.error(TIME_STEP_LIMIT, "it must be two numbers from 0, the smaller one first")),
        }
    }

    /// Refuses attention to later tokens.
    pub(crate) fn check_causal(&self) -> Result<(), ModelError> {
        match self.flag("use_bidirectional_attention")? {
            false => Ok(()),
            true => {
                Err(self.error("use_bidirectional_attention", "this version computes causal attention only"))
            }
        }
    }

    /// Refuses a file without `num_key_value_heads`. transformers would use those of the family's first model.
    pub(crate) fn require_kv_heads(&self) -> Result<(), ModelError> {
        match self.has("num_key_value_heads") {
            true => Ok(()),
            false => Err(self.error("num_key_value_heads", MUST_BE_GIVEN)),
        }
    }
}
