//! Runs the steps of a redistribution as collectives on the groups of a mesh.

use super::{Layout, PlacementError, Plan, Step, StepKind};
use crate::comm::{MeshGroups, Pending, ProcessGroup, ProcessGroupExt, RecvBlock, ReduceOp, StridedPlan};
use candle_core::Tensor;
use std::mem::replace;
use std::ops::Range;
use std::slice::from_ref;
use std::sync::Arc;
use std::vec::IntoIter;
use ulysses_kernels::strided_copy::{self, BlockCopy, StridedBlock};
use ulysses_kernels::tensor;

impl Plan {
    /// Redistributes a tensor of which this rank has `local`. Collective over the groups of the plan's axes, which are
    /// found in `groups` by name. The result may share the storage of `local` if no step changes this rank's elements.
    ///
    /// # Shapes
    /// `local`: the local shape by [`from`](Self::from), contiguous → the local shape by [`to`](Self::to).
    ///
    /// # Errors
    /// A tensor or a mesh that does not fit the plan, or failed communication.
    pub fn execute(&self, groups: &MeshGroups, local: &Tensor) -> Result<Tensor, PlacementError> {
        let groups = self.from.axes().iter().map(|axis| groups.get_group(&axis.name));
        self.execute_on(&groups.collect::<Result<Vec<_>, _>>()?, local)
    }

    /// As [`execute`](Self::execute), on the groups of the plan's axes, in their order.
    ///
    /// # Errors
    /// As [`execute`](Self::execute).
    pub fn execute_on(
        &self,
        groups: &[Arc<dyn ProcessGroup>],
        local: &Tensor,
    ) -> Result<Tensor, PlacementError> {
        self.start_on(groups.to_vec(), local)?.wait()
    }

    /// Starts the first collective of [`execute_on`](Self::execute_on).
    pub(super) fn start_on(
        &self,
        groups: Vec<Arc<dyn ProcessGroup>>,
        local: &Tensor,
    ) -> Result<StartedPlan, PlacementError> {
        let coordinate: Vec<usize> = groups.iter().map(|group| group.rank()).collect();
        let fits = |what, expected: Vec<usize>, got: Vec<usize>| match expected == got {
            true => Ok(()),
            false => Err(PlacementError::Local { what, layout: self.from.to_string(), expected, got }),
        };
        let sizes = self.from.axes().iter().map(|axis| axis.size).collect();
        fits("the mesh", sizes, groups.iter().map(|group| group.world_size()).collect())?;
        fits("the shape", self.from.local_shape(&coordinate)?, local.dims().to_vec())?;
        let steps = self.steps.clone().into_iter();
        let mut plan =
            StartedPlan { groups, coordinate, steps, local: local.clone(), pending: Pending::ready() };
        // Local steps complete at once.
        while plan.start_next()?.is_some_and(StepKind::is_local) {}
        Ok(plan)
    }
}

/// A plan of which a step is in progress. Later steps need its result.
#[derive(Debug)]
pub(super) struct StartedPlan {
    groups: Vec<Arc<dyn ProcessGroup>>,
    coordinate: Vec<usize>,
    /// The steps that have not started.
    steps: IntoIter<Step>,
    /// The result of the last started step, valid after `pending`.
    local: Tensor,
    pending: Pending,
}

impl StartedPlan {
    /// Starts the next step, if there is one. The one before it has completed.
    fn start_next(&mut self) -> Result<Option<StepKind>, PlacementError> {
        let Some(step) = self.steps.next() else { return Ok(None) };
        let started = step.start(&*self.groups[step.axis], &self.coordinate, &self.local)?;
        (self.pending, self.local) = (started.pending, started.local);
        Ok(Some(step.kind))
    }

    /// Whether [`wait`](Self::wait) would return at once.
    pub(super) fn is_completed(&self) -> bool {
        self.steps.as_slice().is_empty() && self.pending.is_completed()
    }

    /// Runs the other steps.
    pub(super) fn wait(mut self) -> Result<Tensor, PlacementError> {
        loop {
            replace(&mut self.pending, Pending::ready()).wait()?;
            if self.start_next()?.is_none() {
                return Ok(self.local);
            }
        }
    }
}

/// A step that was started.
struct StartedStep {
    pending: Pending,
    /// This rank's tensor, valid after `pending`.
    local: Tensor,
}

impl StartedStep {
    /// A step that needs nothing of other ranks.
    fn done(local: Tensor) -> Self {
        Self { pending: Pending::ready(), local }
    }
}

/// The slices of the ranks along a step's axis, by rank, in one layout.
type SlicesByRank = Vec<Vec<Range<usize>>>;

impl Step {
    /// Starts the step.
    fn start(
        &self,
        group: &dyn ProcessGroup,
        coordinate: &[usize],
        local: &Tensor,
    ) -> Result<StartedStep, PlacementError> {
        let shape = self.after.local_shape(coordinate)?;
        let zeros = |shape: &[usize]| tensor::zeros(shape, local.dtype(), local.device());
        let (rank, held, needed) = (
            group.rank(),
            self.along_axis(&self.before, coordinate)?,
            self.along_axis(&self.after, coordinate)?,
        );
        match self.kind {
            StepKind::ZeroOthers if rank == 0 => Ok(StartedStep::done(local.clone())),
            StepKind::ZeroOthers => Ok(StartedStep::done(zeros(&shape)?)),
            StepKind::Slice { .. } | StepKind::Pad { .. } => {
                let own = zeros(&shape)?;
                let copies = Vec::from_iter(transfer(&held[rank], &needed[rank]));
                strided_copy::copy_blocks(&[local], &[&own], &copies)?;
                Ok(StartedStep::done(own))
            }
            StepKind::AllReduce => {
                let sum = zeros(&shape)?;
                strided_copy::copy(local, &sum)?;
                Ok(StartedStep { pending: group.start_all_reduce(&sum, ReduceOp::Sum)?, local: sum })
            }
            StepKind::ReduceScatter { .. } => {
                let chunk = self.chunk_numel(coordinate)?;
                let (padded, sum) = (zeros(&[group.world_size() * chunk])?, zeros(&[chunk])?);
                let pack = |(peer, needed): (usize, &Vec<_>)| {
                    let copy = transfer(&held[rank], needed)?;
                    Some(BlockCopy { to: copy.from.packed_at(peer * chunk), ..copy })
                };
                let copies: Vec<_> = needed.iter().enumerate().filter_map(pack).collect();
                strided_copy::copy_blocks(&[local], &[&padded], &copies)?;
                let pending = group.start_reduce_scatter(&padded, &sum, ReduceOp::Sum)?;
                // A view, without the padding.
                Ok(StartedStep { pending, local: sum.narrow(0, 0, shape.iter().product())?.reshape(shape)? })
            }
            StepKind::AllGather { .. } | StepKind::AllToAll { .. } => {
                let received = zeros(&shape)?;
                let plan = exchange(
                    needed.iter().map(|needed| transfer(&held[rank], needed)),
                    held.iter().map(|held| transfer(held, &needed[rank])),
                );
                let pending = group.start_all_to_all_strided(from_ref(local), from_ref(&received), &plan)?;
                Ok(StartedStep { pending, local: received })
            }
        }
    }

    /// Runs a [`StepKind::Slice`] of a tensor that only the first rank of the axis has: each other rank receives its shard.
    pub(super) fn scatter(
        &self,
        group: &dyn ProcessGroup,
        coordinate: &[usize],
        local: &Tensor,
    ) -> Result<Tensor, PlacementError> {
        let shard = tensor::zeros(self.after.local_shape(coordinate)?, local.dtype(), local.device())?;
        let (held, needed) =
            (self.before.local_slices(coordinate)?, self.along_axis(&self.after, coordinate)?);
        let copy = |from: usize, to: usize| transfer(&held, &needed[to]).filter(|_| from == 0);
        let (rank, ranks) = (group.rank(), 0..group.world_size());
        let plan = exchange(ranks.clone().map(|to| copy(rank, to)), ranks.map(|from| copy(from, rank)));
        group.all_to_all_strided(from_ref(local), from_ref(&shard), &plan)?;
        Ok(shard)
    }

    /// The slices of the ranks that differ from `coordinate` only along the step's axis.
    fn along_axis(&self, layout: &Layout, coordinate: &[usize]) -> Result<SlicesByRank, PlacementError> {
        let of_rank = |rank| {
            let mut coordinate = coordinate.to_vec();
            coordinate[self.axis] = rank;
            layout.local_slices(&coordinate)
        };
        (0..layout.axes()[self.axis].size).map(of_rank).collect()
    }
}

/// The plan of an exchange, given what this rank copies to each other rank and from each, if anything.
fn exchange(
    to_peers: impl Iterator<Item = Option<BlockCopy>>,
    from_peers: impl Iterator<Item = Option<BlockCopy>>,
) -> Arc<StridedPlan> {
    let send = to_peers.map(|copy| copy.map(|copy| copy.from).into_iter().collect()).collect();
    let recv = |copy: BlockCopy| RecvBlock::overwritten(copy.to);
    Arc::new(StridedPlan {
        send,
        recv: from_peers.map(|copy| copy.map(recv).into_iter().collect()).collect(),
    })
}

/// The elements that a rank with the slices `held` has for one that needs the slices `needed`: from where in the one's
/// tensor, to where in the other's. The slices differ in two dimensions at most, as before and after a step.
fn transfer(held: &[Range<usize>], needed: &[Range<usize>]) -> Option<BlockCopy> {
    Some(block_copy(&intersection(held, needed)?, held, needed))
}

/// The same for slices that differ in any dimensions.
pub(crate) fn transfers(held: &[Range<usize>], needed: &[Range<usize>]) -> Vec<BlockCopy> {
    let Some(part) = intersection(held, needed) else { return Vec::new() };
    let differing: Vec<usize> = (0..part.len()).filter(|dim| held[*dim] != needed[*dim]).collect();
    let [first, .., row, _] = differing[..] else { return vec![block_copy(&part, held, needed)] };
    // Rows and runs of a block are the last two of these dimensions: those before are copied index by index.
    let at_each_index = |part: Vec<Range<usize>>, dim: usize| {
        part[dim].clone().map(move |index| {
            let mut part = part.clone();
            part[dim] = index..index + 1;
            part
        })
    };
    let parts = (first..row)
        .fold(vec![part], |parts, dim| parts.into_iter().flat_map(|part| at_each_index(part, dim)).collect());
    parts.iter().map(|part| block_copy(part, held, needed)).collect()
}

/// What two slices have in common, if anything.
fn intersection(held: &[Range<usize>], needed: &[Range<usize>]) -> Option<Vec<Range<usize>>> {
    let both = held.iter().zip(needed);
    let part = both.map(|(held, needed)| held.start.max(needed.start)..held.end.min(needed.end));
    let part = Vec::from_iter(part);
    (!part.iter().any(Range::is_empty)).then_some(part)
}

/// The copy of a part from a tensor with the slices `held` to one with the slices `needed`.
fn block_copy(part: &[Range<usize>], held: &[Range<usize>], needed: &[Range<usize>]) -> BlockCopy {
    let is_cut = |dim: &usize| part[*dim] != held[*dim] || part[*dim] != needed[*dim];
    let first = (0..part.len()).find(is_cut).unwrap_or(0);
    let last = (0..part.len()).rfind(is_cut).unwrap_or(first);
    let numel = |slices: &[Range<usize>]| slices.iter().map(ExactSizeIterator::len).product::<usize>();
    let within = |slices: &[Range<usize>]| {
        let offset = |dim: usize| (part[dim].start - slices[dim].start) * numel(&slices[dim + 1..]);
        StridedBlock {
            tensor: 0,
            offset: (0..part.len()).map(offset).sum(),
            batch: numel(&part[..first]),
            batch_stride: numel(&slices[first..]),
            rows: numel(&part[first..last]),
            row_stride: numel(&slices[last..]),
            run: numel(&part[last..]),
        }
    };
    BlockCopy { from: within(held), to: within(needed), accumulate: false }
}
