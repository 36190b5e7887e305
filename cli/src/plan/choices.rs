//! The tables of single changes and of other meshes.

use super::Report;
use super::table::{bytes, flops, seconds};
use std::collections::BTreeSet;
use ulysses::estimate::{MeshChoice, Throughput};

/// A table as text. Columns that do not apply to the plan are left out.
pub(super) struct Choices {
    pub(super) head: Vec<&'static str>,
    pub(super) rows: Vec<Vec<String>>,
    /// Text next to each row.
    pub(super) row_notes: Vec<Option<String>>,
    /// Why some rows have no time.
    pub(super) footnote: Option<String>,
}

/// Returns the table of single changes.
pub(super) fn alternatives(report: &Report) -> Choices {
    let columns = Columns::of(report);
    let rows = report.alternatives.iter().map(|change| {
        let (peak, sent) = (bytes(change.peak_bytes as f64), bytes(change.sent_bytes as f64));
        let mut cells = vec![change.change.clone(), peak];
        cells.extend(columns.host(change.host_bytes_per_node));
        cells.extend([sent, flops(change.flops)]);
        columns.row(cells, change.throughput.as_ref(), [longest(change.max_seq_len)])
    });
    Choices {
        head: columns.head(
            ["change", "peak per rank"],
            &["sent per rank", "FLOPs per rank"],
            &["longest sequence"],
        ),
        rows: rows.collect(),
        row_notes: vec![None; report.alternatives.len()],
        footnote: footnote(report.alternatives.iter().filter_map(|change| change.throughput.as_ref())),
    }
}

/// Returns the table of meshes with the same number of ranks and the same batch.
pub(super) fn meshes(report: &Report) -> Choices {
    let columns = Columns::of(report);
    let rows = report.meshes.iter().map(|mesh| {
        let sent = [mesh.intra_node_bytes, mesh.inter_node_bytes].map(|sent| bytes(sent as f64));
        let mut cells = vec![
            format!("{} × {}{}", mesh.dp, mesh.sp, replicas(mesh)),
            mesh.zero_partition_axes.with_stage(mesh.zero_stage),
            bytes(mesh.peak_bytes as f64),
        ];
        cells.extend(columns.host(mesh.host_bytes_per_node));
        cells.extend(sent);
        let fits = if mesh.fits { "yes" } else { "no" };
        columns.row(cells, mesh.throughput.as_ref(), [longest(mesh.max_seq_len), fits.to_owned()])
    });
    let (first, sent) =
        (["dp × sp", "ZeRO stage", "peak per rank"], ["sent within node", "sent between nodes"]);
    Choices {
        head: columns.head(first, &sent, &["longest sequence", "fits"]),
        rows: rows.collect(),
        row_notes: report.meshes.iter().map(|mesh| mesh.reason.clone()).collect(),
        footnote: footnote(report.meshes.iter().filter_map(|mesh| mesh.throughput.as_ref())),
    }
}

/// The optional columns of a plan's tables.
struct Columns {
    has_host: bool,
    has_times: bool,
    has_budget: bool,
}

impl Columns {
    fn of(report: &Report) -> Self {
        let of_changes = report.alternatives.iter().map(|change| change.host_bytes_per_node);
        let has_host =
            of_changes.chain(report.meshes.iter().map(|mesh| mesh.host_bytes_per_node)).any(|host| host > 0);
        Self { has_host, has_times: report.step_time.is_some(), has_budget: report.budget.is_some() }
    }

    fn host(&self, bytes_per_node: u64) -> Option<String> {
        self.has_host.then(|| bytes(bytes_per_node as f64))
    }

    fn head<const N: usize>(
        &self,
        memory: [&'static str; N],
        always: &[&'static str],
        with_budget: &[&'static str],
    ) -> Vec<&'static str> {
        let host: &[&str] = if self.has_host { &["host per node"] } else { &[] };
        let with_times: &[&str] = if self.has_times { &["step time", "tokens/s"] } else { &[] };
        let with_budget = if self.has_budget { with_budget } else { &[] };
        [&memory, host, always, with_times, with_budget].concat()
    }

    fn row<const N: usize>(
        &self,
        mut cells: Vec<String>,
        throughput: Option<&Throughput>,
        with_budget: [String; N],
    ) -> Vec<String> {
        if self.has_times {
            cells.extend(times(throughput));
        }
        if self.has_budget {
            cells.extend(with_budget);
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

fn footnote<'a>(throughputs: impl Iterator<Item = &'a Throughput>) -> Option<String> {
    let lacking = throughputs.filter_map(|throughput| match throughput {
        Throughput::Known { .. } => None,
        Throughput::Unknown { profile_lacks } => Some(format!("`{profile_lacks}`")),
    });
    let lacking: BTreeSet<String> = lacking.collect();
    let keys = lacking.into_iter().collect::<Vec<_>>().join(", ");
    (!keys.is_empty()).then(|| format!("–: no time, because the machine profile lacks {keys}"))
}

fn longest(max_seq_len: Option<usize>) -> String {
    max_seq_len.map_or_else(|| "none".to_owned(), |longest| longest.to_string())
}

/// Formats the division of dp under hybrid sharding.
fn replicas(mesh: &MeshChoice) -> String {
    let replicas = |size: usize| format!(" ({} replicas of {})", mesh.dp / size, mesh.num_partitions);
    mesh.shard_size.map(replicas).unwrap_or_default()
}
