//! The `checkpoint` section: when and how a run saves its state.

use crate::config_file::define::words::{choice, count, flag, index};
use crate::config_file::define::{Keys, choices, keys};
use crate::config_file::reader::Section;

keys! {
    /// Interval, retention and form of checkpoints.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct CheckpointConfig {
        /// Steps between checkpoints; if absent, only the last step is saved.
        pub interval: Option<u64> = count(),
        /// Steps between copies of the checkpoint in the host memory of the nodes, each file on its own node and on the next;
        /// only the newest is kept. A restart by `ulysses launch` continues from it if it is newer than the newest
        /// checkpoint on disk, and unless a node and the next are both lost. If absent, no copies are made.
        pub memory_interval: Option<u64> = count(),
        /// Number of checkpoints to keep: older ones are removed after a new one has been saved and verified. 0 keeps all.
        pub keep_last: usize = index().integer(10),
        /// Saves every step with the lowest evaluation loss so far, and keeps the best in addition to the last checkpoints; the
        /// file `best` names it. Requires `ulysses.validation`.
        pub keep_best: bool = flag(),
        /// Saves in the background, from a copy of the state, while training continues.
        pub background: bool = flag().named("async"),
        /// Effect of a failed save on the run.
        pub on_error: OnSaveError = choice().text("stop"),
    }
}

choices! {
    /// Effect of a failed save on the run, for example when the disk is full.
    pub enum OnSaveError {
        /// The run ends with an error.
        #[default]
        Stop = "stop",
        /// The run logs the error and continues; the next interval saves again.
        Continue = "continue",
    }
}

impl CheckpointConfig {
    /// Returns whether the section enables checkpoints. DeepSpeed's keys alone do not: there, the script saves.
    pub(crate) fn is_enabled(section: &Section<'_>) -> bool {
        let own = Self::declare("checkpoint");
        let is_own = |name: &str| own.iter().any(|key| key.name == name);
        let asks = section.given().next().is_none() || section.given().any(is_own);
        if !asks {
            let note = "`checkpoint` has only keys of DeepSpeed, so nothing is saved: set `checkpoint.interval` to save a \
                        checkpoint every `interval` steps and after the last";
            section.warn(note);
        }
        asks
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    #[test]
    fn a_section_with_only_deepspeeds_keys_saves_nothing_and_warns() {
        let read = |section: &str| {
            let text = format!("{{\"train_batch_size\": 1, \"checkpoint\": {section}}}");
            let config = Config::from_json_str(&text, "c.json").unwrap();
            (config.checkpoint.is_some(), config.notes.iter().any(|note| note.contains("nothing is saved")))
        };
        assert_eq!(read(r#"{"tag_validation": "Fail", "load_universal": false}"#), (false, true));
        assert_eq!(read(r#"{"tag_validation": "Fail", "keep_last": 2}"#), (true, false));
        assert_eq!(read("{}"), (true, false));
    }
}
