//! Messages between two ranks of a group.

use super::communicator::{Communicator, TransferEnd, free_after};
use crate::comm::buffer::{StorageId, copy_into, copy_of};
use crate::comm::diagnostics::{OpLabel, compare_message};
use crate::comm::progress_engine::{Operation, Progress, Published};
use crate::comm::{CollectiveOp, CommError, Elements};
use candle_core::{Device, Tensor};
use parking_lot::{Mutex, RwLock};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use ulysses_kernels::device::Fence;

/// The messages of a group that wait for their receivers: one queue per pair of ranks.
#[derive(Debug)]
pub(super) struct Mailbox {
    ranks: usize,
    queues: Box<[Mutex<VecDeque<Arc<Message>>>]>,
}

/// A message. The receiver reads the sender's tensor in place.
#[derive(Debug)]
struct Message {
    /// Cleared by the sender, so that the sender frees the buffer.
    tensor: RwLock<Option<Tensor>>,
    /// A fence after the sender's GPU work before the send.
    sent: Option<Fence>,
    taken: AtomicBool,
    /// A fence after the receiver's copy.
    copied: Mutex<Option<Fence>>,
}

impl Drop for Message {
    /// After a failure, the tensor is still here, and the receiver's copy may still be reading it.
    fn drop(&mut self) {
        if let (Some(tensor), Some(copied)) = (self.tensor.get_mut(), self.copied.get_mut()) {
            free_after(std::slice::from_ref(copied), tensor);
        }
    }
}

impl Mailbox {
    pub(super) fn new(ranks: usize) -> Self {
        Self { ranks, queues: (0..ranks * ranks).map(|_| Mutex::default()).collect() }
    }

    fn queue(&self, src: usize, dst: usize) -> &Mutex<VecDeque<Arc<Message>>> {
        &self.queues[src * self.ranks + dst]
    }
}

/// A message that was published and not yet received.
#[derive(Debug)]
pub(super) struct SendOperation {
    comm: Arc<Communicator>,
    dst: usize,
    label: OpLabel,
    message: Arc<Message>,
    published: [StorageId; 1],
    device: Device,
}

impl SendOperation {
    /// Publishes the message. From now on, the receiver may read it.
    pub(super) fn publish(
        comm: &Arc<Communicator>,
        rank: usize,
        dst: usize,
        label: OpLabel,
        tensor: &Tensor,
        sent: Option<Fence>,
    ) -> Self {
        let (taken, copied) = (AtomicBool::new(false), Mutex::default());
        let message = Arc::new(Message { tensor: RwLock::new(Some(tensor.clone())), sent, taken, copied });
        comm.count_call(rank, label.op);
        comm.mailbox.queue(rank, dst).lock().push_back(message.clone());
        comm.notify_rank(dst);
        let (published, device) = ([StorageId::of(tensor)], tensor.device().clone());
        Self { comm: comm.clone(), dst, label, message, published, device }
    }
}

impl Operation for SendOperation {
    fn label(&self) -> &OpLabel {
        &self.label
    }

    fn advance(&mut self, _published: &Published<'_>) -> Result<Progress, CommError> {
        if !self.message.taken.load(Ordering::SeqCst) {
            return Ok(Progress::WaitingForPeers);
        }
        if let Some(copied) = &*self.message.copied.lock() {
            copied.hold(&self.device)?;
        }
        self.message.tensor.write().take();
        Ok(Progress::Complete)
    }

    fn published(&self) -> &[StorageId] {
        &self.published
    }

    fn missing(&self) -> Vec<usize> {
        vec![self.comm.global_rank(self.dst)]
    }
}

/// A receive that waits for its message.
#[derive(Debug)]
pub(super) struct RecvOperation {
    comm: Arc<Communicator>,
    rank: usize,
    src: usize,
    label: OpLabel,
    output: Tensor,
    has_data: bool,
}

impl RecvOperation {
    pub(super) fn new(
        comm: &Arc<Communicator>,
        rank: usize,
        src: usize,
        label: OpLabel,
        output: &Tensor,
    ) -> Self {
        comm.count_call(rank, label.op);
        // The message may be here already: this wakes a thread that moves data in the background.
        comm.notify_rank(rank);
        Self { comm: comm.clone(), rank, src, label, output: output.clone(), has_data: false }
    }

    /// Takes the next message, if it has been sent. Returns whether the data is here.
    fn receive(&mut self, published: &Published<'_>) -> Result<bool, CommError> {
        if self.has_data {
            return Ok(true);
        }
        let Some(message) = self.comm.mailbox.queue(self.src, self.rank).lock().pop_front() else {
            return Ok(false);
        };
        if let Some(sent) = &message.sent {
            sent.hold(self.output.device())?;
        }
        if let Some(tensor) = &*message.tensor.read() {
            self.take(tensor, published)?;
        }
        *message.copied.lock() = Fence::after(self.output.device())?;
        message.taken.store(true, Ordering::SeqCst);
        self.comm.notify_rank(self.src);
        self.has_data = true;
        Ok(true)
    }

    fn take(&self, tensor: &Tensor, published: &Published<'_>) -> Result<(), CommError> {
        let (sent, expected) = (Elements::of(tensor), Elements::of(&self.output));
        compare_message(self.src, sent, self.rank, expected)
            .map_err(|divergence| divergence.error_in(&self.label))?;
        if published.contains(StorageId::of(&self.output)) {
            // Peers are reading the output's storage: see `Collective::targets`.
            let between = copy_of(&self.output)?;
            copy_into(tensor, &between)?;
            copy_into(&between, &self.output)?;
        } else {
            copy_into(tensor, &self.output)?;
        }
        let bytes = tensor.elem_count() * tensor.dtype().size_in_bytes();
        let from = TransferEnd { rank: self.src, op: CollectiveOp::Send };
        self.comm.count_bytes(from, TransferEnd { rank: self.rank, op: CollectiveOp::Recv }, bytes);
        Ok(())
    }
}

impl Operation for RecvOperation {
    fn label(&self) -> &OpLabel {
        &self.label
    }

    fn advance(&mut self, published: &Published<'_>) -> Result<Progress, CommError> {
        Ok(if self.receive(published)? { Progress::Complete } else { Progress::Blocked })
    }

    fn pull_exchange(&mut self, published: &Published<'_>) -> Result<bool, CommError> {
        Ok(self.output.device().is_cpu() && self.receive(published)?)
    }

    fn missing(&self) -> Vec<usize> {
        vec![self.comm.global_rank(self.src)]
    }
}
