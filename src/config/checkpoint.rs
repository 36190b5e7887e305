//! The `checkpoint` section: when a run saves its state, and how.

use super::reader::Section;
use serde::Serialize;

/// When and how checkpoints are saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CheckpointConfig {
    /// Steps between two checkpoints; without it only the last step of a run is saved, and what
    /// a signal asks for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interval: Option<u64>,
    /// Checkpoints to keep, 0 for all; default 10, as torchtitan's `keep_latest_k`.
    pub keep_last: usize,
    /// Saves a step whose evaluation loss is the lowest so far, and keeps it in addition to the last ones; default false.
    pub keep_best: bool,
    /// `async`: write from a copy of the state while training goes on; default false.
    #[serde(rename = "async")]
    pub background: bool,
    /// What a save that fails does to the run; default [`OnSaveError::Stop`].
    pub on_error: OnSaveError,
}

/// What a save that fails, for one because the disk is full, does to the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OnSaveError {
    /// Ends it with an error.
    #[default]
    Stop,
    /// Reports it and trains on; the next interval saves again.
    Continue,
}

impl CheckpointConfig {
    const ON_ERROR: &[(&str, OnSaveError)] =
        &[("stop", OnSaveError::Stop), ("continue", OnSaveError::Continue)];

    /// The section, if it is there. One that has DeepSpeed's keys only asks for no checkpoints: there the script
    /// saves.
    pub(super) fn read(section: &Section<'_>) -> Option<Self> {
        let own = ["interval", "keep_last", "keep_best", "async", "on_error"];
        let deepspeeds = [
            "tag_validation",
            "load_universal",
            "use_node_local_storage",
            "parallel_write",
            "writer",
            "checkpoint_serialization",
        ];
        let asks =
            own.iter().any(|key| section.names(key)) || !deepspeeds.iter().any(|key| section.names(key));
        if section.is_present() && !asks {
            let note = "`checkpoint` has keys of DeepSpeed's only, so nothing is saved: `checkpoint.interval` asks for \
                        checkpoints every so many steps, and after the last";
            section.warn(note.to_owned());
        }
        (section.is_present() && asks).then(|| Self {
            interval: section.integer("interval"),
            keep_last: section.count("keep_last").unwrap_or(0),
            keep_best: section.boolean("keep_best"),
            background: section.boolean("async"),
            on_error: section.choice("on_error", Self::ON_ERROR).unwrap_or_default(),
        })
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
