//! Checks that all ranks have the same config, data and model: processes on several machines read their own files.

use super::data_stream::TrainingData;
use crate::config::{Config, HeldOut};
use crate::engine::{Engine, EngineError};
use serde_json::{Value, json};

/// Checks that all ranks have the same data, config, model and last step. Collective.
pub(super) fn check_agreement(
    engine: &mut Engine,
    data: &TrainingData,
    model: &Value,
    last_step: u64,
) -> Result<(), EngineError> {
    let config = hash_of(&json!([shared_settings(engine.config()), model]));
    let [data, held_out] = data.hashes().map(|hashes| hash_of(&hashes.into()));
    engine.check_agreement(&[
        ("the config", config),
        ("the hash of the data", data),
        ("the hash of the held-out data", held_out),
        ("the run's last step", last_step),
    ])
}

/// Returns the settings that must be equal: all but paths and threads.
fn shared_settings(config: &Config) -> Config {
    let mut settings = config.clone();
    let ulysses = &mut settings.ulysses;
    (ulysses.model, ulysses.tokenizer, ulysses.output) = (None, None, None);
    (ulysses.threads_per_rank, ulysses.offload_path) = (None, None);
    ulysses.data.iter_mut().for_each(|source| source.path.clear());
    if let Some(HeldOut::Path(path)) = ulysses.validation.as_mut().map(|validation| &mut validation.data) {
        path.clear();
    }
    settings
}

fn hash_of(value: &Value) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&blake3::hash(value.to_string().as_bytes()).as_bytes()[..8]);
    u64::from_le_bytes(word)
}
