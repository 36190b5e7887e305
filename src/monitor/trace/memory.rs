//! The memory of ranks, as counters of a trace.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use ulysses_kernels::memory::{ByCategory, Category, live_by_category, live_bytes};

/// The memory of a rank from one time to its next sample: the peak in a part of a step, or the rest after the step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct MemorySample {
    /// Global rank.
    pub rank: u64,
    /// The start, in microseconds since 1970.
    pub begin_us: f64,
    /// Total bytes.
    pub bytes: u64,
    /// Bytes by category.
    pub by_category: ByCategory,
}

impl MemorySample {
    /// Returns the memory of this thread now.
    pub(super) fn now(rank: u64, begin_us: f64) -> Self {
        let bytes = u64::try_from(live_bytes()).unwrap_or(0);
        Self { rank, begin_us, bytes, by_category: live_by_category() }
    }

    /// Returns a counter by category and, because a counter's values may be stacked, a separate one of the total.
    pub(super) fn events(&self, ts: f64) -> [Value; 2] {
        let names = Category::ALL.map(|category| category.name().to_owned());
        let by_category: Map<String, Value> =
            names.into_iter().zip(self.by_category.values().map(Value::from)).collect();
        let counter = |what: &str, args: Value| {
            let name = format!("rank {} {what}", self.rank);
            json!({ "ph": "C", "pid": 0, "tid": self.rank, "ts": ts, "name": name, "args": args })
        };
        [
            counter("allocated bytes", json!({ "total": self.bytes })),
            counter("allocated bytes by category", by_category.into()),
        ]
    }
}
