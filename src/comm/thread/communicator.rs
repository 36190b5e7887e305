//! State shared by the members of a group, where their calls meet.

use super::mailbox::Mailbox;
use super::world::ThreadWorld;
use crate::comm::diagnostics::{OpLabel, compare};
use crate::comm::stats::TrafficCounter;
use crate::comm::{CallSignature, CollectiveOp, CommError, GroupLabel, GroupStats};
use candle_core::{Device, Tensor};
use parking_lot::{Mutex, RwLock};
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use ulysses_kernels::device::Fence;

/// A group, as shared by all its ranks.
#[derive(Debug)]
pub(super) struct Communicator {
    pub(super) label: Arc<GroupLabel>,
    pub(super) world: Arc<ThreadWorld>,
    pub(super) mailbox: Mailbox,
    rounds: Mutex<Rounds>,
    /// The traffic of each rank.
    traffic: Box<[Mutex<TrafficCounter>]>,
}

/// The operations in progress, as a queue, since they complete in order.
#[derive(Debug, Default)]
struct Rounds {
    /// Sequence number of the front of the queue.
    first: u64,
    /// The rounds, each with the number of ranks that have finished it.
    queue: VecDeque<(Arc<Round>, usize)>,
}

/// A rank that sends or receives, and its own operation: those of a message differ.
#[derive(Debug, Clone, Copy)]
pub(super) struct TransferEnd {
    pub(super) rank: usize,
    pub(super) op: CollectiveOp,
}

/// The state of one collective: a slot for every rank.
#[derive(Debug)]
pub(super) struct Round {
    pub(super) slots: Box<[Slot]>,
    /// The groups that a split creates, by color; the first rank of a color creates its group.
    pub(super) children: Mutex<BTreeMap<usize, Arc<Communicator>>>,
}

/// The state of one rank in a collective.
#[derive(Debug, Default)]
pub(super) struct Slot {
    posting: OnceLock<Posting>,
    /// The rank's reduced chunk in an all_reduce with two phases.
    pub(super) reduced: RwLock<Option<Tensor>>,
    stage: AtomicU8,
    /// A fence after the GPU work that the rank launched before it reached its stage, or a
    /// later one.
    fence: Mutex<Option<Fence>>,
}

/// The call and inputs that a rank publishes.
#[derive(Debug)]
pub(super) struct Posting {
    pub(super) call: CallSignature,
    /// Peers read these in place and never clone them. The owner clears the list
    /// when all have read, so a buffer is always freed by the rank that allocated it.
    pub(super) inputs: RwLock<Vec<Tensor>>,
}

/// The stage that a rank has reached in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(super) enum Stage {
    /// The call and inputs are published.
    Posted = 1,
    /// The chunk of a two-phase all_reduce is published.
    Reduced = 2,
    /// The rank reads no more data of its peers.
    Done = 3,
}

impl Communicator {
    pub(super) fn new(label: Arc<GroupLabel>, world: Arc<ThreadWorld>) -> Self {
        let ranks = label.members.len();
        let traffic = (0..ranks).map(|_| Mutex::new(TrafficCounter::new(ranks))).collect();
        Self { label, world, mailbox: Mailbox::new(ranks), rounds: Mutex::default(), traffic }
    }

    pub(super) fn world_size(&self) -> usize {
        self.label.members.len()
    }

    /// The global rank of a member.
    pub(super) fn global_rank(&self, rank: usize) -> usize {
        self.label.members[rank]
    }

    /// Wakes all members.
    pub(super) fn notify(&self) {
        self.world.notify(&self.label.members);
    }

    /// Wakes one member.
    pub(super) fn notify_rank(&self, rank: usize) {
        self.world.notify(&[self.global_rank(rank)]);
    }

    /// Returns the round of a sequence number. The first rank to ask creates it.
    pub(super) fn round(&self, sequence: u64) -> Arc<Round> {
        let mut rounds = self.rounds.lock();
        let index = (sequence - rounds.first) as usize;
        while rounds.queue.len() <= index {
            rounds.queue.push_back((Arc::new(Round::new(self.world_size())), 0));
        }
        rounds.queue[index].0.clone()
    }

    /// Marks a round as finished by one rank; the last rank removes it.
    pub(super) fn release(&self, sequence: u64) {
        let mut rounds = self.rounds.lock();
        let index = (sequence - rounds.first) as usize;
        if let Some((_, finished)) = rounds.queue.get_mut(index) {
            *finished += 1;
        }
        while rounds.queue.front().is_some_and(|&(_, finished)| finished == self.world_size()) {
            rounds.queue.pop_front();
            rounds.first += 1;
        }
    }

    /// Number of rounds in memory.
    #[cfg(test)]
    pub(super) fn open_rounds(&self) -> usize {
        self.rounds.lock().queue.len()
    }

    pub(super) fn count_call(&self, rank: usize, op: CollectiveOp) {
        self.traffic[rank].lock().call(op);
    }

    /// Counts bytes that `to` copied from `from`. Copies within a rank are not counted.
    pub(super) fn count_bytes(&self, from: TransferEnd, to: TransferEnd, bytes: usize) {
        if from.rank != to.rank {
            self.traffic[from.rank].lock().sent(from.op, to.rank, bytes as u64);
            self.traffic[to.rank].lock().received(to.op, bytes as u64);
        }
    }

    /// Bytes that `rank` has sent to each member.
    pub(super) fn sent_to(&self, rank: usize) -> Vec<u64> {
        self.traffic[rank].lock().sent_to()
    }

    pub(super) fn stats(&self, rank: usize) -> GroupStats {
        self.traffic[rank].lock().stats()
    }
}

impl Round {
    fn new(ranks: usize) -> Self {
        Self { slots: (0..ranks).map(|_| Slot::default()).collect(), children: Mutex::default() }
    }

    pub(super) fn post(&self, rank: usize, call: CallSignature, inputs: Vec<Tensor>, fence: Option<Fence>) {
        // A rank uses each sequence number once, so the slot is empty.
        let _ = self.slots[rank].posting.set(Posting { call, inputs: RwLock::new(inputs) });
        self.reach(rank, Stage::Posted, fence);
    }

    pub(super) fn reach(&self, rank: usize, stage: Stage, fence: Option<Fence>) {
        *self.slots[rank].fence.lock() = fence;
        self.slots[rank].stage.store(stage as u8, Ordering::SeqCst);
    }

    /// Makes the stream of `device` wait for the fences of the peers of `rank`, so its later work follows
    /// the work that they launched before they reached their stages.
    pub(super) fn wait_fences(&self, rank: usize, device: &Device) -> Result<(), CommError> {
        for (_, slot) in self.slots.iter().enumerate().filter(|&(peer, _)| peer != rank) {
            if let Some(fence) = &*slot.fence.lock() {
                fence.hold(device)?;
            }
        }
        Ok(())
    }

    /// The ranks (of the group) that have not reached `stage`.
    pub(super) fn missing(&self, stage: Stage) -> impl Iterator<Item = usize> + '_ {
        let late = move |slot: &Slot| slot.stage.load(Ordering::SeqCst) < stage as u8;
        self.slots.iter().enumerate().filter(move |(_, slot)| late(slot)).map(|(rank, _)| rank)
    }

    pub(super) fn all_at(&self, stage: Stage) -> bool {
        self.missing(stage).next().is_none()
    }

    /// Returns what a rank has published. All ranks must have reached [`Stage::Posted`].
    pub(super) fn posting_of(&self, rank: usize) -> Result<&Posting, CommError> {
        self.slots[rank]
            .posting
            .get()
            .ok_or_else(|| CommError::Tensor(format!("rank {rank} of the group has posted no call")))
    }

    /// Compares the calls of all ranks.
    pub(super) fn compare(&self, label: &OpLabel) -> Result<(), CommError> {
        let postings = (0..self.slots.len()).map(|rank| self.posting_of(rank).map(|posting| &posting.call));
        let calls = postings.collect::<Result<Vec<_>, _>>()?;
        compare(&calls).map_err(|divergence| divergence.error_in(label))
    }
}

impl Drop for Round {
    /// After a failure, the tensors are still here, and kernels of peers may still be reading them. Those kernels then
    /// precede the free, which the stream of the tensor's device runs.
    fn drop(&mut self) {
        let fences: Vec<Fence> = self.slots.iter().filter_map(|slot| slot.fence.lock().clone()).collect();
        for slot in &mut self.slots {
            let inputs = slot.posting.get_mut().map(|posting| posting.inputs.get_mut().as_slice());
            let tensors = inputs.into_iter().flatten().chain(slot.reduced.get_mut().as_ref());
            tensors.for_each(|tensor| free_after(&fences, tensor));
        }
    }
}

/// Makes the free of a tensor's memory wait for the fences.
pub(super) fn free_after(fences: &[Fence], tensor: &Tensor) {
    for fence in fences {
        if let Err(error) = fence.hold(tensor.device()) {
            tracing::warn!("memory may be freed while a kernel of another rank reads it: {error}");
        }
    }
}
