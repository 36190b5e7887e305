//! What a run will need, before it runs: sums over the [`schedule`](mod@super::schedule) of a step.
//!
//! [`Workload::plan`] is the plan of one configuration, [`Workload::longest`] the longest sequence that fits,
//! [`Workload::alternatives`] and [`Workload::meshes`] what other features and meshes would change,
//! [`Workload::propose`] the mesh to take on a cluster, [`scaling`] how the traffic of several kinds
//! of sequence parallelism grows. [`Workload::step_time`] is how long a step takes on a machine whose rates are known.
//! [`RankStep`] is the arithmetic and the communication of one step alone.

mod alternatives;
mod criteria;
mod meshes;
mod nodes;
mod proposal;
mod rank;
pub mod scaling;
mod step;
mod time;

pub use alternatives::Alternative;
pub use criteria::{Criteria, Pace};
pub use meshes::MeshChoice;
pub use proposal::{Proposal, Trial};
pub use rank::{MomentMemory, RankPlan, Sent};
pub use step::{PlannedCalls, RankStep, model_flops};
pub use time::StepTime;

use super::EngineError;
use super::schedule::{Schedule, chunk_plans};
use crate::config::Config;
use crate::mesh::DeviceMesh;
use crate::model::{HeadChunk, LlamaConfig};
use crate::sequence_parallel::ExchangePlan;
use nodes::Nodes;
use ulysses_kernels::device::DeviceKind;

/// Longest sequence that is looked for: positions are 32 bits wide.
const MAX_SEQ_LEN: usize = 1 << 31;

/// Ranks of an sp group that have as many tokens and heads.
#[derive(Debug, Clone, Copy)]
struct KindOfRank {
    /// The first of them.
    rank: usize,
    /// How many they are.
    ranks: usize,
}

/// What is planned.
#[derive(Debug, Clone, PartialEq)]
pub struct Workload {
    /// Mesh, batch, ZeRO stage, precision; its `seq_len` must be set, except to look for the longest.
    pub config: Config,
    /// The model.
    pub model: LlamaConfig,
    /// Tokens of the documents that rows are packed with; none for rows of one document.
    pub document_len: Option<usize>,
    /// Ranks that share a node: consecutive ones.
    pub ranks_per_node: usize,
    /// What ranks compute on: where what is offloaded waits.
    pub device: DeviceKind,
}

impl Workload {
    /// The plan of the rank that needs most memory.
    ///
    /// # Errors
    /// As [`schedule`](super::schedule()).
    pub fn plan(&self) -> Result<RankPlan, EngineError> {
        let mesh = DeviceMesh::dp_sp(self.config.mesh.dp_size, self.config.mesh.sp_size)?;
        let plans = self.kinds_of_ranks()?.into_iter().map(|kind| self.plan_of(&mesh, kind.rank));
        let plans = plans.collect::<Result<Vec<_>, EngineError>>()?;
        // Of equal ones the lowest rank: `max_by_key` takes the last.
        let largest = plans.into_iter().rev().max_by_key(|plan| plan.peak_bytes);
        Ok(largest.unwrap_or_else(|| unreachable!("a mesh has a rank")))
    }

    fn plan_of(&self, mesh: &DeviceMesh, rank: usize) -> Result<RankPlan, EngineError> {
        let events = self.events(mesh, rank)?;
        let sums = RankPlan::sum(rank, events, &self.nodes(mesh, rank)?);
        sums.ok_or_else(|| EngineError::step_too_large(&self.config))
    }

    /// The events of a rank, with repeated micro batches counted instead of listed.
    fn events(&self, mesh: &DeviceMesh, rank: usize) -> Result<Schedule, EngineError> {
        let Self { config, model, document_len, device, .. } = self;
        Ok(Schedule::on(*device, config, model, mesh, rank, *document_len)?.counted())
    }

    /// Where the peers of a rank are.
    fn nodes(&self, mesh: &DeviceMesh, rank: usize) -> Result<Nodes, EngineError> {
        Nodes::new(mesh, self.config.zero_shard_size(), rank, self.ranks_per_node)
    }

    /// One rank for each number of tokens and heads that ranks have: the first rows' are enough, since
    /// partitions are padded to one size.
    fn kinds_of_ranks(&self) -> Result<Vec<KindOfRank>, EngineError> {
        let plans = chunk_plans(&self.config, &self.model, self.config.mesh.sp_size, 0)?;
        let kind = |rank: usize| {
            let of_plan = |(_, plan): &(HeadChunk, ExchangePlan)| {
                [plan.seq_ranges(), plan.q_head_ranges(), plan.kv_head_ranges()]
                    .map(|ranges| ranges[rank].len())
            };
            plans.iter().map(of_plan).collect::<Vec<_>>()
        };
        let mut kinds: Vec<KindOfRank> = Vec::new();
        for rank in 0..self.config.mesh.sp_size {
            match kinds.iter_mut().find(|known| kind(known.rank) == kind(rank)) {
                Some(known) => known.ranks += 1,
                None => kinds.push(KindOfRank { rank, ranks: 1 }),
            }
        }
        Ok(kinds)
    }

    /// The same with rows of `seq_len` tokens.
    #[must_use]
    pub fn with_seq_len(&self, seq_len: usize) -> Self {
        let mut workload = self.clone();
        workload.config.ulysses.seq_len = Some(seq_len);
        workload
    }

    /// The longest sequence whose peak is within `budget_bytes` on every rank; none when not even a token for
    /// each rank is.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn longest(&self, budget_bytes: u64) -> Result<Option<usize>, EngineError> {
        let fits = |seq_len: usize| match self.with_seq_len(seq_len).plan() {
            Err(EngineError::StepTooLarge { .. }) => Ok(false),
            plan => plan.map(|plan| plan.peak_bytes <= budget_bytes),
        };
        let shortest = self.config.mesh.sp_size;
        if self.with_seq_len(shortest).plan()?.peak_bytes > budget_bytes {
            return Ok(None);
        }
        let (mut longest, mut too_long) = (shortest, 2 * shortest);
        while too_long < MAX_SEQ_LEN && fits(too_long)? {
            (longest, too_long) = (too_long, 2 * too_long);
        }
        while longest + 1 < too_long {
            let middle = longest.midpoint(too_long);
            if fits(middle)? { longest = middle } else { too_long = middle }
        }
        Ok(Some(longest))
    }
}

#[cfg(test)]
mod tests;
