//! The resolved values of `"auto"` keys.
//!
//! Hugging Face's Trainer replaces `"auto"` by its own arguments. There is no Trainer here, so
//! the defaults of those arguments apply where the key means the same. DeepSpeed drops any other
//! `"auto"`, which leaves its default.

use super::config::{Config, ResolvedAuto};
use super::raw::{RawConfig, TOTAL_NUM_STEPS};
use crate::config_file::reader::Auto;
use crate::config_file::vocabulary::{DefaultValue, Effect, Key};
use crate::mesh::{SeqSharding, UlyssesLimits};
use serde_json::Value;

/// The key whose `"auto"` depends on the model.
const RING_SIZE: &str = "ulysses.ring_size";

const TRAINER: &str = "the default of Hugging Face's Trainer";

impl Config {
    /// Sets a ring size of `"auto"` to that of [`SeqSharding::auto`], once the model is known; until then there is no ring.
    /// Leaves a ring size that the file or `--mesh` gives.
    pub fn resolve_ring(&mut self, limits: UlyssesLimits) {
        let Some(auto) = self.autos.iter_mut().find(|auto| auto.key == RING_SIZE) else { return };
        // Blocks of flexible sequence parallelism have no ring.
        let sharding = SeqSharding::auto(self.mesh.sp_size, limits);
        let ring_size = if self.ulysses.flexible_sp { 1 } else { sharding.ring_size };
        auto.value = Some(ring_size.into());
        self.ulysses.ring_size = ring_size;
    }

    /// Sets a `total_num_steps` of `"auto"` to the number of steps of the run's epochs, once the data is known.
    pub fn resolve_steps(&mut self, steps: u64) {
        let Some(auto) = self.autos.iter_mut().find(|auto| auto.key == TOTAL_NUM_STEPS) else { return };
        if auto.value.is_none() {
            auto.value = Some(steps.into());
            self.scheduler.iter_mut().for_each(|scheduler| scheduler.end_at(steps));
        }
    }

    /// Returns whether the learning rate depends on a number of steps that [`resolve_steps`](Self::resolve_steps) must set.
    pub fn lacks_steps(&self) -> bool {
        self.autos.iter().any(|auto| auto.key == TOTAL_NUM_STEPS && auto.value.is_none())
    }

    /// Forgets that the file leaves the ring size to the model, because a mesh with a ring replaces it.
    pub(super) fn set_ring(&mut self) {
        self.autos.retain(|auto| auto.key != RING_SIZE);
    }
}

/// Looks the keys of `raw` that are `"auto"` up in the resolved config.
pub(super) fn resolve_autos(raw: &RawConfig, config: &Config) -> Vec<ResolvedAuto> {
    // Serialization fails only for sizes that JSON cannot hold.
    let written = serde_json::to_value(config).unwrap_or_default();
    let resolve = |Auto { path, key }: &Auto| {
        let (value, source) = match path.as_str() {
            RING_SIZE => (None, "from the model's heads and the ranks of a node".to_owned()),
            TOTAL_NUM_STEPS if config.ulysses.epochs.is_some() => {
                (None, "from the number of steps of the epochs, once the data is read".to_owned())
            }
            _ => {
                let source = source_of_batch(path, raw, config).unwrap_or_else(|| source_of(key));
                (value_of(key, path, &written), source)
            }
        };
        ResolvedAuto { key: path.clone(), value, source }
    };
    raw.remarks.autos.iter().map(resolve).collect()
}

/// Returns how a batch size follows from those that the file gives; `None` for other keys.
fn source_of_batch(path: &str, raw: &RawConfig, config: &Config) -> Option<String> {
    let (train, micro) = (config.train_batch_size, config.micro_batch_size);
    let (accumulation, dp) = (config.gradient_accumulation_steps, config.mesh.dp_size);
    let gives = (raw.train_batch_size.is_some(), raw.micro_batch_size.is_some());
    match path {
        "train_batch_size" => Some(format!("micro batch {micro} × accumulation {accumulation} × dp {dp}")),
        "train_micro_batch_size_per_gpu" if gives.1 => Some(TRAINER.to_owned()),
        "train_micro_batch_size_per_gpu" => {
            Some(format!("train batch {train} / (accumulation {accumulation} × dp {dp})"))
        }
        "gradient_accumulation_steps" if gives == (true, true) => {
            Some(format!("train batch {train} / (micro batch {micro} × dp {dp})"))
        }
        "gradient_accumulation_steps" => Some("the default".to_owned()),
        _ => None,
    }
}

fn value_of(key: &Key, path: &str, written: &Value) -> Option<Value> {
    if !matches!(key.effect, Effect::Supported) {
        return None;
    }
    // As in `ulysses.parameter_groups[0].lr_scale`.
    let place = format!("/{}", path.replace(['.', '['], "/").replace(']', ""));
    // A disabled section, such as `fp16`, is not written.
    written.pointer(&place).cloned().or_else(|| key.auto_value().to_json())
}

fn source_of(key: &Key) -> String {
    match (key.effect, key.auto) {
        (Effect::Ignored(why), _) => format!("no effect: {why}"),
        (_, Some(DefaultValue::Is(_))) => TRAINER.to_owned(),
        _ => match key.auto_value() {
            DefaultValue::Derived(from) => format!("from {from}"),
            DefaultValue::Is(_) | DefaultValue::Required => "the default".to_owned(),
        },
    }
}
