//! Plans: the memory, traffic, FLOPs and time of a run, predicted by a dry run of the engine.
//!
//! A dry rank executes the real [`Engine`](crate::engine::Engine) with real shapes, on tensors without elements
//! ([`dry`](ulysses_kernels::device::dry)) and on groups that move no data ([`fake`](crate::comm::fake)). `dry_run` runs it,
//! `recorder` records its operations as [`event`]s, and the memory counters give the peak of each part of a step. One rank
//! per distinct number of tokens and heads is run, so thousands of ranks cost as much as one.
//!
//! - [`Workload::plan`]: the plan of one configuration
//! - [`Workload::copied_bytes`]: the host memory of `checkpoint.memory_interval`
//! - [`Workload::max_seq_len`]: the longest sequence that fits
//! - [`Workload::candidate`]: the plan compared with a budget; the views of the search keep and order such candidates
//! - [`Workload::alternatives`], [`Workload::meshes`]: the effect of other features and meshes
//! - [`Workload::fit`]: the cheapest settings that fit
//! - [`Workload::step_time`]: the time of a step on a machine with known rates
//! - [`Workload::stage_plans`]: the plan of each pipeline stage
//! - [`RankStep`]: the compute and communication of one step

mod alternatives;
mod dry_run;
pub mod event;
mod fit;
mod memory_copies;
mod meshes;
mod nodes;
mod rank_plan;
mod rank_step;
mod recorder;
mod search;
mod stages;
mod tensor_rank;
mod time;

pub use alternatives::Alternative;
pub use fit::{FIT_CRITERION, Fit};
pub use memory_copies::CopiedBytes;
pub use meshes::{MeshChoice, ulysses_limits};
pub use nodes::SentBytes;
pub use rank_plan::{MomentMemory, RankPlan};
pub use rank_step::{ModelFlops, PlannedCalls, RankStep, model_flops};
pub use search::{Candidate, Criteria, Excess, MemoryBudget};
pub use stages::StagePlan;
pub use tensor_rank::{check_tensor_parallel, layers_of_tp_ranks};
pub use time::StepTime;

use crate::config::Config;
use crate::engine::{EngineError, set_stages};
use crate::mesh::{DeviceMesh, shard_range};
use crate::model::{Model, ModelConfig};
use crate::nn::{AttentionConfig, MixerConfig};
use crate::sequence_parallel::{AttentionShape, ExchangePlan};
use dry_run::DryStep;
use event::Event;
use nodes::Nodes;
use tensor_rank::mixers_of_tp_ranks;
use ulysses_kernels::device::DeviceKind;

/// Upper limit of the search for the longest sequence: positions have 32 bits.
const MAX_SEQ_LEN: usize = 1 << 31;

/// The ranks of a stage's first dp row, those of sp and tp, with the same numbers of tokens and heads; and those of stages that
/// compute as much.
#[derive(Debug, Clone, Copy)]
struct RankClass {
    /// The first pipeline stage.
    stage: usize,
    /// The first rank of the class.
    rank: usize,
    /// The number of ranks in the class, of all its stages.
    ranks: usize,
}

/// The configuration to plan.
///
/// # Examples
///
/// ```
/// use ulysses::config::Config;
/// use ulysses::device::DeviceKind;
/// use ulysses::estimate::Workload;
/// use ulysses::model::preset;
///
/// let json = r#"{ "train_batch_size": 1, "mesh_param": [1, 2], "ulysses": { "seq_len": 1024 } }"#;
/// let config = Config::from_json_str(json, "config.json")?;
/// let model = preset("nano")?;
/// let workload =
///     Workload { config, model, document_len: None, ranks_per_node: 8, device: DeviceKind::Cpu };
/// let longest = workload.max_seq_len(32 << 20)?.expect("one token per rank fits");
/// assert!(workload.with_seq_len(longest).plan()?.peak_bytes <= 32 << 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Workload {
    /// Mesh, batch, ZeRO stage and precision. `seq_len` must be set, except for [`max_seq_len`](Self::max_seq_len).
    pub config: Config,
    /// The model.
    pub model: ModelConfig,
    /// Tokens per document in a packed sequence; `None` for sequences of one document.
    pub document_len: Option<usize>,
    /// Ranks per node; consecutive ranks share a node.
    pub ranks_per_node: usize,
    /// The device of the ranks, which determines where offloaded state is stored.
    pub device: DeviceKind,
}

impl Workload {
    /// Returns the plan of the rank that needs most memory, of all pipeline stages.
    ///
    /// # Errors
    /// When the config has no `seq_len` or does not match the model or the mesh, or the bytes of a step overflow.
    pub fn plan(&self) -> Result<RankPlan, EngineError> {
        let mesh = self.mesh()?;
        let plans = self.rank_classes()?.into_iter().map(|kind| self.plan_of(mesh.ranks()[kind.rank]));
        let plans = plans.collect::<Result<Vec<_>, EngineError>>()?;
        Ok(RankPlan::largest(plans))
    }

    /// Returns the plan of one rank.
    ///
    /// # Errors
    /// As [`plan`](Self::plan), or when the rank is outside the mesh.
    pub fn plan_of(&self, rank: usize) -> Result<RankPlan, EngineError> {
        let mesh = self.mesh()?;
        let sums = RankPlan::sum(rank, self.warm_step(&mesh, rank)?, &self.nodes(&mesh, rank)?);
        sums.ok_or_else(|| EngineError::step_too_large(&self.config))
    }

    /// Returns the events of a rank's first step. Repeated micro batches are listed once.
    ///
    /// # Errors
    /// As [`plan_of`](Self::plan_of).
    pub fn events(&self, rank: usize) -> Result<Vec<Event>, EngineError> {
        let DryStep { passes, update, .. } = self.first_step(&self.mesh()?, rank)?;
        Ok(passes.into_iter().flat_map(|pass| pass.events).chain(update).collect())
    }

    fn mesh(&self) -> Result<DeviceMesh, EngineError> {
        Ok(self.config.placed_mesh(None)?.mesh)
    }

    /// Returns the nodes of a rank's peers.
    fn nodes(&self, mesh: &DeviceMesh, rank: usize) -> Result<Nodes, EngineError> {
        Ok(Nodes::new(self.fake_groups(mesh, rank, None)?, rank, self.ranks_per_node))
    }

    /// Returns the distinct ranks of the first dp row of each stage. Other rows are equal, because partitions are padded to equal
    /// size. Of stages that compute as much, the first keeps the most micro batches.
    fn rank_classes(&self) -> Result<Vec<RankClass>, EngineError> {
        let of_row = self.rank_classes_of_row()?;
        let at = |stages: Vec<usize>| {
            let (stage, number) = (stages[0], stages.len());
            let first = stage * self.ranks_per_stage();
            let class = move |RankClass { rank, ranks, .. }: &RankClass| RankClass {
                stage,
                rank: first + rank,
                ranks: number * ranks,
            };
            of_row.iter().map(class).collect::<Vec<_>>()
        };
        Ok(self.equal_stages()?.into_iter().flat_map(at).collect())
    }

    /// Returns the distinct ranks of the first dp row, by numbers of tokens and heads, by ring rank and by share of the weights.
    fn rank_classes_of_row(&self) -> Result<Vec<RankClass>, EngineError> {
        let (sharding, tp_size) = (self.config.seq_sharding(), self.config.mesh.tp_size);
        let seq_len = self.config.require_seq_len()?;
        let mixers = mixers_of_tp_ranks(&self.model, tp_size)?;
        let layers = layers_of_tp_ranks(&self.model, tp_size)?;
        let mut classes: Vec<RankClass> = Vec::new();
        // A zigzag over one causal document gives every ring rank as much to attend and to pass on. Linear attention and short convolutions
        // divide their heads over all ranks of sp.
        let is_balanced = self.document_len.is_none()
            && !self.model.needs_whole_sequences()
            && self.model.attention_layers().all(|layer| layer.window.is_none() && layer.chunk.is_none())
            && seq_len.is_multiple_of(2 * sharding.ring_size);
        let ring_ranks = if is_balanced { 1 } else { sharding.ring_size };
        for ring_rank in 0..ring_ranks {
            let mut of_ring_rank: Vec<(Vec<[usize; 3]>, RankClass)> = Vec::new();
            let tokens = sharding.ring_tokens(seq_len, ring_rank).len();
            let plans = layers.iter().map(|layers| self.chunk_plans(tokens, layers));
            let plans = plans.collect::<Result<Vec<_>, EngineError>>()?;
            let in_group = (0..sharding.ulysses_size).flat_map(|rank| (0..tp_size).map(move |tp| (rank, tp)));
            for (ulysses_rank, tp_rank) in in_group {
                let of_plan = |plan: &ExchangePlan| {
                    [plan.seq_ranges(), plan.q_head_ranges(), plan.kv_head_ranges()]
                        .map(|ranges| ranges[ulysses_rank].len())
                };
                let mut kind: Vec<_> = plans[tp_rank].iter().map(of_plan).collect();
                let tokens_of_sp = kind.first().map_or(0, |[tokens, ..]| *tokens);
                let share = |len| shard_range(len, tp_size, tp_rank).len();
                kind.push([tp_size, share(tokens_of_sp), share(self.model.intermediate_size)]);
                let sp_rank = ring_rank * sharding.ulysses_size + ulysses_rank;
                for heads in mixers[tp_rank].iter().filter_map(MixerConfig::exchanged_heads) {
                    let own = heads.on_sp_rank(sharding.sp_size(), sp_rank).num_heads();
                    kind.push([0, own.kv, own.q]);
                }
                if self.config.ulysses.state_passing && self.model.needs_whole_sequences() {
                    // Every rank gets the states of others.
                    kind.push([sp_rank; 3]);
                }
                match of_ring_rank.iter_mut().find(|(known, _)| *known == kind) {
                    Some((_, class)) => class.ranks += sharding.ring_size / ring_ranks,
                    None => {
                        let rank = sp_rank * tp_size + tp_rank;
                        let ranks = sharding.ring_size / ring_ranks;
                        of_ring_rank.push((kind, RankClass { stage: 0, rank, ranks }));
                    }
                }
            }
            classes.extend(of_ring_rank.into_iter().map(|(_, class)| class));
        }
        Ok(classes)
    }

    /// Returns the exchange plan of each head chunk of a rank's layers, for sequences of which a Ulysses group has `tokens` tokens.
    ///
    /// # Errors
    /// When there are more chunks than the layers allow, or a chunk has fewer heads or a sequence fewer tokens than ranks.
    fn chunk_plans(
        &self,
        tokens: usize,
        layers: &[AttentionConfig],
    ) -> Result<Vec<ExchangePlan>, EngineError> {
        let config = &self.config;
        let chunks = config.ulysses.head_chunks;
        AttentionConfig::check_head_chunks(layers, "model.layers.0", chunks)?;
        let ranks = config.seq_sharding().ulysses_size;
        let mut plans = Vec::new();
        for layer in layers {
            for chunk in layer.heads().chunks(chunks) {
                let shape = AttentionShape::new(layer, chunk.num_heads(), config.micro_batch_size, tokens);
                let plan = ExchangePlan::grouped(shape, ranks, 0);
                plans.push(plan.map_err(|error| {
                    error.within(config.seq_sharding(), config.ulysses.seq_len.unwrap_or(tokens))
                })?);
            }
        }
        Ok(plans)
    }

    /// Returns the workload with another `seq_len`.
    ///
    /// The stages of a pipeline stay those of its own `seq_len`, if it has one.
    #[must_use]
    pub fn with_seq_len(&self, seq_len: usize) -> Self {
        let mut workload = self.clone();
        if let (Some(_), Ok(model)) = (self.config.ulysses.seq_len, Model::new(&self.model)) {
            // What this refuses is refused by the plan.
            let _ = set_stages(&model, &mut workload.config);
        }
        workload.config.ulysses.seq_len = Some(seq_len);
        workload
    }

    /// Returns the longest sequence, in whole tokens per rank of sp and tp, that is within `budget` on every rank; `None`
    /// if not even one token per rank fits. Lengths that the ranks do not divide need buffers for the uneven shards, so
    /// such a length can need more memory than a longer multiple. Attention outputs are saved only if the
    /// config says so; see [`candidate`](Self::candidate).
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn max_seq_len(&self, budget: impl Into<MemoryBudget>) -> Result<Option<usize>, EngineError> {
        let MemoryBudget { rank_bytes, host_bytes_per_node } = budget.into();
        let workload = self.saving_attention_output(false);
        let longest = workload.max_seq_len_of(rank_bytes, |plan| plan.peak_bytes)?;
        let (Some(longest), Some(host_bytes)) = (longest, host_bytes_per_node) else { return Ok(longest) };
        // Most often the device is the limit, and lengths beyond it take long to plan.
        if workload.host_bytes_per_node(&workload.with_seq_len(longest).plan()?) <= host_bytes {
            return Ok(Some(longest));
        }
        let by_host = workload.max_seq_len_of(host_bytes, |plan| workload.host_bytes_per_node(plan))?;
        Ok(by_host.map(|by_host| by_host.min(longest)))
    }

    /// Returns the longest sequence of whose plan `bytes` are at most `budget_bytes`.
    fn max_seq_len_of(
        &self,
        budget_bytes: u64,
        bytes: impl Fn(&RankPlan) -> u64,
    ) -> Result<Option<usize>, EngineError> {
        let ranks = self.config.mesh.ranks_per_sequence();
        let peak = |tokens_per_rank: usize| match self.with_seq_len(tokens_per_rank * ranks).plan() {
            Err(EngineError::StepTooLarge { .. }) => Ok(u64::MAX),
            plan => plan.map(|plan| bytes(&plan)),
        };
        let mut fits = Length { tokens_per_rank: 1, bytes: bytes(&self.with_seq_len(ranks).plan()?) };
        if fits.bytes > budget_bytes {
            return Ok(None);
        }
        let mut too_long = Length { tokens_per_rank: MAX_SEQ_LEN / ranks + 1, bytes: u64::MAX };
        for probe in 1.. {
            if fits.tokens_per_rank + 1 >= too_long.tokens_per_rank {
                break;
            }
            let tokens_per_rank = between(fits, too_long, budget_bytes, probe);
            let found = Length { tokens_per_rank, bytes: peak(tokens_per_rank)? };
            if found.bytes <= budget_bytes { fits = found } else { too_long = found }
        }
        Ok(Some(fits.tokens_per_rank * ranks))
    }
}

/// A length of sequences, and the bytes that they need.
#[derive(Clone, Copy)]
struct Length {
    tokens_per_rank: usize,
    bytes: u64,
}

/// Returns the next length to try between one that fits and one that does not: by linear
/// interpolation, because peaks are nearly linear, and every third time the middle, because they are convex.
fn between(fits: Length, too_long: Length, budget_bytes: u64, probe: usize) -> usize {
    let (shorter, longer) = (fits.tokens_per_rank, too_long.tokens_per_rank);
    let length = match too_long.bytes {
        u64::MAX if shorter.saturating_mul(16) < longer => 16 * shorter,
        u64::MAX => shorter.midpoint(longer),
        _ if probe.is_multiple_of(3) => shorter.midpoint(longer),
        peak => {
            let share = (budget_bytes - fits.bytes) as f64 / (peak - fits.bytes) as f64;
            shorter + ((longer - shorter) as f64 * share) as usize
        }
    };
    length.clamp(shorter + 1, longer - 1)
}

#[cfg(test)]
mod tests;
