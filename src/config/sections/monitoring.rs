//! Logs and monitors besides `metrics.jsonl`: `wall_clock_breakdown`, `comms_logger`, `tensorboard`
//! and `csv_monitor`.

use crate::config_file::define::words::{flag, key, section};
use crate::config_file::define::{FieldValue, keys};
use crate::config_file::reader::Section;
use crate::config_file::vocabulary::Value;
use serde_json::Value as Json;

keys! {
    /// DeepSpeed's logs and monitors. All are off by default.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct MonitoringConfig {
        /// Prints the time of each phase of a step.
        pub wall_clock_breakdown: bool = flag(),
        /// The log of collectives.
        pub comms_logger: CommsLoggerConfig = section(),
        /// Writes metrics for TensorBoard.
        pub tensorboard: EventFilesConfig = section().with_default("job_name", "tensorboard"),
        /// Writes metrics as CSV.
        pub csv_monitor: EventFilesConfig = section().with_default("job_name", "csv"),
    }
}

keys! {
    /// The log of collectives.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct CommsLoggerConfig {
        /// Prints a table of all collectives when the run ends.
        pub enabled: bool = flag(),
        /// Logs each collective when it completes, at level `info` (shown with RUST_LOG=info).
        pub verbose: bool = flag(),
        /// Includes all operations.
        pub prof_all: bool = flag().boolean(true),
        /// The operations to include if `prof_all` is false.
        pub prof_ops: Vec<String> = key(Value::Names(&COLLECTIVE_NAMES)).derived("`[]`"),
    }
}

keys! {
    /// Files of metrics in a directory of their own.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct EventFilesConfig {
        /// Writes the metrics of steps and evaluations to the files of this section.
        pub enabled: bool = flag(),
        /// The parent directory; empty: the run's output directory.
        pub output_path: String = key(Value::AnyText).text(""),
        /// The directory of the files, in `output_path`.
        pub job_name: String = key(Value::AnyText),
    }
}

/// The names of collectives in DeepSpeed's log and here, each with our collective, if there is one.
const COLLECTIVES: &[(&str, Option<&str>)] = &[
    ("all_reduce", Some("all_reduce")),
    ("all_reduce_coalesced", Some("all_reduce")),
    ("inference_all_reduce", Some("all_reduce")),
    ("reduce_scatter", Some("reduce_scatter")),
    ("reduce_scatter_tensor", Some("reduce_scatter")),
    ("all_gather", Some("all_gather")),
    ("all_gather_into_tensor", Some("all_gather")),
    ("all_to_all", Some("all_to_all")),
    ("all_to_all_single", Some("all_to_all")),
    ("all_to_all_strided", Some("all_to_all")),
    ("broadcast", Some("broadcast")),
    ("send", Some("send")),
    ("isend", Some("send")),
    ("recv", Some("recv")),
    ("irecv", Some("recv")),
    ("barrier", Some("barrier")),
    ("monitored_barrier", Some("barrier")),
    ("reduce", None),
    ("gather", None),
    ("scatter", None),
    ("all_gather_object", None),
    ("broadcast_object_list", None),
    ("batch_isend_irecv", None),
];

const COLLECTIVE_NAMES: [&str; COLLECTIVES.len()] = {
    let mut names = [""; COLLECTIVES.len()];
    let mut index = 0;
    while index < names.len() {
        names[index] = COLLECTIVES[index].0;
        index += 1;
    }
    names
};

/// An array of names, converted to lower case.
impl FieldValue for Vec<String> {
    fn read(section: &Section<'_>, name: &str) -> Self {
        section.elements::<String>(name).iter().map(|name| name.to_ascii_lowercase()).collect()
    }

    fn written(&self) -> Option<Json> {
        Some(self.as_slice().into())
    }
}

impl CommsLoggerConfig {
    /// Returns whether the log includes an operation.
    pub fn logs(&self, op: &str) -> bool {
        let op = our_collective(op);
        self.prof_all || self.prof_ops.iter().any(|named| op.is_some() && our_collective(named) == op)
    }

    /// Notes operations that are never called.
    pub(crate) fn check(&self, section: &Section<'_>) {
        let is_never_called =
            |name: &&String| COLLECTIVES.iter().any(|(known, ours)| known == name && ours.is_none());
        for name in self.prof_ops.iter().filter(is_never_called) {
            let note = format!("`comms_logger.prof_ops`: \"{name}\" is never called here");
            section.note(note);
        }
    }
}

/// Returns our collective for a name.
fn our_collective(name: &str) -> Option<&'static str> {
    COLLECTIVES.iter().find(|(known, _)| *known == name).and_then(|(_, ours)| *ours)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn logger(prof_ops: &[&str]) -> CommsLoggerConfig {
        let prof_ops = prof_ops.iter().map(|&name| name.to_owned()).collect();
        CommsLoggerConfig { enabled: true, verbose: false, prof_all: false, prof_ops }
    }

    #[test]
    fn operations_are_chosen_by_the_names_that_deepspeed_has_for_them() {
        let ops = ["all_reduce", "all_gather", "all_to_all_strided", "reduce_scatter", "send", "split"];
        let logged = |prof_ops: &[&str]| ops.map(|op| logger(prof_ops).logs(op));
        let two = logged(&["all_gather_into_tensor", "all_to_all_single"]);
        assert_eq!(two, [false, true, true, false, false, false]);
        // These begin with, or end in, the name of another operation.
        assert_eq!(logged(&["all_gather_object", "reduce"]), [false; 6]);
        assert_eq!(logged(&["isend"]), [false, false, false, false, true, false]);
        assert!(CommsLoggerConfig { prof_all: true, ..logger(&[]) }.logs("split"));
    }

    fn read(prof_ops: &str) -> Result<Config, String> {
        let text = format!(r#"{{"train_batch_size": 1, "comms_logger": {{"prof_ops": {prof_ops}}}}}"#);
        Config::from_json_str(&text, "c.json").map_err(|error| error.to_string())
    }

    #[test]
    fn unknown_names_of_operations_are_refused_with_the_nearest_ones() {
        let message = read(r#"["all_reduce", "all_redcue", "custom"]"#).unwrap_err();
        let lines: Vec<&str> = message.lines().collect();
        let first = "c.json:1:69: `comms_logger.prof_ops[1]`: unknown name \"all_redcue\", did you mean \"all_reduce\"? \
                     (valid here: all_reduce, all_reduce_coalesced, ";
        assert!(lines[0].starts_with(first), "{message}");
        assert!(
            lines[3].starts_with("c.json:1:83: `comms_logger.prof_ops[2]`: unknown name \"custom\" (valid")
        );
        let message = read("[\"all_reduce\", 1]").unwrap_err();
        assert!(message.contains("`comms_logger.prof_ops`: expected an array of names"), "{message}");
    }

    #[test]
    fn names_are_read_in_any_case_and_what_nothing_calls_is_noted() {
        let config = read(r#"["All_Reduce", "gather"]"#).unwrap();
        assert_eq!(config.monitoring.comms_logger.prof_ops, ["all_reduce", "gather"]);
        let noted = config.notes.iter().filter(|note| note.contains("prof_ops")).collect::<Vec<_>>();
        assert!(noted.len() == 1 && noted[0].contains("\"gather\""), "{noted:?}");
    }
}
