//! The tables of candidates: single changes, other meshes, and settings that fit.

use super::Report;
use super::table::{Table, flops, plain_seconds};
use std::collections::BTreeSet;
use ulysses::estimate::{Alternative, Candidate, MeshChoice, StepTime};

const LONGEST: &str = "longest sequence (tokens)";

impl Table<'_, Candidate> {
    fn push_memory(&mut self, report: &Report) {
        self.push_bytes("peak per rank", |candidate| candidate.plan.peak_bytes);
        self.push_bytes("model state per rank", |candidate| candidate.plan.persistent_bytes);
        let changes = report.alternatives.iter().map(|change| &change.candidate);
        let meshes = report.meshes.iter().map(|mesh| &mesh.candidate);
        if changes.chain(meshes).any(|candidate| candidate.host_bytes_per_node > 0) {
            self.push_host();
        }
    }

    pub(super) fn push_host(&mut self) {
        self.push_bytes("host memory per node", |candidate| candidate.host_bytes_per_node);
    }

    /// Adds step times, if there is a machine profile.
    pub(super) fn push_times(&mut self) {
        if self.items.iter().any(|candidate| candidate.time.is_some() || candidate.profile_lacks.is_some()) {
            let known = |candidate: &Candidate, format: fn(&StepTime) -> String| {
                candidate.time.as_ref().map_or_else(|| "–".to_owned(), format)
            };
            self.push("step time (s)", |candidate| {
                known(candidate, |time| plain_seconds(time.total_seconds))
            });
            self.push("tokens/s", |candidate| {
                known(candidate, |time| format!("{:.0}", time.tokens_per_second))
            });
        }
    }

    /// Adds step times with a note on missing rates, and the longest sequences if there is a budget.
    fn push_ratings(&mut self, report: &Report) {
        self.push_times();
        let lacking = self.items.iter().filter_map(|candidate| candidate.profile_lacks);
        let lacking = lacking.map(|key| format!("`{key}`"));
        let keys = lacking.collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>().join(", ");
        if !keys.is_empty() {
            self.footnotes.push(format!("–: no time, because the machine profile lacks {keys}"));
        }
        if report.available.is_some() {
            self.push(LONGEST, |candidate| {
                candidate.max_seq_len.map_or_else(|| "none".to_owned(), |longest| longest.to_string())
            });
        }
    }
}

/// Returns the table of single changes, each with the config keys that make it.
pub(super) fn alternatives(report: &Report) -> Table<'_, Candidate> {
    let changes = &report.alternatives;
    let rows = changes.iter().map(|change| (&change.candidate, [change.change.clone()]));
    let mut table = Table::new(["change"], rows);
    table.push_memory(report);
    table.push_bytes("sent per rank and step", |candidate| candidate.plan.sent.total());
    table.push("FLOPs per rank and step", |Candidate { plan, .. }| {
        flops(plan.model_flops + plan.recompute_flops)
    });
    table.push_ratings(report);
    let keys = |change: &Alternative| (!change.keys.is_empty()).then(|| change.keys.join(", "));
    table.row_notes = changes.iter().map(keys).collect();
    table.row_notes_head = "config keys";
    table
}

/// Returns the table of meshes with the same number of ranks and the same batch; those that do not fit come last.
pub(super) fn meshes(report: &Report) -> Table<'_, Candidate> {
    let mut meshes: Vec<&MeshChoice> = report.meshes.iter().collect();
    meshes.sort_by_key(|mesh| !mesh.candidate.fits());
    let settings = |MeshChoice { candidate, .. }: &MeshChoice| {
        let config = &candidate.workload.config;
        let (dp, partitions) = (config.mesh.dp_size, config.zero_world_size());
        let replicas = |size: usize| format!(" ({} replicas of {partitions})", dp / size);
        let replicas = config.zero_shard_size().map(replicas).unwrap_or_default();
        [
            format!("{}{replicas}", notation(candidate)),
            config.zero_axes().with_stage(config.zero.stage),
            config.micro_batch_size.to_string(),
        ]
    };
    let rows = meshes.iter().map(|mesh| (&mesh.candidate, settings(mesh)));
    let mut table = Table::new(["dp × sp", "ZeRO stage", "micro batch"], rows);
    table.push_memory(report);
    table.push_bytes("sent within node", |candidate| candidate.plan.sent.intra_node_bytes);
    table.push_bytes("sent between nodes", |candidate| candidate.plan.sent.inter_node_bytes);
    table.push_ratings(report);
    if report.available.is_some() {
        table.push("fits", |candidate| if candidate.fits() { "yes" } else { "no" }.to_owned());
        table.footnotes.push(format!(
            "micro batch: sequences, the largest that fits, else 1. {LONGEST}: the longest that fits with that micro batch"
        ));
    }
    table.row_notes = meshes.iter().map(|mesh| marks(mesh)).collect();
    table
}

/// Returns what distinguishes a mesh.
fn marks(mesh: &MeshChoice) -> Option<String> {
    let longest = mesh.is_longest.then(|| "longest sequence".to_owned());
    let marks: Vec<_> =
        mesh.reason.clone().into_iter().chain(longest).map(|mark| format!("◄ {mark}")).collect();
    (!marks.is_empty()).then(|| marks.join("  "))
}

/// Formats the mesh of a candidate.
pub(super) fn notation(candidate: &Candidate) -> String {
    let config = &candidate.workload.config;
    let (dp, sp) = (config.mesh.dp_size, config.mesh.sp_size);
    format!("{dp} × {sp}{}", ring(sp, config.ulysses.ring_size))
}

/// Formats the division of sp by a ring.
pub(super) fn ring(sp_size: usize, ring_size: usize) -> String {
    match ring_size {
        1 => String::new(),
        _ => format!(" (ring {ring_size} × ulysses {})", sp_size / ring_size),
    }
}
