//! The other meshes of as many ranks.

use super::{Criteria, Throughput, RankPlan, Workload};
use crate::config::{MeshConfig, ZeroStage};
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
    /// Data-parallel ranks that share ZeRO's partitions, where they are not all of them.
    pub shard_size: Option<usize>,
    /// ZeRO stage: the configured one, or 3.
    pub zero_stage: u8,
    /// The most that a rank holds.
    pub peak_bytes: u64,
    /// Whether that is within the budget; true without one.
    pub fits: bool,
    /// Bytes that a rank sends to its own node in a step.
    pub intra_node_bytes: u64,
    /// Bytes that it sends to other nodes.
    pub inter_node_bytes: u64,
    /// How long the step takes, where there is a machine.
    #[serde(flatten)]
    pub throughput: Option<Throughput>,
    /// The longest sequence that fits the budget, where there is one and anything fits.
    pub max_seq_len: Option<usize>,
    /// Why this one is to be preferred; on one mesh at most.
    pub reason: Option<String>,
}

impl MeshChoice {
    fn step_seconds(&self) -> Option<f64> {
        self.throughput.as_ref().and_then(Throughput::step_seconds)
    }

    /// The better one first: the faster, where both times are known; one whose time is known before one whose time
    /// is not; then the one that sends less between nodes, less in all, and needs less memory.
    pub(super) fn compare(&self, other: &Self) -> Ordering {
        let seconds = |choice: &Self| choice.step_seconds().unwrap_or(f64::INFINITY);
        let bytes = |choice: &Self| (choice.inter_node_bytes, choice.intra_node_bytes, choice.peak_bytes);
        seconds(self).total_cmp(&seconds(other)).then_with(|| bytes(self).cmp(&bytes(other)))
    }
}

impl Workload {
    /// The ways to arrange as many ranks for the same global batch that training takes: where the config says how many
    /// ranks share ZeRO's partitions, dp is a multiple of that. Each is at the configured ZeRO stage and at
    /// stage 3, one of them with the reason to take it: of those that fit, the fastest on the machine or, where there is
    /// none, the one that sends least between nodes, then least in all.
    ///
    /// # Errors
    /// As [`plan`](Self::plan), of a mesh that the model and the batch allow.
    pub fn meshes(&self, criteria: Criteria<'_>) -> Result<Vec<MeshChoice>, EngineError> {
        let world_size = self.config.world_size();
        let sizes = (1..=self.most_sp()?.min(world_size)).filter(|sp| world_size.is_multiple_of(*sp));
        let arranged = sizes.filter_map(|sp| self.arranged(world_size / sp, sp));
        let arranged = arranged.flat_map(Self::at_stages);
        let mut choices = arranged
            .map(|workload| workload.choice(criteria))
            .collect::<Result<Vec<MeshChoice>, EngineError>>()?;
        recommend(&mut choices, criteria.budget_bytes.is_some());
        Ok(choices)
    }

    /// The largest sp that the model's heads and the tokens of a row allow.
    ///
    /// # Errors
    /// When the config has no sequence length.
    pub(super) fn most_sp(&self) -> Result<usize, EngineError> {
        let seq_len = self.config.require_seq_len()?;
        let chunks = self.model.head_chunks(self.config.ulysses.head_chunks);
        // Every chunk of heads is shared by all ranks of an sp group.
        let fewest_heads = chunks.iter().map(|chunk| chunk.q.len()).min().unwrap_or(0);
        Ok(fewest_heads.min(seq_len))
    }

    /// The same rows per step on `dp` × `sp` ranks, if they divide.
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

    /// Itself and, where there are partitions to make, the same at stage 3.
    fn at_stages(self) -> impl Iterator<Item = Self> {
        let has_partitions = self.config.mesh.dp_size > 1 && self.config.zero.stage != ZeroStage::Parameters;
        let partitioned = has_partitions.then(|| {
            let mut workload = self.clone();
            workload.config.zero.stage = ZeroStage::Parameters;
            workload
        });
        std::iter::once(self).chain(partitioned)
    }

    fn choice(&self, criteria: Criteria<'_>) -> Result<MeshChoice, EngineError> {
        let RankPlan { peak_bytes, sent, .. } = self.plan()?;
        Ok(MeshChoice {
            dp: self.config.mesh.dp_size,
            sp: self.config.mesh.sp_size,
            shard_size: self.config.zero_shard_size(),
            zero_stage: self.config.zero.stage.into(),
            peak_bytes,
            fits: criteria.budget_bytes.is_none_or(|budget| peak_bytes <= budget),
            intra_node_bytes: sent.intra_node_bytes,
            inter_node_bytes: sent.inter_node_bytes,
            throughput: self.throughput(criteria)?,
            max_seq_len: self.max_seq_len_within(criteria)?,
            reason: None,
        })
    }
}

/// Gives the best choice its reason.
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
