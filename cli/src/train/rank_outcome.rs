//! What a rank ends with.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use ulysses::monitor::{RankComms, RankSummary, RunTotals, TraceData};
use ulysses::trainer::{StepMemory, TrainReport};

/// One rank's result.
#[derive(Serialize, Deserialize)]
pub(super) struct RankOutcome {
    /// On rank 0, if there was anything to do.
    pub(super) reported: Option<Reported>,
    pub(super) train: TrainReport,
    pub(super) summary: RankSummary,
    /// What this rank did in the steps that are traced.
    pub(super) trace: TraceData,
    pub(super) comms: RankComms,
    /// The most that the rank held at a time; 0 where nobody counts.
    pub(super) peak_bytes: u64,
    /// What it held over one step.
    pub(super) step_memory: Option<StepMemory>,
    pub(super) peak_flops: Option<f64>,
}

/// What rank 0 has recorded.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Reported {
    pub(super) totals: RunTotals,
    /// `run.json`, as it was when the run began.
    pub(super) record: Value,
}
