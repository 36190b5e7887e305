//! Where a rank's peers are.

use super::Sent;
use crate::engine::EngineError;
use crate::estimate::event::{Axis, Transfer};
use crate::mesh::{DeviceMesh, MeshError, REPLICAS_AXIS, SHARD_AXIS};

/// Which members of a rank's groups share its node.
pub(super) struct Nodes {
    own_node: usize,
    ranks_per_node: usize,
    dp: Vec<usize>,
    sp: Vec<usize>,
    /// ZeRO's groups, partitions and replicas, where these are not dp and sp.
    hybrid: Option<[Vec<usize>; 2]>,
}

impl Nodes {
    pub(super) fn new(
        mesh: &DeviceMesh,
        shard_size: Option<usize>,
        rank: usize,
        ranks_per_node: usize,
    ) -> Result<Self, EngineError> {
        let ranks_per_node = ranks_per_node.max(1);
        let (dp, sp) = (mesh.group_of("dp", rank)?, mesh.group_of("sp", rank)?);
        let hybrid = shard_size.map(|size| mesh.hybrid_sharded(size)).transpose()?;
        let hybrid = hybrid.map(|mesh| -> Result<_, MeshError> {
            Ok([mesh.group_of(SHARD_AXIS, rank)?, mesh.group_of(REPLICAS_AXIS, rank)?])
        });
        Ok(Self { own_node: rank / ranks_per_node, ranks_per_node, dp, sp, hybrid: hybrid.transpose()? })
    }

    fn members(&self, axis: Axis) -> &[usize] {
        match (axis, &self.hybrid) {
            (Axis::Shard, Some([shard, _])) => shard,
            (Axis::Replicas, Some([_, replicas])) => replicas,
            (Axis::Dp | Axis::Shard, _) => &self.dp,
            (Axis::Sp | Axis::Replicas, _) => &self.sp,
        }
    }

    pub(super) fn sent(&self, transfer: &Transfer) -> Sent {
        let mut sent = Sent::default();
        for (member, bytes) in self.members(transfer.axis).iter().zip(&*transfer.sent_to) {
            if member / self.ranks_per_node == self.own_node {
                sent.intra_node_bytes += bytes;
            } else {
                sent.inter_node_bytes += bytes;
            }
        }
        sent
    }
}
