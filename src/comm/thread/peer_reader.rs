//! The copies of a collective: every rank reads what it needs from its peers'
//! tensors, in place.
//!
//! Locks: a peer's tensor is locked for reading only while its elements are copied,
//! and these are the last locks taken. No rank waits for another meanwhile.

use super::communicator::{Communicator, Round, TransferEnd};
use crate::comm::traffic::all_reduce_chunk;
use crate::comm::{CallSignature, CollectiveOp, CommError, ReduceOp, StridedBlock, StridedPlan, reduce};
use candle_core::Tensor;
use std::ops::Range;
use ulysses_kernels::strided_copy::{BlockCopy, copy_blocks};
use ulysses_kernels::tensor::zeros;

/// One rank's view of a round in which all ranks have posted matching calls.
#[derive(Clone, Copy)]
pub(super) struct PeerReader<'a> {
    pub(super) comm: &'a Communicator,
    pub(super) round: &'a Round,
    pub(super) rank: usize,
    pub(super) op: CollectiveOp,
}

/// The elements to copy from one peer's tensors.
struct Pull {
    peer: usize,
    copies: Vec<BlockCopy>,
}

impl Pull {
    /// A contiguous run of elements of the peer's only tensor, copied into the only output.
    fn run(peer: usize, from: usize, to: usize, elements: usize) -> Self {
        let block = |offset| StridedBlock::contiguous(0, offset, elements);
        Self { peer, copies: vec![BlockCopy { from: block(from), to: block(to), accumulate: false }] }
    }
}

impl PeerReader<'_> {
    /// Counts the bytes copied from a peer.
    fn moved(&self, peer: usize, elements: usize, like: &Tensor) {
        let bytes = elements * like.dtype().size_in_bytes();
        let end = |rank| TransferEnd { rank, op: self.op };
        self.comm.count_bytes(end(peer), end(self.rank), bytes);
    }

    /// Copies from the peers' inputs into `outputs`, in the order of `pulls`. On a
    /// GPU this is a single launch, unless blocks are accumulated.
    fn pull(&self, pulls: Vec<Pull>, outputs: &[Tensor]) -> Result<(), CommError> {
        let mut locked = Vec::with_capacity(pulls.len());
        let mut copies = Vec::new();
        let mut sources_before = 0;
        for Pull { peer, copies: of_peer } in pulls {
            let inputs = self.round.posting_of(peer)?.inputs.read();
            let elements = of_peer.iter().filter_map(|copy| copy.to.elements()).sum();
            copies.extend(of_peer.into_iter().map(|mut copy| {
                copy.from.tensor += sources_before;
                copy
            }));
            sources_before += inputs.len();
            locked.push((peer, elements, inputs));
        }
        let sources: Vec<&Tensor> = locked.iter().flat_map(|(_, _, inputs)| inputs.iter()).collect();
        let targets: Vec<&Tensor> = outputs.iter().collect();
        copy_blocks(&sources, &targets, &copies)?;
        for (peer, elements, _) in &locked {
            outputs.iter().take(1).for_each(|output| self.moved(*peer, *elements, output));
        }
        Ok(())
    }

    /// Reduces a range of all ranks' inputs into a new tensor on the device of `like`.
    pub(super) fn reduce(
        &self,
        op: ReduceOp,
        range: Range<usize>,
        like: &Tensor,
    ) -> Result<Tensor, CommError> {
        let reduced = zeros(range.len(), like.dtype(), like.device())?;
        self.reduce_into(op, range.start, &reduced)?;
        Ok(reduced)
    }

    /// Reduces all ranks' inputs, starting at `begin`, into `output`.
    pub(super) fn reduce_into(&self, op: ReduceOp, begin: usize, output: &Tensor) -> Result<(), CommError> {
        let ranks = 0..self.comm.world_size();
        let locked: Vec<_> = ranks
            .map(|peer| Ok(self.round.posting_of(peer)?.inputs.read()))
            .collect::<Result<_, CommError>>()?;
        let sources: Vec<&Tensor> = locked.iter().filter_map(|inputs| inputs.first()).collect();
        reduce::reduce(op, &sources, begin, output)?;
        sources.iter().enumerate().for_each(|(peer, source)| self.moved(peer, output.elem_count(), source));
        Ok(())
    }

    /// Runs the second phase of an all_reduce: all chunks are reduced, and no rank reads
    /// the inputs any more.
    pub(super) fn collect_chunks(&self, count: usize, output: &Tensor) -> Result<(), CommError> {
        let locked: Vec<_> = self.round.slots.iter().map(|slot| slot.reduced.read()).collect();
        let mut chunks = Vec::with_capacity(locked.len());
        let mut copies = Vec::with_capacity(locked.len());
        for (peer, reduced) in locked.iter().enumerate() {
            let Some(chunk) = &**reduced else {
                return Err(CommError::Tensor(format!("rank {peer} of the group has no reduced chunk")));
            };
            let to = all_reduce_chunk(self.comm.world_size(), peer, count);
            chunks.push(chunk);
            copies.push(BlockCopy {
                from: StridedBlock::contiguous(peer, 0, to.len()),
                to: StridedBlock::contiguous(0, to.start, to.len()),
                accumulate: false,
            });
        }
        copy_blocks(&chunks, &[output], &copies)?;
        chunks.iter().enumerate().for_each(|(peer, chunk)| self.moved(peer, chunk.elem_count(), output));
        Ok(())
    }

    pub(super) fn all_gather(&self, count: usize, outputs: &[Tensor]) -> Result<(), CommError> {
        let ranks = 0..self.comm.world_size();
        self.pull(ranks.map(|peer| Pull::run(peer, 0, peer * count, count)).collect(), outputs)
    }

    pub(super) fn all_to_all(&self, recv: &[usize], outputs: &[Tensor]) -> Result<(), CommError> {
        let mut pulls = Vec::with_capacity(recv.len());
        let mut received = 0;
        for (peer, &count) in recv.iter().enumerate() {
            pulls.push(Pull::run(peer, self.sent_before(peer)?, received, count));
            received += count;
        }
        self.pull(pulls, outputs)
    }

    /// Number of elements that a peer of an all_to_all sends to the ranks before this one.
    fn sent_before(&self, peer: usize) -> Result<usize, CommError> {
        match &self.round.posting_of(peer)?.call {
            CallSignature::AllToAll { send, .. } => Ok(send[..self.rank].iter().sum()),
            other => Err(CommError::Tensor(format!("rank {peer} of the group has posted {other}"))),
        }
    }

    /// Copies once, straight from the peers' tensors into the final layout.
    pub(super) fn all_to_all_strided(&self, plan: &StridedPlan, outputs: &[Tensor]) -> Result<(), CommError> {
        let mut pulls = Vec::with_capacity(plan.recv.len());
        for (peer, received) in plan.recv.iter().enumerate() {
            let CallSignature::AllToAllStrided { plan: theirs, .. } = &self.round.posting_of(peer)?.call
            else {
                return Err(CommError::Tensor(format!(
                    "rank {peer} of the group has posted a different call"
                )));
            };
            let blocks = theirs.send[self.rank].iter().zip(received);
            pulls.push(Pull { peer, copies: blocks.map(|(from, to)| to.copy_from(from.clone())).collect() });
        }
        self.pull(pulls, outputs)
    }

    /// Copies `count` elements from `begin` on of rank `root`.
    pub(super) fn pull_from(
        &self,
        root: usize,
        begin: usize,
        count: usize,
        outputs: &[Tensor],
    ) -> Result<(), CommError> {
        self.pull(vec![Pull::run(root, begin, 0, count)], outputs)
    }
}
