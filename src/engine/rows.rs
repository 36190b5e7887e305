//! Whether the ranks of an sp group hold parts of the same rows, and all ranks the same data.

use super::{Engine, EngineError};
use crate::comm::ProcessGroupExt;

/// Puts the hashes of a step's micro batches together, in their order.
pub(super) fn combine(hashes: u64, batch_hash: u64) -> u64 {
    hashes.rotate_left(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ batch_hash
}

impl Engine {
    /// Compares hashes of whole rows along sp: ranks whose loaders went apart would compute a loss of rows that do
    /// not exist. Collective; 8 bytes from each rank.
    pub(super) fn check_rows(&self, hash: u64) -> Result<(), EngineError> {
        let sp = &self.groups.sp;
        if sp.world_size() == 1 {
            return Ok(());
        }
        match sp.find_disagreement(&[hash])? {
            None => Ok(()),
            Some((rank, _)) => Err(EngineError::RowsDiffer { rank, first: sp.global_ranks()[0] }),
        }
    }

    /// Compares numbers that all ranks must have, each with its name, such as that of a run's last step: ranks that
    /// end at different steps would leave the others waiting. Collective; all ranks name the same numbers.
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
        // A step's metrics count what the step sent.
        self.reported_bytes += self.bytes_sent() - sent;
        Ok(())
    }
}
