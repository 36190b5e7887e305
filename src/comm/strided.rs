//! Validation of strided plans, for all backends, and the strided all-to-all by packing, for backends that
//! cannot access their peers' memory.

use super::arg_check::ArgCheck;
use super::plan::num_elems;
use super::{Call, CommError, Pending, ProcessGroup, RecvBlock, StridedBlock, StridedPlan};
use candle_core::Tensor;
use std::collections::HashMap;
use std::sync::Arc;
use ulysses_kernels::strided_copy::{BlockCopy, copy_blocks};
use ulysses_kernels::tensor::zeros;

impl ArgCheck<'_> {
    /// Checks a plan against the tensors of this rank.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] when the plan is for another group size, refers to a missing tensor, exceeds
    /// a tensor's bounds or writes an element twice: within a block, or with a non-accumulating block that overlaps an
    /// earlier one.
    pub(super) fn plan(
        &self,
        inputs: &[Tensor],
        outputs: &[Tensor],
        plan: &StridedPlan,
    ) -> Result<(), CommError> {
        self.plan_bounds(inputs, outputs, plan)?;
        lost_block(plan).map_or(Ok(()), |reason| Err(self.invalid(reason)))
    }

    /// As [`plan`](Self::plan), without the pairwise comparison of blocks, which is slow for thousands of ranks.
    ///
    /// # Errors
    /// As for [`plan`](Self::plan).
    pub(super) fn plan_bounds(
        &self,
        inputs: &[Tensor],
        outputs: &[Tensor],
        plan: &StridedPlan,
    ) -> Result<(), CommError> {
        self.tensors(inputs, outputs)?;
        let world_size = self.world_size;
        for (what, ranks) in [("send", plan.send.len()), ("recv", plan.recv.len())] {
            if ranks != world_size {
                return Err(
                    self.invalid(format!("the plan has {what} blocks for {ranks} ranks, not {world_size}"))
                );
            }
        }
        let elems = |tensors: &[Tensor]| tensors.iter().map(Tensor::elem_count).collect::<Vec<_>>();
        let (input_elems, output_elems) = (elems(inputs), elems(outputs));
        for (rank, blocks) in plan.send.iter().enumerate() {
            for (index, block) in blocks.iter().enumerate() {
                if let Some(fault) = block.fault(&input_elems, "inputs") {
                    return Err(
                        self.invalid(format!("send block {index} for rank {rank} {fault}: {block:?}"))
                    );
                }
            }
        }
        for (rank, blocks) in plan.recv.iter().enumerate() {
            for (index, RecvBlock { block, .. }) in blocks.iter().enumerate() {
                let overlap =
                    || block.overlaps_itself().then(|| "writes an element more than once".to_owned());
                if let Some(fault) = block.fault(&output_elems, "outputs").or_else(overlap) {
                    return Err(
                        self.invalid(format!("recv block {index} from rank {rank} {fault}: {block:?}"))
                    );
                }
            }
        }
        Ok(())
    }
}

/// Describes the first receive block that overwrites data of an earlier one, if any. A backend
/// that receives straight into the outputs would leave whichever data arrives last.
fn lost_block(plan: &StridedPlan) -> Option<String> {
    let of_rank =
        |(rank, blocks): (usize, &'_ Vec<RecvBlock>)| (0..blocks.len()).map(move |index| (rank, index));
    let at = |(rank, index): (usize, usize)| &plan.recv[rank][index];
    // Ranks that receive thousands of blocks receive most of them into tensors of their own.
    let mut of_tensors: HashMap<usize, Vec<(usize, usize)>> = HashMap::new();
    let mut overwritten = |place: (usize, usize)| {
        let RecvBlock { block, accumulate } = at(place);
        let earlier = of_tensors.entry(block.tensor).or_default();
        let lost =
            earlier.iter().find(|&&earlier| !accumulate && block.overlaps(&at(earlier).block)).copied();
        earlier.push(place);
        Some((place, lost?))
    };
    let (place, lost) = plan.recv.iter().enumerate().flat_map(of_rank).find_map(&mut overwritten)?;
    let ((rank, index), (lost_rank, lost_index)) = (place, lost);
    Some(format!(
        "recv block {index} from rank {rank} overwrites elements of recv block {lost_index} from rank {lost_rank}; of \
         blocks that share elements all but the first must accumulate: {:?} and {:?}",
        at(place).block,
        at(lost).block
    ))
}

/// Runs [`start_all_to_all_strided`](ProcessGroup::start_all_to_all_strided) for a backend that cannot access its peers'
/// memory: packs the send blocks into one buffer, exchanges it with
/// [`start_all_to_all`](ProcessGroup::start_all_to_all), and unpacks on completion.
///
/// # Errors
/// As the trait's methods.
pub fn pack_exchange_unpack(
    group: &dyn ProcessGroup,
    inputs: &[Tensor],
    outputs: &[Tensor],
    plan: &Arc<StridedPlan>,
) -> Result<Pending, CommError> {
    let call = Call::strided(inputs, outputs, plan);
    call.check(group)?;
    let Some(first) = call.tensors().next() else { return Ok(Pending::ready()) };
    let (dtype, device) = (first.dtype(), first.device());
    let counts = plan.counts();
    let packed = zeros(counts.send.iter().sum::<usize>(), dtype, device)?;
    let received = zeros(counts.recv.iter().sum::<usize>(), dtype, device)?;
    copy_blocks(&inputs.iter().collect::<Vec<_>>(), &[&packed], &packing(plan))?;
    let pending = group.start_all_to_all(&packed, &received, &counts.send, &counts.recv)?;
    let (outputs, plan) = (outputs.to_vec(), plan.clone());
    Ok(pending
        .then(move || Ok(copy_blocks(&[&received], &outputs.iter().collect::<Vec<_>>(), &unpacking(&plan))?)))
}

/// Copies of the send blocks into one packed buffer.
fn packing(plan: &StridedPlan) -> Vec<BlockCopy> {
    let mut packed = 0;
    let copy = |block: &StridedBlock| {
        let to = block.packed_at(packed);
        packed += num_elems(block);
        BlockCopy { from: block.clone(), to, accumulate: false }
    };
    plan.send.iter().flatten().map(copy).collect()
}

/// Copies of the packed buffer into the receive blocks.
fn unpacking(plan: &StridedPlan) -> Vec<BlockCopy> {
    let mut unpacked = 0;
    let copy = |recv: &RecvBlock| {
        let from = recv.block.packed_at(unpacked);
        unpacked += num_elems(&recv.block);
        recv.copy_from(from)
    };
    plan.recv.iter().flatten().map(copy).collect()
}
