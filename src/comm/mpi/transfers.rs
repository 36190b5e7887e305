//! The messages of one operation.

use super::library::{Communicator, MAX_MESSAGE_BYTES, MAX_TAG, Request};
use super::memory;
use super::staging::Staging;
use crate::comm::diagnostics::OpLabel;
use crate::comm::stats::TrafficCounter;
use crate::comm::{CommError, Membership};
use candle_core::Tensor;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::ffi::c_int;
use ulysses_kernels::tensor::bytes;

/// One rank's handle of a group.
#[derive(Debug)]
pub(super) struct Members {
    pub(super) communicator: Communicator,
    pub(super) membership: Membership,
    pub(super) traffic: Mutex<TrafficCounter>,
    pub(super) staging: Staging,
}

impl Members {
    pub(super) fn new(communicator: Communicator, membership: Membership) -> Self {
        let traffic = Mutex::new(TrafficCounter::new(membership.world_size()));
        Self { communicator, membership, traffic, staging: Staging::default() }
    }

    /// This rank within the group.
    pub(super) fn rank(&self) -> usize {
        self.membership.rank
    }

    pub(super) fn world_size(&self) -> usize {
        self.membership.world_size()
    }
}

/// Number of phases of an operation, each with its own tag: a rank may be a phase, or an operation,
/// ahead of another. Tags repeat after thousands of operations, which is safe, because MPI keeps
/// messages with equal tags between two ranks in order.
const PHASES: u64 = 3;
/// Tags of collectives start at 0, tags of messages here; the last tag is for control messages.
const FIRST_MESSAGE_TAG: c_int = 16_384;
pub(super) const CONTROL_TAG: c_int = MAX_TAG;

/// The sends and receives of an operation.
#[derive(Debug)]
pub(super) struct Transfers {
    label: OpLabel,
    phase: u64,
    in_progress: Vec<Transfer>,
    /// Texts received, by rank of the group.
    texts: Vec<Option<Vec<u8>>>,
    /// Tensor bytes sent to each other rank of the group.
    sent_bytes: Vec<u64>,
    /// Tensor bytes received from other ranks.
    received_bytes: u64,
}

#[derive(Debug)]
struct Transfer {
    /// Rank of the group.
    peer: usize,
    state: State,
}

#[derive(Debug)]
enum State {
    /// A text that has not arrived yet, of unknown length.
    Expecting,
    /// MPI is writing or reading the buffer.
    Moving { request: Request, buffer: Buffer, direction: Direction },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Out,
    /// The number of bytes that must arrive.
    In(usize),
}

/// The owner of a message's memory.
#[derive(Debug)]
enum Buffer {
    Tensor(#[expect(dead_code, reason = "keeps the storage alive")] Tensor),
    Text(Vec<u8>),
}

impl Transfers {
    pub(super) fn new(label: OpLabel) -> Self {
        let ranks = label.group.members.len();
        let (texts, sent_bytes) = (vec![None; ranks], vec![0; ranks]);
        Self { label, phase: 0, in_progress: Vec::new(), texts, sent_bytes, received_bytes: 0 }
    }

    pub(super) fn label(&self) -> &OpLabel {
        &self.label
    }

    /// Switches to the tag of the next phase.
    pub(super) fn next_phase(&mut self) {
        self.phase += 1;
    }

    fn tag(&self) -> c_int {
        let number = self.label.sequence * PHASES + self.phase;
        let spread = |tags: c_int| (number % tags as u64) as c_int;
        match self.label.op {
            op if op.is_message() => FIRST_MESSAGE_TAG + spread(CONTROL_TAG - FIRST_MESSAGE_TAG),
            _ => spread(FIRST_MESSAGE_TAG),
        }
    }

    /// Returns the error for an MPI call of this operation that failed.
    fn refused(&self, members: &Members, reason: String) -> CommError {
        self.label.failed_in("MPI", members.membership.global_rank(), reason)
    }

    /// Starts to send a contiguous tensor, which must not be written until the transfers are complete.
    pub(super) fn send(&mut self, members: &Members, tensor: &Tensor, to: usize) -> Result<(), CommError> {
        let (data, bytes) = (memory::source(tensor)?, bytes(tensor));
        self.sent_bytes[to] += if to == members.rank() { 0 } else { bytes as u64 };
        for begin in (0..bytes).step_by(MAX_MESSAGE_BYTES) {
            let length = MAX_MESSAGE_BYTES.min(bytes - begin);
            // SAFETY: the range is within the tensor, whose storage the transfer keeps until it is complete. The
            // group's contract forbids callers to write it, and this rank's operations write nothing
            // that shares memory with their inputs before all their transfers are complete.
            let request = unsafe { members.communicator.send(data.add(begin), length, to, self.tag()) };
            let request = request.map_err(|reason| self.refused(members, reason))?;
            self.moving(to, request, Buffer::Tensor(tensor.clone()), Direction::Out);
        }
        Ok(())
    }

    /// Starts to receive into a contiguous tensor, which must not be used until the transfers are complete.
    pub(super) fn receive(
        &mut self,
        members: &Members,
        tensor: &Tensor,
        from: usize,
    ) -> Result<(), CommError> {
        let (data, bytes) = (memory::target(tensor)?, bytes(tensor));
        self.received_bytes += if from == members.rank() { 0 } else { bytes as u64 };
        for begin in (0..bytes).step_by(MAX_MESSAGE_BYTES) {
            let length = MAX_MESSAGE_BYTES.min(bytes - begin);
            // SAFETY: the range is within the tensor, whose storage the transfer keeps until it is complete, even
            // after a failure. The group's contract forbids callers to use it meanwhile.
            let request = unsafe { members.communicator.receive(data.add(begin), length, from, self.tag()) };
            let request = request.map_err(|reason| self.refused(members, reason))?;
            self.moving(from, request, Buffer::Tensor(tensor.clone()), Direction::In(length));
        }
        Ok(())
    }

    /// Starts to send a text.
    pub(super) fn send_text(&mut self, members: &Members, text: Vec<u8>, to: usize) -> Result<(), CommError> {
        // SAFETY: the transfer keeps the text alive and unchanged until it is complete.
        let request = unsafe { members.communicator.send(text.as_ptr(), text.len(), to, self.tag()) };
        let request = request.map_err(|reason| self.refused(members, reason))?;
        self.moving(to, request, Buffer::Text(text), Direction::Out);
        Ok(())
    }

    /// Starts to receive a text of any length.
    pub(super) fn expect_text(&mut self, from: usize) {
        self.in_progress.push(Transfer { peer: from, state: State::Expecting });
    }

    /// Returns the text received from a rank.
    pub(super) fn text_from(&mut self, peer: usize) -> Vec<u8> {
        self.texts[peer].take().unwrap_or_default()
    }

    fn moving(&mut self, peer: usize, request: Request, buffer: Buffer, direction: Direction) {
        self.in_progress.push(Transfer { peer, state: State::Moving { request, buffer, direction } });
    }

    /// Advances the messages. Returns whether all are complete.
    pub(super) fn settle(&mut self, members: &Members) -> Result<bool, CommError> {
        let mut index = 0;
        while index < self.in_progress.len() {
            if self.advance(members, index).map_err(|reason| self.refused(members, reason))? {
                let transfer = self.in_progress.swap_remove(index);
                if let State::Moving { buffer: Buffer::Text(text), direction: Direction::In(_), .. } =
                    transfer.state
                {
                    self.texts[transfer.peer] = Some(text);
                }
            } else {
                index += 1;
            }
        }
        Ok(self.in_progress.is_empty())
    }

    /// Advances one message. Returns whether it is complete.
    fn advance(&mut self, members: &Members, index: usize) -> Result<bool, String> {
        let tag = self.tag();
        let Transfer { peer, state } = &mut self.in_progress[index];
        if let State::Expecting = state {
            let Some(arrived) = members.communicator.probe(Some(*peer), tag)? else { return Ok(false) };
            let mut text = vec![0_u8; arrived.bytes];
            // SAFETY: the text's memory stays in place when the vector moves into the transfer, which
            // keeps it until the request is complete.
            let request = unsafe { members.communicator.receive(text.as_mut_ptr(), text.len(), *peer, tag)? };
            let (buffer, direction) = (Buffer::Text(text), Direction::In(arrived.bytes));
            *state = State::Moving { request, buffer, direction };
        }
        let State::Moving { request, direction, .. } = state else { return Ok(false) };
        let Some(bytes) = request.test()? else { return Ok(false) };
        match *direction {
            Direction::In(expected) if bytes != expected => Err(format!(
                "received {bytes} bytes from rank {}, expected {expected}; the ranks made different calls \
                 (set `\"comm\": {{\"check\": \"on\"}}` to find which)",
                self.label.group.members[*peer]
            )),
            _ => Ok(true),
        }
    }

    /// The global ranks whose messages are not complete.
    pub(super) fn missing(&self) -> Vec<usize> {
        let peers: BTreeSet<usize> = self.in_progress.iter().map(|transfer| transfer.peer).collect();
        peers.into_iter().map(|peer| self.label.group.members[peer]).collect()
    }

    /// Adds the bytes moved to the group's counters.
    pub(super) fn count(&self, members: &Members) {
        let (mut traffic, op) = (members.traffic.lock(), self.label.op);
        self.sent_bytes.iter().enumerate().for_each(|(to, sent)| traffic.sent(op, to, *sent));
        traffic.received(op, self.received_bytes);
    }
}

impl Drop for Transfers {
    /// Leaks the buffers of unfinished transfers: MPI may still read or write them.
    fn drop(&mut self) {
        // Without unfinished ones the list itself is freed: an operation that leaked it would cost every step some memory.
        if !self.in_progress.is_empty() {
            std::mem::forget(std::mem::take(&mut self.in_progress));
        }
    }
}
