//! The description of a model, and the family that it belongs to.

use super::ModelError;
use super::checks::{
    check_attention, check_linear_attention, check_number, check_positive, check_sizes, refused,
};
use super::hf::{HfConfig, scaling_to_hf};
use crate::nn::{AttentionConfig, Layer, LinearAttentionConfig, MixerConfig, NormConfig, ShortConvConfig};
use serde_json::{Value, json};
use std::fmt;
use ulysses_kernels::causal_conv::MAX_WIDTH;
use ulysses_kernels::rope::Rope;

/// A model family: what differs between models that are composed of the same modules.
pub struct Family {
    /// `model_type` in a Hugging Face `config.json`.
    pub model_type: &'static str,
    /// The class in its `architectures`.
    pub(crate) class: &'static str,
    /// Names of its parameters.
    pub names: ModelNames,
    /// Reads a `config.json`. Fields that it does not ask for are refused, unless they change no model.
    pub(crate) read: fn(&HfConfig<'_>) -> Result<ModelConfig, ModelError>,
    /// Adds the fields that not all families have to a `config.json`.
    pub(crate) write: fn(&ModelConfig, &mut Value),
    /// Composes the layer of this index.
    pub(crate) block: fn(&ModelConfig, usize) -> Box<dyn Layer>,
    /// Published models, for plans.
    pub(crate) models: &'static [KnownModel],
}

/// Names of the layers, and of the parameters outside of them.
#[derive(Debug, Clone, Copy)]
pub struct ModelNames {
    /// The embedding matrix.
    pub embedding: &'static str,
    /// The embedding matrix of the positions, if they are learned.
    pub positions: &'static str,
    /// The layers, without their index.
    pub layers: &'static str,
    /// The final norm, without the name of its parameter.
    pub norm: &'static str,
    /// The output projection, unless it is tied.
    pub head: &'static str,
}

impl ModelNames {
    /// Those of Llama and most others.
    pub const LLAMA: Self = Self {
        embedding: "model.embed_tokens.weight",
        positions: "model.embed_positions.weight",
        layers: "model.layers",
        norm: "model.norm",
        head: "lm_head.weight",
    };
}

/// The shape of a published model, which has no weights.
pub struct KnownModel {
    /// Its name at Hugging Face, without the organization and the stage of its training.
    pub name: &'static str,
    /// Its number of parameters, as it is known to have.
    pub num_parameters: usize,
    /// `max_position_embeddings`.
    pub max_positions: usize,
    /// Its description.
    pub config: fn() -> ModelConfig,
}

impl KnownModel {
    pub(super) const fn new(
        name: &'static str,
        num_parameters: usize,
        max_positions: usize,
        config: fn() -> ModelConfig,
    ) -> Self {
        Self { name, num_parameters, max_positions, config }
    }
}

impl fmt::Debug for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.model_type)
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Self) -> bool {
        self.model_type == other.model_type
    }
}

/// Shape of a decoder. Engine, plans and exports read it; only its family knows what else its layers have.
///
/// # Examples
///
/// ```
/// use ulysses::model::{ModelConfig, preset};
///
/// let config = ModelConfig { vocab_size: 32_000, ..preset("nano")?.with_num_layers(4) };
/// config.validate("my model")?;
/// assert_eq!(config.attention_layers().nth(3).unwrap().q_to_kv(), [0, 0, 1, 1]);
/// # Ok::<(), ulysses::model::ModelError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The model family.
    pub family: &'static Family,
    /// Size of the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// The decoder layers, by what mixes their tokens, if anything does.
    pub layers: Vec<MixerConfig>,
    /// Epsilon of the RMSNorm, added to the mean square.
    pub rms_norm_eps: f64,
    /// Added to the weights of the norms: 0, or 1 in Gemma.
    pub norm_offset: f64,
    /// Whether the norms subtract the mean first: LayerNorm.
    pub centered_norms: bool,
    /// Whether the norms have biases.
    pub norm_bias: bool,
    /// Whether the projections of the MLP have biases.
    pub mlp_bias: bool,
    /// Whether the output projection has a bias.
    pub head_bias: bool,
    /// The number of learned position embeddings; `None` without them.
    pub learned_positions: Option<usize>,
    /// Constant factors.
    pub multipliers: Multipliers,
    /// The soft cap of the logits, `cap · tanh(logit / cap)`; `None` without one.
    pub final_softcap: Option<f64>,
    /// Standard deviation of random initial weights.
    pub initializer_range: f64,
    /// Whether the output projection is the embedding matrix.
    pub tie_word_embeddings: bool,
}

/// Factors on hidden states and logits, 1 in most families.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Multipliers {
    /// On the embedding.
    pub embedding: f64,
    /// On the output of attention and MLP, before it is added to the residual stream.
    pub residual: f64,
    /// On the logits.
    pub logits: f64,
}

impl Default for Multipliers {
    fn default() -> Self {
        Self { embedding: 1.0, residual: 1.0, logits: 1.0 }
    }
}

/// Hidden size, layers, query heads, KV heads and intermediate size of a model.
pub type Sizes = [usize; 5];

/// Larger than the number of layers of any model.
pub(super) const MAX_LAYERS: usize = 1 << 14;

impl ModelConfig {
    /// A decoder of equal layers. All else is as in Llama 2.
    pub fn with_sizes(family: &'static Family, sizes: Sizes) -> Self {
        let [hidden_size, num_layers, num_heads, num_kv_heads, intermediate_size] = sizes;
        let layer = AttentionConfig {
            rope: Some(Rope::from(10_000.0)),
            ..AttentionConfig::with_heads(num_heads, num_kv_heads, hidden_size / num_heads.max(1))
        };
        Self {
            family,
            vocab_size: 32_000,
            hidden_size,
            intermediate_size,
            layers: vec![layer.into(); num_layers],
            rms_norm_eps: 1e-5,
            norm_offset: 0.0,
            centered_norms: false,
            norm_bias: false,
            mlp_bias: false,
            head_bias: false,
            learned_positions: None,
            multipliers: Multipliers::default(),
            final_softcap: None,
            initializer_range: 0.02,
            tie_word_embeddings: false,
        }
    }

    /// Number of layers.
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// The name of a layer.
    pub fn layer_name(&self, index: usize) -> String {
        format!("{}.{index}", self.family.names.layers)
    }

    /// The largest number of head chunks that all layers allow.
    pub fn max_head_chunks(&self) -> usize {
        AttentionConfig::common_head_chunks(self.attention_layers())
    }

    /// The same model with another number of layers: the first ones, repeated if there are not as many.
    #[must_use]
    pub fn with_num_layers(self, num_layers: usize) -> Self {
        let layers = self.layers.iter().copied().cycle().take(num_layers).collect();
        Self { layers, ..self }
    }

    /// The same model with a change in the attention of all layers that have one.
    #[must_use]
    pub fn with_attention(mut self, change: impl Fn(&mut AttentionConfig)) -> Self {
        self.attention_layers_mut().for_each(change);
        self
    }

    /// The layers with attention, to change them.
    pub fn attention_layers_mut(&mut self) -> impl Iterator<Item = &mut AttentionConfig> {
        self.layers.iter_mut().filter_map(MixerConfig::attention_mut)
    }

    /// The attention of the first layer that has one.
    ///
    /// # Panics
    /// If no layer has attention, which [`validate`](Self::validate) refuses.
    pub fn attention(&self) -> &AttentionConfig {
        self.attention_layers().next().expect("some layer has attention")
    }

    /// The layers with attention.
    pub fn attention_layers(&self) -> impl Iterator<Item = &AttentionConfig> {
        self.layers.iter().filter_map(MixerConfig::attention)
    }

    /// The layers with linear attention.
    pub fn linear_layers(&self) -> impl Iterator<Item = &LinearAttentionConfig> {
        self.layers.iter().filter_map(MixerConfig::linear_attention)
    }

    /// Whether a layer reads whole sequences and is not attention.
    pub fn needs_whole_sequences(&self) -> bool {
        self.layers.iter().any(|layer| layer.exchanged_heads().is_some())
    }

    /// The same model with another module in some layers instead of attention.
    #[must_use]
    pub fn with_mixer(
        mut self,
        layers: impl IntoIterator<Item = bool>,
        mixer: impl Into<MixerConfig>,
    ) -> Self {
        let mixer = mixer.into();
        for (layer, _) in self.layers.iter_mut().zip(layers).filter(|(_, has_it)| *has_it) {
            *layer = mixer;
        }
        self
    }

    /// The same model with a window in some layers, and their rotary embedding if it is another one.
    #[must_use]
    pub fn with_windows(mut self, windowed: &[bool], window: usize, rope: Option<Rope>) -> Self {
        let layers = self.layers.iter_mut().map(MixerConfig::attention_mut);
        for layer in layers.zip(windowed).filter(|(_, windowed)| **windowed).filter_map(|(layer, _)| layer) {
            layer.window = Some(window);
            layer.rope = rope.or(layer.rope);
        }
        self
    }

    /// The same model with a change in the rotary embedding of the layers that have one.
    #[must_use]
    pub fn with_rope(self, change: impl Fn(&mut Rope)) -> Self {
        self.with_attention(|layer| layer.rope.iter_mut().for_each(&change))
    }

    /// The rotary embedding of the layers that see the whole document, or else of the first layer that has one.
    pub fn rope(&self) -> Option<Rope> {
        let rotating =
            || self.attention_layers().filter(|layer| layer.rope.is_some_and(|rope| rope.rotates()));
        rotating()
            .find(|layer| layer.window.is_none() && layer.chunk.is_none())
            .or_else(|| rotating().next())?
            .rope
    }

    /// The constants of its norms.
    pub fn norm(&self) -> NormConfig {
        let Self {
            rms_norm_eps: eps, norm_offset: offset, centered_norms: centered, norm_bias: bias, ..
        } = *self;
        NormConfig { eps, offset, centered, bias }
    }

    /// The layers that differ in what mixes their tokens, each once.
    pub fn distinct_layers(&self) -> Vec<MixerConfig> {
        let mut distinct = Vec::new();
        for layer in &self.layers {
            if !distinct.contains(layer) {
                distinct.push(*layer);
            }
        }
        distinct
    }

    /// The same description as a Hugging Face `config.json`.
    pub fn to_hf_json(&self) -> Value {
        let Family { model_type, class, write, .. } = self.family;
        let first = self.attention_layers().next();
        let rope = self.rope();
        let mut json = json!({
            "architectures": [class], "model_type": model_type, "hidden_act": "silu",
            "vocab_size": self.vocab_size, "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size, "num_hidden_layers": self.num_layers(),
            "num_attention_heads": first.map(|layer| layer.num_heads),
            "num_key_value_heads": first.map(|layer| layer.num_kv_heads),
            "head_dim": first.map(|layer| layer.head_dim),
            "rms_norm_eps": self.rms_norm_eps, "initializer_range": self.initializer_range,
            "tie_word_embeddings": self.tie_word_embeddings,
        });
        if let Some(rope) = rope {
            json["rope_theta"] = json!(rope.theta);
            if rope.partial_rotary_factor != 1.0 {
                json["partial_rotary_factor"] = json!(rope.partial_rotary_factor);
            }
        }
        if let Some((scaling, max_positions)) = rope.and_then(|rope| scaling_to_hf(rope.scaling)) {
            json["rope_scaling"] = scaling;
            if let Some(positions) = max_positions {
                json["max_position_embeddings"] = json!(positions);
            }
        }
        write(self, &mut json);
        json
    }

    /// Checks the constraints of the layers; errors call the description `origin`.
    ///
    /// # Errors
    /// Sizes that are zero or unrealistically large, an odd `head_dim` of heads that rotate, KV heads that do not divide the query
    /// heads, or layers that the family does not have.
    pub fn validate(&self, origin: &str) -> Result<(), ModelError> {
        // No model comes near these limits; within them no element count overflows.
        check_sizes(
            origin,
            &[
                ("vocab_size", self.vocab_size, 1 << 32),
                ("hidden_size", self.hidden_size, 1 << 18),
                ("intermediate_size", self.intermediate_size, 1 << 20),
                ("num_hidden_layers", self.num_layers(), MAX_LAYERS),
            ],
        )?;
        if self.attention_layers().next().is_none() {
            let expected = "at least one layer must have attention".to_owned();
            return Err(refused(origin, "layer_types", "none with attention".to_owned(), expected));
        }
        check_number(origin, "rms_norm_eps", self.rms_norm_eps, 0.0)?;
        check_positive(origin, "final_logit_softcapping", self.final_softcap)?;
        self.distinct_layers().iter().try_for_each(|layer| match layer {
            MixerConfig::Attention(attention) => check_attention(origin, attention),
            MixerConfig::LinearAttention(linear) => check_linear_attention(origin, linear),
            MixerConfig::ShortConv(ShortConvConfig { taps, .. }) => {
                check_sizes(origin, &[("conv_L_cache", *taps, MAX_WIDTH)])
            }
            MixerConfig::Mlp => Ok(()),
        })?;
        // Otherwise an export would be another model.
        let json = self.to_hf_json();
        match (self.family.read)(&HfConfig::new(origin, &json)) {
            Ok(written) if written == *self => Ok(()),
            Err(error) => Err(error),
            Ok(_) => {
                let expected = "its config.json cannot describe these layers";
                Err(refused(origin, "model_type", self.family.model_type.to_owned(), expected.to_owned()))
            }
        }
    }
}
