//! The effect of single changes of the configuration.

use super::{Candidate, Criteria, Workload};
use crate::config::{CommunicationDtype, Config, Offload, PartitionAxes, Precision, ZeroStage};
use crate::engine::EngineError;
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::num::NonZero;
use ulysses_kernels::device::DeviceKind;

/// Tile size of the loss in the alternative with small tiles.
const SMALL_LOSS_TILE: NonZero<usize> = NonZero::new(128).unwrap();

/// Tile size of norms, projections and the MLP in the alternative with tiles.
const TILE_TOKENS: NonZero<usize> = NonZero::new(1024).unwrap();

/// A single change of the configuration, and its effect.
#[derive(Debug, Clone, PartialEq)]
pub struct Alternative {
    /// The change.
    pub change: String,
    /// The config keys that change, with their values.
    pub keys: Vec<String>,
    /// The changed configuration.
    pub candidate: Candidate,
}

impl Workload {
    /// Returns the workload itself, followed by variants with one feature added or removed. Variants that the model or the
    /// batch does not allow are omitted.
    ///
    /// # Errors
    /// As [`plan`](Self::plan) for the workload itself.
    pub fn alternatives(&self, criteria: Criteria<'_>) -> Result<Vec<Alternative>, EngineError> {
        let rated = |workload: &Self| workload.candidate(criteria.budget)?.rated(criteria);
        let candidate = rated(self)?;
        let mut changes = Changes { config: &self.config, device: self.device, changed: Vec::new() };
        changes.add_all(candidate.decided.config.saves_attention_output(), self.fewest_heads());
        let alternative = |(change, config): (String, Config)| {
            let keys = changed_keys(&self.config, &config);
            // Variants that cannot be planned are omitted.
            Some(Alternative { change, keys, candidate: rated(&Self { config, ..self.clone() }).ok()? })
        };
        let as_configured = Alternative { change: "as configured".to_owned(), keys: Vec::new(), candidate };
        let changed = changes.changed.into_iter().filter_map(alternative);
        Ok(std::iter::once(as_configured).chain(changed).collect())
    }
}

/// The single changes of a config. Add new features of the engine here.
struct Changes<'a> {
    config: &'a Config,
    device: DeviceKind,
    changed: Vec<(String, Config)>,
}

impl Changes<'_> {
    fn add(&mut self, is_possible: bool, change: impl Into<String>, apply: impl FnOnce(&mut Config)) {
        if is_possible {
            let mut config = self.config.clone();
            apply(&mut config);
            self.changed.push((change.into(), config));
        }
    }

    /// Adds the changes of a config that does, or does not, save attention outputs. `fewest_heads` are those of the
    /// smallest head chunk.
    fn add_all(&mut self, saves_attention_output: bool, fewest_heads: usize) {
        let (config, axes) = (self.config, self.config.ulysses.zero_partition_axes);
        let has_sp = axes == PartitionAxes::Dp && config.can_partition_over_sp();
        let is_stage_0 = config.zero.stage == ZeroStage::Disabled;
        let stage = if is_stage_0 { ZeroStage::Parameters } else { config.zero.stage };
        self.add(has_sp, format!("ZeRO stage {}", PartitionAxes::DpSp.with_stage(stage)), |config| {
            config.ulysses.zero_partition_axes = PartitionAxes::DpSp;
            config.zero.set_stage(stage);
        });
        self.add_checkpointing();
        self.add_tiles_and_chunks();
        let recomputes = config.ulysses.activation_checkpointing;
        let attention =
            if saves_attention_output { "attention recomputed" } else { "attention output saved" };
        self.add(recomputes, attention, |config| {
            config.ulysses.save_attention_output = Some(!saves_attention_output);
        });
        for stage in ZeroStage::ALL {
            // With one partition, all stages are equal.
            let is_other = config.zero_world_size() > 1 && stage != config.zero.stage;
            let change = format!("ZeRO stage {}", axes.with_stage(stage));
            self.add(is_other, change, |config| config.zero.set_stage(stage));
        }
        self.add_offloads();
        self.add_dtypes_and_batch();
        let sp_size = 2 * config.mesh.sp_size;
        let exceeds_heads = 2 * config.seq_sharding().ulysses_size > fewest_heads;
        let ring_size = config.ulysses.ring_size * if exceeds_heads { 2 } else { 1 };
        let ring = if exceeds_heads { format!(" in a ring of {ring_size}") } else { String::new() };
        self.add(true, format!("sp {sp_size}{ring} (twice the ranks)"), |config| {
            config.mesh.sp_size = sp_size;
            config.ulysses.ring_size = ring_size;
        });
    }

    fn add_checkpointing(&mut self) {
        let recomputes = self.config.ulysses.activation_checkpointing;
        self.add(recomputes, "without activation checkpointing", |config| {
            config.ulysses.activation_checkpointing = false;
            config.ulysses.save_attention_output = None;
            config.activation_checkpointing.cpu_checkpointing = false;
        });
        let (layers, interval) = match self.config.ulysses.activation_checkpointing_interval {
            1 => ("every other layer", 2),
            _ => ("every layer", 1),
        };
        self.add(recomputes, format!("activation checkpointing of {layers}"), |config| {
            config.ulysses.activation_checkpointing_interval = interval;
        });
        self.add(!recomputes, "with activation checkpointing", |config| {
            config.ulysses.activation_checkpointing = true;
        });
        let is_offloaded = self.config.activation_checkpointing.cpu_checkpointing;
        let (here, place) = match self.device {
            DeviceKind::Cpu => ("in memory", "in a file"),
            DeviceKind::Cuda => ("on the GPU", "in host memory"),
        };
        let change = match (recomputes, is_offloaded) {
            (_, true) => format!("activation checkpoints {here}"),
            (true, false) => format!("activation checkpoints {place}"),
            (false, false) => format!("with activation checkpointing, checkpoints {place}"),
        };
        self.add(true, change, |config| {
            config.ulysses.activation_checkpointing = true;
            config.activation_checkpointing.cpu_checkpointing = !is_offloaded;
        });
    }

    fn add_tiles_and_chunks(&mut self) {
        let (change, tiles) = match self.config.ulysses.tile_tokens {
            None => (format!("tiles of {TILE_TOKENS} tokens"), Some(TILE_TOKENS)),
            Some(_) => ("all tokens at once".to_owned(), None),
        };
        self.add(true, change, |config| config.ulysses.tile_tokens = tiles);
        let chunks = self.config.ulysses.head_chunks;
        // Omitted if the model or the mesh does not allow it.
        self.add(true, format!("{} head chunks", 2 * chunks), |config| config.ulysses.head_chunks *= 2);
        self.add(chunks > 1, "all heads at once", |config| config.ulysses.head_chunks = 1);
    }

    /// Adds the other offload settings of optimizer state, of parameters, and of both, each at the stage that it
    /// requires.
    fn add_offloads(&mut self) {
        let zero = &self.config.zero;
        let (offloaded, here, place, places) = match self.device {
            DeviceKind::Cpu => (Offload::Nvme(None), "in memory", "in a file", "in files"),
            DeviceKind::Cuda => (Offload::Cpu, "on the GPU", "in host memory", "in host memory"),
        };
        let [optimizer_moves, parameters_move] =
            [&zero.offload_optimizer, &zero.offload_param].map(|state| state.is_moved_from(self.device));
        for (optimizer, parameters, state, place) in [
            (true, false, "optimizer state", place),
            (false, true, "parameters", place),
            (true, true, "optimizer state and parameters", places),
        ] {
            let moves = optimizer && optimizer_moves || parameters && parameters_move;
            let needed = if parameters { ZeroStage::Parameters } else { ZeroStage::OptimizerStates };
            let (stage, place, offload) = match moves {
                true => (zero.stage, here, Offload::None),
                false => (zero.stage.max(needed), place, offloaded.clone()),
            };
            let stated = match stage == zero.stage {
                true => String::new(),
                false => format!("ZeRO stage {} with ", u8::from(stage)),
            };
            let is_possible = !(optimizer && parameters && moves);
            self.add(is_possible, format!("{stated}{state} {place}"), |config| {
                if optimizer {
                    config.zero.offload_optimizer = offload.clone();
                }
                if parameters {
                    config.zero.offload_param = offload;
                }
                config.zero.set_stage(stage);
            });
        }
    }

    fn add_dtypes_and_batch(&mut self) {
        let config = self.config;
        self.add(config.precision == Precision::F32, "bf16", |config| {
            config.precision = Precision::Bf16 { check_grad_overflow: false };
        });
        let sends_f32 =
            config.world_size() > 1 && config.gradient_communication() == CommunicationDtype::Fp32;
        self.add(sends_f32, "gradients sent in bf16", |config| {
            config.communication_data_type = CommunicationDtype::Bf16;
            config.seq_parallel_communication_data_type = CommunicationDtype::Bf16;
        });
        let has_large_tiles = config.ulysses.loss_tile_tokens.is_none_or(|tokens| tokens > SMALL_LOSS_TILE);
        self.add(has_large_tiles, format!("loss in tiles of {SMALL_LOSS_TILE}"), |config| {
            config.ulysses.loss_tile_tokens = Some(SMALL_LOSS_TILE);
        });
        self.add(config.micro_batch_size > 1, "micro batches of one sequence", |config| {
            config.gradient_accumulation_steps *= config.micro_batch_size;
            config.micro_batch_size = 1;
        });
    }
}

/// Returns the keys whose values differ, as `path: value` of `changed`.
fn changed_keys(config: &Config, changed: &Config) -> Vec<String> {
    let [before, after] = [config, changed].map(|config| serde_json::to_value(config).unwrap_or_default());
    let mut keys = Vec::new();
    compare("", &before, &after, &mut keys);
    keys
}

fn compare(path: &str, before: &Value, after: &Value, keys: &mut Vec<String>) {
    let empty = Map::new();
    let (before, after) = match (before.as_object(), after.as_object()) {
        _ if before == after => return,
        (None, None) if after.is_null() => return keys.push(format!("no {path}")),
        (None, None) => return keys.push(format!("{path}: {after}")),
        (before, after) => (before.unwrap_or(&empty), after.unwrap_or(&empty)),
    };
    let names: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    for name in names {
        let [before, after] = [before, after].map(|section| section.get(name).unwrap_or(&Value::Null));
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        compare(&path, before, after, keys);
    }
}
