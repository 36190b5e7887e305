//! The strided all-to-all, one message per block: straight from input to output where the block is contiguous, and
//! through a buffer elsewhere. A rank's own blocks are copied once.

use super::collective::{StepResult, part};
use super::operation::{Step, peers};
use super::staging::Staged;
use super::transfers::{Members, Transfers};
use crate::comm::plan::num_elems;
use crate::comm::{CommError, RecvBlock, StridedBlock, StridedPlan};
use candle_core::{DType, Tensor};
use std::sync::Arc;
use ulysses_kernels::strided_copy::{BlockCopy, copy_blocks};

/// One rank's strided all-to-all, with a checked plan and inputs that share no memory with outputs.
pub(super) struct StridedAllToAll {
    pub(super) inputs: Vec<Tensor>,
    pub(super) outputs: Vec<Tensor>,
    pub(super) plan: Arc<StridedPlan>,
    pub(super) dtype: DType,
}

/// Blocks that are on their way to this rank.
struct Incoming {
    /// The buffer of those that cannot be received in place.
    received: Staged,
    /// The remaining copies, in rank order.
    copies: Vec<BlockCopy>,
}

pub(super) fn all_to_all_strided(
    transfers: &mut Transfers,
    members: &Members,
    strided: StridedAllToAll,
) -> StepResult {
    let packed = strided.send(transfers, members)?;
    let mut own = Some(strided.own_copies(members.rank())?);
    // Accumulated blocks are added in rank order, including the rank's own.
    if !strided.adds() {
        strided.copy(&[], &own.take().unwrap_or_default())?;
    }
    let incoming = strided.receive(transfers, members, own)?;
    Ok(Some(strided.finish(packed, incoming)))
}

impl StridedAllToAll {
    fn adds(&self) -> bool {
        self.plan.recv.iter().flatten().any(|recv| recv.accumulate)
    }

    /// Sends every other rank its blocks. The packed blocks are in use until all transfers are complete.
    fn send(&self, transfers: &mut Transfers, members: &Members) -> Result<Staged, CommError> {
        let of_peers = peers(members).flat_map(|peer| &self.plan.send[peer]);
        let scattered = of_peers.filter(|block| block.in_one_piece().is_none()).map(num_elems).sum();
        let packed = members.staging.alloc(scattered, self.dtype)?;
        let mut begin = 0;
        for peer in peers(members) {
            for block in self.plan.send[peer].iter().filter(|block| num_elems(block) > 0) {
                let piece = match block.in_one_piece() {
                    Some(range) => part(&self.inputs[block.tensor], range)?,
                    None => {
                        let piece = part(&packed.tensor()?, begin..begin + num_elems(block))?;
                        begin += num_elems(block);
                        let (from, to) = (block.clone(), block.packed_at(0));
                        let inputs: Vec<&Tensor> = self.inputs.iter().collect();
                        copy_blocks(&inputs, &[&piece], &[BlockCopy { from, to, accumulate: false }])?;
                        piece
                    }
                };
                transfers.send(members, &piece, peer)?;
            }
        }
        Ok(packed)
    }

    /// The copies of the rank's own blocks, from inputs to outputs.
    fn own_copies(&self, rank: usize) -> Result<Vec<BlockCopy>, CommError> {
        let (send, recv) = (&self.plan.send[rank], &self.plan.recv[rank]);
        if send.len() != recv.len() {
            let (sent, expected) = (send.len(), recv.len());
            let message = format!("the rank sends {sent} block(s) to itself but expects {expected}");
            return Err(CommError::Tensor(message));
        }
        Ok(send.iter().zip(recv).map(|(from, to)| to.copy_from(from.clone())).collect())
    }

    /// Receives the other ranks' blocks. The remaining copies include `own` if given.
    fn receive(
        &self,
        transfers: &mut Transfers,
        members: &Members,
        mut own: Option<Vec<BlockCopy>>,
    ) -> Result<Incoming, CommError> {
        let is_direct = |recv: &RecvBlock| own.is_none() && recv.block.in_one_piece().is_some();
        let of_peers = peers(members).flat_map(|peer| &self.plan.recv[peer]);
        let staged = of_peers.filter(|recv| !is_direct(recv)).map(|recv| num_elems(&recv.block)).sum();
        let received = members.staging.alloc(staged, self.dtype)?;
        let (mut begin, mut copies) = (0, Vec::new());
        for (rank, blocks) in self.plan.recv.iter().enumerate() {
            if rank == members.rank() {
                copies.extend(own.as_mut().map(std::mem::take).unwrap_or_default());
                continue;
            }
            for recv in blocks.iter().filter(|recv| num_elems(&recv.block) > 0) {
                let block = &recv.block;
                let target = match block.in_one_piece() {
                    Some(range) if own.is_none() => part(&self.outputs[block.tensor], range)?,
                    _ => {
                        // The buffer follows the inputs among the sources of the copies.
                        let from = StridedBlock { tensor: self.inputs.len(), ..block.packed_at(begin) };
                        copies.push(recv.copy_from(from));
                        begin += num_elems(block);
                        part(&received.tensor()?, begin - num_elems(block)..begin)?
                    }
                };
                transfers.receive(members, &target, rank)?;
            }
        }
        Ok(Incoming { received, copies })
    }

    /// Returns the step that runs after all messages are complete.
    fn finish(self, packed: Staged, Incoming { received, copies }: Incoming) -> Step {
        Step::last(move |members| {
            self.copy(&[&received.tensor()?], &copies)?;
            members.staging.recycle(packed);
            members.staging.recycle(received);
            Ok(())
        })
    }

    /// Copies from the inputs and the tensors of `behind` to the outputs.
    fn copy(&self, behind: &[&Tensor], copies: &[BlockCopy]) -> Result<(), CommError> {
        if copies.is_empty() {
            return Ok(());
        }
        let sources: Vec<&Tensor> = self.inputs.iter().chain(behind.iter().copied()).collect();
        Ok(copy_blocks(&sources, &self.outputs.iter().collect::<Vec<_>>(), copies)?)
    }
}
