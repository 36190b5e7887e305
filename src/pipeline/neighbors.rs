//! The messages between the ranks of a pipeline.

use crate::comm::{CommError, Pending, ProcessGroup, ProcessGroupExt};
use crate::nn::LayerError;
use candle_core::{Shape, Tensor};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use ulysses_kernels::Workspace;

/// The links of one rank to those with the previous and the next stages, and the same place on the other axes.
pub struct Neighbors {
    /// The ranks with all stages, in the order of their first ones.
    group: Arc<dyn ProcessGroup>,
    workspace: Arc<Workspace>,
    /// Tensors that were sent and that nothing else keeps alive, oldest first.
    sent: Mutex<VecDeque<Sent>>,
}

/// A tensor on its way.
struct Sent {
    pending: Pending,
    tensor: Tensor,
}

impl Neighbors {
    /// Creates the links within `group`, the ranks with all stages. Received tensors come from the `workspace`.
    pub fn new(group: Arc<dyn ProcessGroup>, workspace: Arc<Workspace>) -> Self {
        // A rank sends, and computes on.
        group.progress_in_background();
        Self { group, workspace, sent: Mutex::default() }
    }

    /// Number of ranks.
    pub fn num_ranks(&self) -> usize {
        self.group.world_size()
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// Receives a tensor of the workspace's dtype from a rank.
    pub(super) fn receive(&self, shape: impl Into<Shape>, rank: usize) -> Result<Tensor, LayerError> {
        let tensor = self.workspace.alloc(shape)?;
        self.group.recv(&tensor, rank).map_err(failed)?;
        self.settle(self.num_ranks()).map_err(failed)?;
        Ok(tensor)
    }

    /// Starts to send a tensor to a rank. It must not be overwritten before the end of the operation.
    pub(super) fn start_send(&self, tensor: &Tensor, rank: usize) -> Result<Pending, LayerError> {
        self.group.start_send(&tensor.contiguous()?, rank).map_err(failed)
    }

    /// Starts to send a tensor without other users, and keeps it until it is received.
    pub(super) fn send(&self, tensor: &Tensor, rank: usize) -> Result<(), LayerError> {
        let pending = self.start_send(tensor, rank)?;
        self.sent.lock().push_back(Sent { pending, tensor: tensor.clone() });
        Ok(())
    }

    /// Waits until all tensors that were sent are received, and recycles them. The other ranks must not need another message
    /// for that.
    ///
    /// # Errors
    /// Failed communication.
    pub fn settle_all(&self) -> Result<(), CommError> {
        self.settle(0)
    }

    /// Waits until at most `most` of the tensors that were sent are still on their way, and recycles the others.
    ///
    /// The previous rank receives gradients in the order in which they are sent, and needs no later one for that. Only when no
    /// message waits for [`flush`](Self::flush), or this would flush it.
    fn settle(&self, most: usize) -> Result<(), CommError> {
        loop {
            let oldest = {
                let mut sent = self.sent.lock();
                if sent.len() > most { sent.pop_front() } else { None }
            };
            let Some(Sent { pending, tensor }) = oldest else { return Ok(()) };
            pending.wait()?;
            self.workspace.recycle(tensor);
        }
    }

    /// Passes the messages so far to the backend's library, if it collects them to run as a group. Call it after a pass,
    /// unless the next pass receives from the stage that this one sent to: one stream has all messages of a rank, and the two
    /// stages would each wait there for the other one to receive.
    ///
    /// # Errors
    /// Failed communication.
    pub fn flush(&self) -> Result<(), CommError> {
        self.group.flush_messages()?;
        self.settle(self.num_ranks())
    }
}

fn failed(error: CommError) -> LayerError {
    LayerError::Exchange(error.into())
}
