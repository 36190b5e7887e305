//! The tables of single changes and of other meshes.

use super::Report;
use super::table::{bytes, flops, plain_seconds};
use std::collections::BTreeSet;
use ulysses::estimate::{Alternative, MeshChoice, Throughput};

/// A table as text. Columns that do not apply to the plan are left out.
pub(super) struct Choices {
    pub(super) head: Vec<&'static str>,
    pub(super) rows: Vec<Vec<String>>,
    /// Text next to each row.
    pub(super) row_notes: Vec<Option<String>>,
    /// Head of these texts.
    pub(super) row_notes_head: &'static str,
    /// Notes on columns, and on rows without a time.
    pub(super) footnotes: Vec<String>,
}

const LONGEST: &str = "longest sequence (tokens)";

/// Returns the table of single changes, each with the config keys that make it.
pub(super) fn alternatives(report: &Report) -> Choices {
    let columns = Columns::of(report);
    let rows = report.alternatives.iter().map(|change| {
        let memory = [change.peak_bytes, change.persistent_bytes].map(|amount| bytes(amount as f64));
        let mut cells = vec![change.change.clone()];
        cells.extend(memory);
        cells.extend(columns.host(change.host_bytes_per_node));
        cells.extend([bytes(change.sent_bytes as f64), flops(change.flops)]);
        columns.row(cells, change.throughput.as_ref(), [longest(change.max_seq_len)])
    });
    let keys = |change: &Alternative| (!change.keys.is_empty()).then(|| change.keys.join(", "));
    Choices {
        head: columns.head(
            ["change", "peak per rank", "model state per rank"],
            &["sent per rank and step", "FLOPs per rank and step"],
            &[LONGEST],
        ),
        rows: rows.collect(),
        row_notes: report.alternatives.iter().map(keys).collect(),
        row_notes_head: "config keys",
        footnotes: lacking_rates(report.alternatives.iter().filter_map(|change| change.throughput.as_ref())),
    }
}

/// Returns the table of meshes with the same number of ranks and the same batch; those that do not fit come last.
pub(super) fn meshes(report: &Report) -> Choices {
    let columns = Columns::of(report);
    let (fitting, others): (Vec<_>, Vec<_>) = report.meshes.iter().partition(|mesh| mesh.fits);
    let meshes = [fitting, others].concat();
    let rows = meshes.iter().map(|mesh| {
        let sent = [mesh.intra_node_bytes, mesh.inter_node_bytes].map(|sent| bytes(sent as f64));
        let mut cells = vec![
            format!("{} × {}{}{}", mesh.dp, mesh.sp, ring(mesh.sp, mesh.ring_size), replicas(mesh)),
            mesh.zero_partition_axes.with_stage(mesh.zero_stage),
            mesh.micro_batch_size.to_string(),
        ];
        cells.extend([mesh.peak_bytes, mesh.persistent_bytes].map(|amount| bytes(amount as f64)));
        cells.extend(columns.host(mesh.host_bytes_per_node));
        cells.extend(sent);
        let fits = if mesh.fits { "yes" } else { "no" };
        columns.row(cells, mesh.throughput.as_ref(), [longest(mesh.max_seq_len), fits.to_owned()])
    });
    let first = ["dp × sp", "ZeRO stage", "micro batch", "peak per rank", "model state per rank"];
    let mut footnotes = lacking_rates(report.meshes.iter().filter_map(|mesh| mesh.throughput.as_ref()));
    if columns.has_budget {
        footnotes.push(format!(
            "micro batch: sequences, the largest that fits, else 1. {LONGEST}: the longest that fits with that micro batch"
        ));
    }
    Choices {
        head: columns.head(first, &["sent within node", "sent between nodes"], &[LONGEST, "fits"]),
        rows: rows.collect(),
        row_notes: meshes.iter().map(|mesh| marks(mesh)).collect(),
        row_notes_head: "",
        footnotes,
    }
}

/// Returns what distinguishes a mesh.
fn marks(mesh: &MeshChoice) -> Option<String> {
    let longest = mesh.is_longest.then(|| "longest sequence".to_owned());
    let marks: Vec<_> =
        mesh.reason.clone().into_iter().chain(longest).map(|mark| format!("◄ {mark}")).collect();
    (!marks.is_empty()).then(|| marks.join("  "))
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
        let host: &[&str] = if self.has_host { &["host memory per node"] } else { &[] };
        let with_times: &[&str] = if self.has_times { &["step time (s)", "tokens/s"] } else { &[] };
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

pub(super) fn times(throughput: Option<&Throughput>) -> [String; 2] {
    match throughput {
        Some(Throughput::Known { step_seconds, tokens_per_second }) => {
            [plain_seconds(*step_seconds), format!("{tokens_per_second:.0}")]
        }
        Some(Throughput::Unknown { .. }) | None => ["–", "–"].map(str::to_owned),
    }
}

fn lacking_rates<'a>(throughputs: impl Iterator<Item = &'a Throughput>) -> Vec<String> {
    let lacking = throughputs.filter_map(|throughput| match throughput {
        Throughput::Known { .. } => None,
        Throughput::Unknown { profile_lacks } => Some(format!("`{profile_lacks}`")),
    });
    let lacking: BTreeSet<String> = lacking.collect();
    let keys = lacking.into_iter().collect::<Vec<_>>().join(", ");
    let note = (!keys.is_empty()).then(|| format!("–: no time, because the machine profile lacks {keys}"));
    note.into_iter().collect()
}

fn longest(max_seq_len: Option<usize>) -> String {
    max_seq_len.map_or_else(|| "none".to_owned(), |longest| longest.to_string())
}

/// Formats the division of sp by a ring.
pub(super) fn ring(sp_size: usize, ring_size: usize) -> String {
    match ring_size {
        1 => String::new(),
        _ => format!(" (ring {ring_size} × ulysses {})", sp_size / ring_size),
    }
}

/// Formats the division of dp under hybrid sharding.
fn replicas(mesh: &MeshChoice) -> String {
    let replicas = |size: usize| format!(" ({} replicas of {})", mesh.dp / size, mesh.num_partitions);
    mesh.shard_size.map(replicas).unwrap_or_default()
}
