//! The exchange of tokens around the modules of tensor-parallel layers, as redistributions along tp.

use crate::comm::ProcessGroup;
use crate::mesh::TP_AXIS;
use crate::nn::{LayerError, TokenExchange};
use crate::placement::{Layout, LayoutAxis, Placement, PlacementError, redistribute};
use candle_core::Tensor;
use std::sync::Arc;

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
    fn gather(&self, some: &Tensor, seq_local: usize) -> Result<Tensor, LayerError> {
        let (batch, _, width) = some.dims3()?;
        self.redistribute(some, [batch, seq_local, width], [Placement::Shard(1), Placement::Replicate])
    }

    fn sum_scatter(&self, summand: &Tensor) -> Result<Tensor, LayerError> {
        self.redistribute(summand, summand.dims3()?.into(), [Placement::Partial, Placement::Shard(1)])
    }
}
