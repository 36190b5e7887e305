//! The messages between the ranks of a pipeline.

use super::DueMessages;
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
    /// Messages that [`flush`](Self::flush) starts, oldest first.
    waiting: Mutex<Vec<Waiting>>,
    /// Messages with tensors that nothing else keeps alive, oldest first.
    sent: Mutex<VecDeque<(Message, Tensor)>>,
}

/// A message that is not started yet.
struct Waiting {
    receiver: usize,
    tensor: Tensor,
    message: Message,
}

/// A message of this rank: its operation, from its start until it is waited for.
#[derive(Clone, Default)]
pub(super) struct Message(Arc<Mutex<Option<Pending>>>);

impl Message {
    /// Waits until a message that was started is received.
    pub(super) fn wait(&self) -> Result<(), CommError> {
        let pending = self.0.lock().take();
        pending.map_or(Ok(()), Pending::wait)
    }

    fn is_started(&self) -> bool {
        self.0.lock().is_some()
    }
}

impl Neighbors {
    /// Creates the links within `group`, the ranks with all stages. Received tensors come from the `workspace`.
    pub fn new(group: Arc<dyn ProcessGroup>, workspace: Arc<Workspace>) -> Self {
        // A rank sends, and computes on.
        group.progress_in_background();
        Self { group, workspace, waiting: Mutex::default(), sent: Mutex::default() }
    }

    /// Number of ranks.
    pub fn num_ranks(&self) -> usize {
        self.group.world_size()
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// Whether messages run one after another, each when both of its ranks have reached it:
    /// [`due_messages`](super::due_messages).
    pub fn have_one_stream(&self) -> bool {
        self.group.has_one_stream()
    }

    /// Receives a tensor of the workspace's dtype from a rank.
    pub(super) fn receive(&self, shape: impl Into<Shape>, rank: usize) -> Result<Tensor, LayerError> {
        let tensor = self.workspace.alloc(shape)?;
        self.group.recv(&tensor, rank).map_err(failed)?;
        self.settle(self.num_ranks()).map_err(failed)?;
        Ok(tensor)
    }

    /// Sends a tensor to a rank, from the next [`flush`](Self::flush) on. It must not be overwritten before the end of the
    /// operation.
    pub(super) fn start_send(&self, tensor: &Tensor, receiver: usize) -> Message {
        let message = Message::default();
        let waiting = Waiting { receiver, tensor: tensor.clone(), message: message.clone() };
        self.waiting.lock().push(waiting);
        message
    }

    /// Sends a tensor without other users, and keeps it until it is received.
    pub(super) fn send(&self, tensor: &Tensor, receiver: usize) {
        let message = self.start_send(tensor, receiver);
        self.sent.lock().push_back((message, tensor.clone()));
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
    /// The previous rank receives gradients in the order in which they are sent, and needs no later one for that. Only when the backend
    /// holds back no message, or this would flush it.
    fn settle(&self, most: usize) -> Result<(), CommError> {
        loop {
            let oldest = {
                let mut sent = self.sent.lock();
                let is_next =
                    sent.len() > most && sent.front().is_some_and(|(oldest, _)| oldest.is_started());
                if is_next { sent.pop_front() } else { None }
            };
            let Some((message, tensor)) = oldest else { return Ok(()) };
            message.wait()?;
            self.workspace.recycle(tensor);
        }
    }

    /// Starts the messages so far, or those that are `due`. Call it after a pass.
    ///
    /// # Errors
    /// Failed communication.
    pub fn flush(&self, due: Option<&DueMessages>) -> Result<(), CommError> {
        for Waiting { receiver, tensor, message } in self.take_waiting(due) {
            let pending = self.group.start_send(&tensor.contiguous()?, receiver)?;
            *message.0.lock() = Some(pending);
        }
        if due.is_some_and(|due| due.join_next) {
            // The backend's library gets them with the message that the next pass receives.
            return Ok(());
        }
        self.group.flush_messages()?;
        self.settle(self.num_ranks())
    }

    fn take_waiting(&self, due: Option<&DueMessages>) -> Vec<Waiting> {
        let mut waiting = self.waiting.lock();
        let Some(due) = due else { return std::mem::take(&mut *waiting) };
        let oldest = |receiver: &usize| {
            let place = waiting.iter().position(|message| message.receiver == *receiver)?;
            Some(waiting.remove(place))
        };
        due.receivers.iter().filter_map(oldest).collect()
    }
}

fn failed(error: CommError) -> LayerError {
    LayerError::Exchange(error.into())
}
