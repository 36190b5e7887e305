//! What one rank stores of one unit.

use super::state_tensor::StateTensor;
use super::param_group_ranges::ParamGroupRange;
use super::{FlatLayout, ZeroError};
use crate::comm::{Pending, ProcessGroup};
use crate::config::ZeroStage;
use candle_core::{DType, Device, Tensor};
use std::sync::Arc;
use ulysses_kernels::elementwise;
use ulysses_kernels::memory::{Category, with_category};
use ulysses_kernels::offload::OffloadStore;

/// A flat buffer together with its parameter-shaped views.
#[derive(Debug)]
pub(super) struct Viewed {
    pub(super) flat: Tensor,
    pub(super) views: Vec<Tensor>,
}

impl Viewed {
    fn zeros(layout: &FlatLayout, dtype: DType, device: &Device) -> Result<Self, ZeroError> {
        let flat = ulysses_kernels::tensor::zeros(layout.padded_numel(), dtype, device)?;
        Ok(Self { views: layout.views(&flat)?, flat })
    }
}

/// One flat buffer of a unit as the stage leaves it on this rank: whole, or the own partition
/// and, while it is needed, something that holds the whole.
pub(super) enum MaybePartitioned<P, T> {
    Whole(Viewed),
    Partitioned { partition: P, transient: Option<T> },
}

/// Partitioned parameters are gathered for their use.
pub(super) type Parameters = MaybePartitioned<StateTensor, Gathered>;

/// Partitioned gradients accumulate over micro steps; the whole gradient exists from a unit's
/// backward to its reduction.
pub(super) type Gradients = MaybePartitioned<Tensor, Viewed>;

/// The whole of partitioned parameters; `pending` until the gather has been waited for.
pub(super) struct Gathered {
    whole: Viewed,
    pending: Option<Pending>,
}

impl Parameters {
    /// Zeros; a partition goes to the `store`, if there is one.
    pub(super) fn zeros(
        layout: &FlatLayout,
        partitioned: bool,
        (dtype, device): (DType, &Device),
        store: Option<&Arc<OffloadStore>>,
    ) -> Result<Self, ZeroError> {
        Ok(if partitioned {
            let partition = StateTensor::new(
                ulysses_kernels::tensor::zeros(layout.partition_numel(), dtype, device)?,
                Category::Parameters,
                store,
            )?;
            Self::Partitioned { partition, transient: None }
        } else {
            Self::Whole(Viewed::zeros(layout, dtype, device)?)
        })
    }

    /// The elements that persist: all, or the own partition.
    pub(super) fn persistent(&self) -> StateTensor {
        match self {
            Self::Whole(whole) => StateTensor::Resident(whole.flat.clone()),
            Self::Partitioned { partition, .. } => partition.clone(),
        }
    }
}

impl Gradients {
    /// Zeros in f32.
    pub(super) fn zeros(layout: &FlatLayout, partitioned: bool, device: &Device) -> Result<Self, ZeroError> {
        Ok(if partitioned {
            let partition = ulysses_kernels::tensor::zeros(layout.partition_numel(), DType::F32, device)?;
            Self::Partitioned { partition, transient: None }
        } else {
            Self::Whole(Viewed::zeros(layout, DType::F32, device)?)
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

/// One unit on one rank.
pub(super) struct Unit {
    pub(super) layout: FlatLayout,
    /// This rank's partition is `layout.partition(shard_rank)`.
    pub(super) shard_rank: usize,
    pub(super) parameters: Parameters,
    /// None of frozen parameters, which have no master copy and no state either.
    pub(super) gradients: Option<Gradients>,
    /// f32 copy of 16-bit parameters, of the elements that this rank updates: steps are too
    /// small to be seen in 16 bits.
    pub(super) master: Option<StateTensor>,
    /// What the optimizer keeps of the elements that this rank updates: Adam's two moments, for example.
    pub(super) state: Vec<StateTensor>,
    /// The elements that this rank updates, by settings.
    pub(super) param_group_ranges: Vec<ParamGroupRange>,
}

impl Unit {
    /// Views of all parameters, gathered over dp first where they are partitioned.
    pub(super) fn gather(&mut self, dp: &dyn ProcessGroup) -> Result<Vec<Tensor>, ZeroError> {
        self.start_gather(dp)?;
        match &mut self.parameters {
            Parameters::Whole(whole) => Ok(whole.views.clone()),
            Parameters::Partitioned { transient, .. } => {
                // Out of the unit while it is waited for: what failed to arrive must not be served.
                let Some(Gathered { whole, pending }) = transient.take() else {
                    unreachable!("a gather was started above")
                };
                pending.map_or(Ok(()), Pending::wait)?;
                Ok(transient.insert(Gathered { whole, pending: None }).whole.views.clone())
            }
        }
    }

    /// Begins to gather partitioned parameters, unless that is done or under way.
    pub(super) fn start_gather(&mut self, dp: &dyn ProcessGroup) -> Result<(), ZeroError> {
        if let Parameters::Partitioned { partition, transient: transient @ None } = &mut self.parameters {
            // Of one in a store the copy lives until its peers have read it.
            let partition = partition.fetch()?;
            let whole = with_category(Category::Parameters, || {
                Viewed::zeros(&self.layout, partition.dtype(), partition.device())
            })?;
            let pending = Some(dp.start_all_gather(&partition, &whole.flat)?);
            *transient = Some(Gathered { whole, pending });
        }
        Ok(())
    }

    /// Starts to fetch a partition that is in a store, before it is gathered.
    pub(super) fn read_ahead(&self) -> Result<(), ZeroError> {
        match &self.parameters {
            Parameters::Partitioned { partition, transient: None } => partition.read_ahead(),
            _ => Ok(()),
        }
    }

    /// Starts to fetch what an update needs.
    pub(super) fn read_state_ahead(&self) -> Result<(), ZeroError> {
        if self.master.is_none() {
            self.read_ahead()?;
        }
        self.master.iter().chain(&self.state).try_for_each(StateTensor::read_ahead)
    }

    /// Takes back the state that was fetched and changed; none of what was not fetched.
    pub(super) fn put_state(&self, state: Vec<Tensor>) -> Result<(), ZeroError> {
        self.state.iter().zip(state).try_for_each(|(stored, changed)| stored.put(changed))
    }

    /// Frees gathered parameters.
    pub(super) fn release(&mut self) {
        if let Parameters::Partitioned { transient, .. } = &mut self.parameters {
            *transient = None;
        }
    }

    /// Views that a backward pass adds gradients to: one for each parameter, none where they are frozen.
    pub(super) fn gradient_views(&mut self) -> Result<Vec<Option<Tensor>>, ZeroError> {
        let views = match &mut self.gradients {
            None => return Ok(vec![None; self.layout.parameters().len()]),
            Some(Gradients::Whole(whole)) => &whole.views,
            Some(Gradients::Partitioned { transient, partition }) => {
                let whole = match transient.take() {
                    Some(whole) => whole,
                    None => with_category(Category::Gradients, || {
                        Viewed::zeros(&self.layout, partition.dtype(), partition.device())
                    })?,
                };
                &transient.insert(whole).views
            }
        };
        Ok(views.iter().cloned().map(Some).collect())
    }

    /// The gradients that persist.
    pub(super) fn persistent_gradients(&self) -> Option<&Tensor> {
        self.gradients.as_ref().map(Gradients::persistent)
    }

    /// Partition `rank` within the persistent gradients, if this rank holds it.
    pub(super) fn gradient_partition(&self, rank: usize) -> Result<Option<Tensor>, ZeroError> {
        match &self.gradients {
            None => Ok(None),
            Some(Gradients::Whole(whole)) => {
                let range = self.layout.partition(rank);
                Ok(Some(whole.flat.narrow(0, range.start, range.len())?))
            }
            Some(Gradients::Partitioned { partition, .. }) => {
                Ok((rank == self.shard_rank).then(|| partition.clone()))
            }
        }
    }

    /// The parameters that this rank updates, as they are stored: its partition, or all of them
    /// where the optimizer is not partitioned.
    pub(super) fn updated_parameters(&self, stage: ZeroStage) -> Result<StateTensor, ZeroError> {
        match &self.parameters {
            Parameters::Whole(whole) if stage.partitions_optimizer() => {
                let range = self.layout.partition(self.shard_rank);
                Ok(StateTensor::Resident(whole.flat.narrow(0, range.start, range.len())?))
            }
            parameters => Ok(parameters.persistent()),
        }
    }

    pub(super) fn zero_gradients(&self) -> Result<(), ZeroError> {
        self.persistent_gradients().map_or(Ok(()), |gradients| Ok(elementwise::fill(gradients, 0.0)?))
    }
}
