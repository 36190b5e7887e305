//! The groups that ZeRO communicates with: who holds the other partitions, and who holds the same one.

use crate::comm::{CommError, MeshGroups, ProcessGroup, REPLICAS_AXIS, SHARD_AXIS};
use std::sync::Arc;

/// The groups of one rank that gradients are summed over.
#[derive(Debug, Clone)]
pub struct ZeroGroups {
    /// Ranks with other rows and the same tokens of them. Without [`hybrid`](Self::hybrid) they hold the other
    /// partitions: they are the ZeRO world.
    pub dp: Arc<dyn ProcessGroup>,
    /// Ranks that hold the other tokens of the same rows.
    pub sp: Arc<dyn ProcessGroup>,
    /// What takes the place of both in ZeRO where dp holds several replicas of the partitions.
    pub hybrid: Option<HybridGroups>,
}

/// Hybrid sharding (PyTorch's HSDP, MiCS): partitions over a part of dp, replicas of them over the rest.
#[derive(Debug, Clone)]
pub struct HybridGroups {
    /// Ranks that hold the other partitions: neighbours along dp.
    pub shard: Arc<dyn ProcessGroup>,
    /// Ranks that hold the same partition: those at this place of the other replicas, with their sp peers.
    pub replicas: Arc<dyn ProcessGroup>,
}

impl ZeroGroups {
    /// The groups of this rank in a mesh with the axes `dp` and `sp`, with partitions over `shard_size` neighbours
    /// along dp, or over all of dp without it. Collective over the mesh's world.
    ///
    /// # Errors
    /// A mesh that lacks an axis, a `shard_size` that does not divide dp, or failed communication.
    pub fn new(groups: &MeshGroups, shard_size: Option<usize>) -> Result<Self, CommError> {
        let (dp, sp) = (groups.get_group("dp")?, groups.get_group("sp")?);
        let hybrid = match shard_size.filter(|&size| size != dp.world_size()) {
            None => None,
            Some(size) => {
                let hybrid = groups.hybrid_sharded(size)?;
                // The same ordered list of ranks has one group.
                let known = |group: Arc<dyn ProcessGroup>| {
                    [&dp, &sp].into_iter().find(|known| are_same(known, &group)).cloned().unwrap_or(group)
                };
                let shard = known(hybrid.get_group(SHARD_AXIS)?);
                Some(HybridGroups { shard, replicas: known(hybrid.get_group(REPLICAS_AXIS)?) })
            }
        };
        Ok(Self { dp, sp, hybrid })
    }

    /// Each group as `wrap` makes it, which is told the axis that the group runs along.
    #[must_use]
    pub fn map(self, wrap: impl Fn(&'static str, Arc<dyn ProcessGroup>) -> Arc<dyn ProcessGroup>) -> Self {
        Self {
            dp: wrap("dp", self.dp),
            sp: wrap("sp", self.sp),
            hybrid: self.hybrid.map(|HybridGroups { shard, replicas }| HybridGroups {
                shard: wrap(SHARD_AXIS, shard),
                replicas: wrap(REPLICAS_AXIS, replicas),
            }),
        }
    }

    /// Ranks that hold the other partitions: the ZeRO world.
    pub fn shard(&self) -> &Arc<dyn ProcessGroup> {
        self.hybrid.as_ref().map_or(&self.dp, |hybrid| &hybrid.shard)
    }

    /// Ranks that hold the same partition.
    pub fn replicas(&self) -> &Arc<dyn ProcessGroup> {
        self.hybrid.as_ref().map_or(&self.sp, |hybrid| &hybrid.replicas)
    }

    /// This rank's partition, on the one of its holders that writes it to a checkpoint.
    pub fn written_partition(&self) -> Option<usize> {
        (self.replicas().rank() == 0).then(|| self.shard().rank())
    }

    /// Every group once, with the axis that it runs along. A group that spans the world serves several axes and
    /// is told of the first.
    pub fn by_axis(&self) -> Vec<(&'static str, &Arc<dyn ProcessGroup>)> {
        let hybrid = self.hybrid.iter();
        let hybrid =
            hybrid.flat_map(|groups| [(SHARD_AXIS, &groups.shard), (REPLICAS_AXIS, &groups.replicas)]);
        let mut distinct: Vec<(_, &Arc<dyn ProcessGroup>)> = Vec::new();
        for (axis, group) in [("dp", &self.dp), ("sp", &self.sp)].into_iter().chain(hybrid) {
            if !distinct.iter().any(|(_, known)| are_same(known, group)) {
                distinct.push((axis, group));
            }
        }
        distinct
    }
}

fn are_same(group: &Arc<dyn ProcessGroup>, other: &Arc<dyn ProcessGroup>) -> bool {
    group.global_ranks() == other.global_ranks()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::{LaunchOptions, launch};
    use crate::mesh::DeviceMesh;

    #[test]
    fn one_rank_writes_each_partition_and_no_group_is_told_twice() {
        for (dp, sp, size, writers, axes) in [
            (4, 2, Some(2), vec![0, 2], vec!["dp", "sp", "dp_shard", "replicas"]),
            (4, 1, Some(2), vec![0, 1], vec!["dp", "sp", "dp_shard", "replicas"]),
            // One partition: all ranks are replicas, which without sp are those along dp.
            (3, 1, Some(1), vec![0], vec!["dp", "sp"]),
            (4, 2, Some(4), vec![0, 2, 4, 6], vec!["dp", "sp"]),
            (2, 2, None, vec![0, 2], vec!["dp", "sp"]),
        ] {
            let mesh = DeviceMesh::dp_sp(dp, sp).unwrap();
            let on_ranks = launch(mesh.world_size(), &LaunchOptions::default(), |rank| {
                let groups = ZeroGroups::new(&MeshGroups::new(&mesh, rank.group.clone())?, size)?;
                let told: Vec<_> = groups.by_axis().into_iter().map(|(axis, _)| axis).collect();
                assert_eq!(told, axes, "dp {dp} × sp {sp}, {size:?}");
                Ok::<_, CommError>(groups.written_partition())
            });
            let of_ranks = on_ranks.unwrap().into_iter().enumerate();
            let written: Vec<_> = of_ranks.filter_map(|(rank, partition)| Some((partition?, rank))).collect();
            let expected: Vec<_> = writers.into_iter().enumerate().collect();
            assert_eq!(written, expected, "dp {dp} × sp {sp}, {size:?}");
        }
    }
}
