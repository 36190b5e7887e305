//! A whole model: input, layers, objective.

use super::{ModelConfig, ModelError};
use crate::nn::{Embedding, InputLayer, Layer, LayerError, LearnedPositions, ParameterSpec, TensorRank};
use crate::objective::{CausalLm, Objective};

/// An input, a stack of layers, and an objective: for a language model, embedding, blocks, and head with loss.
///
/// # Examples
///
/// ```
/// use ulysses::model::{Model, preset};
///
/// let model = Model::new(&preset("nano")?)?;
/// let names: Vec<String> = model.units().into_iter().map(|unit| unit.name).collect();
/// assert_eq!(names, ["embedding", "model.layers.0", "model.layers.1", "head"]);
/// # Ok::<(), ulysses::model::ModelError>(())
/// ```
pub struct Model {
    /// From a micro batch to hidden states.
    pub input: Box<dyn InputLayer>,
    /// From hidden states to hidden states.
    pub layers: Vec<Box<dyn Layer>>,
    /// From hidden states to a loss.
    pub objective: Box<dyn Objective>,
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
    /// Creates a decoder from its description.
    ///
    /// # Errors
    /// A description that [`ModelConfig::validate`] refuses.
    pub fn new(config: &ModelConfig) -> Result<Self, ModelError> {
        config.validate("model")?;
        Ok(Self::unchecked(config))
    }

    /// Keeps the part that one tensor-parallel rank has of every layer, and of input and objective if they can be divided. One that
    /// cannot stays whole, and so does the other if they share parameters: each rank has some of the tokens there.
    ///
    /// # Errors
    /// A layer that cannot be divided over so many ranks.
    pub fn tensor_parallel(self, tp: TensorRank) -> Result<Self, LayerError> {
        if tp.size == 1 {
            return Ok(self);
        }
        let (input, objective) = match (self.input.tensor_parallel(tp), self.objective.tensor_parallel(tp)) {
            (None, _) | (_, None) if self.is_tied() => (None, None),
            parts => parts,
        };
        let layers = self.layers.into_iter().map(|layer| layer.tensor_parallel(tp));
        Ok(Self {
            input: input.unwrap_or(self.input),
            layers: layers.collect::<Result<_, _>>()?,
            objective: objective.unwrap_or(self.objective),
        })
    }

    /// As [`new`](Self::new), without a check of the description; allocates nothing.
    pub(super) fn unchecked(config: &ModelConfig) -> Self {
        let ModelConfig {
            vocab_size, hidden_size, initializer_range: std, multipliers, final_softcap, ..
        } = *config;
        let names = config.family.names;
        let tokens = Embedding::new(vocab_size, hidden_size, std)
            .with_name(names.embedding)
            .with_multiplier(multipliers.embedding);
        let input: Box<dyn InputLayer> = match config.learned_positions {
            None => Box::new(tokens),
            Some(positions) => Box::new(LearnedPositions::new(tokens, names.positions, positions, std)),
        };
        let projection = if config.tie_word_embeddings { names.embedding } else { names.head };
        let objective = CausalLm::new(projection, vocab_size, hidden_size, config.norm(), std)
            .with_norm_name(names.norm)
            .with_logit_scale(multipliers.logits)
            .with_softcap(final_softcap);
        let objective = match config.head_bias {
            true => objective.with_bias(&names.head.replace(".weight", ".bias")),
            false => objective,
        };
        let layer = |index| (config.family.block)(config, index);
        let layers = (0..config.num_layers()).map(layer).collect();
        Self { input, layers, objective: Box::new(objective) }
    }

    /// Returns whether the objective has a parameter of the input, judged by its name, such as the embedding matrix.
    pub fn is_tied(&self) -> bool {
        self.objective.parameters().iter().any(|parameter| self.is_shared_with_input(parameter))
    }

    fn is_shared_with_input(&self, parameter: &ParameterSpec) -> bool {
        self.input.parameters().iter().any(|of_input| of_input.name == parameter.name)
    }

    /// The parameters that the objective shares with the input.
    pub fn tied_parameters(&self) -> impl Iterator<Item = &ParameterSpec> {
        self.objective.parameters().iter().filter(|parameter| self.is_shared_with_input(parameter))
    }

    /// All parameters by unit: the input, every layer, the objective. If input and objective are tied, the first unit
    /// also has the objective's other parameters and there is no last unit, so that a shared one is gathered and reduced once.
    pub fn units(&self) -> Vec<UnitSpec> {
        let unit = |name: &str, parameters: &[_]| UnitSpec {
            name: name.to_owned(),
            parameters: parameters.to_vec(),
        };
        let mut units = vec![unit(self.input.name(), self.input.parameters())];
        units.extend(self.layers.iter().map(|layer| unit(layer.name(), layer.parameters())));
        let objective = self.objective.parameters();
        if self.is_tied() {
            let others = objective.iter().filter(|parameter| !self.is_shared_with_input(parameter));
            units[0].parameters.extend(others.cloned());
        } else {
            units.push(unit(self.objective.name(), objective));
        }
        units
    }

    /// The views of the objective's parameters or gradients, from those of its unit.
    pub(crate) fn objective_views<T: Clone>(&self, unit: Vec<T>) -> Vec<T> {
        if !self.is_tied() {
            return unit;
        }
        let (input, objective) = (self.input.parameters(), self.objective.parameters());
        let mut others = input.len()..;
        let place = |parameter: &ParameterSpec| {
            input.iter().position(|of_input| of_input.name == parameter.name).or_else(|| others.next())
        };
        objective.iter().filter_map(place).map(|place| unit[place].clone()).collect()
    }
}
