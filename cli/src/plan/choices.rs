//! The tables of what one change would make of a plan, and of other meshes.

use super::Report;
use super::table::{bytes, flops, seconds};
use std::collections::BTreeSet;
use ulysses::estimate::{MeshChoice, Throughput};

/// A table as text: what does not apply to the plan has no column.
pub(super) struct Choices {
    pub(super) head: Vec<&'static str>,
    pub(super) rows: Vec<Vec<String>>,
    /// What stands beside a row.
    pub(super) remarks: Vec<Option<String>>,
    /// Why some rows have no time.
    pub(super) note: Option<String>,
}

/// What one change would make of it.
pub(super) fn alternatives(report: &Report) -> Choices {
    let columns = Columns::of(report);
    let rows = report.alternatives.iter().map(|change| {
        let (peak, sent) = (bytes(change.peak_bytes as f64), bytes(change.sent_bytes as f64));
        let cells = vec![change.change.clone(), peak, sent, flops(change.flops)];
        columns.row(cells, change.throughput.as_ref(), [longest(change.max_seq_len)])
    });
    Choices {
        head: columns.head(&["change", "peak", "sent", "arithmetic"], &["longest sequence"]),
        rows: rows.collect(),
        remarks: vec![None; report.alternatives.len()],
        note: note(report.alternatives.iter().filter_map(|change| change.throughput.as_ref())),
    }
}

/// Meshes of as many ranks for the same batch.
pub(super) fn meshes(report: &Report) -> Choices {
    let columns = Columns::of(report);
    let rows = report.meshes.iter().map(|mesh| {
        let sent = [mesh.intra_node_bytes, mesh.inter_node_bytes].map(|sent| bytes(sent as f64));
        let mut cells = vec![
            format!("{} × {}{}", mesh.dp, mesh.sp, replicas(mesh)),
            mesh.zero_stage.to_string(),
            bytes(mesh.peak_bytes as f64),
        ];
        cells.extend(sent);
        let fits = if mesh.fits { "yes" } else { "no" };
        columns.row(cells, mesh.throughput.as_ref(), [longest(mesh.max_seq_len), fits.to_owned()])
    });
    let head = ["dp × sp", "ZeRO stage", "peak", "within the node", "between nodes"];
    Choices {
        head: columns.head(&head, &["longest sequence", "fits"]),
        rows: rows.collect(),
        remarks: report.meshes.iter().map(|mesh| mesh.reason.clone()).collect(),
        note: note(report.meshes.iter().filter_map(|mesh| mesh.throughput.as_ref())),
    }
}

/// Which columns a plan has besides those that all have.
struct Columns {
    has_times: bool,
    has_budget: bool,
}

impl Columns {
    fn of(report: &Report) -> Self {
        Self { has_times: report.step_time.is_some(), has_budget: report.budget.is_some() }
    }

    fn head(&self, of_all: &[&'static str], of_budget: &[&'static str]) -> Vec<&'static str> {
        let of_times: &[&str] = if self.has_times { &["step", "tokens/s"] } else { &[] };
        let of_budget = if self.has_budget { of_budget } else { &[] };
        [of_all, of_times, of_budget].concat()
    }

    fn row<const N: usize>(
        &self,
        mut cells: Vec<String>,
        throughput: Option<&Throughput>,
        of_budget: [String; N],
    ) -> Vec<String> {
        if self.has_times {
            cells.extend(times(throughput));
        }
        if self.has_budget {
            cells.extend(of_budget);
        }
        cells
    }
}

fn times(throughput: Option<&Throughput>) -> [String; 2] {
    match throughput {
        Some(Throughput::Known { step_seconds, tokens_per_second }) => {
            [seconds(*step_seconds), format!("{tokens_per_second:.0}")]
        }
        Some(Throughput::Unknown { .. }) | None => ["–", "–"].map(str::to_owned),
    }
}

fn note<'a>(throughputs: impl Iterator<Item = &'a Throughput>) -> Option<String> {
    let lacking = throughputs.filter_map(|throughput| match throughput {
        Throughput::Known { .. } => None,
        Throughput::Unknown { profile_lacks } => Some(format!("`{profile_lacks}`")),
    });
    let lacking: BTreeSet<String> = lacking.collect();
    let keys = lacking.into_iter().collect::<Vec<_>>().join(", ");
    (!keys.is_empty()).then(|| format!("–: no time, since the machine profile does not tell {keys}"))
}

fn longest(max_seq_len: Option<usize>) -> String {
    max_seq_len.map_or_else(|| "none".to_owned(), |longest| longest.to_string())
}

/// How dp is divided where replicas of ZeRO's partitions are.
fn replicas(mesh: &MeshChoice) -> String {
    let replicas = |size: usize| format!(" ({} replicas of {size})", mesh.dp / size);
    mesh.shard_size.map(replicas).unwrap_or_default()
}
