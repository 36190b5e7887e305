//! Reduces gradients to the layout of the optimizer state: first over the ranks that share the partitions (by default dp), then over
//! those with the same partition (sp), always in rank order.
//!
//! Gradients sent in bf16 are summed in f32, from the contributions as sent, and the sum is not rounded.

use super::flat_unit::{FlatUnit, Gradients};
use super::{Buffer, BufferLayout, Storage, ZeroAxis, ZeroError};
use crate::comm::{Pending, ProcessGroup, ProcessGroupExt, ReduceOp, TrainingGroups};
use crate::config::{CommunicationDtype, ZeroStage};
use crate::placement::{Placement, ledger};
use candle_core::{DType, Tensor};
use ulysses_kernels::memory::{Category, with_category};
use ulysses_kernels::{cast, strided_copy};

/// A started reduction of a flat unit over the ZeRO world. It completes when the next one starts, and so overlaps with one
/// layer's backward.
#[must_use]
pub(super) struct Reduction {
    /// The index of the flat unit.
    pub(super) index: usize,
    pending: Pending,
    /// Destination of the reduced partition; `None` if the whole gradient is reduced in place.
    received: Option<Tensor>,
    boundary: bool,
}

/// Starts to reduce a flat unit after the backward of its unit.
///
/// Stages 0 and 1 keep whole gradients and reduce them once per step, at the accumulation `boundary`. Stages
/// 2 and 3 reduce after every micro step and keep their partition.
pub(super) fn start(
    index: usize,
    flat: &mut FlatUnit,
    stage: ZeroStage,
    groups: &TrainingGroups,
    storage: &Storage,
    boundary: bool,
) -> Result<Option<Reduction>, ZeroError> {
    let layout = state_layout(flat, stage, groups);
    let (shard, is_replicated) = (&**layout.partitions().group, is_replicated(&layout));
    let whole = match &mut flat.gradients {
        None => return Ok(None),
        Some(Gradients::Whole(_)) if !boundary => return Ok(None),
        Some(Gradients::Whole(whole)) if is_replicated && !rounds(shard, storage) => {
            let pending = shard.start_all_reduce(&whole.flat, ReduceOp::Sum)?;
            return Ok(Some(Reduction { index, pending, received: None, boundary }));
        }
        Some(Gradients::Whole(whole)) => whole.flat.clone(),
        Some(Gradients::Partitioned { transient, partition }) => match transient.take() {
            Some(whole) => {
                // Loaded while the next unit's backward runs, to be added to.
                partition.read_ahead()?;
                whole.flat
            }
            None => return Err(ZeroError::NoGradients { unit: flat.layout.name().to_owned() }),
        },
    };
    let received = with_category(Category::Gradients, || {
        ulysses_kernels::tensor::empty(flat.layout.partition_numel(), whole.dtype(), whole.device())
    })?;
    let sent = if rounds(shard, storage) { rounded(&whole, whole.elem_count())? } else { whole };
    let pending = shard.start_reduce_scatter(&sent, &received, ReduceOp::Sum)?;
    Ok(Some(Reduction { index, pending, received: Some(received), boundary }))
}

/// Completes a reduction, and at the boundary sums the result over the replicas. An offloaded partition is written
/// back once the previous unit's is written.
pub(super) fn complete(
    reduction: Reduction,
    flat: &mut FlatUnit,
    stage: ZeroStage,
    groups: &TrainingGroups,
    storage: &Storage,
) -> Result<(), ZeroError> {
    let Reduction { pending, received, boundary, .. } = reduction;
    pending.wait()?;
    let own = flat.layout.partition(flat.shard_rank);
    let layout = state_layout(flat, stage, groups);
    let sum_over_replicas = |gradient: &Tensor| sum_over(layout.summed_within_stage(), gradient, storage);
    match (&mut flat.gradients, received) {
        (None, _) => {}
        (Some(Gradients::Whole(whole)), None) => sum_over_replicas(&whole.flat)?,
        (Some(Gradients::Whole(whole)), Some(received)) if is_replicated(&layout) => {
            sum_over_replicas(&received)?;
            layout.partitions().group.all_gather(&received, &whole.flat)?;
        }
        (Some(Gradients::Whole(whole)), Some(received)) => {
            sum_over_replicas(&received)?;
            strided_copy::copy(&received, &whole.flat.narrow(0, own.start, own.len())?)?;
            ledger::copy(&received, &whole.flat)?;
        }
        (Some(Gradients::Partitioned { partition, .. }), Some(received)) => {
            let sum = partition.plus(received)?;
            if boundary {
                sum_over_replicas(&sum)?;
            }
            storage.settle()?;
            partition.put(sum, boundary)?;
        }
        (Some(Gradients::Partitioned { .. }), None) => unreachable!("partitions are received"),
    }
    Ok(())
}

/// Sums the complete gradient of a flat unit over the stages of a pipeline that have it, so that all update it alike.
pub(super) fn sum_tied(
    flat: &mut FlatUnit,
    stage: ZeroStage,
    groups: &TrainingGroups,
    storage: &Storage,
) -> Result<(), ZeroError> {
    let layout = state_layout(flat, stage, groups);
    let Some(stages) = layout.summed_over_stages() else { return Ok(()) };
    let sum_over_pp = |gradient: &Tensor| sum_over([stages], gradient, storage);
    match &mut flat.gradients {
        None => Ok(()),
        Some(Gradients::Whole(whole)) if is_replicated(&layout) => sum_over_pp(&whole.flat),
        Some(Gradients::Whole(whole)) => {
            let own = flat.layout.partition(flat.shard_rank);
            sum_over_pp(&whole.flat.narrow(0, own.start, own.len())?)
        }
        Some(Gradients::Partitioned { partition, .. }) => {
            let sum = partition.fetch()?;
            sum_over_pp(&sum)?;
            storage.settle()?;
            partition.put(sum, true)
        }
    }
}

/// The layout of a flat unit's optimizer state, which that of its reduced gradient is.
fn state_layout<'a>(flat: &FlatUnit, stage: ZeroStage, groups: &'a TrainingGroups) -> BufferLayout<'a> {
    groups.layout(Buffer::OptimizerState, stage, flat.layout.division())
}

/// Returns whether all ranks that share the partitions get the whole reduced gradient.
fn is_replicated(layout: &BufferLayout<'_>) -> bool {
    layout.partitions().placement == Placement::Replicate
}

/// Sums a gradient along axes whose ranks have the same partition.
fn sum_over<'a>(
    axes: impl IntoIterator<Item = &'a ZeroAxis<'a>>,
    gradient: &Tensor,
    storage: &Storage,
) -> Result<(), ZeroError> {
    axes.into_iter().try_for_each(|axis| match &**axis.group {
        group if group.world_size() == 1 => Ok(()),
        group if rounds(group, storage) => {
            with_category(Category::Gradients, || sum_rounded(gradient, group))
        }
        group => Ok(group.all_reduce(gradient, ReduceOp::Sum)?),
    })
}

/// Returns whether gradients are rounded before they are sent to the other ranks of a group.
fn rounds(group: &dyn ProcessGroup, storage: &Storage) -> bool {
    storage.gradient_dtype == CommunicationDtype::Bf16 && group.world_size() > 1
}

/// Returns a copy in bf16, padded with zeros to `numel` elements.
fn rounded(gradient: &Tensor, numel: usize) -> Result<Tensor, ZeroError> {
    let rounded = with_category(Category::Gradients, || {
        ulysses_kernels::tensor::zeros(numel, DType::BF16, gradient.device())
    })?;
    cast::cast(gradient, &rounded.narrow(0, 0, gradient.elem_count())?)?;
    ledger::copy(gradient, &rounded)?;
    Ok(rounded)
}

/// Sums a gradient over a group in place. Each rank sums one chunk of it, then gathers the other chunks, in f32.
fn sum_rounded(gradient: &Tensor, group: &dyn ProcessGroup) -> Result<(), ZeroError> {
    let empty = |numel| ulysses_kernels::tensor::empty(numel, DType::F32, gradient.device());
    let (numel, ranks) = (gradient.elem_count(), group.world_size());
    let chunk = empty(numel.div_ceil(ranks))?;
    let padded_numel = chunk.elem_count() * ranks;
    group.reduce_scatter(&rounded(gradient, padded_numel)?, &chunk, ReduceOp::Sum)?;
    if padded_numel == numel {
        return Ok(group.all_gather(&chunk, gradient)?);
    }
    let padded = empty(padded_numel)?;
    group.all_gather(&chunk, &padded)?;
    strided_copy::copy(&padded.narrow(0, 0, numel)?, gradient)?;
    Ok(ledger::copy(&padded, gradient)?)
}
