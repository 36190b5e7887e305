//! The other meshes with the same number of ranks.

use super::{Criteria, RankPlan, Throughput, Workload};
use crate::config::{MeshConfig, PartitionAxes, ZeroStage};
use crate::engine::EngineError;
use serde::Serialize;
use std::cmp::Ordering;

/// A mesh for the same ranks and batch.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MeshChoice {
    /// Data-parallel ranks.
    pub dp: usize,
    /// Sequence-parallel ranks.
    pub sp: usize,
    /// ZeRO's shard size, in hybrid sharding.
    pub shard_size: Option<usize>,
    /// Number of partitions of one copy of ZeRO's state.
    pub num_partitions: usize,
    /// ZeRO stage: the configured one, or 3.
    pub zero_stage: ZeroStage,
    /// Axes over which ZeRO partitions: the configured ones, or dp and sp.
    pub zero_partition_axes: PartitionAxes,
    /// Peak memory of a rank.
    pub peak_bytes: u64,
    /// Bytes of host memory per node that ranks on GPUs offload to.
    pub host_bytes_per_node: u64,
    /// Whether both are within the budget; true without one.
    pub fits: bool,
    /// Bytes that a rank sends within its node per step.
    pub intra_node_bytes: u64,
    /// Bytes that a rank sends to other nodes per step.
    pub inter_node_bytes: u64,
    /// The step time, if there is a machine profile.
    #[serde(flatten)]
    pub throughput: Option<Throughput>,
    /// The longest sequence that fits the budget, if there is one.
    pub max_seq_len: Option<usize>,
    /// Why this mesh is the best; set on at most one.
    pub reason: Option<String>,
}

impl MeshChoice {
    fn step_seconds(&self) -> Option<f64> {
        self.throughput.as_ref().and_then(Throughput::step_seconds)
    }

    /// Orders the better mesh first: the faster one, known times first; then the one that sends less between nodes, less
    /// in total, and needs less memory.
    pub(super) fn compare(&self, other: &Self) -> Ordering {
        let seconds = |choice: &Self| choice.step_seconds().unwrap_or(f64::INFINITY);
        let bytes = |choice: &Self| (choice.inter_node_bytes, choice.intra_node_bytes, choice.peak_bytes);
        seconds(self).total_cmp(&seconds(other)).then_with(|| bytes(self).cmp(&bytes(other)))
    }
}

impl Workload {
    /// Returns the valid meshes for the same ranks and global batch, each at the configured ZeRO stage, at stage 3, and at
    /// stage 3 over dp and sp. dp
    /// is a multiple of the configured shard size. The best one has a reason: of those that fit, the fastest on the machine
    /// or, without a machine, the one that sends least between nodes, then least in total.
    ///
    /// # Errors
    /// As [`plan`](Self::plan), for a mesh that the model and the batch allow.
    pub fn meshes(&self, criteria: Criteria<'_>) -> Result<Vec<MeshChoice>, EngineError> {
        let world_size = self.config.world_size();
        let sizes = (1..=self.max_sp()?.min(world_size)).filter(|sp| world_size.is_multiple_of(*sp));
        let arranged = sizes.filter_map(|sp| self.arranged(world_size / sp, sp));
        let arranged = arranged.flat_map(Self::at_stages);
        let mut choices = arranged
            .map(|workload| workload.choice(criteria))
            .collect::<Result<Vec<MeshChoice>, EngineError>>()?;
        recommend(&mut choices, criteria.budget.is_some());
        Ok(choices)
    }

    /// Returns the largest sp that the model's heads and the sequence length allow.
    ///
    /// # Errors
    /// When the config has no sequence length.
    pub(super) fn max_sp(&self) -> Result<usize, EngineError> {
        let seq_len = self.config.require_seq_len()?;
        let chunks = self.model.head_chunks(self.config.ulysses.head_chunks);
        // All ranks of an sp group share every head chunk.
        let fewest_heads = chunks.iter().map(|chunk| chunk.q.len()).min().unwrap_or(0);
        Ok(fewest_heads.min(seq_len))
    }

    /// Returns the workload with the same batch on `dp` × `sp` ranks, if it divides.
    fn arranged(&self, dp: usize, sp: usize) -> Option<Self> {
        let mut workload = self.clone();
        let config = &mut workload.config;
        let sequences_per_rank = config.train_batch_size / dp;
        let divides = config.partitions_fill(dp)
            && config.train_batch_size.is_multiple_of(dp)
            && sequences_per_rank.is_multiple_of(config.micro_batch_size);
        if !divides || sequences_per_rank == 0 {
            return None;
        }
        config.gradient_accumulation_steps = sequences_per_rank / config.micro_batch_size;
        config.mesh = MeshConfig { dp_size: dp, sp_size: sp };
        Some(workload)
    }

    /// Returns the workload itself, then the same with more partitions: at stage 3, and at stage 3 over dp and sp.
    pub(super) fn at_stages(self) -> impl Iterator<Item = Self> {
        let stage_3 = |axes: PartitionAxes| {
            let mut workload = self.clone();
            workload.config.zero.stage = ZeroStage::Parameters;
            workload.config.ulysses.zero_partition_axes = axes;
            workload
        };
        let axes = self.config.ulysses.zero_partition_axes;
        let over_dp = (self.config.zero.stage != ZeroStage::Parameters).then(|| stage_3(axes));
        let over_sp =
            (axes == PartitionAxes::Dp && self.config.mesh.sp_size > 1).then(|| stage_3(PartitionAxes::DpSp));
        let partitioned = over_dp.into_iter().chain(over_sp);
        let more: Vec<Self> = partitioned.filter(|workload| workload.config.zero_world_size() > 1).collect();
        std::iter::once(self).chain(more)
    }

    fn choice(&self, criteria: Criteria<'_>) -> Result<MeshChoice, EngineError> {
        let decided = self.decided(criteria.budget)?;
        let plan = decided.plan()?;
        let host_bytes_per_node = self.host_bytes_per_node(&plan);
        let fits = criteria.budget.is_none_or(|budget| self.fits(&plan, budget));
        let RankPlan { peak_bytes, sent, .. } = plan;
        Ok(MeshChoice {
            dp: self.config.mesh.dp_size,
            sp: self.config.mesh.sp_size,
            shard_size: self.config.zero_shard_size(),
            zero_stage: self.config.zero.stage,
            zero_partition_axes: self.config.zero_axes(),
            num_partitions: self.config.zero_world_size(),
            peak_bytes,
            host_bytes_per_node,
            fits,
            intra_node_bytes: sent.intra_node_bytes,
            inter_node_bytes: sent.inter_node_bytes,
            throughput: decided.throughput(criteria)?,
            max_seq_len: self.max_seq_len_within(criteria)?,
            reason: None,
        })
    }
}

/// Sets the reason of the best choice.
fn recommend(choices: &mut [MeshChoice], has_budget: bool) {
    let fitting = || choices.iter().filter(|choice| choice.fits);
    let (num_choices, num_fitting) = (choices.len(), fitting().count());
    let num_timed = fitting().filter(|choice| choice.step_seconds().is_some()).count();
    let of_them = match has_budget {
        true => format!("of the {num_fitting} that fit"),
        false => format!("of all {num_choices}"),
    };
    let best = choices.iter_mut().filter(|choice| choice.fits).min_by(|a, b| a.compare(b));
    if let Some(best) = best {
        best.reason = Some(match num_timed {
            _ if num_fitting == 1 && num_choices > 1 => "the only one that fits".to_owned(),
            0 => format!("sends least {of_them}"),
            timed if timed < num_fitting => format!("fastest of the {timed} that fit and can be timed"),
            _ => format!("fastest {of_them}"),
        });
    } else if let Some(smallest) = choices.iter_mut().min_by_key(|choice| choice.peak_bytes) {
        smallest.reason = Some("none fits; this one needs least memory".to_owned());
    }
}
