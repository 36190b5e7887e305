//! The tensors of one flat unit on one rank.

use super::state::{GradientPartition, StateTensor};
use super::update::param_group_ranges::ParamGroupRange;
use super::{Buffer, FlatLayout, FlatParameter, ZeroError};
use crate::comm::{Pending, ProcessGroup, TrainingGroups};
use crate::config::ZeroStage;
use crate::mesh::{PP_AXIS, TP_AXIS};
use crate::placement::ledger::{self, GradientOf, Placed, PlacedAlong};
use candle_core::{DType, Device, Tensor};
use std::sync::Arc;
use ulysses_kernels::elementwise;
use ulysses_kernels::memory::{Category, with_category};
use ulysses_kernels::offload::OffloadStore;
use ulysses_kernels::tensor::TensorOptions;

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

    /// The views, for a use of the whole.
    fn gathered_views(&self) -> Result<Vec<Tensor>, ZeroError> {
        ledger::placed(&self.flat).iter().try_for_each(Placed::check_gathered)?;
        Ok(self.views.clone())
    }
}

/// The name of a flat unit's tensor in a dry run, by its parameters.
fn label(what: &str, layout: &FlatLayout) -> String {
    match layout.parameters() {
        [] => format!("the {what} of `{}`", layout.name()),
        [only] => format!("the {what} of `{}`", only.name),
        [first, others @ ..] => format!("the {what} of `{}` and {} more", first.name, others.len()),
    }
}

/// The gradient of a parameter in a dry run.
fn gradient_of(parameter: &FlatParameter) -> GradientOf<'_> {
    let tp = parameter.shard.is_some().then_some(TP_AXIS);
    let pp = (!parameter.is_tied).then_some(PP_AXIS);
    GradientOf {
        parameter: &parameter.name,
        is_frozen: parameter.is_frozen,
        divided_over: tp.into_iter().chain(pp).collect(),
    }
}

/// A flat buffer of this rank, by stage: whole, or its partition and, while in use, a buffer for
/// the whole.
pub(super) enum MaybePartitioned<P, T> {
    Whole(Viewed),
    Partitioned { partition: P, transient: Option<T> },
}

/// Parameters. Partitioned parameters are gathered for their use.
pub(super) type Parameters = MaybePartitioned<StateTensor, Gathered>;

/// Gradients. Partitioned gradients accumulate over micro steps; the whole gradient exists from
/// the unit's backward to its reduction.
pub(super) type Gradients = MaybePartitioned<GradientPartition, Viewed>;

/// Gathered parameters; `pending` until the gather is complete.
pub(super) struct Gathered {
    whole: Viewed,
    pending: Option<Pending>,
}

impl Parameters {
    /// Allocates zeros; a partition goes to the `store`, if there is one.
    pub(super) fn zeros(
        layout: &FlatLayout,
        partitioned: bool,
        TensorOptions { dtype, device }: &TensorOptions,
        store: Option<&Arc<OffloadStore>>,
    ) -> Result<Self, ZeroError> {
        Ok(if partitioned {
            let partition = StateTensor::new(
                ulysses_kernels::tensor::zeros(layout.partition_numel(), *dtype, device)?,
                Category::Parameters,
                store,
            )?;
            Self::Partitioned { partition, transient: None }
        } else {
            Self::Whole(Viewed::zeros(layout, *dtype, device)?)
        })
    }

    /// The elements that persist: all, or this rank's partition.
    pub(super) fn persistent(&self) -> StateTensor {
        match self {
            Self::Whole(whole) => StateTensor::Resident(whole.flat.clone()),
            Self::Partitioned { partition, .. } => partition.clone(),
        }
    }
}

impl Gradients {
    /// Allocates zeros in f32; a partition goes to the `store`, if there is one.
    pub(super) fn zeros(
        layout: &FlatLayout,
        partitioned: bool,
        device: &Device,
        store: Option<&Arc<OffloadStore>>,
    ) -> Result<Self, ZeroError> {
        Ok(if partitioned {
            let partition = GradientPartition::zeros(layout.partition_numel(), device, store)?;
            Self::Partitioned { partition, transient: None }
        } else {
            Self::Whole(Viewed::zeros(layout, DType::F32, device)?)
        })
    }
}

/// The parameters of a unit that are stored together, one after another, with their gradients and state: the part of one rank.
pub(super) struct FlatUnit {
    pub(super) layout: FlatLayout,
    /// Index of this rank's partition in `layout`.
    pub(super) shard_rank: usize,
    pub(super) parameters: Parameters,
    /// `None` for frozen parameters, which have no master copy and no optimizer state either.
    pub(super) gradients: Option<Gradients>,
    /// The f32 master copy of 16-bit parameters, for the elements that this rank updates. Updates are too
    /// small for 16 bits.
    pub(super) master: Option<StateTensor>,
    /// Optimizer state of the elements that this rank updates, such as Adam's two moments.
    pub(super) state: Vec<StateTensor>,
    /// The elements that this rank updates, by parameter group.
    pub(super) param_group_ranges: Vec<ParamGroupRange>,
}

impl FlatUnit {
    /// Views of all parameters; gathers partitioned ones over the shard group first.
    pub(super) fn gather(&mut self, shard: &dyn ProcessGroup) -> Result<Vec<Tensor>, ZeroError> {
        self.start_gather(shard)?;
        match &mut self.parameters {
            Parameters::Whole(whole) => whole.gathered_views(),
            Parameters::Partitioned { transient, .. } => {
                // Removed during the wait, so that a failed gather is not used.
                let Some(Gathered { whole, pending }) = transient.take() else {
                    unreachable!("a gather was started above")
                };
                pending.map_or(Ok(()), Pending::wait)?;
                transient.insert(Gathered { whole, pending: None }).whole.gathered_views()
            }
        }
    }

    /// Starts to gather partitioned parameters, unless they are gathered or being gathered.
    pub(super) fn start_gather(&mut self, shard: &dyn ProcessGroup) -> Result<(), ZeroError> {
        if let Parameters::Partitioned { partition, transient: transient @ None } = &mut self.parameters {
            // The copy of an offloaded partition lives until its peers have read it.
            let partition = partition.fetch()?;
            let whole = with_category(Category::Parameters, || {
                Viewed::zeros(&self.layout, partition.dtype(), partition.device())
            })?;
            let pending = Some(shard.start_all_gather(&partition, &whole.flat)?);
            *transient = Some(Gathered { whole, pending });
        }
        Ok(())
    }

    /// Starts to load an offloaded partition, before it is gathered.
    pub(super) fn read_ahead(&self) -> Result<(), ZeroError> {
        match &self.parameters {
            Parameters::Partitioned { partition, transient: None } => partition.read_ahead(),
            _ => Ok(()),
        }
    }

    /// Starts to load the offloaded tensors of an update.
    pub(super) fn read_state_ahead(&self) -> Result<(), ZeroError> {
        if self.master.is_none() {
            self.read_ahead()?;
        }
        if let Some(Gradients::Partitioned { partition, .. }) = &self.gradients {
            partition.read_ahead()?;
        }
        self.master.iter().chain(&self.state).try_for_each(StateTensor::read_ahead)
    }

    /// Writes back fetched gradients that an update has overwritten.
    pub(super) fn put_gradients(&self, overwritten: Tensor) -> Result<(), ZeroError> {
        match &self.gradients {
            Some(Gradients::Partitioned { partition, .. }) => partition.put_overwritten(overwritten),
            _ => Ok(()),
        }
    }

    /// Writes back the state tensors that were fetched and changed.
    pub(super) fn put_state(&self, state: Vec<Tensor>) -> Result<(), ZeroError> {
        self.state.iter().zip(state).try_for_each(|(stored, changed)| stored.put(changed))
    }

    /// Frees gathered parameters.
    pub(super) fn release(&mut self) {
        if let Parameters::Partitioned { transient, .. } = &mut self.parameters {
            *transient = None;
        }
    }

    /// Views for the gradients of a backward pass: one per parameter, `None` for frozen ones.
    pub(super) fn gradient_views(&mut self) -> Result<Vec<Option<Tensor>>, ZeroError> {
        let whole = match &mut self.gradients {
            None => return Ok(vec![None; self.layout.parameters().len()]),
            Some(Gradients::Whole(whole)) => whole,
            Some(Gradients::Partitioned { transient, partition }) => {
                let whole = match transient.take() {
                    Some(whole) => whole,
                    None => with_category(Category::Gradients, || {
                        Viewed::zeros(&self.layout, DType::F32, partition.device())
                    })?,
                };
                transient.insert(whole)
            }
        };
        let gradients = || self.layout.parameters().iter().map(gradient_of).collect();
        ledger::add_tokens(&whole.flat, gradients, || label("gradient", &self.layout))?;
        Ok(whole.views.iter().cloned().map(Some).collect())
    }

    /// The gradients of the elements that this rank updates; a copy of offloaded ones.
    pub(super) fn updated_gradients(&self, stage: ZeroStage) -> Result<Option<Tensor>, ZeroError> {
        match &self.gradients {
            Some(Gradients::Whole(whole)) if !stage.partitions_optimizer() => Ok(Some(whole.flat.clone())),
            _ => self.gradient_partition(self.shard_rank),
        }
    }

    /// Partition `rank` within the persistent gradients, if this rank holds it; a copy of an offloaded one.
    pub(super) fn gradient_partition(&self, rank: usize) -> Result<Option<Tensor>, ZeroError> {
        match &self.gradients {
            None => Ok(None),
            Some(Gradients::Whole(whole)) => {
                let range = self.layout.partition(rank);
                Ok(Some(whole.flat.narrow(0, range.start, range.len())?))
            }
            Some(Gradients::Partitioned { partition, .. }) => {
                (rank == self.shard_rank).then(|| partition.fetch()).transpose()
            }
        }
    }

    /// Number of elements that this rank updates: its partition, or all if the optimizer is not partitioned.
    pub(super) fn updated_numel(&self, stage: ZeroStage) -> usize {
        if stage.partitions_optimizer() { self.layout.partition_numel() } else { self.layout.padded_numel() }
    }

    /// The stored parameters that this rank updates: its partition, or all if the optimizer is not
    /// partitioned.
    pub(super) fn updated_parameters(&self, stage: ZeroStage) -> Result<StateTensor, ZeroError> {
        match &self.parameters {
            Parameters::Whole(whole) if stage.partitions_optimizer() => {
                let range = self.layout.partition(self.shard_rank);
                Ok(StateTensor::Resident(whole.flat.narrow(0, range.start, range.len())?))
            }
            parameters => Ok(parameters.persistent()),
        }
    }

    pub(super) fn zero_gradients(&mut self) -> Result<(), ZeroError> {
        match &mut self.gradients {
            None => {}
            Some(Gradients::Whole(whole)) => {
                elementwise::fill(&whole.flat, 0.0)?;
                ledger::place(&whole.flat, Placed::unwritten(|| label("gradient", &self.layout)));
            }
            Some(Gradients::Partitioned { partition, transient }) => {
                // A step that failed may have left a gradient that was not reduced.
                *transient = None;
                partition.set_to_zero();
            }
        }
        Ok(())
    }
}

/// The placements of the flat unit's tensors in a dry run.
impl FlatUnit {
    /// Sets the placements of parameters and optimizer state that are new, each by the layout of its buffer.
    pub(super) fn place_state(&self, groups: &TrainingGroups, stage: ZeroStage) {
        let place = |tensor: &StateTensor, what: &str, buffer: Buffer| {
            let layout = groups.layout(buffer, stage, self.layout.division());
            let along = layout.axes().iter();
            let along = along.map(|axis| PlacedAlong { group: &**axis.group, placement: axis.placement });
            tensor.place(Placed::along(|| label(what, &self.layout), along));
        };
        place(&self.parameters.persistent(), "parameter buffer", Buffer::Parameters);
        self.master.iter().for_each(|master| place(master, "master copy", Buffer::OptimizerState));
        self.state.iter().for_each(|state| place(state, "optimizer state", Buffer::OptimizerState));
    }

    /// The placement of the gradient; `None` for frozen parameters.
    pub(super) fn placed_gradient(&self) -> Option<Placed> {
        let placed = match &self.gradients {
            None => return None,
            Some(_) if self.layout.numel() == 0 => return None,
            Some(Gradients::Whole(whole)) => ledger::placed(&whole.flat),
            Some(Gradients::Partitioned { partition, .. }) => partition.placed(),
        };
        placed.or_else(|| Placed::unwritten(|| label("gradient", &self.layout)))
    }

    /// Sets those of the parameters that an update changes: where the gradient is. It must be reduced, and placed as the state.
    pub(super) fn place_updated(&self) -> Result<(), ZeroError> {
        let Some(gradient) = self.placed_gradient() else { return Ok(()) };
        gradient.check_summed()?;
        let state = self.master.iter().chain(&self.state).filter_map(StateTensor::placed);
        state.into_iter().try_for_each(|state| state.check_equal(&gradient))?;
        self.parameters.persistent().place(Some(gradient.named(|| label("parameter buffer", &self.layout))));
        Ok(())
    }
}
