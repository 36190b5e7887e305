//! What a run tells its user: metrics, progress, and a summary at the end.

mod metrics;
mod progress;
mod summary;

pub use metrics::{EvalMetrics, Metrics, MetricsWriter, TimeShares};
pub use progress::{Progress, above_progress};
pub use summary::{RankSummary, RunSummary, RunTotals};
