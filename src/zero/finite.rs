//! Which gradients are not finite: what a run that keeps overflowing wants to know.

use super::{ZeroError, ZeroOptimizer};
use ulysses_kernels::elementwise;

impl ZeroOptimizer {
    /// The parameters whose reduced gradient is not finite, as far as this rank holds it.
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
