//! The copying of a collective: every rank pulls what it needs out of its peers'
//! tensors, in place.
//!
//! Locks: a tensor of a peer is locked for reading only while elements are copied out
//! of it, and that is the last lock to be taken. Nobody waits for a rank meanwhile.

use super::communicator::{Communicator, Round};
use crate::comm::block::{copy_all, copy_block};
use crate::comm::dtype::{Arithmetic, for_dtype};
use crate::comm::reduce::{Sources, reduce_into};
use crate::comm::{CollectiveOp, CommError, RecvBlock, ReduceOp, StridedPlan};
use crate::tensor::{with_slice, with_slice_mut};
use candle_core::{DType, Device, Tensor, WithDType};
use std::ops::Range;

/// Up to here every rank of an all_reduce reduces all elements itself; above, each
/// reduces its chunk and collects those of the others.
pub(super) const DIRECT_REDUCE_MAX_ELEMS: usize = 4096;

/// What one rank sees of a round in which all have posted agreeing calls.
#[derive(Clone, Copy)]
pub(super) struct Exchange<'a> {
    pub(super) comm: &'a Communicator,
    pub(super) round: &'a Round,
    pub(super) rank: usize,
    pub(super) op: CollectiveOp,
}

impl Exchange<'_> {
    /// The part of `count` elements that a rank reduces in an all_reduce.
    pub(super) fn chunk_of(&self, rank: usize, count: usize) -> Range<usize> {
        let ranks = self.comm.world_size();
        rank * count / ranks..(rank + 1) * count / ranks
    }

    /// Calls `read` with the elements of a peer's (or the own) input.
    fn with_input<T: Arithmetic, R>(
        &self,
        peer: usize,
        tensor: usize,
        read: impl FnOnce(&[T]) -> R,
    ) -> Result<R, CommError> {
        let inputs = self.round.post_of(peer)?.inputs.read();
        let input = inputs.get(tensor).ok_or_else(|| {
            CommError::Tensor(format!(
                "rank {peer} of the group has published {} tensors, not {tensor}",
                inputs.len()
            ))
        })?;
        Ok(with_slice(input, read)?)
    }

    /// Counts what was copied out of a peer's memory.
    fn moved<T>(&self, peer: usize, elements: usize) {
        self.comm.count_bytes((peer, self.op), (self.rank, self.op), elements * size_of::<T>());
    }

    /// Copies part of a peer's input over `target`.
    fn fetch<T: Arithmetic>(&self, peer: usize, begin: usize, target: &mut [T]) -> Result<(), CommError> {
        self.with_input(peer, 0, |input: &[T]| copy_all(&input[begin..begin + target.len()], target))?;
        self.moved::<T>(peer, target.len());
        Ok(())
    }

    /// Reduces a range of all ranks' inputs into a new tensor.
    pub(super) fn reduce(
        &self,
        op: ReduceOp,
        dtype: DType,
        range: Range<usize>,
    ) -> Result<Tensor, CommError> {
        let count = range.len();
        for_dtype!(dtype, T => {
            let mut reduced = vec![<T as WithDType>::from_f64(0.0); count];
            self.reduce_range::<T>(op, range.start, &mut reduced)?;
            Ok(Tensor::from_vec(reduced, count, &Device::Cpu)?)
        })
    }

    pub(super) fn reduce_scatter(
        &self,
        op: ReduceOp,
        dtype: DType,
        begin: usize,
        output: &Tensor,
    ) -> Result<(), CommError> {
        for_dtype!(dtype, T => with_slice_mut(output, |output: &mut [T]| self.reduce_range(op, begin, output))?)
    }

    fn reduce_range<T: Arithmetic>(
        &self,
        op: ReduceOp,
        begin: usize,
        target: &mut [T],
    ) -> Result<(), CommError> {
        let elements = target.len();
        reduce_into::<T>(op, self, begin, target)?;
        (0..self.comm.world_size()).for_each(|peer| self.moved::<T>(peer, elements));
        Ok(())
    }

    /// Second phase of an all_reduce: all chunks are reduced, and nobody reads any
    /// rank's elements any more.
    pub(super) fn collect_chunks(
        &self,
        dtype: DType,
        count: usize,
        output: &Tensor,
    ) -> Result<(), CommError> {
        for_dtype!(dtype, T => with_slice_mut(output, |output: &mut [T]| {
            for (peer, seat) in self.round.seats.iter().enumerate() {
                let reduced = seat.reduced.read();
                let Some(chunk) = &*reduced else {
                    return Err(CommError::Tensor(format!("rank {peer} of the group has reduced nothing")));
                };
                let target = &mut output[self.chunk_of(peer, count)];
                with_slice(chunk, |chunk| copy_all(chunk, target))?;
                self.moved::<T>(peer, target.len());
            }
            Ok(())
        })?)
    }

    pub(super) fn all_gather(&self, dtype: DType, count: usize, output: &Tensor) -> Result<(), CommError> {
        for_dtype!(dtype, T => with_slice_mut(output, |output: &mut [T]| {
            (0..self.comm.world_size()).try_for_each(|peer| self.fetch(peer, 0, &mut output[peer * count..][..count]))
        })?)
    }

    pub(super) fn all_to_all(&self, dtype: DType, recv: &[usize], output: &Tensor) -> Result<(), CommError> {
        for_dtype!(dtype, T => with_slice_mut(output, |output: &mut [T]| {
            let mut rest = output;
            for (peer, &count) in recv.iter().enumerate() {
                let (target, tail) = rest.split_at_mut(count);
                rest = tail;
                self.fetch(peer, self.sent_before(peer)?, target)?;
            }
            Ok(())
        })?)
    }

    /// Elements that a peer of an all_to_all sends to the ranks before this one.
    fn sent_before(&self, peer: usize) -> Result<usize, CommError> {
        match &self.round.post_of(peer)?.call {
            super::call::Call::AllToAll { send, .. } => Ok(send[..self.rank].iter().sum()),
            other => Err(CommError::Tensor(format!("rank {peer} of the group has posted {other}"))),
        }
    }

    /// One copy, straight from the peers' tensors into the final layout.
    pub(super) fn all_to_all_strided(
        &self,
        dtype: DType,
        plan: &StridedPlan,
        outputs: &[Tensor],
    ) -> Result<(), CommError> {
        for peer in 0..self.comm.world_size() {
            let super::call::Call::AllToAllStrided { plan: theirs, .. } = &self.round.post_of(peer)?.call
            else {
                return Err(CommError::Tensor(format!("rank {peer} of the group has posted another call")));
            };
            for (from, RecvBlock { block: to, accumulate }) in
                theirs.send[self.rank].iter().zip(&plan.recv[peer])
            {
                for_dtype!(dtype, T => {
                    let moved = with_slice_mut(&outputs[to.tensor], |output: &mut [T]| {
                        self.with_input(peer, from.tensor, |input| copy_block(input, from, output, to, *accumulate))
                    })??;
                    self.moved::<T>(peer, moved);
                    Ok(())
                })?;
            }
        }
        Ok(())
    }

    pub(super) fn broadcast(&self, dtype: DType, root: usize, output: &Tensor) -> Result<(), CommError> {
        for_dtype!(dtype, T => with_slice_mut(output, |output: &mut [T]| self.fetch(root, 0, output))?)
    }
}

impl<T: Arithmetic> Sources<T> for Exchange<'_> {
    fn ranks(&self) -> usize {
        self.comm.world_size()
    }

    fn read(&self, rank: usize, begin: usize, visit: &mut dyn FnMut(&[T])) -> Result<(), CommError> {
        self.with_input(rank, 0, |input: &[T]| visit(&input[begin..]))
    }
}
