//! Finds non-finite gradients, for the report of a run that keeps overflowing.

use super::{ZeroError, ZeroOptimizer};
use ulysses_kernels::elementwise;

impl ZeroOptimizer {
    /// Names of the parameters whose reduced gradient, as far as this rank holds it, is not finite.
    ///
    /// # Errors
    /// A refused operation.
    pub fn non_finite_gradients(&self) -> Result<Vec<&str>, ZeroError> {
        let mut names = Vec::new();
        for flat in self.trained_flats() {
            let partitions = if self.stage.partitions_optimizer() {
                flat.shard_rank..flat.shard_rank + 1
            } else {
                0..flat.layout.num_partitions()
            };
            for rank in partitions {
                let Some(gradients) = flat.gradient_partition(rank)? else { continue };
                for piece in flat.layout.pieces(flat.layout.partition(rank)) {
                    let part = gradients.narrow(0, piece.target.start, piece.target.len())?;
                    if !elementwise::all_finite(&part)? {
                        names.push(flat.layout.parameters()[piece.parameter].name.as_str());
                    }
                }
            }
        }
        Ok(names)
    }
}
