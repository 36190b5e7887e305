//! What a run tells of itself besides `metrics.jsonl`: `wall_clock_breakdown`, `comms_logger`, `flops_profiler`,
//! `tensorboard` and `csv_monitor`.

use super::reader::Section;
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
    /// Operations by DeepSpeed's names or ours: `all_reduce`, `all_to_all_single`, …
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
    /// Whether an operation is in the table. DeepSpeed's names may have endings that ours lack (`_into_tensor`).
    pub fn tells(&self, op: &str) -> bool {
        let op = op.strip_suffix("_strided").unwrap_or(op);
        self.prof_all || self.prof_ops.iter().any(|named| named.starts_with(op))
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

fn read_ops(section: &Section<'_>) -> Vec<String> {
    let ops = section.texts("prof_ops");
    if ops.contains(&None) {
        section.contradiction("prof_ops", "an array of names of operations, as in [\"all_reduce\"]");
    }
    ops.into_iter().flatten().collect()
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

    #[test]
    fn operations_are_chosen_by_the_names_that_deepspeed_has_for_them() {
        let prof_ops = ["all_gather_into_tensor", "all_to_all_single"].map(String::from).to_vec();
        let logger = CommsLoggerConfig { enabled: true, verbose: false, prof_all: false, prof_ops };
        let told = ["all_reduce", "all_gather", "all_to_all_strided", "reduce_scatter"];
        assert_eq!(told.map(|op| logger.tells(op)), [false, true, true, false]);
        assert!(CommsLoggerConfig { prof_all: true, ..logger }.tells("all_reduce"));
    }
}
