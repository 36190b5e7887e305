//! The effect of single changes of the configuration.

use super::{Criteria, RankPlan, Throughput, Workload};
use crate::config::{CommunicationDtype, Config, Offload, PartitionAxes, Precision, ZeroStage};
use crate::engine::EngineError;
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::num::NonZero;
use ulysses_kernels::device::DeviceKind;

/// Tile size of the loss in the alternative with small tiles.
const SMALL_LOSS_TILE: NonZero<usize> = NonZero::new(128).unwrap();

/// Tile size of norms, projections and the MLP in the alternative with tiles.
const TILE_TOKENS: NonZero<usize> = NonZero::new(1024).unwrap();

/// Offload target of ranks on GPUs.
const HOST_MEMORY: &str = "in host memory";

/// A single change of the configuration, and its effect.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Alternative {
    /// The change.
    pub change: String,
    /// The config keys that change, with their values.
    pub keys: Vec<String>,
    /// Peak memory of a rank.
    pub peak_bytes: u64,
    /// Memory of a rank between steps: its model state, without what is offloaded.
    pub persistent_bytes: u64,
    /// Bytes of host memory per node that ranks on GPUs offload to.
    pub host_bytes_per_node: u64,
    /// Bytes that a rank sends per step.
    pub sent_bytes: u64,
    /// FLOPs per step and rank, including recomputation.
    pub flops: f64,
    /// The step time, if there is a machine profile.
    #[serde(flatten)]
    pub throughput: Option<Throughput>,
    /// The longest sequence that fits the budget, if there is one.
    pub max_seq_len: Option<usize>,
}

impl Workload {
    /// Returns the workload itself, followed by variants with one feature added or removed. Variants that the model or the
    /// batch does not allow are omitted.
    ///
    /// # Errors
    /// As [`plan`](Self::plan) for the workload itself.
    pub fn alternatives(&self, criteria: Criteria<'_>) -> Result<Vec<Alternative>, EngineError> {
        let as_configured = self.alternative("as configured".to_owned(), criteria)?;
        let saves_attention_output = self.decided(criteria.budget)?.config.saves_attention_output();
        let changed = self.variants(saves_attention_output).into_iter().filter_map(|(change, workload)| {
            // Variants that cannot be planned are omitted.
            let alternative = workload.alternative(change, criteria).ok()?;
            Some(Alternative { keys: changed_keys(&self.config, &workload.config), ..alternative })
        });
        Ok(std::iter::once(as_configured).chain(changed).collect())
    }

    fn alternative(&self, change: String, criteria: Criteria<'_>) -> Result<Alternative, EngineError> {
        let decided = self.decided(criteria.budget)?;
        let plan = decided.plan()?;
        let host_bytes_per_node = self.host_bytes_per_node(&plan);
        let RankPlan { peak_bytes, persistent_bytes, sent, model_flops, recompute_flops, .. } = plan;
        Ok(Alternative {
            change,
            keys: Vec::new(),
            peak_bytes,
            persistent_bytes,
            host_bytes_per_node,
            sent_bytes: sent.total(),
            flops: model_flops + recompute_flops,
            throughput: decided.throughput(criteria)?,
            max_seq_len: self.max_seq_len_within(criteria)?,
        })
    }

    /// Returns the variants of a config that does, or does not, save attention outputs. Add new features of the engine
    /// here or to [`features`].
    fn variants(&self, saves_attention_output: bool) -> Vec<(String, Self)> {
        let config = &self.config;
        let mut variants = Vec::new();
        let mut add = |change: String, apply: &dyn Fn(&mut Config)| {
            let mut workload = self.clone();
            apply(&mut workload.config);
            variants.push((change, workload));
        };
        let (axes, stage) = (config.ulysses.zero_partition_axes, config.zero.stage);
        if axes == PartitionAxes::Dp && config.mesh.sp_size > 1 {
            let stage = if stage == ZeroStage::Disabled { ZeroStage::Parameters } else { stage };
            add(format!("ZeRO stage {}", PartitionAxes::DpSp.with_stage(stage)), &|config| {
                config.ulysses.zero_partition_axes = PartitionAxes::DpSp;
                config.zero.set_stage(stage);
            });
        }
        for (change, changed) in features(config, self.device) {
            add(change, &|config| *config = changed.clone());
        }
        if config.ulysses.activation_checkpointing {
            let (change, saves) = match saves_attention_output {
                true => ("attention recomputed", false),
                false => ("attention output saved", true),
            };
            add(change.to_owned(), &|config| config.ulysses.save_attention_output = Some(saves));
        }
        // With one partition, all stages are equal.
        let has_partitions = |stage: &ZeroStage| config.zero_world_size() > 1 && *stage != config.zero.stage;
        for stage in ZeroStage::ALL.into_iter().filter(has_partitions) {
            add(format!("ZeRO stage {}", axes.with_stage(stage)), &|config| config.zero.set_stage(stage));
        }
        for (change, stage, optimizer, parameters) in offloads(config, self.device) {
            add(change, &|config| {
                (config.zero.offload_optimizer, config.zero.offload_param) =
                    (optimizer.clone(), parameters.clone());
                config.zero.set_stage(stage);
            });
        }
        if config.precision == Precision::F32 {
            add("bf16".to_owned(), &|config| {
                config.precision = Precision::Bf16 { check_grad_overflow: false };
            });
        }
        if config.world_size() > 1 && config.gradient_communication() == CommunicationDtype::Fp32 {
            add("gradients sent in bf16".to_owned(), &|config| {
                config.communication_data_type = CommunicationDtype::Bf16;
                config.seq_parallel_communication_data_type = CommunicationDtype::Bf16;
            });
        }
        if config.ulysses.loss_tile_tokens.is_none_or(|tokens| tokens > SMALL_LOSS_TILE) {
            add(format!("loss in tiles of {SMALL_LOSS_TILE}"), &|config| {
                config.ulysses.loss_tile_tokens = Some(SMALL_LOSS_TILE);
            });
        }
        if config.micro_batch_size > 1 {
            add("micro batches of one sequence".to_owned(), &|config| {
                config.gradient_accumulation_steps *= config.micro_batch_size;
                config.micro_batch_size = 1;
            });
        }
        let sp = 2 * config.mesh.sp_size;
        let ring = if 2 * config.seq_sharding().ulysses_size > self.fewest_heads() { 2 } else { 1 };
        let label = if ring == 1 {
            String::new()
        } else {
            format!(" in a ring of {}", ring * config.ulysses.ring_size)
        };
        add(format!("sp {sp}{label} (twice the ranks)"), &|config| {
            config.mesh.sp_size = sp;
            config.ulysses.ring_size *= ring;
        });
        variants
    }
}

/// Returns the keys whose values differ, as `path: value` of `changed`.
fn changed_keys(config: &Config, changed: &Config) -> Vec<String> {
    let written = |config: &Config| serde_json::to_value(config).unwrap_or_default();
    let mut keys = Vec::new();
    compare("", &written(config), &written(changed), &mut keys);
    keys
}

fn compare(path: &str, before: &Value, after: &Value, keys: &mut Vec<String>) {
    if before == after {
        return;
    }
    let empty = Map::new();
    let section = |value: &'_ Value| value.as_object().cloned();
    let (before, after) = match (section(before), section(after)) {
        (None, None) if after.is_null() => return keys.push(format!("no {path}")),
        (None, None) => return keys.push(format!("{path}: {after}")),
        (before, after) => (before.unwrap_or_else(|| empty.clone()), after.unwrap_or(empty)),
    };
    let names: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    for name in names {
        let value = |section: &Map<String, Value>| section.get(name).cloned().unwrap_or_default();
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        compare(&path, &value(&before), &value(&after), keys);
    }
}

/// Returns the other offload settings of optimizer state and parameters, each with the stage that it requires.
fn offloads(config: &Config, device: DeviceKind) -> Vec<(String, ZeroStage, Offload, Offload)> {
    let stage = config.zero.stage;
    let (optimizer, parameters) = (&config.zero.offload_optimizer, &config.zero.offload_param);
    let (offloaded, here, place, places) = match device {
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
    let are_offloaded = [optimizer, parameters].map(|state| state.is_moved_from(device));
    match are_offloaded[0] {
        true => add(named(format!("optimizer state {here}"), stage), &Offload::None, parameters),
        false => {
            let change = format!("optimizer state {place}");
            add(named(change, ZeroStage::OptimizerStates), &offloaded, parameters);
        }
    }
    match are_offloaded[1] {
        true => add(named(format!("parameters {here}"), stage), optimizer, &Offload::None),
        false => add(named(format!("parameters {place}"), ZeroStage::Parameters), optimizer, &offloaded),
    }
    if are_offloaded == [false, false] {
        let change = format!("optimizer state and parameters {places}");
        add(named(change, ZeroStage::Parameters), &offloaded, &offloaded);
    }
    offloads
}

/// Returns the config with other settings of checkpointing, tiles and chunks.
fn features(config: &Config, device: DeviceKind) -> Vec<(String, Config)> {
    let (ulysses, is_offloaded) = (&config.ulysses, config.activation_checkpointing.cpu_checkpointing);
    let recomputes = ulysses.activation_checkpointing;
    let mut features = Vec::new();
    let mut add = |change: String, apply: &dyn Fn(&mut Config)| {
        let mut changed = config.clone();
        apply(&mut changed);
        features.push((change, changed));
    };
    if recomputes {
        add("without activation checkpointing".to_owned(), &|config| {
            config.ulysses.activation_checkpointing = false;
            config.ulysses.save_attention_output = None;
            config.activation_checkpointing.cpu_checkpointing = false;
        });
        let is_of_every_layer = ulysses.activation_checkpointing_interval == 1;
        let (change, interval) =
            if is_of_every_layer { ("of every other layer", 2) } else { ("of every layer", 1) };
        add(format!("activation checkpointing {change}"), &|config| {
            config.ulysses.activation_checkpointing_interval = interval;
        });
    } else {
        add("with activation checkpointing".to_owned(), &|config| {
            config.ulysses.activation_checkpointing = true;
        });
    }
    let (here, place) = match device {
        DeviceKind::Cpu => ("in memory", "in a file"),
        DeviceKind::Cuda => ("on the GPU", HOST_MEMORY),
    };
    let change = match (recomputes, is_offloaded) {
        (_, true) => format!("activation checkpoints {here}"),
        (true, false) => format!("activation checkpoints {place}"),
        (false, false) => format!("with activation checkpointing, checkpoints {place}"),
    };
    add(change, &|config| {
        config.ulysses.activation_checkpointing = true;
        config.activation_checkpointing.cpu_checkpointing = !is_offloaded;
    });
    let (change, tiles) = match ulysses.tile_tokens {
        None => (format!("tiles of {TILE_TOKENS} tokens"), Some(TILE_TOKENS)),
        Some(_) => ("all tokens at once".to_owned(), None),
    };
    add(change, &|config| config.ulysses.tile_tokens = tiles);
    // Omitted if the model or the mesh does not allow it.
    let chunks = 2 * ulysses.head_chunks;
    add(format!("{chunks} head chunks"), &|config| config.ulysses.head_chunks = chunks);
    if ulysses.head_chunks > 1 {
        add("all heads at once".to_owned(), &|config| config.ulysses.head_chunks = 1);
    }
    features
}
