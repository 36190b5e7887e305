//! The stages of ZeRO.

use serde::Serialize;

/// What ZeRO partitions over the data-parallel ranks; each stage includes those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(into = "u8")]
pub enum ZeroStage {
    /// Stage 0: nothing; every rank holds everything (DeepSpeed's default).
    #[default]
    Disabled,
    /// Stage 1: the optimizer state.
    OptimizerStates,
    /// Stage 2: the optimizer state and the gradients.
    Gradients,
    /// Stage 3: the optimizer state, the gradients and the parameters.
    Parameters,
}

impl ZeroStage {
    /// All stages, in order.
    pub const ALL: [Self; 4] = [Self::Disabled, Self::OptimizerStates, Self::Gradients, Self::Parameters];

    /// The stage with this number, if it is 0 to 3.
    pub fn from_number(number: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|&stage| u64::from(u8::from(stage)) == number)
    }

    /// Whether each rank keeps only its partition of the optimizer state.
    pub fn partitions_optimizer(self) -> bool {
        self >= Self::OptimizerStates
    }

    /// Whether each rank keeps only its partition of the gradients.
    pub fn partitions_gradients(self) -> bool {
        self >= Self::Gradients
    }

    /// Whether each rank keeps only its partition of the parameters.
    pub fn partitions_parameters(self) -> bool {
        self >= Self::Parameters
    }
}

impl From<ZeroStage> for u8 {
    fn from(stage: ZeroStage) -> Self {
        stage as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stage_partitions_one_thing_more() {
        let partitioned = ZeroStage::ALL.map(|stage| {
            (stage.partitions_optimizer(), stage.partitions_gradients(), stage.partitions_parameters())
        });
        assert_eq!(
            partitioned,
            [(false, false, false), (true, false, false), (true, true, false), (true, true, true)]
        );
    }

    #[test]
    fn numbers_name_the_stages() {
        for number in 0..4 {
            assert_eq!(ZeroStage::from_number(number).map(u8::from), u8::try_from(number).ok());
        }
        assert_eq!(ZeroStage::from_number(4), None);
    }
}
