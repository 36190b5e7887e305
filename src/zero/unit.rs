//! What one rank stores of one unit.

use super::{FlatLayout, ZeroError};
use crate::comm::{Pending, ProcessGroup};
use crate::config::ZeroStage;
use crate::ops::reduce;
use candle_core::{DType, Device, Tensor};

/// A flat buffer together with its parameter-shaped views.
#[derive(Debug)]
pub(super) struct Viewed {
    pub(super) flat: Tensor,
    pub(super) views: Vec<Tensor>,
}

impl Viewed {
    pub(super) fn zeros(layout: &FlatLayout) -> Result<Self, ZeroError> {
        let flat = zeros(layout.padded_numel())?;
        Ok(Self { views: layout.views(&flat)?, flat })
    }
}

pub(super) fn zeros(numel: usize) -> Result<Tensor, ZeroError> {
    Ok(Tensor::zeros(numel, DType::F32, &Device::Cpu)?)
}

/// Parameters: whole (stages 0–2), or the own partition and, while in use, the gathered whole.
pub(super) enum Parameters {
    Whole(Viewed),
    Partitioned { partition: Tensor, gathered: Option<Gathered> },
}

/// The whole of a partitioned unit; `pending` until its gather has been waited for.
pub(super) struct Gathered {
    whole: Viewed,
    pending: Option<Pending>,
}

/// Gradients: whole (stages 0 and 1), or the own partition, which accumulates over micro
/// steps, and the whole gradient from a unit's backward to its reduction.
pub(super) enum Gradients {
    Whole(Viewed),
    Partitioned { partition: Tensor, transient: Option<Viewed> },
}

/// One unit on one rank.
pub(super) struct Unit {
    pub(super) layout: FlatLayout,
    /// This rank's partition is `layout.partition(dp_rank)`.
    pub(super) dp_rank: usize,
    pub(super) parameters: Parameters,
    pub(super) gradients: Gradients,
    /// Optimizer state, each as long as [`Unit::updated`]: Adam's two moments, SGD's momentum.
    pub(super) state: Vec<Tensor>,
}

impl Parameters {
    pub(super) fn zeros(layout: &FlatLayout, stage: ZeroStage) -> Result<Self, ZeroError> {
        Ok(if stage.partitions_parameters() {
            Self::Partitioned { partition: zeros(layout.partition_numel())?, gathered: None }
        } else {
            Self::Whole(Viewed::zeros(layout)?)
        })
    }

    /// The elements that persist: all, or the own partition.
    pub(super) fn persistent(&self) -> &Tensor {
        match self {
            Self::Whole(whole) => &whole.flat,
            Self::Partitioned { partition, .. } => partition,
        }
    }
}

impl Gradients {
    pub(super) fn zeros(layout: &FlatLayout, stage: ZeroStage) -> Result<Self, ZeroError> {
        Ok(if stage.partitions_gradients() {
            Self::Partitioned { partition: zeros(layout.partition_numel())?, transient: None }
        } else {
            Self::Whole(Viewed::zeros(layout)?)
        })
    }

    /// The elements that persist: all, or the own partition.
    pub(super) fn persistent(&self) -> &Tensor {
        match self {
            Self::Whole(whole) => &whole.flat,
            Self::Partitioned { partition, .. } => partition,
        }
    }
}

impl Unit {
    /// Views of all parameters, gathered over dp first where they are partitioned.
    pub(super) fn gather(&mut self, dp: &dyn ProcessGroup) -> Result<Vec<Tensor>, ZeroError> {
        self.start_gather(dp)?;
        match &mut self.parameters {
            Parameters::Whole(whole) => Ok(whole.views.clone()),
            Parameters::Partitioned { gathered, .. } => {
                // Out of the unit while it is waited for: what failed to arrive must not be served.
                let Some(Gathered { whole, pending }) = gathered.take() else {
                    unreachable!("a gather was started above")
                };
                pending.map_or(Ok(()), Pending::wait)?;
                Ok(gathered.insert(Gathered { whole, pending: None }).whole.views.clone())
            }
        }
    }

    /// Begins to gather partitioned parameters, unless that is done or under way.
    pub(super) fn start_gather(&mut self, dp: &dyn ProcessGroup) -> Result<(), ZeroError> {
        if let Parameters::Partitioned { partition, gathered: gathered @ None } = &mut self.parameters {
            let whole = Viewed::zeros(&self.layout)?;
            let pending = Some(dp.start_all_gather(partition, &whole.flat)?);
            *gathered = Some(Gathered { whole, pending });
        }
        Ok(())
    }

    /// Frees gathered parameters.
    pub(super) fn release(&mut self) {
        if let Parameters::Partitioned { gathered, .. } = &mut self.parameters {
            *gathered = None;
        }
    }

    /// Views that a backward pass adds gradients to.
    pub(super) fn gradient_views(&mut self) -> Result<Vec<Tensor>, ZeroError> {
        match &mut self.gradients {
            Gradients::Whole(whole) => Ok(whole.views.clone()),
            Gradients::Partitioned { transient, .. } => {
                let whole = match transient.take() {
                    Some(whole) => whole,
                    None => Viewed::zeros(&self.layout)?,
                };
                Ok(transient.insert(whole).views.clone())
            }
        }
    }

    /// Partition `rank` within the persistent gradients, if this rank holds it.
    pub(super) fn gradient_partition(&self, rank: usize) -> Result<Option<Tensor>, ZeroError> {
        match &self.gradients {
            Gradients::Whole(whole) => {
                let range = self.layout.partition(rank);
                Ok(Some(whole.flat.narrow(0, range.start, range.len())?))
            }
            Gradients::Partitioned { partition, .. } => Ok((rank == self.dp_rank).then(|| partition.clone())),
        }
    }

    /// The own partition of whole parameters, or the partition that there is.
    pub(super) fn parameter_partition(&self) -> Result<Tensor, ZeroError> {
        match &self.parameters {
            Parameters::Whole(whole) => {
                let range = self.layout.partition(self.dp_rank);
                Ok(whole.flat.narrow(0, range.start, range.len())?)
            }
            Parameters::Partitioned { partition, .. } => Ok(partition.clone()),
        }
    }

    pub(super) fn zero_gradients(&self) -> Result<(), ZeroError> {
        Ok(reduce::fill(self.gradients.persistent(), 0.0)?)
    }
}
