//! Whether the ranks of an sp group hold parts of the same rows, and all ranks the same data.

use super::{Engine, EngineError};
use crate::comm::ProcessGroupExt;

/// Puts the hashes of a step's micro batches together, in their order.
pub(super) fn combine(hashes: u64, rows_hash: u64) -> u64 {
    hashes.rotate_left(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ rows_hash
}

impl Engine {
    /// Compares hashes of whole rows along sp: ranks whose loaders went apart would compute a loss of rows that do
    /// not exist. Collective; 8 bytes from each rank.
    pub(super) fn check_rows(&self, hash: u64) -> Result<(), EngineError> {
        let sp = &self.groups.sp;
        if sp.world_size() == 1 {
            return Ok(());
        }
        let hashes = sp.all_gather_values(&[hash.cast_signed()])?;
        match hashes.iter().position(|hash| *hash != hashes[0]) {
            None => Ok(()),
            Some(differs) => {
                let ranks = sp.global_ranks();
                Err(EngineError::RowsDiffer { rank: ranks[differs], first: ranks[0] })
            }
        }
    }

    /// Compares a number that all ranks must have, such as that of a run's last step: ranks that end at different
    /// steps would leave the others waiting. Collective.
    ///
    /// # Errors
    /// Ranks with different values, or failed communication.
    pub fn check_agreement(&mut self, what: &'static str, value: u64) -> Result<(), EngineError> {
        let sent = self.bytes_sent();
        for group in [&self.groups.sp, &self.groups.dp] {
            let values = group.all_gather_values(&[value.cast_signed()])?;
            if let Some(differs) = values.iter().position(|value| *value != values[0]) {
                let ranks = group.global_ranks();
                return Err(EngineError::Disagreement { what, rank: ranks[differs], first: ranks[0] });
            }
        }
        // A step's metrics count what the step sent.
        self.reported_bytes += self.bytes_sent() - sent;
        Ok(())
    }
}
