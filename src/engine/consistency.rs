//! Checks that the ranks of an sp group hold shards of the same sequences, and that all ranks agree.

use super::{Engine, EngineError};
use crate::comm::ProcessGroupExt;

/// Combines the hashes of a step's micro batches, in order.
pub(super) fn combine(hashes: u64, batch_hash: u64) -> u64 {
    hashes.rotate_left(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ batch_hash
}

impl Engine {
    /// Compares hashes of whole sequences along sp. If the loaders of a group had diverged, the loss
    /// would be that of sequences that do not exist. Collective; each rank sends 8 bytes.
    pub(super) fn check_sequences(&self, hash: u64) -> Result<(), EngineError> {
        let sp = &self.groups.sp;
        if sp.world_size() == 1 {
            return Ok(());
        }
        match sp.find_disagreement(&[hash])? {
            None => Ok(()),
            Some((rank, _)) => Err(EngineError::SequencesDiffer { rank, first: sp.global_ranks()[0] }),
        }
    }

    /// Compares values that must be equal on all ranks, each with a name. Ranks that disagree on the last
    /// step, for example, would wait for each other forever. Collective; all ranks pass the same names.
    ///
    /// # Errors
    /// Ranks with different values, or failed communication.
    pub fn check_agreement(&mut self, numbers: &[(&'static str, u64)]) -> Result<(), EngineError> {
        let sent = self.bytes_sent();
        let values: Vec<u64> = numbers.iter().map(|(_, value)| *value).collect();
        for group in [&self.groups.sp, &self.groups.dp] {
            if let Some((rank, index)) = group.find_disagreement(&values)? {
                let (what, first) = (numbers[index].0, group.global_ranks()[0]);
                return Err(EngineError::Disagreement { what, rank, first });
            }
        }
        // The bytes sent by this check do not count toward a step's metrics.
        self.reported_bytes += self.bytes_sent() - sent;
        Ok(())
    }
}
