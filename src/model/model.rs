//! A whole model: embedding, layers, head.

use super::{ModelConfig, ModelError};
use crate::nn::{Embedding, Layer, LossHead, ParameterSpec};

/// An embedding, a stack of layers, and a head with its loss.
///
/// # Examples
///
/// ```
/// use ulysses::model::{Model, preset};
///
/// let model = Model::llama(&preset("nano")?)?;
/// let names: Vec<String> = model.units().into_iter().map(|unit| unit.name).collect();
/// assert_eq!(names, ["embedding", "model.layers.0", "model.layers.1", "head"]);
/// # Ok::<(), ulysses::model::ModelError>(())
/// ```
pub struct Model {
    /// From token ids to hidden states.
    pub embedding: Embedding,
    /// From hidden states to hidden states.
    pub layers: Vec<Box<dyn Layer>>,
    /// From hidden states to a loss.
    pub head: LossHead,
}

/// Parameters that are partitioned, gathered and reduced as a whole.
#[derive(Debug, Clone)]
pub struct UnitSpec {
    /// Name for messages and reports.
    pub name: String,
    /// The parameters, in the order of the flat buffer.
    pub parameters: Vec<ParameterSpec>,
}

impl Model {
    /// Creates a Llama-style decoder.
    ///
    /// # Errors
    /// A description that [`ModelConfig::validate`] refuses.
    pub fn llama(config: &ModelConfig) -> Result<Self, ModelError> {
        config.validate("model")?;
        Ok(Self::layers_of(config))
    }

    /// As [`llama`](Self::llama), for an unchecked description; allocates nothing.
    pub(super) fn layers_of(config: &ModelConfig) -> Self {
        let ModelConfig { vocab_size, hidden_size, rms_norm_eps, initializer_range: std, .. } = *config;
        let embedding = Embedding::new(vocab_size, hidden_size, std);
        let projection =
            if config.tie_word_embeddings { &embedding.parameter().name } else { "lm_head.weight" };
        let head = LossHead::new(projection, vocab_size, hidden_size, rms_norm_eps, std);
        let layer = |index| (config.family.block)(config, index);
        Self { layers: (0..config.num_layers()).map(layer).collect(), embedding, head }
    }

    /// Returns whether the head's projection is the embedding matrix, judged by its name.
    pub fn is_tied(&self) -> bool {
        self.head.projection().name == self.embedding.parameter().name
    }

    /// All parameters by unit: the embedding, every layer, the head. With a tied head, the first unit also
    /// has the head's norm and there is no last unit, so that the shared matrix is gathered and reduced once.
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
