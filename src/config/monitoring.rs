//! What a run tells of itself besides `metrics.jsonl`: `wall_clock_breakdown`, `comms_logger`, `flops_profiler`,
//! `tensorboard` and `csv_monitor`.

use super::reader::Section;
use super::vocabulary::COLLECTIVES;
use serde::Serialize;

/// DeepSpeed's logs, profilers and monitors. All are off by default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MonitoringConfig {
    /// `wall_clock_breakdown`: print the time of the phases of a step.
    pub wall_clock_breakdown: bool,
    /// `comms_logger`.
    pub comms_logger: CommsLoggerConfig,
    /// `flops_profiler`.
    pub flops_profiler: FlopsProfilerConfig,
    /// `tensorboard`.
    pub tensorboard: EventFilesConfig,
    /// `csv_monitor`.
    pub csv_monitor: EventFilesConfig,
}

/// A table of all collectives when the run ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CommsLoggerConfig {
    /// Whether there is one.
    pub enabled: bool,
    /// Log every collective when it completes, at level `info`.
    pub verbose: bool,
    /// Count all operations; otherwise those of `prof_ops`.
    pub prof_all: bool,
    /// Operations by DeepSpeed's names or ours, in lower case: `all_reduce`, `all_to_all_single`, …
    pub prof_ops: Vec<String>,
}

/// A profile of one step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FlopsProfilerConfig {
    /// Whether there is one.
    pub enabled: bool,
    /// The step, from 1.
    pub profile_step: u64,
    /// Tell the parts of the model besides the sums.
    pub detailed: bool,
    /// The file to write to; standard error without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_file: Option<String>,
}

/// Files of metrics in a directory of their own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EventFilesConfig {
    /// Whether they are written.
    pub enabled: bool,
    /// The directory above that of the job; the output directory of the run where it is empty.
    pub output_path: String,
    /// The directory of the job.
    pub job_name: String,
}

impl CommsLoggerConfig {
    /// Whether an operation is in the table.
    pub fn tells(&self, op: &str) -> bool {
        let op = counted_as(op);
        self.prof_all || self.prof_ops.iter().any(|named| op.is_some() && counted_as(named) == op)
    }

    fn read(section: &Section<'_>) -> Self {
        Self {
            enabled: section.boolean("enabled"),
            verbose: section.boolean("verbose"),
            prof_all: section.boolean("prof_all"),
            prof_ops: read_ops(section),
        }
    }
}

/// The operation of ours that a name stands for.
fn counted_as(name: &str) -> Option<&'static str> {
    COLLECTIVES.iter().find(|(known, _)| *known == name).and_then(|(_, ours)| *ours)
}

fn read_ops(section: &Section<'_>) -> Vec<String> {
    let ops = section.texts("prof_ops").into_iter().flatten();
    let ops: Vec<String> = ops.map(|name| name.to_ascii_lowercase()).collect();
    let never_called =
        |name: &&String| COLLECTIVES.iter().any(|(known, ours)| known == name && ours.is_none());
    for name in ops.iter().filter(never_called) {
        section.note(format!("`comms_logger.prof_ops`: \"{name}\" is an operation that nothing here calls"));
    }
    ops
}

impl FlopsProfilerConfig {
    fn read(section: &Section<'_>) -> Self {
        Self {
            enabled: section.boolean("enabled"),
            profile_step: section.integer("profile_step").unwrap_or(1),
            detailed: section.boolean("detailed"),
            output_file: section.text("output_file"),
        }
    }
}

impl EventFilesConfig {
    fn read(section: &Section<'_>) -> Self {
        Self {
            enabled: section.boolean("enabled"),
            output_path: section.text("output_path").unwrap_or_default(),
            job_name: section.text("job_name").unwrap_or_default(),
        }
    }
}

impl MonitoringConfig {
    pub(super) fn read(root: &Section<'_>) -> Self {
        Self {
            wall_clock_breakdown: root.boolean("wall_clock_breakdown"),
            comms_logger: CommsLoggerConfig::read(&root.section("comms_logger")),
            flops_profiler: FlopsProfilerConfig::read(&root.section("flops_profiler")),
            tensorboard: EventFilesConfig::read(&root.section("tensorboard")),
            csv_monitor: EventFilesConfig::read(&root.section("csv_monitor")),
        }
    }
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
        let told = |prof_ops: &[&str]| ops.map(|op| logger(prof_ops).tells(op));
        let two = told(&["all_gather_into_tensor", "all_to_all_single"]);
        assert_eq!(two, [false, true, true, false, false, false]);
        // These begin with, or end in, the name of another operation.
        assert_eq!(told(&["all_gather_object", "reduce"]), [false; 6]);
        assert_eq!(told(&["isend"]), [false, false, false, false, true, false]);
        assert!(CommsLoggerConfig { prof_all: true, ..logger(&[]) }.tells("split"));
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
