//! Collectives, summed over all parts of a run.

use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use ulysses::comm::CallTimes;
use ulysses::monitor::{Bandwidth, StragglerStats, Volume};

/// Returns the rows of all tables.
pub(super) fn totals(parts: &[&Value]) -> Value {
    let calls = calls(parts).into_iter().map(|call| {
        let Bandwidth { algbw, busbw } = Bandwidth::of(&call);
        json!({ "kind": format!("{} {}", call.axis, call.op), "call": call, "algbw": algbw, "busbw": busbw })
    });
    json!({
        "parts": parts.len(),
        "unfinished_parts": parts.iter().filter(|part| part["communication"].is_null()).count(),
        "calls": calls.collect::<Vec<_>>(),
        "volumes": volumes(parts),
        "straggling": straggling(parts).iter().map(|rows| straggling_row(rows)).collect::<Vec<_>>(),
    })
}

/// Returns a row. The slowest rank is listed per part, because rank numbers depend on the mesh.
fn straggling_row(parts: &[StragglerStats]) -> Value {
    let latest =
        |part: &StragglerStats| format!("{} ({:.0} % of calls)", part.latest.0, 100.0 * part.latest.1);
    json!({
        "kind": format!("{} {}", parts[0].axis, parts[0].op),
        "calls": parts.iter().fold(0, |sum: u64, part| sum.saturating_add(part.calls)),
        "seconds": parts.iter().map(|part| part.seconds).sum::<f64>(),
        "straggler_seconds": parts.iter().map(|part| part.straggler_seconds).sum::<f64>(),
        "slowest_ranks": parts.iter().map(latest).collect::<Vec<_>>().join(", then "),
    })
}

fn calls(parts: &[&Value]) -> Vec<CallTimes> {
    let kind = |call: &CallTimes| (call.axis.clone(), call.op, call.ranks, call.input_bytes);
    sums(grouped(parts, "calls", kind), |sum: &mut CallTimes, call| {
        sum.calls = sum.calls.saturating_add(call.calls);
        sum.seconds += call.seconds;
    })
}

fn volumes(parts: &[&Value]) -> Vec<Volume> {
    sums(grouped(parts, "volumes", |volume: &Volume| volume.what.clone()), |sum, volume| {
        sum.planned_bytes = sum.planned_bytes.saturating_add(volume.planned_bytes);
        sum.sent_bytes = sum.sent_bytes.saturating_add(volume.sent_bytes);
    })
}

fn sums<T: Clone>(kinds: Vec<Vec<T>>, add: impl Fn(&mut T, &T)) -> Vec<T> {
    let sum = |kind: Vec<T>| {
        let mut sum = kind[0].clone();
        kind[1..].iter().for_each(|entry| add(&mut sum, entry));
        sum
    };
    kinds.into_iter().map(sum).collect()
}

fn straggling(parts: &[&Value]) -> Vec<Vec<StragglerStats>> {
    grouped(parts, "straggling", |row: &StragglerStats| (row.axis.clone(), row.op))
}

/// Groups the entries of all parts that are of one kind; records of another format have none.
fn grouped<T: DeserializeOwned, K: PartialEq>(
    parts: &[&Value],
    key: &str,
    kind: impl Fn(&T) -> K,
) -> Vec<Vec<T>> {
    let entries = |part: &&Value| -> Vec<T> {
        serde_json::from_value(part["communication"][key].clone()).unwrap_or_default()
    };
    let mut kinds: Vec<Vec<T>> = Vec::new();
    for entry in parts.iter().flat_map(entries) {
        match kinds.iter_mut().find(|entries| kind(&entries[0]) == kind(&entry)) {
            Some(entries) => entries.push(entry),
            None => kinds.push(vec![entry]),
        }
    }
    kinds
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
        let data = json!({ "runs": [{ "communication": totals(&parts), "parts": [], "ranks": [] }] });
        let page = crate::template::render("report.html", data).unwrap();
        let row = ["sp all_reduce", "7", "1000", "500", "1 (75 % of calls), then 0 (75 % of calls)"];
        let row = row.join("</td><td class=\"n\">");
        assert!(page.contains(&format!("<tr><td>{row}</td></tr>")), "{page}");
    }
}
