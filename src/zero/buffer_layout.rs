//! The layout of a flat buffer on the groups of ZeRO. What is summed, counted, compared and saved follows from it.

use crate::comm::{ProcessGroup, TrainingGroups};
use crate::config::ZeroStage;
use crate::mesh::{PP_AXIS, REPLICAS_AXIS, SHARD_AXIS, TOKENS_AXIS, TP_AXIS};
use crate::placement::Placement::{self, Partial, Replicate, Shard};
use std::sync::Arc;

/// The ranks that have the parameters of a flat buffer, apart from ZeRO's partitions.
/// By default all ranks of one stage do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Division {
    /// Whether the ranks of tp divide its parameters.
    pub over_tp: bool,
    /// Whether the first and the last stage have its parameters.
    pub is_tied: bool,
}

impl Division {
    /// All divisions, in the order of flat buffers and comparisons.
    pub const ALL: [Self; 4] = [
        Self { over_tp: true, is_tied: false },
        Self { over_tp: false, is_tied: false },
        Self { over_tp: true, is_tied: true },
        Self { over_tp: false, is_tied: true },
    ];
}

/// A persistent buffer of a unit, by its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Buffer {
    /// Parameters, between their uses.
    Parameters,
    /// Optimizer state with the master copy of 16-bit parameters. Reduced gradients are placed as it.
    OptimizerState,
}

/// A group of ranks, and the placement of a buffer along it.
#[derive(Debug, Clone)]
pub struct ZeroAxis<'a> {
    /// Name of the axis.
    pub name: &'static str,
    /// The ranks along it.
    pub group: &'a Arc<dyn ProcessGroup>,
    /// The placement of a gradient before any sum: a partial sum, unless the ranks have different parameters.
    pub unreduced: Placement,
    /// The placement of the buffer.
    pub placement: Placement,
}

/// The placement of a buffer along every axis: first that of ZeRO's partitions, then those of ranks with the same partition,
/// tp if it divides the parameters, and pp.
///
/// A gradient is summed over the axes on which it is a partial sum before: scattered where the optimizer state is sharded, as a whole
/// where it is replicated. The norm adds up shards. Replicas are compared, and share the files of a checkpoint.
#[derive(Debug, Clone)]
pub struct BufferLayout<'a> {
    axes: Vec<ZeroAxis<'a>>,
}

/// The part of the state that the files of a checkpoint have of one partition, rank along tp and stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CheckpointPart {
    /// Index of the partition.
    pub partition: usize,
    /// The rank along tp whose shards these are. Parameters that all ranks along tp have belong to rank 0.
    pub tp_rank: usize,
    /// The stage of the pipeline whose parameters these are. Tied ones belong to the first.
    pub stage: usize,
}

/// The replicas of a part of the state, which share the files that a checkpoint has of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartReplica {
    /// The part.
    pub part: CheckpointPart,
    /// This rank among those that have the part.
    pub replica: usize,
    /// Number of ranks that have it.
    pub num_replicas: usize,
}

impl PartReplica {
    /// Returns the replica that writes each file, by the bytes of the files: from the largest on, in turn the replica with the
    /// fewest bytes so far, and the first of several (the rule of PyTorch DCP with `dedup_save_to_lowest_rank=False`).
    pub fn writers(&self, file_bytes: &[u64]) -> Vec<usize> {
        let mut order: Vec<usize> = (0..file_bytes.len()).collect();
        order.sort_by_key(|file| std::cmp::Reverse(file_bytes[*file]));
        let (mut written, mut writers) = (vec![0; self.num_replicas], vec![0; file_bytes.len()]);
        for file in order {
            let writer = (0..self.num_replicas).min_by_key(|replica| written[*replica]).unwrap_or(0);
            written[writer] += file_bytes[file];
            writers[file] = writer;
        }
        writers
    }
}

impl TrainingGroups {
    /// The layout of a buffer at a stage, of parameters with this division.
    pub fn layout(&self, buffer: Buffer, stage: ZeroStage, division: Division) -> BufferLayout<'_> {
        BufferLayout::new(self, buffer, stage, division)
    }

    /// Returns whether this rank's stage counts parameters in the norm and saves them: the first one does, of those that have them.
    pub(super) fn is_of_stage(&self, division: Division) -> bool {
        !division.is_tied || self.pp_rank() == 0
    }

    /// The part of the state that this rank writes to a checkpoint, if one replica of each part writes it.
    pub fn written_part(&self) -> Option<CheckpointPart> {
        let PartReplica { part, replica, .. } = self.part_replica();
        (replica == 0).then_some(part)
    }

    /// This rank among those that have the same part of the state.
    pub fn part_replica(&self) -> PartReplica {
        let part =
            CheckpointPart { partition: self.shard().rank(), tp_rank: self.tp_rank(), stage: self.pp_rank() };
        // Each rank of tp has parameters of its own.
        let layout = self.layout(
            Buffer::OptimizerState,
            ZeroStage::Parameters,
            Division { over_tp: true, is_tied: false },
        );
        let replicas = layout.axes[1..].iter().filter(|axis| axis.placement == Replicate);
        let [replica, num_replicas] = replicas.fold([0, 1], |[replica, num_replicas], axis| {
            let size = axis.group.world_size();
            [replica * size + axis.group.rank(), num_replicas * size]
        });
        PartReplica { part, replica, num_replicas }
    }
}

impl<'a> BufferLayout<'a> {
    fn new(groups: &'a TrainingGroups, buffer: Buffer, stage: ZeroStage, division: Division) -> Self {
        let is_partitioned = match buffer {
            Buffer::Parameters => stage.partitions_parameters(),
            Buffer::OptimizerState => stage.partitions_optimizer(),
        };
        let (shard, replicas, same_partition) = match (&groups.sharding, &groups.tensor) {
            (Some(sharding), _) => (SHARD_AXIS, REPLICAS_AXIS, &sharding.replicas),
            (None, Some(tensor)) if !division.over_tp => ("dp", TOKENS_AXIS, &tensor.tokens),
            (None, _) => ("dp", "sp", &groups.sp),
        };
        let placement = if is_partitioned { Shard(0) } else { Replicate };
        let summed = |name, group, placement| ZeroAxis { name, group, unreduced: Partial, placement };
        let divided = |name, group| ZeroAxis { name, group, unreduced: Shard(0), placement: Shard(0) };
        let tp = groups.tensor.iter().filter(|_| division.over_tp);
        let pp = groups.pipeline.iter().map(|groups| match &groups.tied {
            Some(tied) if division.is_tied => summed(PP_AXIS, tied, Replicate),
            _ => divided(PP_AXIS, &groups.pp),
        });
        let axes = [summed(shard, groups.shard(), placement), summed(replicas, same_partition, Replicate)];
        let axes = axes.into_iter().chain(tp.map(|groups| divided(TP_AXIS, &groups.tp))).chain(pp);
        Self { axes: axes.collect() }
    }

    /// The axes, in the order of sums.
    pub fn axes(&self) -> &[ZeroAxis<'a>] {
        &self.axes
    }

    /// The axis of ZeRO's partitions.
    pub fn partitions(&self) -> &ZeroAxis<'a> {
        &self.axes[0]
    }

    /// The axes over which the gradient of a partition is summed within a stage of a pipeline.
    pub(super) fn summed_within_stage(&self) -> impl Iterator<Item = &ZeroAxis<'a>> {
        self.axes[1..].iter().filter(|axis| axis.unreduced == Partial && axis.name != PP_AXIS)
    }

    /// The axis over which the gradient of a tied parameter is summed between the stages of a pipeline.
    pub(super) fn summed_over_stages(&self) -> Option<&ZeroAxis<'a>> {
        self.axes[1..].iter().find(|axis| axis.unreduced == Partial && axis.name == PP_AXIS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::{CommError, LaunchOptions, MeshGroups, launch};
    use crate::mesh::{DeviceMesh, ShardShape};

    #[test]
    fn replicas_write_files_of_about_the_same_bytes() {
        let part = CheckpointPart { partition: 0, tp_rank: 0, stage: 0 };
        let writers =
            |num_replicas, bytes: &[u64]| PartReplica { part, replica: 0, num_replicas }.writers(bytes);
        assert_eq!(writers(1, &[5, 4, 4]), [0, 0, 0]);
        assert_eq!(writers(2, &[4, 4, 4]), [0, 1, 0]);
        // The parameters have frozen ones, too.
        assert_eq!(writers(2, &[9, 4, 4]), [0, 1, 1]);
        assert_eq!(writers(4, &[4, 9, 4]), [1, 0, 2]);
        assert_eq!(writers(3, &[]), [0; 0]);
    }

    #[test]
    fn one_rank_writes_each_partition_and_no_group_is_listed_twice() {
        let (of_dp, of_both) = (
            |dp_size| Some(ShardShape { dp_size, spans_sp: false }),
            |dp_size| Some(ShardShape { dp_size, spans_sp: true }),
        );
        for (dp, sp, shape, writers, axes) in [
            (4, 2, of_dp(2), vec![0, 2], vec!["dp", "sp", "shard", "replicas"]),
            (4, 1, of_dp(2), vec![0, 1], vec!["dp", "sp", "shard", "replicas"]),
            // One partition: all ranks are replicas; without sp they are the dp group.
            (3, 1, of_dp(1), vec![0], vec!["dp", "sp"]),
            (4, 2, of_dp(4), vec![0, 2, 4, 6], vec!["dp", "sp"]),
            (2, 2, None, vec![0, 2], vec!["dp", "sp"]),
            (2, 2, of_both(2), vec![0, 1, 2, 3], vec!["dp", "sp", "shard"]),
            (4, 2, of_both(2), vec![0, 1, 2, 3], vec!["dp", "sp", "shard", "replicas"]),
            // Partitions that span sp have a group of their own even where it has the ranks of sp.
            (1, 3, of_both(1), vec![0, 1, 2], vec!["dp", "sp", "shard"]),
        ] {
            let mesh = DeviceMesh::dp_sp(dp, sp).unwrap();
            let on_ranks = launch(mesh.world_size(), &LaunchOptions::default(), |rank| {
                let groups = TrainingGroups::new(&MeshGroups::new(&mesh, rank.group.clone())?, shape)?;
                let listed: Vec<_> = groups.by_axis().into_iter().map(|(axis, _)| axis).collect();
                assert_eq!(listed, axes, "dp {dp} × sp {sp}, {shape:?}");
                Ok::<_, CommError>((groups.written_part(), groups.part_replica()))
            });
            let (parts, replicas): (Vec<_>, Vec<_>) = on_ranks.unwrap().into_iter().unzip();
            let of_ranks = parts.into_iter().enumerate();
            let written: Vec<_> = of_ranks.filter_map(|(rank, part)| Some((part?.partition, rank))).collect();
            for partition in 0..writers.len() {
                let of_part = replicas.iter().filter(|replica| replica.part.partition == partition);
                let numbers: Vec<_> =
                    of_part.map(|replica| (replica.replica, replica.num_replicas)).collect();
                let all: Vec<_> = (0..numbers.len()).map(|number| (number, numbers.len())).collect();
                assert_eq!(numbers, all, "the replicas of partition {partition}, in the order of ranks");
            }
            let expected: Vec<_> = writers.into_iter().enumerate().collect();
            assert_eq!(written, expected, "dp {dp} × sp {sp}, {shape:?}");
        }
    }
}
