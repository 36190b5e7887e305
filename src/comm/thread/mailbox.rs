//! Messages between two ranks of a group.

use super::communicator::Communicator;
use super::engine::{Operation, Step, StorageId, Stuck};
use crate::comm::dtype::{copy_into, copy_of};
use crate::comm::{CollectiveOp, CommError};
use candle_core::Tensor;
use parking_lot::{Mutex, RwLock};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The messages of a group that wait for their receivers: a queue for each pair.
#[derive(Debug)]
pub(super) struct Mailbox {
    ranks: usize,
    queues: Box<[Mutex<VecDeque<Arc<Message>>>]>,
}

/// A message: the sender's tensor, read in place.
#[derive(Debug)]
struct Message {
    /// Emptied by the sender, so that it is the one that frees the buffer.
    tensor: RwLock<Option<Tensor>>,
    taken: AtomicBool,
}

impl Mailbox {
    pub(super) fn new(ranks: usize) -> Self {
        Self { ranks, queues: (0..ranks * ranks).map(|_| Mutex::default()).collect() }
    }

    fn queue(&self, src: usize, dst: usize) -> &Mutex<VecDeque<Arc<Message>>> {
        &self.queues[src * self.ranks + dst]
    }
}

/// A message that was published and not yet taken.
#[derive(Debug)]
pub(super) struct SendOperation {
    comm: Arc<Communicator>,
    dst: usize,
    sequence: u64,
    message: Arc<Message>,
    lent: [StorageId; 1],
}

impl SendOperation {
    /// Publishes the message: from here on the receiver may read it.
    pub(super) fn publish(
        comm: &Arc<Communicator>,
        rank: usize,
        dst: usize,
        sequence: u64,
        tensor: &Tensor,
    ) -> Self {
        let message =
            Arc::new(Message { tensor: RwLock::new(Some(tensor.clone())), taken: AtomicBool::new(false) });
        comm.count_call(rank, CollectiveOp::Send);
        comm.mailbox.queue(rank, dst).lock().push_back(message.clone());
        comm.world.notify(&comm.global_ranks[dst..=dst]);
        Self { comm: comm.clone(), dst, sequence, message, lent: [StorageId::of(tensor)] }
    }
}

impl Operation for SendOperation {
    fn advance(&mut self, _lent: &[StorageId]) -> Result<Step, CommError> {
        if !self.message.taken.load(Ordering::SeqCst) {
            return Ok(Step::Settling);
        }
        self.message.tensor.write().take();
        Ok(Step::Complete)
    }

    fn lent(&self) -> &[StorageId] {
        &self.lent
    }

    fn stuck(&self) -> Stuck {
        let (group, missing) = (self.comm.name.clone(), vec![self.comm.global_ranks[self.dst]]);
        Stuck { group, op: CollectiveOp::Send, sequence: self.sequence, missing }
    }
}

/// A message that is expected.
#[derive(Debug)]
pub(super) struct RecvOperation {
    comm: Arc<Communicator>,
    rank: usize,
    src: usize,
    sequence: u64,
    output: Tensor,
}

impl RecvOperation {
    pub(super) fn new(
        comm: &Arc<Communicator>,
        rank: usize,
        src: usize,
        sequence: u64,
        output: &Tensor,
    ) -> Self {
        comm.count_call(rank, CollectiveOp::Recv);
        Self { comm: comm.clone(), rank, src, sequence, output: output.clone() }
    }

    fn take(&self, tensor: &Tensor, lent: &[StorageId]) -> Result<(), CommError> {
        let describe =
            |op: CollectiveOp, t: &Tensor| format!("{op}({} × {})", t.elem_count(), t.dtype().as_str());
        if (tensor.dtype(), tensor.elem_count()) != (self.output.dtype(), self.output.elem_count()) {
            return Err(CommError::Desync {
                group: self.comm.name.clone(),
                sequence: self.sequence,
                rank: self.comm.global_ranks[self.src],
                called: describe(CollectiveOp::Send, tensor),
                others: vec![self.comm.global_ranks[self.rank]],
                others_called: describe(CollectiveOp::Recv, &self.output),
            });
        }
        if lent.contains(&StorageId::of(&self.output)) {
            // The output's storage is being read by peers: see `Collective::targets`.
            copy_into(&copy_of(tensor)?, &self.output)?;
        } else {
            copy_into(tensor, &self.output)?;
        }
        let bytes = tensor.elem_count() * tensor.dtype().size_in_bytes();
        self.comm.count_bytes((self.src, CollectiveOp::Send), (self.rank, CollectiveOp::Recv), bytes);
        Ok(())
    }
}

impl Operation for RecvOperation {
    fn advance(&mut self, lent: &[StorageId]) -> Result<Step, CommError> {
        let Some(message) = self.comm.mailbox.queue(self.src, self.rank).lock().pop_front() else {
            return Ok(Step::Blocked);
        };
        if let Some(tensor) = &*message.tensor.read() {
            self.take(tensor, lent)?;
        }
        message.taken.store(true, Ordering::SeqCst);
        self.comm.world.notify(&self.comm.global_ranks[self.src..=self.src]);
        Ok(Step::Complete)
    }

    fn lent(&self) -> &[StorageId] {
        &[]
    }

    fn stuck(&self) -> Stuck {
        let (group, missing) = (self.comm.name.clone(), vec![self.comm.global_ranks[self.src]]);
        Stuck { group, op: CollectiveOp::Recv, sequence: self.sequence, missing }
    }
}
