//! The table of collectives of `comms_logger`, in DeepSpeed's terms.

use super::table::{bytes, format_table};
use crate::comm::{CallTimes, CollectiveOp, EachCall, RING_AXIS, TP_AXIS};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};

/// The collectives of one rank, measured and planned.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RankComms {
    /// Calls by axis, operation and size.
    pub calls: Vec<CallTimes>,
    /// Every single call, if they were recorded.
    pub each: Vec<EachCall>,
    /// Planned bytes by axis and purpose.
    pub planned: Vec<PlannedVolume>,
    /// Measured bytes by axis and operation.
    pub sent: Vec<(String, CollectiveOp, u64)>,
    /// Bytes within its node and between nodes, if there are several.
    pub by_node: Vec<Volume>,
}

/// Bytes that a rank should send, by plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlannedVolume {
    /// The axis of the mesh.
    pub axis: String,
    /// The operation.
    pub op: CollectiveOp,
    /// The purpose.
    pub purpose: String,
    /// Planned bytes.
    pub sent_bytes: u64,
}

/// The bandwidths of equal calls, as defined by nccl-tests: `algbw` is the size of the collective divided by the time,
/// `busbw` the bytes that each rank sends divided by the time. DeepSpeed's log calls them `tput` and `busbw`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bandwidth {
    /// Algorithm bandwidth, bytes per second.
    pub algbw: f64,
    /// Bus bandwidth, bytes per second.
    pub busbw: f64,
}

impl Bandwidth {
    /// Returns the bandwidths of calls.
    pub fn of(calls: &CallTimes) -> Self {
        use CollectiveOp::*;
        let ranks = calls.ranks as f64;
        let seconds = calls.seconds / calls.calls.max(1) as f64;
        // The size is that of the whole collective on one rank: for a gather, its output.
        let (size, factor) = match calls.op {
            AllGather | Gather => (ranks * calls.input_bytes as f64, (ranks - 1.0) / ranks),
            AllReduce => (calls.input_bytes as f64, 2.0 * (ranks - 1.0) / ranks),
            ReduceScatter | AllToAll | AllToAllStrided | Scatter => {
                (calls.input_bytes as f64, (ranks - 1.0) / ranks)
            }
            Broadcast | Reduce | Send | Recv | Barrier | Split => (calls.input_bytes as f64, 1.0),
        };
        let algbw = if seconds > 0.0 { size / seconds } else { 0.0 };
        Self { algbw, busbw: factor * algbw }
    }
}

/// The stragglers in the calls of an operation along an axis.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StragglerStats {
    /// The axis of the mesh.
    pub axis: String,
    /// The operation.
    pub op: CollectiveOp,
    /// Calls per rank.
    pub calls: u64,
    /// Time in these calls, mean over ranks.
    pub seconds: f64,
    /// Time that a rank waited for the last one to arrive, mean over ranks: its time minus the shortest time in the group.
    pub straggler_seconds: f64,
    /// The rank that most often arrived last, and the share of its group's calls in which it did.
    pub latest: (usize, f64),
}

/// The groups of each axis: `groups[axis]` lists the global ranks of each group.
pub type Groups = BTreeMap<String, Vec<Vec<usize>>>;

/// Compares all ranks of the mesh call by call; every single call must have been recorded.
pub fn straggler_stats(ranks: &[RankComms], groups: &Groups) -> Vec<StragglerStats> {
    let kinds = ranks.first().map_or(&[][..], |rank| &rank.each);
    kinds.iter().map(|kind| stats_of(ranks, groups, &kind.axis, kind.op)).collect()
}

fn stats_of(ranks: &[RankComms], groups: &Groups, axis: &str, op: CollectiveOp) -> StragglerStats {
    let seconds_of = |rank: usize| -> &[f32] {
        let each = ranks.get(rank).map_or(&[][..], |rank| &rank.each);
        each.iter().find(|each| each.axis == axis && each.op == op).map_or(&[], |each| &each.seconds)
    };
    let (mut total, mut beyond, mut calls) = (0.0, 0.0, 0);
    let mut latest = (0, 0.0);
    for group in groups.get(axis).into_iter().flatten() {
        let count = group.iter().map(|&rank| seconds_of(rank).len()).min().unwrap_or(0);
        let mut came_last = vec![0_u64; group.len()];
        for call in 0..count {
            let times: Vec<f64> = group.iter().map(|&rank| f64::from(seconds_of(rank)[call])).collect();
            let shortest = times.iter().copied().fold(f64::INFINITY, f64::min);
            if let Some(member) = times.iter().position(|&time| time == shortest) {
                came_last[member] += 1;
            }
            total += times.iter().sum::<f64>();
            beyond += times.iter().map(|time| time - shortest).sum::<f64>();
        }
        calls = calls.max(count as u64);
        for (&rank, &often) in group.iter().zip(&came_last) {
            let share = often as f64 / count.max(1) as f64;
            if share > latest.1 {
                latest = (rank, share);
            }
        }
    }
    let mean = 1.0 / ranks.len().max(1) as f64;
    let (seconds, straggler_seconds) = (mean * total, mean * beyond);
    StragglerStats { axis: axis.to_owned(), op, calls, seconds, straggler_seconds, latest }
}

/// Bytes sent by all ranks, measured and planned for the same training steps and evaluations.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Volume {
    /// `Ulysses exchange`, `ring attention`, `ZeRO and data parallelism`, `all-reduce over sp` or `tensor parallelism`; of all these, `within
    /// nodes` and `between nodes`.
    pub what: String,
    /// Planned bytes by purpose.
    pub planned: Vec<(String, u64)>,
    /// Total planned bytes.
    pub planned_bytes: u64,
    /// Measured bytes, counted by the backend.
    pub sent_bytes: u64,
}

/// Returns the measured and planned bytes, by kind.
pub fn volumes(ranks: &[RankComms]) -> Vec<Volume> {
    let is_exchange = |op| matches!(op, CollectiveOp::AllToAll | CollectiveOp::AllToAllStrided);
    let is_planned = ranks
        .iter()
        .flat_map(|rank| &rank.planned)
        .any(|volume| is_exchange(volume.op) && volume.axis == RING_AXIS && volume.sent_bytes > 0);
    let is_counted = ranks.iter().flat_map(|rank| &rank.sent).any(|(axis, ..)| axis == RING_AXIS);
    // A ring of all sp ranks has their group, whose bytes are counted for sp, with those of linear attention.
    let is_ring_over_sp = is_planned && !is_counted;
    let kind = |axis: &str, op| match (is_exchange(op), axis) {
        (_, TP_AXIS) => 4,
        (true, axis) => usize::from(axis == RING_AXIS || is_ring_over_sp),
        (false, "sp" | "tokens") => 3,
        // dp, and the axes of ZeRO's shards.
        (false, _) => 2,
    };
    let names = [
        "Ulysses exchange",
        "ring attention",
        "ZeRO and data parallelism",
        "all-reduce over sp",
        "tensor parallelism",
    ];
    let of_kind = |index: usize, what: &&str| {
        let mut planned: BTreeMap<String, u64> = BTreeMap::new();
        for volume in ranks.iter().flat_map(|rank| &rank.planned) {
            if kind(&volume.axis, volume.op) == index {
                *planned.entry(volume.purpose.clone()).or_default() += volume.sent_bytes;
            }
        }
        let sent = ranks.iter().flat_map(|rank| &rank.sent);
        let sent_bytes = sent.filter(|(axis, op, _)| kind(axis, *op) == index).map(|(.., bytes)| bytes).sum();
        let planned_bytes = planned.values().sum();
        Volume { what: (*what).to_owned(), planned: planned.into_iter().collect(), planned_bytes, sent_bytes }
    };
    let all = names.iter().enumerate().map(|(index, what)| of_kind(index, what));
    let mut by_node: Vec<Volume> = Vec::new();
    for volume in ranks.iter().flat_map(|rank| &rank.by_node) {
        match by_node.iter_mut().find(|sum| sum.what == volume.what) {
            Some(sum) => {
                sum.planned_bytes += volume.planned_bytes;
                sum.sent_bytes += volume.sent_bytes;
            }
            None => by_node.push(volume.clone()),
        }
    }
    all.chain(by_node).filter(|volume| volume.planned_bytes + volume.sent_bytes > 0).collect()
}

/// The tables as text, with the operations that `shows` selects.
pub struct CommsTable<'a> {
    /// All ranks of the mesh.
    pub ranks: &'a [RankComms],
    /// The groups of each axis.
    pub groups: &'a Groups,
    /// Selects the operations in the table.
    pub shows: &'a dyn Fn(CollectiveOp) -> bool,
}

impl Display for CommsTable<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "collectives of rank 0; time that the rank spent in the calls")?;
        let header =
            ["op", "axis", "message size", "count", "total (ms)", "avg (ms)", "algbw (GB/s)", "busbw (GB/s)"];
        let mut rows = vec![header.map(str::to_owned).to_vec()];
        let calls = self.ranks.first().map_or(&[][..], |rank| &rank.calls);
        rows.extend(calls.iter().filter(|calls| (self.shows)(calls.op)).map(call_row));
        f.write_str(&format_table(&rows, 0))?;
        writeln!(f, "\nstragglers: time that a rank waited for the slowest one, mean over ranks")?;
        let header =
            ["op", "axis", "count", "total (ms)", "straggler (ms)", "slowest rank", "share of calls"];
        let mut rows = vec![header.map(str::to_owned).to_vec()];
        let stragglers = straggler_stats(self.ranks, self.groups);
        rows.extend(stragglers.iter().filter(|row| (self.shows)(row.op)).map(straggler_row));
        f.write_str(&format_table(&rows, 0))?;
        writeln!(
            f,
            "\nbytes sent by all ranks in total: planned for the training steps and evaluations, and measured"
        )?;
        let mut rows =
            vec![["kind", "planned", "measured", "planned by purpose"].map(str::to_owned).to_vec()];
        rows.extend(volumes(self.ranks).iter().map(|volume| {
            let parts = volume.planned.iter().map(|(purpose, sent)| format!("{purpose} {}", bytes(*sent)));
            let parts = parts.collect::<Vec<_>>().join(", ");
            vec![volume.what.clone(), bytes(volume.planned_bytes), bytes(volume.sent_bytes), parts]
        }));
        f.write_str(&format_table(&rows, 0))
    }
}

fn call_row(calls: &CallTimes) -> Vec<String> {
    let Bandwidth { algbw, busbw } = Bandwidth::of(calls);
    vec![
        calls.op.to_string(),
        calls.axis.clone(),
        bytes(calls.input_bytes),
        calls.calls.to_string(),
        format!("{:.2}", 1e3 * calls.seconds),
        format!("{:.3}", 1e3 * calls.seconds / calls.calls.max(1) as f64),
        format!("{:.2}", algbw / 1e9),
        format!("{:.2}", busbw / 1e9),
    ]
}

fn straggler_row(row: &StragglerStats) -> Vec<String> {
    vec![
        row.op.to_string(),
        row.axis.clone(),
        row.calls.to_string(),
        format!("{:.2}", 1e3 * row.seconds),
        format!("{:.2}", 1e3 * row.straggler_seconds),
        row.latest.0.to_string(),
        format!("{:.0} %", 100.0 * row.latest.1),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls(op: CollectiveOp, input_bytes: u64) -> CallTimes {
        CallTimes { axis: "dp".into(), op, ranks: 4, input_bytes, calls: 2, seconds: 4.0 }
    }

    #[test]
    fn bandwidths_are_those_of_nccl_tests() {
        let of = |op, input| Bandwidth::of(&calls(op, input));
        // Two seconds a call; a gather of 100 bytes from each of four ranks makes 400.
        assert_eq!(of(CollectiveOp::AllGather, 100), Bandwidth { algbw: 200.0, busbw: 150.0 });
        assert_eq!(of(CollectiveOp::ReduceScatter, 400), Bandwidth { algbw: 200.0, busbw: 150.0 });
        assert_eq!(of(CollectiveOp::AllReduce, 400), Bandwidth { algbw: 200.0, busbw: 300.0 });
        assert_eq!(of(CollectiveOp::AllToAllStrided, 400), Bandwidth { algbw: 200.0, busbw: 150.0 });
    }

    #[test]
    fn stragglers_are_found_call_by_call_within_their_groups() {
        let rank = |seconds: [f32; 4]| {
            let each = EachCall { axis: "dp".into(), op: CollectiveOp::AllReduce, seconds: seconds.to_vec() };
            RankComms { each: vec![each], ..RankComms::default() }
        };
        // Groups {0, 2} and {1, 3}: rank 3 arrives last three times, and waits once.
        let ranks = [rank([1.0; 4]), rank([5.0, 5.0, 5.0, 2.0]), rank([1.0; 4]), rank([1.0, 1.0, 1.0, 8.0])];
        let groups: Groups = [("dp".to_owned(), vec![vec![0, 2], vec![1, 3]])].into();
        let found = straggler_stats(&ranks, &groups);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].calls, found[0].seconds), (4, (4.0 + 17.0 + 4.0 + 11.0) / 4.0));
        assert_eq!(found[0].straggler_seconds, (3.0 * 4.0 + 6.0) / 4.0);
        // The lower of equal ranks is reported: rank 0 equals rank 2 in every call.
        assert_eq!(found[0].latest, (0, 1.0));
    }

    #[test]
    fn measured_bytes_are_shown_next_to_planned_ones() {
        let planned = |axis: &str, op, purpose: &str, sent_bytes| PlannedVolume {
            axis: axis.into(),
            op,
            purpose: purpose.into(),
            sent_bytes,
        };
        let rank = RankComms {
            planned: vec![
                planned("sp", CollectiveOp::AllToAllStrided, "exchange forward", 30),
                planned("sp", CollectiveOp::AllToAllStrided, "exchange backward", 40),
                planned("dp", CollectiveOp::AllGather, "gather parameters", 5),
            ],
            sent: vec![
                ("sp".into(), CollectiveOp::AllToAllStrided, 70),
                ("dp".into(), CollectiveOp::AllGather, 6),
            ],
            ..RankComms::default()
        };
        let between = |planned_bytes, sent_bytes| {
            let what = "between nodes".to_owned();
            vec![Volume { what, planned: Vec::new(), planned_bytes, sent_bytes }]
        };
        let other = RankComms { by_node: between(3, 4), ..rank.clone() };
        let rank = RankComms { by_node: between(1, 1), ..rank };
        let volumes = volumes(&[rank, other]);
        let found: Vec<_> =
            volumes.iter().map(|v| (v.what.as_str(), v.planned_bytes, v.sent_bytes)).collect();
        let expected =
            [("Ulysses exchange", 140, 140), ("ZeRO and data parallelism", 10, 12), ("between nodes", 4, 5)];
        assert_eq!(found, expected);
        assert_eq!(volumes[0].planned[1], ("exchange forward".to_owned(), 60));
    }

    #[test]
    fn a_ring_has_a_row_of_its_own_also_if_it_is_all_of_sp() {
        let op = CollectiveOp::AllToAllStrided;
        let volumes_of = |planned: &[(&str, u64)], sent: &[(&str, u64)]| -> Vec<(String, u64, u64)> {
            let planned = planned.iter().map(|&(axis, sent_bytes)| PlannedVolume {
                axis: axis.into(),
                op,
                purpose: "exchange forward".into(),
                sent_bytes,
            });
            let sent = sent.iter().map(|&(axis, bytes)| (axis.to_owned(), op, bytes)).collect();
            let rank = RankComms { planned: planned.collect(), sent, ..RankComms::default() };
            volumes(&[rank])
                .into_iter()
                .map(|volume| (volume.what, volume.planned_bytes, volume.sent_bytes))
                .collect()
        };
        let ring = ("ring attention".to_owned(), 5, 6);
        assert_eq!(volumes_of(&[("ring", 5), ("ulysses", 0)], &[("sp", 6)]), std::slice::from_ref(&ring));
        let with_linear = volumes_of(&[("ring", 5), ("sp", 3)], &[("sp", 9)]);
        assert_eq!(with_linear, [("ring attention".to_owned(), 8, 9)]);
        let both = volumes_of(&[("ring", 5), ("ulysses", 7)], &[("ring", 6), ("ulysses", 8)]);
        assert_eq!(both, [("Ulysses exchange".to_owned(), 7, 8), ring]);
    }
}
