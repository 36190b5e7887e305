//! The `checkpoint` section: when a run saves its state, and how.

use crate::config::define::words::{choice, count, flag, index};
use crate::config::define::{Keys, choices, keys};
use crate::config::reader::Section;

keys! {
    /// When and how checkpoints are saved.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct CheckpointConfig {
        /// Steps between two checkpoints; without it the last step only is saved.
        pub interval: Option<u64> = count(),
        /// Checkpoints to keep: older ones are removed once a new one was saved and read back. 0 keeps all.
        pub keep_last: usize = index().integer(10),
        /// Saves each step whose evaluation loss is the lowest so far, and keeps the best of them in addition to the last ones;
        /// the file `best` names it. Needs `ulysses.validation`.
        pub keep_best: bool = flag(),
        /// Writes from a copy of the state while training goes on.
        pub background: bool = flag().named("async"),
        /// What a save that fails does to the run.
        pub on_error: OnSaveError = choice().text("stop"),
    }
}

choices! {
    /// What a save that fails, for one because the disk is full, does to the run.
    pub enum OnSaveError {
        /// Ends it with an error.
        #[default]
        Stop = "stop",
        /// Reports it and trains on; the next interval saves again.
        Continue = "continue",
    }
}

impl CheckpointConfig {
    /// Whether the section asks for checkpoints. One that has DeepSpeed's keys only does not: there the script saves.
    pub(crate) fn is_asked_for(section: &Section<'_>) -> bool {
        let own = Self::declare("checkpoint");
        let is_own = |name: &str| own.iter().any(|key| key.name == name);
        let asks = section.given().next().is_none() || section.given().any(is_own);
        if !asks {
            let note = "`checkpoint` has keys of DeepSpeed's only, so nothing is saved: `checkpoint.interval` asks for \
                        checkpoints every so many steps, and after the last";
            section.warn(note.to_owned());
        }
        asks
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    #[test]
    fn a_section_with_deepspeeds_keys_only_saves_nothing_and_says_so() {
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
