//! Reduces gradients: first over the ranks that share the partitions (by default dp), then over those with the same
//! partition (sp), always in rank order.

use super::unit::{Gradients, Unit};
use super::{Storage, ZeroError, ZeroGroups};
use crate::comm::{Pending, ProcessGroupExt, ReduceOp};
use crate::config::ZeroStage;
use candle_core::Tensor;
use ulysses_kernels::memory::{Category, with_category};
use ulysses_kernels::strided_copy;

/// A started reduction of a unit over the ZeRO world. It completes when the next one starts, and so overlaps with one
/// layer's backward.
#[must_use]
pub(super) struct Reduction {
    pub(super) unit: usize,
    pending: Pending,
    /// Destination of the reduced partition; `None` if the whole unit is reduced in place.
    received: Option<Tensor>,
    boundary: bool,
}

/// Starts to reduce a unit after its backward.
///
/// Stages 0 and 1 keep whole gradients and reduce them once per step, at the accumulation `boundary`. Stages
/// 2 and 3 reduce after every micro step and keep their partition.
pub(super) fn start(
    index: usize,
    unit: &mut Unit,
    stage: ZeroStage,
    groups: &ZeroGroups,
    boundary: bool,
) -> Result<Option<Reduction>, ZeroError> {
    let whole = match &mut unit.gradients {
        None => return Ok(None),
        Some(Gradients::Whole(_)) if !boundary => return Ok(None),
        Some(Gradients::Whole(whole)) if !stage.partitions_optimizer() => {
            let pending = groups.shard().start_all_reduce(&whole.flat, ReduceOp::Sum)?;
            return Ok(Some(Reduction { unit: index, pending, received: None, boundary }));
        }
        Some(Gradients::Whole(whole)) => whole.flat.clone(),
        Some(Gradients::Partitioned { transient, partition }) => match transient.take() {
            Some(whole) => {
                // Loaded while the next unit's backward runs, to be added to.
                partition.read_ahead()?;
                whole.flat
            }
            None => return Err(ZeroError::NoGradients { unit: unit.layout.name().to_owned() }),
        },
    };
    let received = with_category(Category::Gradients, || {
        ulysses_kernels::tensor::zeros(unit.layout.partition_numel(), whole.dtype(), whole.device())
    })?;
    let pending = groups.shard().start_reduce_scatter(&whole, &received, ReduceOp::Sum)?;
    Ok(Some(Reduction { unit: index, pending, received: Some(received), boundary }))
}

/// Completes a reduction, and at the boundary sums the result over the replicas. An offloaded partition is written
/// back once the previous unit's is written.
pub(super) fn complete(
    reduction: Reduction,
    unit: &mut Unit,
    groups: &ZeroGroups,
    storage: &Storage,
) -> Result<(), ZeroError> {
    let Reduction { pending, received, boundary, .. } = reduction;
    pending.wait()?;
    let own = unit.layout.partition(unit.shard_rank);
    match (&mut unit.gradients, received) {
        (None, _) => {}
        (Some(Gradients::Whole(whole)), None) => sum_over_replicas(&whole.flat, groups)?,
        (Some(Gradients::Whole(whole)), Some(received)) => {
            sum_over_replicas(&received, groups)?;
            strided_copy::copy(&received, &whole.flat.narrow(0, own.start, own.len())?)?;
        }
        (Some(Gradients::Partitioned { partition, .. }), Some(received)) => {
            let sum = partition.plus(received)?;
            if boundary {
                sum_over_replicas(&sum, groups)?;
            }
            storage.settle()?;
            partition.put(sum, boundary)?;
        }
        (Some(Gradients::Partitioned { .. }), None) => unreachable!("partitions are received"),
    }
    Ok(())
}

fn sum_over_replicas(gradient: &Tensor, groups: &ZeroGroups) -> Result<(), ZeroError> {
    if groups.replicas().world_size() > 1 {
        groups.replicas().all_reduce(gradient, ReduceOp::Sum)?;
    }
    Ok(())
}
