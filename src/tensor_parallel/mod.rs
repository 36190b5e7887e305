//! The exchange of tokens around the modules of tensor-parallel layers. Gathers, scatters and the change from features to tokens
//! are redistributions along tp; rows with counts per rank have exchanges of their own.

use crate::comm::{ProcessGroup, ProcessGroupExt, RecvBlock, ReduceOp, StridedBlock, StridedPlan};
use crate::mesh::TP_AXIS;
use crate::nn::{LayerError, TokenExchange};
use crate::placement::{Layout, LayoutAxis, Placement, PlacementError, redistribute};
use candle_core::Tensor;
use std::ops::Range;
use std::slice::from_ref;
use std::sync::Arc;
use ulysses_kernels::{rank_reduce, tensor};

/// Exchanges tokens over the ranks of tp, which divide those of an sp rank as evenly as possible.
pub struct TensorParallel {
    group: Arc<dyn ProcessGroup>,
}

impl TensorParallel {
    /// Exchanges tokens over `group`.
    pub fn new(group: Arc<dyn ProcessGroup>) -> Self {
        Self { group }
    }

    /// Redistributes this rank's part of a `[batch, seq_local, width]`.
    fn redistribute(
        &self,
        part: &Tensor,
        shape: [usize; 3],
        placements: [Placement; 2],
    ) -> Result<Tensor, LayerError> {
        let layout =
            |placement| Layout::new(shape, [LayoutAxis::new(TP_AXIS, self.group.world_size(), placement)]);
        let run = || {
            let [from, to] = placements;
            redistribute(&layout(from)?, &layout(to)?)?.execute_on(std::slice::from_ref(&self.group), part)
        };
        run().map_err(|error: PlacementError| LayerError::Exchange(error.into()))
    }
}

impl TokenExchange for TensorParallel {
    fn all_gather(&self, some: &Tensor, seq_local: usize) -> Result<Tensor, LayerError> {
        let (batch, _, width) = some.dims3()?;
        self.redistribute(some, [batch, seq_local, width], [Placement::Shard(1), Placement::Replicate])
    }

    fn reduce_scatter(&self, partial: &Tensor) -> Result<Tensor, LayerError> {
        self.redistribute(partial, partial.dims3()?.into(), [Placement::Partial, Placement::Shard(1)])
    }

    fn features_to_tokens(&self, part: &Tensor, width: usize) -> Result<Tensor, LayerError> {
        let (batch, seq_local, _) = part.dims3()?;
        self.redistribute(part, [batch, seq_local, width], [Placement::Shard(2), Placement::Shard(1)])
    }

    fn all_reduce(&self, partial: &Tensor) -> Result<(), LayerError> {
        self.group.all_reduce(partial, ReduceOp::Sum).map_err(|error| LayerError::Exchange(error.into()))
    }

    fn all_gather_rows(&self, own: &Tensor, counts: &[usize], all: &Tensor) -> Result<(), LayerError> {
        let sent = vec![0..counts[self.group.rank()]; counts.len()];
        self.exchange(own, &sent, all, &consecutive(counts))
    }

    /// The partial sums of all ranks, then their sum: bytes of exactly these rows, and the same order on every backend.
    fn reduce_scatter_rows(
        &self,
        partial: &Tensor,
        counts: &[usize],
        own: &Tensor,
    ) -> Result<(), LayerError> {
        let (ranks, rows) = (counts.len(), counts[self.group.rank()]);
        let width = partial.dims2()?.1;
        let partials = tensor::empty(((ranks * rows).max(1), width), partial.dtype(), partial.device())?;
        self.exchange(partial, &consecutive(counts), &partials, &consecutive(&vec![rows; ranks]))?;
        if rows > 0 {
            let of_ranks = (0..ranks).map(|rank| partials.narrow(0, rank * rows, rows));
            let of_ranks = of_ranks.collect::<candle_core::Result<Vec<_>>>()?;
            rank_reduce::reduce(ReduceOp::Sum, &of_ranks.iter().collect::<Vec<_>>(), 0, own)?;
        }
        Ok(())
    }
}

/// The rows of each rank, if they are in rank order.
fn consecutive(counts: &[usize]) -> Vec<Range<usize>> {
    let of_rank = |end: &mut usize, count: &usize| {
        let start = *end;
        *end += count;
        Some(start..*end)
    };
    counts.iter().scan(0, of_rank).collect()
}

impl TensorParallel {
    /// Sends rows of a matrix to every rank and receives rows from it.
    fn exchange(
        &self,
        from: &Tensor,
        sent: &[Range<usize>],
        to: &Tensor,
        received: &[Range<usize>],
    ) -> Result<(), LayerError> {
        let width = from.dims().last().copied().unwrap_or(1);
        let block = |rows: &Range<usize>| {
            (!rows.is_empty()).then(|| StridedBlock::contiguous(0, rows.start * width, rows.len() * width))
        };
        let recv = |rows| block(rows).map(|block| RecvBlock { block, accumulate: false });
        let plan = StridedPlan {
            send: sent.iter().map(|rows| block(rows).into_iter().collect()).collect(),
            recv: received.iter().map(|rows| recv(rows).into_iter().collect()).collect(),
        };
        self.group
            .all_to_all_strided(from_ref(from), from_ref(to), &Arc::new(plan))
            .map_err(|error| LayerError::Exchange(error.into()))
    }
}
