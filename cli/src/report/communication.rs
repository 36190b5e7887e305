//! Communication tables, summed over all parts of a run.

use super::run::RunFiles;
use crate::html::chart::{Unit, text};
use crate::html::table;
use serde::de::DeserializeOwned;
use serde_json::Value;
use ulysses::comm::CallTimes;
use ulysses::monitor::{Bandwidth, StragglerStats, Volume};

/// Returns the tables; empty if no part recorded any call.
pub(super) fn tables(run: &RunFiles) -> String {
    let parts = run.parts();
    let calls = calls(&parts);
    if calls.is_empty() {
        return String::new();
    }
    let unrecorded = parts.iter().filter(|part| part["communication"].is_null()).count();
    let unrecorded = match unrecorded {
        0 => String::new(),
        _ => format!(" {unrecorded} of {} parts did not finish and are missing.", parts.len()),
    };
    let mut html = format!(
        "<p class=\"faint\">Collectives of rank 0. Times are wall times inside the calls.{unrecorded}</p>\n"
    );
    let head = ["operation", "ranks", "message", "count", "total ms", "mean ms", "algbw GB/s", "busbw GB/s"];
    html.push_str(&table(&head, calls.iter().map(call_row)));
    html.push_str("<p></p><p class=\"faint\">Bytes sent by all ranks, measured and by formula, for the same training steps and evaluations.</p>\n");
    let volumes = volumes(&parts);
    html.push_str(&table(
        &["purpose", "formula", "measured", "measured / formula"],
        volumes.iter().map(volume_row),
    ));
    let straggling = straggling(&parts);
    if !straggling.is_empty() {
        html.push_str(
            "<p></p><p class=\"faint\">Time spent waiting for the slowest rank, mean over ranks.</p>\n",
        );
        let head = ["operation", "count", "total ms", "straggler ms", "slowest rank"];
        html.push_str(&table(&head, straggling.iter().map(|kind| straggling_row(kind))));
    }
    html
}

fn call_row(call: &CallTimes) -> Vec<String> {
    let Bandwidth { algbw, busbw } = Bandwidth::of(call);
    let rate = |rate: f64| format!("{:.2}", rate / 1e9);
    vec![
        format!("{} {}", call.axis, call.op),
        call.ranks.to_string(),
        text(call.input_bytes as f64, Unit::Bytes),
        call.calls.to_string(),
        milliseconds(call.seconds),
        milliseconds(call.seconds / call.calls.max(1) as f64),
        rate(algbw),
        rate(busbw),
    ]
}

fn volume_row(volume: &Volume) -> Vec<String> {
    let bytes = |bytes: u64| text(bytes as f64, Unit::Bytes);
    let ratio = match volume.planned_bytes {
        0 => "–".to_owned(),
        planned => format!("{:.3}", volume.sent_bytes as f64 / planned as f64),
    };
    vec![volume.what.clone(), bytes(volume.planned_bytes), bytes(volume.sent_bytes), ratio]
}

/// Formats a row. The slowest rank is listed per part, because rank numbers depend on the mesh.
fn straggling_row(parts: &[StragglerStats]) -> Vec<String> {
    let sum = |value: fn(&StragglerStats) -> f64| parts.iter().map(value).sum::<f64>();
    let latest =
        |part: &StragglerStats| format!("{} ({:.0} % of calls)", part.latest.0, 100.0 * part.latest.1);
    vec![
        format!("{} {}", parts[0].axis, parts[0].op),
        parts.iter().fold(0, |sum: u64, part| sum.saturating_add(part.calls)).to_string(),
        milliseconds(sum(|part| part.seconds)),
        milliseconds(sum(|part| part.straggler_seconds)),
        parts.iter().map(latest).collect::<Vec<_>>().join(", then "),
    ]
}

fn milliseconds(seconds: f64) -> String {
    text(1e3 * seconds, Unit::Number)
}

/// Sums equal calls over all parts.
fn calls(parts: &[&Value]) -> Vec<CallTimes> {
    let mut sums: Vec<CallTimes> = Vec::new();
    for call in of_parts::<CallTimes>(parts, "calls") {
        let kind = |call: &CallTimes| (call.axis.clone(), call.op, call.ranks, call.input_bytes);
        match sums.iter_mut().find(|sum| kind(sum) == kind(&call)) {
            Some(sum) => {
                sum.calls = sum.calls.saturating_add(call.calls);
                sum.seconds += call.seconds;
            }
            None => sums.push(call),
        }
    }
    sums
}

fn volumes(parts: &[&Value]) -> Vec<Volume> {
    let mut sums: Vec<Volume> = Vec::new();
    for volume in of_parts::<Volume>(parts, "volumes") {
        match sums.iter_mut().find(|sum| sum.what == volume.what) {
            Some(sum) => {
                sum.planned_bytes = sum.planned_bytes.saturating_add(volume.planned_bytes);
                sum.sent_bytes = sum.sent_bytes.saturating_add(volume.sent_bytes);
            }
            None => sums.push(volume),
        }
    }
    sums
}

/// Groups the stragglers of all parts by axis and operation.
fn straggling(parts: &[&Value]) -> Vec<Vec<StragglerStats>> {
    let mut kinds: Vec<Vec<StragglerStats>> = Vec::new();
    for row in of_parts::<StragglerStats>(parts, "straggling") {
        let is_kind = |kind: &&mut Vec<StragglerStats>| (&kind[0].axis, kind[0].op) == (&row.axis, row.op);
        match kinds.iter_mut().find(is_kind) {
            Some(kind) => kind.push(row),
            None => kinds.push(vec![row]),
        }
    }
    kinds
}

/// Parses the entries of all parts; records of another format give none.
fn of_parts<T: DeserializeOwned>(parts: &[&Value], key: &str) -> Vec<T> {
    let of_part = |part: &&Value| -> Vec<T> {
        serde_json::from_value(part["communication"][key].clone()).unwrap_or_default()
    };
    parts.iter().flat_map(of_part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use ulysses::comm::CollectiveOp;

    fn part(ranks: usize, calls: u64, latest: usize) -> Value {
        let call = CallTimes {
            axis: "sp".into(),
            op: CollectiveOp::AllReduce,
            ranks,
            input_bytes: 64,
            calls,
            seconds: 0.5,
        };
        let volume = Volume {
            what: "all-reduce over sp".into(),
            planned: vec![],
            planned_bytes: 10 * calls,
            sent_bytes: 11 * calls,
        };
        let straggling = StragglerStats {
            axis: "sp".into(),
            op: CollectiveOp::AllReduce,
            calls,
            seconds: 0.5,
            straggler_seconds: 0.25,
            latest: (latest, 0.75),
        };
        json!({ "communication": { "calls": [call], "volumes": [volume], "straggling": [straggling] } })
    }

    #[test]
    fn the_parts_of_a_run_add_up() {
        let (first, killed, last) = (part(2, 3, 1), json!({ "communication": null }), part(2, 4, 0));
        let (elsewhere, parts) = (part(4, 5, 2), [&first, &killed, &last]);
        let summed = calls(&parts);
        assert_eq!((summed.len(), summed[0].calls, summed[0].seconds), (1, 7, 1.0));
        assert_eq!(
            calls(&[&first, &elsewhere]).len(),
            2,
            "calls of groups of different sizes are not summed"
        );
        let sent = volumes(&parts);
        assert_eq!((sent.len(), sent[0].planned_bytes, sent[0].sent_bytes), (1, 70, 77));
        let rows: Vec<_> = straggling(&parts).iter().map(|kind| straggling_row(kind)).collect();
        let expected = ["sp all_reduce", "7", "1000", "500", "1 (75 % of calls), then 0 (75 % of calls)"];
        assert_eq!(rows, [expected]);
    }
}
