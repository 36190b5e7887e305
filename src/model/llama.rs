//! Llama-style models: their description, and the stack of layers made from it.

use super::{DecoderLayer, Embedding, Layer, LossHead, ModelError, ParameterSpec};
use serde_json::{Value, json};
use std::path::Path;

/// Shape of a Llama-style decoder.
#[derive(Debug, Clone, PartialEq)]
pub struct LlamaConfig {
    /// Token ids are below this.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads; a divisor of `num_heads`.
    pub num_kv_heads: usize,
    /// Elements in a head; even.
    pub head_dim: usize,
    /// Base of the rotary embedding's wavelengths.
    pub rope_theta: f64,
    /// Added to the mean square before its root is taken.
    pub rms_norm_eps: f64,
    /// Standard deviation of random initial weights.
    pub initializer_range: f64,
    /// Whether the output projection is the embedding.
    pub tie_word_embeddings: bool,
}

impl LlamaConfig {
    /// Reads a Hugging Face `config.json`.
    ///
    /// # Errors
    /// A file that is missing, is no JSON object, or describes a model that this version
    /// would compute wrongly (other architectures, RoPE scaling, biases, sliding windows).
    pub fn from_hf_dir(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join("config.json");
        let text =
            std::fs::read_to_string(&path).map_err(|source| ModelError::Io { path: path.clone(), source })?;
        let value: Value = serde_json::from_str(&text).map_err(|error| ModelError::Format {
            path: path.clone(),
            reason: format!("not valid JSON: {error}"),
        })?;
        if !value.is_object() {
            return Err(ModelError::Format { path, reason: "expected a JSON object".into() });
        }
        let config = HfConfig { origin: path.display().to_string(), value }.llama()?;
        config.validate(&path.display().to_string())?;
        Ok(config)
    }

    /// The same description in Hugging Face's vocabulary.
    pub fn to_hf_json(&self) -> Value {
        json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            "vocab_size": self.vocab_size, "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size, "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads, "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim, "rope_theta": self.rope_theta, "rms_norm_eps": self.rms_norm_eps,
            "initializer_range": self.initializer_range, "tie_word_embeddings": self.tie_word_embeddings,
        })
    }

    /// Checks what the layers rely on; `origin` names the description in errors.
    ///
    /// # Errors
    /// Sizes that are zero or beyond any model, an odd `head_dim`, or KV heads that do not divide the query heads.
    pub fn validate(&self, origin: &str) -> Result<(), ModelError> {
        let error = |key, got: String, expected: String| {
            Err(ModelError::Config { origin: origin.to_owned(), key, got, expected })
        };
        // No model comes near these limits; within them no count of elements overflows.
        let sizes = [
            ("vocab_size", self.vocab_size, 1 << 32),
            ("hidden_size", self.hidden_size, 1 << 18),
            ("intermediate_size", self.intermediate_size, 1 << 20),
            ("num_hidden_layers", self.num_layers, 1 << 14),
            ("num_attention_heads", self.num_heads, 1 << 12),
            ("num_key_value_heads", self.num_kv_heads, 1 << 12),
            ("head_dim", self.head_dim, 1 << 12),
        ];
        if let Some((key, got, limit)) =
            sizes.into_iter().find(|(_, size, limit)| !(1..=*limit).contains(size))
        {
            return error(key, got.to_string(), format!("it must be from 1 to {limit}"));
        }
        let numbers = [("rope_theta", self.rope_theta, 1.0), ("rms_norm_eps", self.rms_norm_eps, 0.0)];
        if let Some((key, got, least)) = numbers.into_iter().find(|(_, number, least)| !(*number >= *least)) {
            return error(key, got.to_string(), format!("it must be at least {least}"));
        }
        if self.head_dim % 2 != 0 {
            return error("head_dim", self.head_dim.to_string(), "rotary embedding needs an even one".into());
        }
        if self.num_heads % self.num_kv_heads != 0 {
            let expected = format!("it must divide num_attention_heads = {}", self.num_heads);
            return error("num_key_value_heads", self.num_kv_heads.to_string(), expected);
        }
        Ok(())
    }

    /// The KV head that each query head uses.
    pub fn q_to_kv(&self) -> Vec<usize> {
        (0..self.num_heads).map(|head| head * self.num_kv_heads / self.num_heads).collect()
    }

    /// Number of parameters.
    pub fn num_parameters(&self) -> usize {
        Model::llama(self).units().iter().flat_map(|unit| &unit.parameters).map(ParameterSpec::numel).sum()
    }
}

/// Typed access to a Hugging Face `config.json`.
struct HfConfig {
    origin: String,
    value: Value,
}

impl HfConfig {
    fn llama(&self) -> Result<LlamaConfig, ModelError> {
        self.refuse_unsupported()?;
        let num_heads = self.size("num_attention_heads")?;
        let hidden_size = self.size("hidden_size")?;
        let rope_theta = match self.value.pointer("/rope_parameters/rope_theta") {
            Some(theta) => theta.as_f64(),
            None => self.value.get("rope_theta").map_or(Some(10_000.0), Value::as_f64),
        };
        Ok(LlamaConfig {
            vocab_size: self.size("vocab_size")?,
            hidden_size,
            intermediate_size: self.size("intermediate_size")?,
            num_layers: self.size("num_hidden_layers")?,
            num_heads,
            num_kv_heads: self.optional_size("num_key_value_heads")?.unwrap_or(num_heads),
            head_dim: self.optional_size("head_dim")?.unwrap_or(hidden_size / num_heads.max(1)),
            rope_theta: rope_theta.ok_or_else(|| self.error("rope_theta", "it must be a number"))?,
            rms_norm_eps: self.number("rms_norm_eps", 1e-6)?,
            initializer_range: self.number("initializer_range", 0.02)?,
            tie_word_embeddings: self.flag("tie_word_embeddings")?,
        })
    }

    /// A model that would load but compute something else must not load.
    fn refuse_unsupported(&self) -> Result<(), ModelError> {
        let get = |key: &str| self.value.get(key).filter(|value| !value.is_null());
        let is = |value: Option<&Value>, allowed: &str| value.is_none_or(|value| value == allowed);
        if get("model_type").is_none_or(|kind| kind != "llama") {
            return Err(self.error("model_type", "this version loads \"llama\""));
        }
        if !is(get("hidden_act"), "silu") {
            return Err(self.error("hidden_act", "this version computes \"silu\""));
        }
        let rope = get("rope_parameters").or(get("rope_scaling"));
        let rope_type = rope.and_then(|rope| rope.get("rope_type").or(rope.get("type")));
        if !is(rope_type, "default") {
            let key = if get("rope_parameters").is_some() { "rope_parameters" } else { "rope_scaling" };
            return Err(self.error(key, "this version computes the default rotary embedding, unscaled"));
        }
        for key in ["attention_bias", "mlp_bias"] {
            if self.flag(key)? {
                return Err(self.error(key, "this version has no biases"));
            }
        }
        Ok(())
    }

    fn error(&self, key: &'static str, expected: &str) -> ModelError {
        let got = self.value.get(key).map_or("missing".to_owned(), Value::to_string);
        ModelError::Config { origin: self.origin.clone(), key, got, expected: expected.to_owned() }
    }

    fn optional_size(&self, key: &'static str) -> Result<Option<usize>, ModelError> {
        match self.value.get(key).filter(|value| !value.is_null()) {
            None => Ok(None),
            Some(value) => match value.as_u64() {
                Some(size) => Ok(Some(size as usize)),
                None => Err(self.error(key, "it must be a positive integer")),
            },
        }
    }

    fn size(&self, key: &'static str) -> Result<usize, ModelError> {
        self.optional_size(key)?.ok_or_else(|| self.error(key, "it must be a positive integer"))
    }

    fn number(&self, key: &'static str, default: f64) -> Result<f64, ModelError> {
        match self.value.get(key) {
            None => Ok(default),
            Some(value) => value.as_f64().ok_or_else(|| self.error(key, "it must be a number")),
        }
    }

    fn flag(&self, key: &'static str) -> Result<bool, ModelError> {
        match self.value.get(key) {
            None | Some(Value::Null) => Ok(false),
            Some(value) => value.as_bool().ok_or_else(|| self.error(key, "it must be true or false")),
        }
    }
}

/// An embedding, a stack of layers, and a head with its loss.
pub struct Model {
    /// Token ids to hidden states.
    pub embedding: Embedding,
    /// Hidden states to hidden states.
    pub layers: Vec<Box<dyn Layer>>,
    /// Hidden states to a loss.
    pub head: LossHead,
}

/// Parameters that are partitioned, gathered and reduced as a whole.
#[derive(Debug, Clone)]
pub struct UnitSpec {
    /// Name for messages and reports.
    pub name: String,
    /// The parameters, in the order in which they lie in the flat buffer.
    pub parameters: Vec<ParameterSpec>,
}

impl Model {
    /// The layers of a Llama-style decoder.
    pub fn llama(config: &LlamaConfig) -> Self {
        let LlamaConfig { vocab_size, hidden_size, rms_norm_eps, initializer_range: std, .. } = *config;
        let embedding = Embedding::new(vocab_size, hidden_size, std);
        let projection =
            if config.tie_word_embeddings { &embedding.parameter().name } else { "lm_head.weight" };
        let head = LossHead::new(projection, vocab_size, hidden_size, rms_norm_eps, std);
        let layer = |index| Box::new(DecoderLayer::new(config, index)) as Box<dyn Layer>;
        Self { layers: (0..config.num_layers).map(layer).collect(), embedding, head }
    }

    /// Whether the head's projection is the embedding's matrix, told by its name.
    pub fn is_tied(&self) -> bool {
        self.head.projection().name == self.embedding.parameter().name
    }

    /// All parameters by unit: the embedding, every layer, the head. With a tied head the
    /// first unit holds the head's norm too and there is no last one, so that the shared
    /// matrix is gathered and reduced once.
    pub fn units(&self) -> Vec<UnitSpec> {
        let embedding = self.embedding.parameter().clone();
        let (norm, projection) = (self.head.norm().clone(), self.head.projection().clone());
        let mut units = vec![UnitSpec { name: "embedding".into(), parameters: vec![embedding] }];
        units.extend(
            self.layers
                .iter()
                .map(|layer| UnitSpec { name: layer.name().into(), parameters: layer.parameters().to_vec() }),
        );
        if self.is_tied() {
            units[0].parameters.push(norm);
        } else {
            units.push(UnitSpec { name: "head".into(), parameters: vec![norm, projection] });
        }
        units
    }
}
