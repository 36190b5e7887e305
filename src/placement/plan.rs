//! How a tensor gets from one layout into another: plain integers.

use super::{Layout, Placement, PlacementError};
use crate::comm::{CallSignature, Elements, ReduceOp, Traffic};
use Placement::{Partial, Replicate, Shard};
use candle_core::DType;

/// The operation of a step. Of several possible steps, the first in this order runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StepKind {
    /// Each rank keeps its shard: `Replicate` → `Shard(dim)`. Sends nothing.
    Slice {
        /// The sharded dimension.
        dim: usize,
    },
    /// Summands are summed, shard by shard: `Partial` → `Shard(dim)`.
    ReduceScatter {
        /// The sharded dimension.
        dim: usize,
    },
    /// `Shard(from)` → `Shard(to)`.
    AllToAll {
        /// The dimension that was sharded.
        from: usize,
        /// The dimension that is sharded now.
        to: usize,
    },
    /// Summands are summed: `Partial` → `Replicate`.
    AllReduce,
    /// Shards are put together: `Shard(dim)` → `Replicate`.
    AllGather {
        /// The dimension that was sharded.
        dim: usize,
    },
    /// Each rank has zeros beside its shard: `Shard(dim)` → `Partial`. Sends nothing.
    Pad {
        /// The dimension that was sharded.
        dim: usize,
    },
    /// The first rank keeps its elements, the others have zeros: `Replicate` → `Partial`. Sends nothing.
    ZeroOthers,
}

/// One step of a redistribution, along one axis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Index of the axis.
    pub axis: usize,
    /// The operation of the ranks along the axis.
    pub kind: StepKind,
    /// The layout before the step.
    pub before: Layout,
    /// The layout after the step.
    pub after: Layout,
}

/// The steps from one layout to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    pub(super) from: Layout,
    pub(super) to: Layout,
    pub(super) steps: Vec<Step>,
}

/// Plans how tensors of layout `from` become tensors of layout `to`.
///
/// Where two axes shard one dimension, the inner one is gathered before the outer one, and divides after it. Within that
/// order, steps that make tensors smaller run first: slices, then reduce-scatters, all-to-alls, all-reduces, gathers.
///
/// ```
/// use ulysses::placement::{Layout, LayoutAxis, Placement::*, StepKind, redistribute};
///
/// // A gradient of stage 1: summed over both axes, each dp rank has its partition.
/// let layout = |dp, sp| Layout::new([10], [LayoutAxis::new("dp", 4, dp), LayoutAxis::new("sp", 2, sp)]);
/// let plan = redistribute(&layout(Partial, Partial)?, &layout(Shard(0), Replicate)?)?;
/// let kinds: Vec<_> = plan.steps().iter().map(|step| step.kind).collect();
/// assert_eq!(kinds, [StepKind::ReduceScatter { dim: 0 }, StepKind::AllReduce]);
/// # Ok::<(), ulysses::placement::PlacementError>(())
/// ```
///
/// # Errors
/// Layouts of different shapes or meshes.
pub fn redistribute(from: &Layout, to: &Layout) -> Result<Plan, PlacementError> {
    let mesh = |layout: &Layout| -> Vec<_> {
        layout.axes().iter().map(|axis| (axis.name.clone(), axis.size)).collect()
    };
    if from.shape() != to.shape() || mesh(from) != mesh(to) {
        return Err(PlacementError::Different { from: from.to_string(), to: to.to_string() });
    }
    let (mut steps, mut now) = (Vec::new(), from.clone());
    // Along one rank, all placements are the same.
    for (axis, target) in to.axes().iter().enumerate().filter(|(_, target)| target.size == 1) {
        now = now.with(axis, target.placement);
    }
    while let Some(NextStep { kind, axis }) = next_step(&now, to) {
        let after = now.with(axis, kind.placement_after());
        let before = std::mem::replace(&mut now, after.clone());
        steps.push(Step { axis, kind, before, after });
    }
    Ok(Plan { from: from.clone(), to: to.clone(), steps })
}

impl StepKind {
    /// Whether ranks need nothing of each other.
    pub(super) fn is_local(self) -> bool {
        matches!(self, Self::Slice { .. } | Self::Pad { .. } | Self::ZeroOthers)
    }

    fn placement_after(self) -> Placement {
        match self {
            Self::Slice { dim } | Self::ReduceScatter { dim } | Self::AllToAll { to: dim, .. } => Shard(dim),
            Self::AllReduce | Self::AllGather { .. } => Replicate,
            Self::Pad { .. } | Self::ZeroOthers => Partial,
        }
    }

    /// The step of one axis towards its target, if it has not reached it.
    fn towards(now: Placement, to: Placement) -> Option<Self> {
        Some(match (now, to) {
            _ if now == to => return None,
            (Replicate, Shard(dim)) => Self::Slice { dim },
            (Partial, Shard(dim)) => Self::ReduceScatter { dim },
            (Shard(from), Shard(to)) => Self::AllToAll { from, to },
            (Partial, _) => Self::AllReduce,
            (Shard(dim), Partial) => Self::Pad { dim },
            (Shard(dim), _) => Self::AllGather { dim },
            (Replicate, _) => Self::ZeroOthers,
        })
    }
}

/// A step along an axis. Of several, the least one runs first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct NextStep {
    kind: StepKind,
    axis: usize,
}

/// The next step from `now` to `to`; `None` at the end.
fn next_step(now: &Layout, to: &Layout) -> Option<NextStep> {
    let axes = now.axes().len();
    let shards = |layout: &Layout, axis: usize, dim: usize| {
        layout.placement(axis) == Shard(dim) && layout.axes()[axis].size > 1
    };
    // A shard can be divided or put together only by the innermost axis of its dimension.
    let is_innermost = |axis: usize, dim: usize| !(axis + 1..axes).any(|inner| shards(now, inner, dim));
    // An axis that divides a dimension before an outer axis has come, or gone, would have to be gathered again.
    let waits =
        |axis: usize, dim: usize| (0..axis).any(|outer| shards(now, outer, dim) != shards(to, outer, dim));
    let is_possible = |NextStep { kind, axis }: NextStep| {
        let (left, entered) = match kind {
            StepKind::Slice { dim } | StepKind::ReduceScatter { dim } => (None, Some(dim)),
            StepKind::AllToAll { from, to } => (Some(from), Some(to)),
            StepKind::AllGather { dim } | StepKind::Pad { dim } => (Some(dim), None),
            StepKind::AllReduce | StepKind::ZeroOthers => (None, None),
        };
        left.into_iter().chain(entered).all(|dim| is_innermost(axis, dim))
            && entered.is_none_or(|dim| !waits(axis, dim))
    };
    let wanted = (0..axes).filter_map(|axis| {
        let kind = StepKind::towards(now.placement(axis), to.placement(axis))?;
        let step = NextStep { kind, axis };
        match kind {
            // The whole sum of a shard is less than a part of the sum of all gathered shards.
            StepKind::ReduceScatter { .. } if !is_possible(step) => {
                Some(NextStep { kind: StepKind::AllReduce, axis })
            }
            _ => Some(step),
        }
    });
    let next = wanted.filter(|step| is_possible(*step)).min();
    // Axes that wait for each other: the innermost one that is in the way is gathered. One rank is in no way.
    next.or_else(|| {
        let mut several = (0..axes).rev().filter(|axis| now.axes()[*axis].size > 1);
        several.find_map(|axis| match now.placement(axis) {
            Shard(dim) if waits(axis, dim) || now.placement(axis) != to.placement(axis) => {
                Some(NextStep { kind: StepKind::AllGather { dim }, axis })
            }
            _ => None,
        })
    })
}

impl Plan {
    /// The layout before the first step. Along axes of one rank, the steps begin with the placements of [`to`](Self::to).
    pub fn from(&self) -> &Layout {
        &self.from
    }

    /// The layout after the last step.
    pub fn to(&self) -> &Layout {
        &self.to
    }

    /// The steps in order.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Number of elements that the rank at a mesh coordinate sends in all steps.
    ///
    /// # Errors
    /// A coordinate outside of the mesh.
    pub fn sent_elems(&self, coordinate: &[usize]) -> Result<u64, PlacementError> {
        self.steps.iter().map(|step| step.sent_elems(coordinate)).sum()
    }
}

impl Step {
    /// Number of elements that the rank at a mesh coordinate sends to the other ranks of the axis, as [`Traffic`] counts
    /// them.
    ///
    /// # Errors
    /// A coordinate outside of the mesh.
    pub fn sent_elems(&self, coordinate: &[usize]) -> Result<u64, PlacementError> {
        let own = self.before.local_numel(coordinate)?;
        let (rank, ranks) = (coordinate[self.axis], self.before.axes()[self.axis].size);
        Ok(match self.kind {
            StepKind::Slice { .. } | StepKind::Pad { .. } | StepKind::ZeroOthers => 0,
            StepKind::AllGather { .. } => own * (ranks - 1),
            // Chunks are padded to the largest one.
            StepKind::ReduceScatter { .. } => self.chunk_numel(coordinate)? * (ranks - 1),
            StepKind::AllToAll { to, .. } => {
                let kept = self.after.local_shape(coordinate)?[to];
                let whole = self.before.local_shape(coordinate)?[to];
                own / whole.max(1) * (whole - kept)
            }
            StepKind::AllReduce => {
                let elements = Elements { dtype: DType::F32, count: own };
                let call = CallSignature::AllReduce { op: ReduceOp::Sum, elements };
                return Ok(Traffic::new(&call, rank, ranks).sent.iter().sum());
            }
        } as u64)
    }

    /// Number of elements of the largest shard along the axis after the step: that of the first rank.
    pub(super) fn chunk_numel(&self, coordinate: &[usize]) -> Result<usize, PlacementError> {
        let mut first = coordinate.to_vec();
        first[self.axis] = 0;
        self.after.local_numel(&first)
    }
}
