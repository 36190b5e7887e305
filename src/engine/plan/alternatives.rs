//! What other features and other meshes would change.

use super::{RankPlan, Workload};
use crate::config::{Config, MemoryConfig, Offload, Precision, ZeroStage};
use crate::device::DeviceKind;
use crate::engine::EngineError;
use serde::Serialize;
use std::num::NonZero;

/// Tokens whose logits exist at a time in the alternative of a small tile.
const SMALL_LOSS_TILE: usize = 128;

/// Tokens that norms, projections and the MLP work on at a time in the alternative of tiles.
const TILE_TOKENS: NonZero<usize> = NonZero::new(1024).unwrap();

/// Where ranks on GPUs offload to.
const HOST_MEMORY: &str = "in the host's memory";

/// One thing changed, and what follows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Alternative {
    /// What is changed.
    pub change: String,
    /// The most that a rank holds.
    pub peak_bytes: u64,
    /// Bytes that it sends in a step.
    pub sent_bytes: u64,
    /// Floating-point operations of a step, recomputation included.
    pub flops: f64,
    /// The longest sequence that fits the budget, where there is one and anything fits.
    pub max_seq_len: Option<usize>,
}

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
    /// The longest sequence that fits the budget, where there is one and anything fits.
    pub max_seq_len: Option<usize>,
    /// Why this one is to be preferred; on one mesh at most.
    pub reason: Option<String>,
}

impl Workload {
    /// The workload with one feature more, or one less, at a time; the first is the workload itself. What the
    /// model or the batch does not allow is left out.
    ///
    /// # Errors
    /// As [`plan`](Self::plan), of the workload itself.
    pub fn alternatives(&self, budget_bytes: Option<u64>) -> Result<Vec<Alternative>, EngineError> {
        let as_configured = self.alternative("as configured".to_owned(), budget_bytes)?;
        let changed = self.variants().into_iter().filter_map(|(change, workload)| {
            // A variant that cannot be planned is none.
            workload.alternative(change, budget_bytes).ok()
        });
        Ok(std::iter::once(as_configured).chain(changed).collect())
    }

    fn alternative(&self, change: String, budget_bytes: Option<u64>) -> Result<Alternative, EngineError> {
        let RankPlan { peak_bytes, sent, model_flops, recompute_flops, .. } = self.plan()?;
        Ok(Alternative {
            change,
            peak_bytes,
            sent_bytes: sent.total(),
            flops: model_flops + recompute_flops,
            max_seq_len: self.longest_within(budget_bytes)?,
        })
    }

    fn longest_within(&self, budget_bytes: Option<u64>) -> Result<Option<usize>, EngineError> {
        budget_bytes.map_or(Ok(None), |budget| self.longest(budget))
    }

    /// Single changes. A new feature of the engine is a row here or among the [`features`].
    fn variants(&self) -> Vec<(String, Self)> {
        let config = &self.config;
        let mut variants = Vec::new();
        let mut add = |change: String, apply: &dyn Fn(&mut Config)| {
            let mut workload = self.clone();
            apply(&mut workload.config);
            variants.push((change, workload));
        };
        for (change, changed) in features(config, self.device) {
            add(change, &|config| {
                (config.activation_checkpointing, config.memory) = changed.clone();
            });
        }
        // Partitions of one rank are the whole.
        let has_partitions = |stage: &ZeroStage| config.dp_size > 1 && *stage != config.zero_stage;
        for stage in ZeroStage::ALL.into_iter().filter(has_partitions) {
            add(format!("ZeRO stage {}", u8::from(stage)), &|config| config.set_zero_stage(stage));
        }
        for (change, stage, optimizer, parameters) in offloads(config, self.device) {
            add(change, &|config| {
                (config.memory.offload_optimizer, config.memory.offload_parameters) =
                    (optimizer.clone(), parameters.clone());
                config.set_zero_stage(stage);
            });
        }
        if config.precision == Precision::F32 {
            add("bf16".to_owned(), &|config| {
                config.precision = Precision::Bf16 { check_grad_overflow: false };
            });
        }
        if config.loss_tile_tokens > SMALL_LOSS_TILE {
            add(format!("loss in tiles of {SMALL_LOSS_TILE}"), &|config| {
                config.loss_tile_tokens = SMALL_LOSS_TILE;
            });
        }
        if config.micro_batch_size > 1 {
            add("micro batches of one row".to_owned(), &|config| {
                config.gradient_accumulation_steps *= config.micro_batch_size;
                config.micro_batch_size = 1;
            });
        }
        let sp = 2 * config.sp_size;
        add(format!("sp {sp} (twice the ranks)"), &|config| config.sp_size = sp);
        variants
    }

    /// The ways to arrange as many ranks for the same global batch that training takes: where the config says how many
    /// ranks share ZeRO's partitions, dp is a multiple of that. Each is at the configured ZeRO stage and at
    /// stage 3, one of them with the reason to take it: of those that fit, the one that sends least between nodes,
    /// then least in all.
    ///
    /// # Errors
    /// As [`plan`](Self::plan), of a mesh that the model and the batch allow.
    pub fn meshes(&self, budget_bytes: Option<u64>) -> Result<Vec<MeshChoice>, EngineError> {
        let world_size = self.config.world_size();
        let sizes = (1..=self.most_sp()?.min(world_size)).filter(|sp| world_size.is_multiple_of(*sp));
        let arranged = sizes.filter_map(|sp| self.arranged(world_size / sp, sp));
        let arranged = arranged.flat_map(Self::at_stages);
        let mut choices = arranged
            .map(|workload| workload.choice(budget_bytes))
            .collect::<Result<Vec<MeshChoice>, EngineError>>()?;
        recommend(&mut choices, budget_bytes.is_some());
        Ok(choices)
    }

    /// The largest sp that the model's heads and the tokens of a row allow.
    ///
    /// # Errors
    /// When the config has no sequence length.
    pub(super) fn most_sp(&self) -> Result<usize, EngineError> {
        let seq_len = self.config.require_seq_len()?;
        let chunks = self.model.head_chunks(self.config.memory.head_chunks);
        // Every chunk of heads is shared by all ranks of an sp group.
        let fewest_heads = chunks.iter().map(|chunk| chunk.q.len()).min().unwrap_or(0);
        Ok(fewest_heads.min(seq_len))
    }

    /// The same rows per step on `dp` × `sp` ranks, if they divide.
    fn arranged(&self, dp: usize, sp: usize) -> Option<Self> {
        let mut workload = self.clone();
        let config = &mut workload.config;
        let rows_per_rank = config.train_batch_size / dp;
        let divides = config.partitions_fill(dp)
            && config.train_batch_size.is_multiple_of(dp)
            && rows_per_rank.is_multiple_of(config.micro_batch_size);
        if !divides || rows_per_rank == 0 {
            return None;
        }
        config.gradient_accumulation_steps = rows_per_rank / config.micro_batch_size;
        config.set_mesh(dp, sp);
        Some(workload)
    }

    /// Itself and, where there are partitions to make, the same at stage 3.
    fn at_stages(self) -> impl Iterator<Item = Self> {
        let has_partitions = self.config.dp_size > 1 && self.config.zero_stage != ZeroStage::Parameters;
        let partitioned = has_partitions.then(|| {
            let mut workload = self.clone();
            workload.config.zero_stage = ZeroStage::Parameters;
            workload
        });
        std::iter::once(self).chain(partitioned)
    }

    fn choice(&self, budget_bytes: Option<u64>) -> Result<MeshChoice, EngineError> {
        let RankPlan { peak_bytes, sent, .. } = self.plan()?;
        Ok(MeshChoice {
            dp: self.config.dp_size,
            sp: self.config.sp_size,
            shard_size: self.config.zero_shard_size,
            zero_stage: self.config.zero_stage.into(),
            peak_bytes,
            fits: budget_bytes.is_none_or(|budget| peak_bytes <= budget),
            intra_node_bytes: sent.intra_node_bytes,
            inter_node_bytes: sent.inter_node_bytes,
            max_seq_len: self.longest_within(budget_bytes)?,
            reason: None,
        })
    }
}

/// Other places for optimizer state and parameters, each with the stage that it takes.
fn offloads(config: &Config, device: DeviceKind) -> Vec<(String, ZeroStage, Offload, Offload)> {
    let stage = config.zero_stage;
    let MemoryConfig { offload_optimizer: optimizer, offload_parameters: parameters, .. } = &config.memory;
    let (away, here, place, places) = match device {
        DeviceKind::Cpu => (Offload::Nvme(None), "in memory", "in a file", "in files"),
        DeviceKind::Cuda => (Offload::Cpu, "on the GPU", HOST_MEMORY, HOST_MEMORY),
    };
    let mut offloads = Vec::new();
    let named = |change: String, needed: ZeroStage| match stage >= needed {
        true => (change, stage),
        false => (format!("ZeRO stage {} with {change}", u8::from(needed)), needed),
    };
    let mut add = |(change, stage): (String, ZeroStage), optimizer: &Offload, parameters: &Offload| {
        offloads.push((change, stage, optimizer.clone(), parameters.clone()));
    };
    let are_away = [optimizer, parameters].map(|state| state.is_moved_from(device));
    match are_away[0] {
        true => add(named(format!("optimizer state {here}"), stage), &Offload::None, parameters),
        false => {
            let change = format!("optimizer state {place}");
            add(named(change, ZeroStage::OptimizerStates), &away, parameters);
        }
    }
    match are_away[1] {
        true => add(named(format!("parameters {here}"), stage), optimizer, &Offload::None),
        false => add(named(format!("parameters {place}"), ZeroStage::Parameters), optimizer, &away),
    }
    if are_away == [false, false] {
        let change = format!("optimizer state and parameters {places}");
        add(named(change, ZeroStage::Parameters), &away, &away);
    }
    offloads
}

/// Other settings of what exists at a time: whether layers are recomputed, and the rest.
fn features(config: &Config, device: DeviceKind) -> Vec<(String, (bool, MemoryConfig))> {
    let (recomputes, memory) = (config.activation_checkpointing, &config.memory);
    let MemoryConfig { checkpointing_interval, tile_tokens, head_chunks, offload_checkpoints, .. } = *memory;
    let mut features = Vec::new();
    let mut add = |change: String, recomputes: bool, changed: MemoryConfig| {
        features.push((change, (recomputes, changed)));
    };
    if recomputes {
        let in_memory = MemoryConfig { offload_checkpoints: false, ..memory.clone() };
        add("without activation checkpointing".to_owned(), false, in_memory);
        let (change, interval) =
            if checkpointing_interval == 1 { ("of every other layer", 2) } else { ("of every layer", 1) };
        let changed = MemoryConfig { checkpointing_interval: interval, ..memory.clone() };
        add(format!("activation checkpointing {change}"), true, changed);
    } else {
        add("with activation checkpointing".to_owned(), true, memory.clone());
    }
    let (here, place) = match device {
        DeviceKind::Cpu => ("in memory", "in a file"),
        DeviceKind::Cuda => ("on the GPU", HOST_MEMORY),
    };
    let change = match (recomputes, offload_checkpoints) {
        (_, true) => format!("checkpoints {here}"),
        (true, false) => format!("checkpoints {place}"),
        (false, false) => format!("with activation checkpointing, checkpoints {place}"),
    };
    add(change, true, MemoryConfig { offload_checkpoints: !offload_checkpoints, ..memory.clone() });
    let (change, tiles) = match tile_tokens {
        None => (format!("tiles of {TILE_TOKENS} tokens"), Some(TILE_TOKENS)),
        Some(_) => ("all tokens at once".to_owned(), None),
    };
    add(change, recomputes, MemoryConfig { tile_tokens: tiles, ..memory.clone() });
    // More than the model or the mesh allows cannot be planned and is left out.
    let chunks = 2 * head_chunks;
    let changed = MemoryConfig { head_chunks: chunks, ..memory.clone() };
    add(format!("{chunks} chunks of heads"), recomputes, changed);
    if head_chunks > 1 {
        let changed = MemoryConfig { head_chunks: 1, ..memory.clone() };
        add("all heads at once".to_owned(), recomputes, changed);
    }
    features
}

/// Gives the best choice its reason.
fn recommend(choices: &mut [MeshChoice], has_budget: bool) {
    let num_fitting = choices.iter().filter(|choice| choice.fits).count();
    let num_choices = choices.len();
    let cost = |choice: &MeshChoice| {
        let MeshChoice { intra_node_bytes, inter_node_bytes, peak_bytes, .. } = *choice;
        (inter_node_bytes, intra_node_bytes, peak_bytes)
    };
    let best = choices.iter_mut().filter(|choice| choice.fits).min_by_key(|choice| cost(choice));
    if let Some(best) = best {
        let fitting = match num_fitting {
            1 if num_choices > 1 => "the only one that fits".to_owned(),
            _ if has_budget => format!("sends least of the {num_fitting} that fit"),
            _ => format!("sends least of all {num_choices}"),
        };
        best.reason = Some(fitting);
    } else if let Some(smallest) = choices.iter_mut().min_by_key(|choice| choice.peak_bytes) {
        smallest.reason = Some("none fits; this one needs least memory".to_owned());
    }
}
