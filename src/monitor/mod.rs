//! The output of a run: metrics, progress lines, traces, communication tables, and a final summary.

mod append_file;
mod breakdown;
mod comms;
mod csv;
mod escape;
mod event_files;
mod metrics;
mod progress;
mod step_line;
mod summary;
mod table;
mod trace;

pub use append_file::is_out_of_space;
pub use breakdown::breakdown;
pub use comms::{
    Bandwidth, CommsTable, Groups, PlannedVolume, RankComms, StragglerStats, Volume, straggler_stats, volumes,
};
pub use csv::CsvFiles;
pub use escape::{brief, escaped, write_line};
pub use event_files::EventFile;
pub use metrics::{CheckpointSource, EvalMetrics, Metrics, MetricsWriter, RestartMetrics, TimeShares};
pub use progress::Progress;
pub use step_line::{MAX_COLUMNS, live_lines};
pub use summary::{RankSummary, RunSummary, RunTotals, StageIdle, VerboseSummary};
pub use table::{bytes as grouped_bytes, counted, format_bytes, format_flops, format_table};
pub use trace::{MemorySample, Slice, TraceData, Tracer, write_trace};
