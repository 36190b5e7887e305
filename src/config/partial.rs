//! Partial resolution of an incomplete config, for `ulysses config resolve`.

use super::batch::{BATCH_KEYS, BatchError};
use super::config::Config;
use super::error::ConfigError;
use super::mesh_shape::MeshShapeError;
use super::overrides::Overrides;
use super::raw::{RawConfig, TOTAL_NUM_STEPS};
use crate::mesh::MeshShape;
use serde_json::{Value, json};

/// A config that is resolved as far as possible.
#[derive(Clone, Debug)]
pub struct PartiallyResolved {
    /// The config, with assumed values in place of [open](Self::open) ones.
    pub config: Config,
    /// The config as JSON; open values are those of the file, or assumed ones that fit.
    pub written: Value,
    /// The values that depend on an unset flag or key.
    pub open: Vec<UnresolvedValue>,
}

/// A value that is not determined yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnresolvedValue {
    /// The path of the key.
    pub key: &'static str,
    /// The flag or key that determines it.
    pub needs: String,
}

impl RawConfig {
    /// Like [`resolve`](Self::resolve), but assumes unset steps, mesh or batch sizes, and reports them as open.
    ///
    /// # Errors
    /// When the config is invalid whatever the open values are.
    pub fn resolve_partially(&self, overrides: &Overrides) -> Result<PartiallyResolved, ConfigError> {
        let (mut raw, mut overrides, mut open) = (self.clone(), overrides.clone(), Vec::new());
        // Each round resolves one of three causes.
        let mut config = loop {
            match raw.resolve(&overrides) {
                Ok(config) => break config,
                Err(error) if open.len() > BATCH_KEYS.len() => return Err(error),
                Err(error) => open.push(raw.assume(&mut overrides, error)?),
            }
        };
        open.extend(unset(&config));
        let is_open = |key: &str| open.iter().any(|value: &UnresolvedValue| value.key == key);
        config.autos.retain(|auto| !is_open(&auto.key));
        // Serialization fails only for sizes that JSON cannot hold.
        let mut written = serde_json::to_value(&config).unwrap_or_default();
        if is_open(TOTAL_NUM_STEPS) || config.lacks_steps() {
            written["scheduler"]["params"]["total_num_steps"] = json!("auto");
        }
        if let Some(sizes) = written.as_object_mut().filter(|_| is_open(BATCH_KEYS[0])) {
            sizes.retain(|key, _| !BATCH_KEYS.contains(&key.as_str()));
            sizes.extend(
                self.gradient_accumulation_steps.map(|passes| (BATCH_KEYS[2].to_owned(), json!(passes))),
            );
        }
        Ok(PartiallyResolved { config, written, open })
    }

    /// Assumes the value that the error says is missing, or returns the error.
    fn assume(
        &mut self,
        overrides: &mut Overrides,
        error: ConfigError,
    ) -> Result<UnresolvedValue, ConfigError> {
        let knows_dp =
            overrides.mesh.is_some() || !self.sizes.dp.is_empty() || self.config.ulysses.mesh.is_some();
        match &error {
            ConfigError::AutoWithoutSource { key, .. } => {
                self.remarks.autos.retain(|auto| auto.path != TOTAL_NUM_STEPS);
                Ok(UnresolvedValue { key, needs: "--steps, or `ulysses.steps` or `epochs`".to_owned() })
            }
            ConfigError::Batch { reason, .. } => match **reason {
                BatchError::Unset => {
                    // One sequence per rank fits every mesh.
                    self.micro_batch_size = Some(1);
                    let needs = "--batch-size, or `train_micro_batch_size_per_gpu`".to_owned();
                    Ok(UnresolvedValue { key: BATCH_KEYS[0], needs })
                }
                // A mesh is named if the sizes need another dp.
                BatchError::Contradiction { train, micro, accumulation, mesh: Some(_), .. } if !knows_dp => {
                    Ok(self.assume_dp(overrides, train / (micro * accumulation), "the batch sizes need"))
                }
                _ => Err(error),
            },
            ConfigError::Mesh { reason, .. } => match **reason {
                MeshShapeError::ShardSize { shard_size, .. } if !knows_dp => {
                    Ok(self.assume_dp(overrides, shard_size.size, "ZeRO's partitions need a multiple of"))
                }
                _ => Err(error),
            },
            _ => Err(error),
        }
    }

    fn assume_dp(&self, overrides: &mut Overrides, dp: usize, why: &str) -> UnresolvedValue {
        let stated = self.sizes.clone().map(|_, stated| stated.first().map_or(1, |stated| stated.size));
        let mesh = MeshShape { dp, ..stated };
        overrides.mesh = Some(mesh);
        UnresolvedValue {
            key: "data_parallel_size",
            needs: format!("--mesh: {why} dp {dp}, such as {}", mesh.notation()),
        }
    }
}

/// Returns the required values that are not set.
fn unset(config: &Config) -> impl Iterator<Item = UnresolvedValue> + use<> {
    let ulysses = &config.ulysses;
    let lacks = [
        (ulysses.model.is_none(), "ulysses.model", "--model"),
        (ulysses.data.is_empty(), "ulysses.data", "--data"),
        (ulysses.seq_len.is_none(), "ulysses.seq_len", "--seq-len"),
        (ulysses.steps.is_none() && ulysses.epochs.is_none(), "ulysses.steps", "--steps or --epochs"),
    ];
    let open = |(_, key, flag): (bool, _, &str)| UnresolvedValue {
        key,
        needs: format!("{flag} of `ulysses train`"),
    };
    lacks.into_iter().filter(|(lacks, ..)| *lacks).map(open)
}
