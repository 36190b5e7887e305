//! The other meshes with the same number of ranks.

use super::dry_run::MAX_DOCUMENTS;
use super::search::Search;
use super::{Candidate, Criteria, MemoryBudget, RankPlan, Workload, layers_of_tp_ranks};
use crate::config::{Config, MeshConfig, PartitionAxes, ZeroStage};
use crate::engine::EngineError;
use crate::mesh::{MeshShape, SeqSharding, UlyssesLimits};
use crate::model::ModelConfig;
use crate::nn::{AttentionConfig, HeadRanges};
use std::cmp::Ordering;

/// A mesh for the same ranks and batch.
#[derive(Debug, Clone, PartialEq)]
pub struct MeshChoice {
    /// The mesh, with its ZeRO stage, the configured one or 3, and its micro batch.
    pub candidate: Candidate,
    /// Why this mesh is the best; set on at most one.
    pub reason: Option<String>,
    /// Whether the longest sequence of all choices fits on this one, with its micro batch; set on at most one.
    pub is_longest: bool,
}

impl MeshChoice {
    /// Orders the better mesh first: the faster one, known times first; then the one with less idle time between pipeline stages;
    /// then the one that sends less between nodes, less in total, and needs less memory.
    pub(super) fn compare(&self, other: &Self) -> Ordering {
        let bytes = |RankPlan { sent, peak_bytes, .. }: &RankPlan| {
            (sent.inter_node_bytes, sent.intra_node_bytes, *peak_bytes)
        };
        let (this, other) = (&self.candidate, &other.candidate);
        let bubble = |candidate: &Candidate| candidate.workload.pipeline_bubble();
        this.compare_seconds(other)
            .then_with(|| bubble(this).total_cmp(&bubble(other)))
            .then_with(|| bytes(&this.plan).cmp(&bytes(&other.plan)))
    }
}

impl Workload {
    /// Returns the valid meshes for the same ranks and global batch, each at the configured ZeRO stage, at stage 3, and at
    /// stage 3 over dp and sp. dp is a multiple of the configured shard size. With a budget, each has the largest micro
    /// batch that fits, or 1; without one, the configured micro batch or the largest smaller one that divides the batch.
    /// The best mesh has a reason: of those that fit, the fastest on the machine or, without a machine, the one that sends
    /// least between nodes, then least in total.
    ///
    /// Other numbers of pipeline stages than the configured one are compared where it can matter: on a machine, whose times include
    /// the idle time of the stages, or if nothing fits without.
    ///
    /// # Errors
    /// As [`plan`](Self::plan), for a mesh that the model and the batch allow.
    pub fn meshes(&self, criteria: Criteria<'_>) -> Result<Vec<MeshChoice>, EngineError> {
        let choice = |workload: Self| {
            let workload = match criteria.budget {
                Some(budget) => workload.with_largest_micro_batch(budget)?,
                None => workload,
            };
            let candidate = workload.candidate(criteria.budget)?.rated(criteria)?;
            Ok(MeshChoice { candidate, reason: None, is_longest: false })
        };
        let of_stages = |pp: usize| {
            let meshes = self.meshes_of_batch(pp)?.into_iter();
            let at_stages =
                meshes.flat_map(|mesh| [vec![mesh.clone()], mesh.with_more_partitions()].concat());
            at_stages.map(choice).collect::<Result<Vec<MeshChoice>, EngineError>>()
        };
        let mut choices = of_stages(self.config.mesh.pp_size)?;
        if criteria.machine.is_some() || !choices.iter().any(|choice| choice.candidate.fits()) {
            for pp in self.other_sizes_of_pp() {
                choices.extend(of_stages(pp)?);
            }
        }
        recommend(&mut choices, criteria.budget.is_some());
        // The first of equal ones; `max_by_key` takes the last.
        let longest = choices.iter_mut().rev().filter(|choice| choice.candidate.max_seq_len.is_some());
        if let Some(longest) = longest.max_by_key(|choice| choice.candidate.max_seq_len) {
            longest.is_longest = true;
        }
        Ok(choices)
    }

    /// Returns the workload on every mesh of its ranks, with `pp` stages and its tp, that the batch, the shard size and the sequence
    /// length allow, by ascending sp; for each sp with the shardings that are worth comparing, and the configured one.
    pub(super) fn meshes_of_batch(&self, pp: usize) -> Result<Vec<Self>, EngineError> {
        let MeshConfig { pp_size, dp_size, sp_size, tp_size } = self.config.mesh;
        let ranks = pp_size * dp_size * sp_size / pp;
        let max_sp = self.config.require_seq_len()? / tp_size;
        let sizes = (1..=max_sp.min(ranks)).filter(|sp| ranks.is_multiple_of(*sp));
        let shardings = sizes.flat_map(|sp| self.shardings(sp));
        let arranged = |sharding: SeqSharding| {
            let dp = ranks / sharding.sp_size();
            self.arranged(MeshShape { pp, dp, sp: sharding.sp_size(), tp: tp_size }, sharding)
        };
        Ok(shardings.filter_map(arranged).collect())
    }

    /// Returns the numbers of pipeline stages that the ranks allow, without the configured one.
    pub(super) fn other_sizes_of_pp(&self) -> Vec<usize> {
        let MeshConfig { pp_size, dp_size, sp_size, .. } = self.config.mesh;
        let ranks = pp_size * dp_size * sp_size;
        let most = self.model.num_layers() / self.config.ulysses.pipeline.virtual_stages;
        let sizes = (1..=ranks.min(most)).filter(|pp| ranks.is_multiple_of(*pp));
        sizes.filter(|pp| *pp != pp_size && (*pp == 1 || self.may_have_stages())).collect()
    }

    /// Returns whether the config has no setting that a pipeline refuses, besides partitions over sp.
    fn may_have_stages(&self) -> bool {
        let Config { ulysses, zero, checkpoint, .. } = &self.config;
        let copies = checkpoint.as_ref().and_then(|checkpoint| checkpoint.memory_interval);
        !ulysses.flexible_sp && zero.mics_shard_size.is_none() && copies.is_none()
    }

    /// Returns the shardings of an sp group, the configured one first if it leaves every Ulysses rank a head.
    fn shardings(&self, sp_size: usize) -> Vec<SeqSharding> {
        let configured = self.config.seq_sharding();
        let mut shardings = SeqSharding::choices(sp_size, self.ulysses_limits());
        if configured.sp_size() == sp_size && configured.ulysses_size <= self.fewest_heads() {
            shardings.retain(|sharding| *sharding != configured);
            shardings.insert(0, configured);
        }
        shardings
    }

    fn ulysses_limits(&self) -> UlyssesLimits {
        ulysses_limits(&self.model, &self.config, self.ranks_per_node)
    }

    /// Returns the number of heads of the smallest head chunk: all ranks of a Ulysses group share every chunk.
    pub(super) fn fewest_heads(&self) -> usize {
        self.ulysses_limits().num_heads
    }

    /// Sets the mesh. Other stages than the configured ones have the layers that balance them, and partitions over dp.
    fn set_mesh(&mut self, mesh: MeshShape, sharding: SeqSharding) {
        let config = &mut self.config;
        config.ulysses.ring_size = sharding.ring_size;
        if mesh.pp != config.mesh.pp_size {
            config.ulysses.pipeline.layers_per_stage = None;
        }
        if mesh.pp > 1 && config.mesh.pp_size == 1 {
            config.ulysses.zero_partition_axes = PartitionAxes::Dp;
            config.ulysses.pipeline.virtual_stages = 1;
        }
        config.mesh = mesh.into();
    }

    /// Returns the workload with the same batch on another mesh, if it divides. The micro batch is the configured one
    /// or the largest smaller one that divides, and leaves a micro batch for each of other stages than the configured ones.
    fn arranged(&self, mesh: MeshShape, sharding: SeqSharding) -> Option<Self> {
        let mut workload = self.clone();
        let config = &mut workload.config;
        if !config.partitions_fill(mesh.dp) || !config.train_batch_size.is_multiple_of(mesh.dp) {
            return None;
        }
        let configured = config.micro_batch_size;
        let stages = if mesh.pp == config.mesh.pp_size { 1 } else { mesh.pp };
        workload.set_mesh(mesh, sharding);
        // Training refuses it.
        if workload.config.mesh.shape().divides_model() && workload.config.zero_shards().is_some() {
            return None;
        }
        let per_rank = workload.config.train_batch_size / mesh.dp;
        let is_interleaved = workload.config.ulysses.pipeline.stages_per_rank(mesh.pp) > 1;
        let fits = |size: &usize| {
            let accumulation = per_rank / size;
            *size <= configured
                && accumulation >= stages
                && (!is_interleaved || accumulation.is_multiple_of(mesh.pp))
        };
        let micro_batch = workload.micro_batches().into_iter().find(fits)?;
        Some(workload.with_micro_batch(micro_batch))
    }

    /// Returns the micro batch sizes that divide the batch on this mesh, in descending order; of huge batches only those
    /// that can be planned.
    pub(super) fn micro_batches(&self) -> Vec<usize> {
        let per_rank = self.config.train_batch_size / self.config.mesh.dp_size;
        let below_root = (1..MAX_DOCUMENTS).take_while(|size| *size <= per_rank / size);
        let small: Vec<usize> = below_root.filter(|size| per_rank.is_multiple_of(*size)).collect();
        let large = small.iter().map(|size| per_rank / size).filter(|size| *size > per_rank / size);
        large.chain(small.iter().rev().copied()).collect()
    }

    /// Returns the workload with another micro batch size and the same batch.
    pub(super) fn with_micro_batch(&self, micro_batch_size: usize) -> Self {
        let mut workload = self.clone();
        let config = &mut workload.config;
        config.micro_batch_size = micro_batch_size;
        config.gradient_accumulation_steps = config.train_batch_size / config.mesh.dp_size / micro_batch_size;
        workload
    }

    /// Returns the micro batch sizes to choose from: of a pipeline those that leave four micro batches for each stage, or the
    /// smallest, so that its stages are idle for less than a fifth of the step where that is possible.
    pub(super) fn chosen_micro_batches(&self) -> Vec<usize> {
        let mut sizes = self.micro_batches();
        let MeshConfig { pp_size, dp_size, .. } = self.config.mesh;
        let per_rank = self.config.train_batch_size / dp_size;
        let is_interleaved = self.config.ulysses.pipeline.stages_per_rank(pp_size) > 1;
        if pp_size > 1 {
            sizes.retain(|size| *size == 1 || per_rank / size >= 4 * pp_size);
            sizes.retain(|size| !is_interleaved || (per_rank / size).is_multiple_of(pp_size));
        }
        sizes
    }

    /// Returns the workload with the largest micro batch within `budget`; 1 if none is.
    fn with_largest_micro_batch(&self, budget: MemoryBudget) -> Result<Self, EngineError> {
        let sizes = self.chosen_micro_batches();
        let of_size = |index: usize| self.with_micro_batch(sizes[index]);
        Ok(of_size(Search::new(budget).first_that_fits(sizes.len() - 1, of_size)?))
    }

    /// Returns the workload with more partitions: at stage 3, and at stage 3 over dp and sp.
    fn with_more_partitions(&self) -> Vec<Self> {
        let config = &self.config;
        let axes = config.ulysses.zero_partition_axes;
        let over_dp = (config.zero.stage != ZeroStage::Parameters).then_some(axes);
        let over_sp =
            (axes == PartitionAxes::Dp && config.can_partition_over_sp()).then_some(PartitionAxes::DpSp);
        let at_stage_3 = |axes: PartitionAxes| {
            let mut workload = self.clone();
            workload.config.zero.stage = ZeroStage::Parameters;
            workload.config.ulysses.zero_partition_axes = axes;
            workload
        };
        let partitioned = over_dp.into_iter().chain(over_sp).map(at_stage_3);
        partitioned.filter(|workload| workload.config.zero_world_size() > 1).collect()
    }
}

/// Returns the limits of a model's Ulysses groups: all ranks of a group share every head chunk of their tp rank.
pub fn ulysses_limits(model: &ModelConfig, config: &Config, ranks_per_node: usize) -> UlyssesLimits {
    let tp_size = config.mesh.tp_size;
    // Heads that tp ranks cannot divide are refused elsewhere.
    let layers = layers_of_tp_ranks(model, tp_size)
        .map_or_else(|_| model.attention_layers().copied().collect(), |layers| layers.concat());
    // More chunks are refused elsewhere, with the key.
    let max_chunks = AttentionConfig::common_head_chunks(&layers);
    let num_chunks = config.ulysses.head_chunks.min(max_chunks);
    let chunks: Vec<_> = layers.iter().flat_map(|layer| layer.heads().chunks(num_chunks)).collect();
    let fewest = |heads: &dyn Fn(&HeadRanges) -> usize| chunks.iter().map(heads).min().unwrap_or(0);
    UlyssesLimits {
        num_heads: fewest(&|chunk| chunk.q.len()),
        num_kv_heads: fewest(&|chunk| chunk.kv.len()),
        ranks_per_node: (ranks_per_node / tp_size).max(1),
    }
}

/// Sets the reason of the best choice.
fn recommend(choices: &mut [MeshChoice], has_budget: bool) {
    let fitting = || choices.iter().filter(|choice| choice.candidate.fits());
    let (num_choices, num_fitting) = (choices.len(), fitting().count());
    let num_timed = fitting().filter(|choice| choice.candidate.step_seconds().is_some()).count();
    let of_them = match has_budget {
        true => format!("of the {num_fitting} that fit"),
        false => format!("of all {num_choices}"),
    };
    let best = choices.iter_mut().filter(|choice| choice.candidate.fits()).min_by(|a, b| a.compare(b));
    if let Some(best) = best {
        best.reason = Some(match num_timed {
            _ if num_fitting == 1 && num_choices > 1 => "the only one that fits".to_owned(),
            0 => format!("sends the fewest bytes {of_them}"),
            timed if timed < num_fitting => format!("fastest of the {timed} that fit and can be timed"),
            _ => format!("fastest {of_them}"),
        });
    } else if let Some(smallest) = choices.iter_mut().min_by_key(|choice| choice.candidate.plan.peak_bytes) {
        smallest.reason = Some("none fits; this one needs least memory".to_owned());
    }
}
