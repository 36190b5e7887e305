//! The process groups of one rank: those of ZeRO's partitions and replicas, of attention, tensor parallelism and pipelines.

use super::{AxisGroups, CommError, MeshGroups, ProcessGroup};
use crate::mesh::{
    PP_AXIS, REPLICAS_AXIS, RING_AXIS, SHARD_AXIS, ShardShape, TOKENS_AXIS, TP_AXIS, ULYSSES_AXIS,
};
use std::sync::Arc;

/// The process groups of one rank, by the axes of the mesh.
#[derive(Debug, Clone)]
pub struct TrainingGroups {
    /// Ranks with other sequences and the same token range. Without [`sharding`](Self::sharding) they
    /// hold the other partitions: the ZeRO world.
    pub dp: Arc<dyn ProcessGroup>,
    /// Ranks with the other tokens of the same sequences.
    pub sp: Arc<dyn ProcessGroup>,
    /// Groups that ZeRO uses instead, if partitions do not span exactly dp.
    pub sharding: Option<ShardGroups>,
    /// The groups of attention, if sp is a ring of Ulysses groups.
    pub ring: Option<RingGroups>,
    /// The groups of attention over parts of sp, of 2 ranks or more, from small to large: with flexible sequence parallelism,
    /// aligned blocks of every size that divides sp.
    pub sp_blocks: Vec<Arc<dyn ProcessGroup>>,
    /// The groups of tensor parallelism, if tp has more than one rank.
    pub tensor: Option<TensorGroups>,
    /// The groups of pipeline parallelism, if pp has more than one rank.
    pub pipeline: Option<PipelineGroups>,
}

/// The groups of tensor parallelism.
#[derive(Debug, Clone)]
pub struct TensorGroups {
    /// Ranks that divide the weights, heads and tokens of one sp rank.
    pub tp: Arc<dyn ProcessGroup>,
    /// Ranks with other tokens of the same sequences: those of sp and tp, sp first.
    pub tokens: Arc<dyn ProcessGroup>,
}

/// The groups of pipeline parallelism.
#[derive(Debug, Clone)]
pub struct PipelineGroups {
    /// Ranks of the other stages with the same place on the other axes, first stage first.
    pub pp: Arc<dyn ProcessGroup>,
    /// The ranks of the first and the last stage, which both have the tied parameters; `None` on other stages.
    pub tied: Option<Arc<dyn ProcessGroup>>,
}

/// The groups of a [`ShardShape`]: partitions over a part of dp (PyTorch's HSDP, MiCS), or over sp too.
#[derive(Debug, Clone)]
pub struct ShardGroups {
    /// Ranks that together hold all partitions.
    pub shard: Arc<dyn ProcessGroup>,
    /// Ranks with the same partition: those with the same shard rank in the other replicas.
    pub replicas: Arc<dyn ProcessGroup>,
}

/// The groups of attention within an sp group of `ring_size · ulysses_size` ranks.
#[derive(Debug, Clone)]
pub struct RingGroups {
    /// Ranks with the same heads and other tokens.
    pub ring: Arc<dyn ProcessGroup>,
    /// Ranks with the same tokens and other heads.
    pub ulysses: Arc<dyn ProcessGroup>,
}

impl TrainingGroups {
    /// Creates this rank's groups in a mesh with the axes `dp` and `sp`, and `tp` and `pp` if it has them. The partitions span the ranks
    /// of `shape`, or dp without a `shape`. Collective over the mesh's world.
    ///
    /// # Errors
    /// A mesh that lacks an axis, a `shape` that does not divide dp, or failed communication.
    pub fn new(groups: &impl AxisGroups, shape: Option<ShardShape>) -> Result<Self, CommError> {
        let (dp, sp) = (groups.get_group("dp")?, groups.get_group("sp")?);
        let mut own =
            Self { dp, sp, sharding: None, ring: None, sp_blocks: Vec::new(), tensor: None, pipeline: None };
        if let Some(shape) = shape {
            let groups = groups.sharded(shape)?;
            let (shard, replicas) = (groups.get_group(SHARD_AXIS)?, groups.get_group(REPLICAS_AXIS)?);
            own.sharding = Some(ShardGroups { shard, replicas });
        }
        if groups.mesh().has_axis(TP_AXIS) {
            let tokens = groups.flatten(&["sp", TP_AXIS], TOKENS_AXIS)?.get_group(TOKENS_AXIS)?;
            own.tensor = Some(TensorGroups { tp: groups.get_group(TP_AXIS)?, tokens });
        }
        if groups.mesh().has_axis(PP_AXIS) {
            own.pipeline =
                Some(PipelineGroups { pp: groups.get_group(PP_AXIS)?, tied: groups.ends(PP_AXIS)? });
        }
        Ok(own)
    }

    /// Adds the groups of a ring of `ring_size` ranks, if there is one. `groups` are those of [`new`](Self::new).
    /// Collective over the mesh's world.
    ///
    /// # Errors
    /// A `ring_size` that does not divide sp, or failed communication.
    pub fn with_ring(self, groups: &impl AxisGroups, ring_size: usize) -> Result<Self, CommError> {
        if ring_size == 1 {
            return Ok(self);
        }
        let groups = groups.ring(ring_size)?;
        let (ring, ulysses) = (groups.get_group(RING_AXIS)?, groups.get_group(ULYSSES_AXIS)?);
        Ok(Self { ring: Some(RingGroups { ring, ulysses }), ..self })
    }

    /// Adds the groups of blocks within sp, if the config `is_flexible`. `groups` are those of [`new`](Self::new).
    /// Collective over the mesh's world.
    ///
    /// # Errors
    /// Failed communication.
    pub fn with_sp_blocks(self, groups: &MeshGroups, is_flexible: bool) -> Result<Self, CommError> {
        let sp_size = self.sp.world_size();
        let sizes = (2..sp_size).filter(|size| is_flexible && sp_size.is_multiple_of(*size));
        let of_size = |size| groups.sp_blocks(size)?.get_group(ULYSSES_AXIS);
        Ok(Self { sp_blocks: sizes.map(of_size).collect::<Result<_, CommError>>()?, ..self })
    }

    /// Wraps each group with `wrap`, which gets the axis of the group.
    #[must_use]
    pub fn map(self, wrap: impl Fn(&'static str, Arc<dyn ProcessGroup>) -> Arc<dyn ProcessGroup>) -> Self {
        Self {
            dp: wrap("dp", self.dp),
            sp: wrap("sp", self.sp),
            sharding: self.sharding.map(|ShardGroups { shard, replicas }| ShardGroups {
                shard: wrap(SHARD_AXIS, shard),
                replicas: wrap(REPLICAS_AXIS, replicas),
            }),
            ring: self.ring.map(|RingGroups { ring, ulysses }| RingGroups {
                ring: wrap(RING_AXIS, ring),
                ulysses: wrap(ULYSSES_AXIS, ulysses),
            }),
            sp_blocks: self.sp_blocks.into_iter().map(|group| wrap("sp", group)).collect(),
            tensor: self.tensor.map(|TensorGroups { tp, tokens }| TensorGroups {
                tp: wrap(TP_AXIS, tp),
                tokens: wrap(TOKENS_AXIS, tokens),
            }),
            pipeline: self.pipeline.map(|PipelineGroups { pp, tied }| PipelineGroups {
                pp: wrap(PP_AXIS, pp),
                tied: tied.map(|tied| wrap(PP_AXIS, tied)),
            }),
        }
    }

    /// Ranks that together hold all partitions: the ZeRO world.
    pub fn shard(&self) -> &Arc<dyn ProcessGroup> {
        self.sharding.as_ref().map_or(&self.dp, |groups| &groups.shard)
    }

    /// Ranks with other tokens of the same sequences.
    pub fn tokens(&self) -> &Arc<dyn ProcessGroup> {
        self.tensor.as_ref().map_or(&self.sp, |groups| &groups.tokens)
    }

    /// This rank along tp.
    pub fn tp_rank(&self) -> usize {
        self.tensor.as_ref().map_or(0, |groups| groups.tp.rank())
    }

    /// Number of ranks along tp.
    pub fn tp_size(&self) -> usize {
        self.tensor.as_ref().map_or(1, |groups| groups.tp.world_size())
    }

    /// This rank along pp: its stage of the pipeline.
    pub fn pp_rank(&self) -> usize {
        self.pipeline.as_ref().map_or(0, |groups| groups.pp.rank())
    }

    /// Number of ranks along pp.
    pub fn pp_size(&self) -> usize {
        self.pipeline.as_ref().map_or(1, |groups| groups.pp.world_size())
    }

    /// Every group once, with its axis; blocks of sp have the axis sp. A group that spans the world serves several axes and is listed under
    /// the first.
    pub fn by_axis(&self) -> Vec<(&'static str, &Arc<dyn ProcessGroup>)> {
        let sharding = self.sharding.iter();
        let sharding =
            sharding.flat_map(|groups| [(SHARD_AXIS, &groups.shard), (REPLICAS_AXIS, &groups.replicas)]);
        let ring = self.ring.iter();
        let ring = ring.flat_map(|groups| [(RING_AXIS, &groups.ring), (ULYSSES_AXIS, &groups.ulysses)]);
        let blocks = self.sp_blocks.iter().map(|group| ("sp", group));
        let tensor = self.tensor.iter();
        let tensor = tensor.flat_map(|groups| [(TP_AXIS, &groups.tp), (TOKENS_AXIS, &groups.tokens)]);
        let pipeline = self.pipeline.iter();
        let pipeline = pipeline.flat_map(|groups| std::iter::once(&groups.pp).chain(&groups.tied));
        let pipeline = pipeline.map(|group| (PP_AXIS, group));
        let others = sharding.chain(ring).chain(blocks).chain(tensor).chain(pipeline);
        let others = others.filter(|(_, group)| group.world_size() > 1);
        let mut distinct: Vec<(_, &Arc<dyn ProcessGroup>)> = Vec::new();
        for (axis, group) in [("dp", &self.dp), ("sp", &self.sp)].into_iter().chain(others) {
            if !distinct.iter().any(|(_, known)| are_same(known, group)) {
                distinct.push((axis, group));
            }
        }
        distinct
    }
}

fn are_same(group: &Arc<dyn ProcessGroup>, other: &Arc<dyn ProcessGroup>) -> bool {
    (group.name(), group.global_ranks()) == (other.name(), other.global_ranks())
}
