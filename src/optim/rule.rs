//! The interface of an optimizer to the config and to ZeRO.

use crate::config_file::reader::Section;
pub(crate) use ulysses_kernels::optimizer::Step;
use ulysses_kernels::optimizer::{ElementStep, TensorStep};

/// The parameters of an optimizer.
pub(crate) trait Optimizer {
    /// The parameters that schedules and parameter groups know.
    fn shared(&mut self) -> Shared<'_>;

    /// Reports parameters that contradict each other, or the `name` in the file.
    fn check(&self, _name: Option<&str>, _params: &Section<'_>) {}

    /// The names of the state tensors, as in checkpoints.
    fn state_kinds(&self) -> &'static [&'static str];

    /// The initial value of the state.
    fn initial_state(&self) -> f64 {
        0.0
    }

    /// The update of a step.
    fn rule(&self, step: Step) -> Rule;
}

/// Parameters that schedules and parameter groups know.
pub(crate) struct Shared<'a> {
    pub(super) lr: f64,
    /// `None` if the optimizer has none.
    pub(super) betas: Option<&'a mut [f64; 2]>,
    pub(super) weight_decay: &'a mut f64,
}

/// One step of an optimizer.
pub(crate) enum Rule {
    /// Updates every element by itself.
    Element(Box<dyn ElementStep>),
    /// Needs norms of whole parameter tensors.
    Tensor(Box<dyn TensorStep>),
}

impl Rule {
    /// The step of an optimizer that [is by element](super::OptimizerConfig::is_by_element).
    pub(crate) fn by_element(self) -> Box<dyn ElementStep> {
        match self {
            Self::Element(rule) => rule,
            Self::Tensor(_) => unreachable!("the caller has asked the optimizer"),
        }
    }

    /// The step of another optimizer.
    pub(crate) fn by_tensor(self) -> Box<dyn TensorStep> {
        match self {
            Self::Tensor(rule) => rule,
            Self::Element(_) => unreachable!("the caller has asked the optimizer"),
        }
    }
}
