//! What all ranks of a run must have alike: processes on several machines each read their own files.

use super::Run;
use super::feed::Phase;
use serde_json::{Value, json};
use ulysses::config::HeldOut;
use ulysses::engine::{Engine, EngineError};

impl Run {
    /// Compares data, config and the run's last step with those of the other ranks. Collective.
    pub(super) fn check_agreement(&self, engine: &mut Engine, last_step: u64) -> Result<(), EngineError> {
        let of_phases =
            |hash: fn(&Phase) -> u64| hash_of(&self.phases.iter().map(hash).collect::<Vec<_>>().into());
        engine.check_agreement(&[
            ("the config", hash_of(&self.shared_settings())),
            ("the hash of the data", of_phases(|phase| phase.data_hash)),
            ("the hash of the held-out data", of_phases(|phase| phase.held_out_hash)),
            ("the run's last step", last_step),
        ])
    }

    /// The model's shape and the settings, less what each machine may have its own: paths and threads.
    fn shared_settings(&self) -> Value {
        let mut settings = self.config.clone();
        let ulysses = &mut settings.ulysses;
        (ulysses.model, ulysses.tokenizer, ulysses.output) = (None, None, None);
        (ulysses.threads_per_rank, ulysses.offload_path) = (None, None);
        ulysses.data.iter_mut().for_each(|source| source.path.clear());
        if let Some(HeldOut::Path(path)) = ulysses.validation.as_mut().map(|validation| &mut validation.data)
        {
            path.clear();
        }
        json!([settings, self.llama.to_hf_json()])
    }
}

fn hash_of(value: &Value) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&blake3::hash(value.to_string().as_bytes()).as_bytes()[..8]);
    u64::from_le_bytes(word)
}
