//! What ranks held, as counters of a trace.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use ulysses_kernels::memory::{ByCategory, Category, live_by_category, live_bytes};

/// What a rank held from a moment on, until its next sample: the most in a part of a step, or what is left after it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct MemorySample {
    /// Global rank.
    pub rank: u64,
    /// From when on, in microseconds since 1970.
    pub begin_us: f64,
    /// Bytes.
    pub bytes: u64,
    /// What for.
    pub by_category: ByCategory,
}

impl MemorySample {
    /// What this thread holds now.
    pub(super) fn now(rank: u64, begin_us: f64) -> Self {
        let bytes = u64::try_from(live_bytes()).unwrap_or(0);
        Self { rank, begin_us, bytes, by_category: live_by_category() }
    }

    /// The counter of what things are for and, since a counter's values may be drawn on top of each other, another one of all.
    pub(super) fn events(&self, ts: f64) -> [Value; 2] {
        let names = Category::ALL.map(|category| category.name().to_owned());
        let by_category: Map<String, Value> =
            names.into_iter().zip(self.by_category.values().map(Value::from)).collect();
        let counter = |what: &str, args: Value| {
            let name = format!("rank {} {what}", self.rank);
            json!({ "ph": "C", "pid": 0, "tid": self.rank, "ts": ts, "name": name, "args": args })
        };
        [
            counter("bytes held", json!({ "total": self.bytes })),
            counter("bytes held by category", by_category.into()),
        ]
    }
}
