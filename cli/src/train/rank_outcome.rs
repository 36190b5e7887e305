//! The result of a rank.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use ulysses::monitor::{RankComms, RankSummary, RunTotals, TraceData};
use ulysses::trainer::{StepMemory, TrainReport};

/// One rank's result.
#[derive(Serialize, Deserialize)]
pub(super) struct RankOutcome {
    /// Set on rank 0 if any step was trained.
    pub(super) reported: Option<Reported>,
    pub(super) train: TrainReport,
    pub(super) summary: RankSummary,
    /// This rank's trace of the traced steps.
    pub(super) trace: TraceData,
    pub(super) comms: RankComms,
    /// Peak bytes allocated by the rank; 0 if not counted.
    pub(super) peak_bytes: u64,
    /// Memory over one step.
    pub(super) step_memory: Option<StepMemory>,
    pub(super) peak_flops: Option<f64>,
}

/// The totals and record of rank 0.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Reported {
    pub(super) totals: RunTotals,
    /// `run.json` as of the start of the run.
    pub(super) record: Value,
}
