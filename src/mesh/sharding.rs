//! Hybrid sharding: a mesh whose `dp` axis holds several replicas of ZeRO's partitions.

use super::{DeviceMesh, MeshError};

/// The axis of the ranks that hold the partitions of one replica.
pub const SHARD_AXIS: &str = "dp_shard";
/// The axis of the ranks that hold the same partition: those of other replicas, and their sp peers.
pub const REPLICAS_AXIS: &str = "replicas";
/// The part of `dp` that runs across the replicas.
const REPLICATE_AXIS: &str = "dp_replicate";

impl DeviceMesh {
    /// A mesh with the axes `dp` and `sp` as ZeRO sees it with partitions over `shard_size` neighbours along dp
    /// (PyTorch's HSDP, MiCS): [`REPLICAS_AXIS`], row-major over the replicas along dp and over sp, and
    /// [`SHARD_AXIS`].
    ///
    /// # Errors
    /// A mesh that lacks an axis, or a `shard_size` that does not divide dp.
    pub fn hybrid_sharded(&self, shard_size: usize) -> Result<Self, MeshError> {
        let size = i64::try_from(shard_size).unwrap_or(i64::MAX);
        self.unflatten("dp", &[(REPLICATE_AXIS, -1), (SHARD_AXIS, size)])?
            .flatten(&[REPLICATE_AXIS, "sp"], REPLICAS_AXIS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_lie_on_neighbours_along_dp_and_replicas_across_them() {
        // dp 4 × sp 2: rank = 2·dp + sp.
        let mesh = DeviceMesh::dp_sp(4, 2).unwrap().hybrid_sharded(2).unwrap();
        assert_eq!(mesh.all_groups(SHARD_AXIS).unwrap(), [[0, 2], [1, 3], [4, 6], [5, 7]]);
        assert_eq!(mesh.all_groups(REPLICAS_AXIS).unwrap(), [[0, 1, 4, 5], [2, 3, 6, 7]]);
    }

    #[test]
    fn a_shard_size_that_does_not_divide_dp_is_refused_with_both_numbers() {
        let message = DeviceMesh::dp_sp(4, 2).unwrap().hybrid_sharded(3).unwrap_err().to_string();
        assert!(message.contains('4') && message.contains('3'), "{message}");
    }
}
