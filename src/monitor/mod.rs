//! What a run tells its user: metrics, progress, a trace of its steps, tables of its communication, and a summary at
//! the end.

mod appended;
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

pub use appended::is_out_of_space;
pub use breakdown::breakdown;
pub use comms::{
    Bandwidth, CommsTable, Groups, PlannedVolume, RankComms, Straggling, Volume, straggling, volumes,
};
pub use csv::CsvFiles;
pub use escape::escaped;
pub use event_files::EventFile;
pub use metrics::{EvalMetrics, Metrics, MetricsWriter, TimeShares};
pub use progress::Progress;
pub use step_line::{MAX_COLUMNS, live_lines};
pub use summary::{RankSummary, RunSummary, RunTotals, VerboseSummary};
pub use table::{bytes as grouped_bytes, format_bytes, format_flops};
pub use trace::{MemorySample, Slice, Traced, Tracer, write_trace};
