//! Hybrid sharding (HSDP): ZeRO partitions over a part of the `dp` axis, replicated along the rest.

use super::{DeviceMesh, MeshError};

/// Axis of the ranks that together hold the partitions of one replica.
pub const SHARD_AXIS: &str = "dp_shard";
/// Axis of the ranks that hold the same partition: the replicas along dp, and all sp ranks.
pub const REPLICAS_AXIS: &str = "replicas";
/// The part of `dp` along which partitions are replicated.
const DP_REPLICATE_AXIS: &str = "dp_replicate";

/// Axis sizes of a training mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrainingShape {
    /// Data-parallel size.
    pub dp: usize,
    /// Sequence-parallel size.
    pub sp: usize,
    /// Number of ranks that ZeRO partitions over, if the mesh has both `dp_replicate` and `dp_shard`. Otherwise it is `dp`.
    pub shard_size: Option<usize>,
}

impl DeviceMesh {
    /// Returns the sizes of a mesh with the axes `dp` and `sp`, either of which may be missing.
    ///
    /// The axes `dp_replicate` and `dp_shard`, in this order, may replace `dp`.
    ///
    /// # Errors
    /// Fails if the mesh has any other axis.
    pub fn training_shape(&self) -> Result<TrainingShape, MeshError> {
        let sp = if self.has_axis("sp") { self.axis_size("sp")? } else { 1 };
        let others: Vec<&str> =
            self.axis_names().iter().map(String::as_str).filter(|name| *name != "sp").collect();
        match others[..] {
            [] => Ok(TrainingShape { dp: 1, sp, shard_size: None }),
            ["dp" | SHARD_AXIS] => Ok(TrainingShape { dp: self.axis_size(others[0])?, sp, shard_size: None }),
            [DP_REPLICATE_AXIS, SHARD_AXIS] => {
                let (replicas, shard) = (self.axis_size(DP_REPLICATE_AXIS)?, self.axis_size(SHARD_AXIS)?);
                Ok(TrainingShape { dp: replicas * shard, sp, shard_size: Some(shard) })
            }
            _ => {
                let names = self.axis_names().join(", ");
                let reason = format!(
                    "the axes are dp and sp, got {names}; {DP_REPLICATE_AXIS},{SHARD_AXIS} may replace dp"
                );
                Err(MeshError::Notation { text: self.to_string(), reason })
            }
        }
    }

    /// Returns ZeRO's view of a `dp`, `sp` mesh with partitions over `shard_size` adjacent dp ranks (PyTorch's
    /// HSDP, MiCS).
    ///
    /// The axes are [`REPLICAS_AXIS`], row-major over the replicas along dp and over sp, and [`SHARD_AXIS`].
    ///
    /// # Errors
    /// Fails if the mesh lacks an axis or `shard_size` does not divide dp.
    pub fn hybrid_sharded(&self, shard_size: usize) -> Result<Self, MeshError> {
        let size = i64::try_from(shard_size).unwrap_or(i64::MAX);
        self.unflatten("dp", &[(DP_REPLICATE_AXIS, -1), (SHARD_AXIS, size)])?
            .flatten(&[DP_REPLICATE_AXIS, "sp"], REPLICAS_AXIS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_span_adjacent_dp_ranks_and_replicas_the_rest() {
        // dp 4 × sp 2: rank = 2·dp + sp.
        let mesh = DeviceMesh::dp_sp(4, 2).unwrap().hybrid_sharded(2).unwrap();
        assert_eq!(mesh.all_groups(SHARD_AXIS).unwrap(), [[0, 2], [1, 3], [4, 6], [5, 7]]);
        assert_eq!(mesh.all_groups(REPLICAS_AXIS).unwrap(), [[0, 1, 4, 5], [2, 3, 6, 7]]);
    }

    #[test]
    fn dp_replicate_and_dp_shard_may_replace_dp() {
        let shape = |text: &str| DeviceMesh::parse(text, None).unwrap().training_shape();
        let sizes = |dp, sp, shard_size| Ok(TrainingShape { dp, sp, shard_size });
        assert_eq!(shape("3x2"), sizes(3, 2, None));
        assert_eq!(shape("sp=4"), sizes(1, 4, None));
        assert_eq!(shape("dp_replicate=3,dp_shard=2,sp=4"), sizes(6, 4, Some(2)));
        assert_eq!(shape("dp_shard=2,sp=4"), sizes(2, 4, None));
        for refused in ["dp=2,tp=2", "dp_shard=2,dp_replicate=2", "dp=2,dp_shard=2", "dp_replicate=2"] {
            let message = shape(refused).unwrap_err().to_string();
            assert!(message.contains("the axes are dp and sp, got"), "{message}");
        }
    }

    #[test]
    fn a_shard_size_that_does_not_divide_dp_is_an_error_with_both_sizes() {
        let message = DeviceMesh::dp_sp(4, 2).unwrap().hybrid_sharded(3).unwrap_err().to_string();
        assert!(message.contains('4') && message.contains('3'), "{message}");
    }
}
