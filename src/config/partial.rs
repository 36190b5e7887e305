//! Partial resolution of an incomplete config, for `ulysses config resolve`.

use super::batch::BatchError;
use super::config::Config;
use super::error::ConfigError;
use super::mesh_shape::MeshShapeError;
use super::overrides::Overrides;
use super::raw::RawConfig;
use serde_json::{Value, json};

/// A config as far as it can be resolved.
#[derive(Clone, Debug)]
pub struct PartiallyResolved {
    /// The config, with presumed values in place of those that are [open](Self::open).
    pub config: Config,
    /// It as it is written: what is open is as the file has it, or is presumed and fits.
    pub written: Value,
    /// The values that wait for a flag or for another key.
    pub open: Vec<UnresolvedValue>,
}

/// A value that nothing gives yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnresolvedValue {
    /// The path of the key.
    pub key: &'static str,
    /// The flag or key that would give it.
    pub needs: String,
}

const TOTAL_NUM_STEPS: &str = "scheduler.params.total_num_steps";
const BATCH_KEYS: [&str; 3] =
    ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"];

impl RawConfig {
    /// Like [`resolve`](Self::resolve), but goes on where the steps, the mesh or the batch size are still to come, and
    /// says so.
    ///
    /// # Errors
    /// When the config contradicts itself, whatever is still to come.
    pub fn resolve_partially(&self, overrides: &Overrides) -> Result<PartiallyResolved, ConfigError> {
        let (mut raw, mut overrides, mut open) = (self.clone(), overrides.clone(), Vec::new());
        // Each round settles one of three causes.
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
        // Only sizes of a config that is too strange to write could fail here.
        let mut written = serde_json::to_value(&config).unwrap_or_default();
        if is_open(TOTAL_NUM_STEPS) {
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

    /// Fills in what an error says is missing, or gives the error back.
    fn assume(&mut self, overrides: &mut Overrides, error: ConfigError) -> Result<UnresolvedValue, ConfigError> {
        let knows_dp = overrides.mesh.is_some() || !self.dp_sizes.is_empty();
        match &error {
            ConfigError::AutoWithoutSource { key, .. } => {
                self.decays_to_last_step = false;
                Ok(UnresolvedValue { key, needs: "--steps, or `ulysses.steps`".to_owned() })
            }
            ConfigError::Batch { reason, .. } => match **reason {
                BatchError::Unset => {
                    // One row for each rank, as no mesh contradicts it.
                    self.micro_batch_size = Some(1);
                    let needs = "--batch-size, or `train_micro_batch_size_per_gpu`".to_owned();
                    Ok(UnresolvedValue { key: BATCH_KEYS[0], needs })
                }
                BatchError::Contradiction { train, micro, accumulation, .. }
                    if !knows_dp && train.is_multiple_of(micro * accumulation) =>
                {
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
        let sp = self.sp_sizes.first().map_or(1, |stated| stated.size);
        overrides.mesh = Some((dp, sp));
        UnresolvedValue {
            key: "data_parallel_size",
            needs: format!("--mesh: {why} dp {dp}, such as {dp}x{sp}"),
        }
    }
}

/// A required value that nothing gives.
fn unset(config: &Config) -> impl Iterator<Item = UnresolvedValue> + use<> {
    let ulysses = &config.ulysses;
    let lacks = [
        (ulysses.model.is_none(), "ulysses.model", "--model"),
        (ulysses.data.is_empty(), "ulysses.data", "--data"),
        (ulysses.seq_len.is_none(), "ulysses.seq_len", "--seq-len"),
        (ulysses.steps.is_none() && ulysses.epochs.is_none(), "ulysses.steps", "--steps or --epochs"),
    ];
    let open =
        |(_, key, flag): (bool, _, &str)| UnresolvedValue { key, needs: format!("{flag} of `ulysses train`") };
    lacks.into_iter().filter(|(lacks, ..)| *lacks).map(open)
}
