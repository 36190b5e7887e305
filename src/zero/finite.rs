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
        for unit in self.trained_units() {
            let partitions = if self.stage.partitions_optimizer() {
                unit.shard_rank..unit.shard_rank + 1
            } else {
                0..unit.layout.num_partitions()
            };
            for rank in partitions {
                let Some(gradients) = unit.gradient_partition(rank)? else { continue };
                for piece in unit.layout.pieces(unit.layout.partition(rank)) {
                    let part = gradients.narrow(0, piece.target.start, piece.target.len())?;
                    if !elementwise::all_finite(&part)? {
                        names.push(unit.layout.parameters()[piece.parameter].name.as_str());
                    }
                }
            }
        }
        Ok(names)
    }
}
