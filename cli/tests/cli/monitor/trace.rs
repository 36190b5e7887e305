//! `ulysses train --trace`: the file for Perfetto.

use crate::support::cli::Workplace;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Begin and end of a slice in nanoseconds, and its name.
type Slice<'a> = (i64, i64, &'a str);

fn nanoseconds(event: &Value, key: &str) -> i64 {
    (1e3 * event[key].as_f64().unwrap()).round() as i64
}

fn of_phase<'a>(events: &'a [Value], phase: &str) -> Vec<&'a Value> {
    events.iter().filter(|event| event["ph"] == phase).collect()
}

/// Slices by track, ordered by begin, longest first.
fn slices(events: &[Value]) -> BTreeMap<u64, Vec<Slice<'_>>> {
    let mut tracks: BTreeMap<u64, Vec<Slice<'_>>> = BTreeMap::new();
    for event in of_phase(events, "X") {
        let begin = nanoseconds(event, "ts");
        let slice = (begin, begin + nanoseconds(event, "dur"), event["name"].as_str().unwrap());
        tracks.entry(event["tid"].as_u64().unwrap()).or_default().push(slice);
    }
    tracks.values_mut().for_each(|slices| slices.sort_by_key(|(begin, end, _)| (*begin, -end)));
    tracks
}

#[test]
fn a_trace_has_all_ranks_nested_slices_and_arrows_between_ranks() {
    let place = Workplace::new();
    let changes =
        json!({ "mesh_param": [2, 2], "zero_optimization": { "stage": 3 }, "ulysses": { "steps": 4 } });
    place.write_config("c.json", changes);
    let arguments = ["train", "c.json", "--trace", "trace.json", "--trace-steps", "2"];
    let outcome = place.run(&arguments);
    assert!(outcome.assert_done().stderr.contains("trace.json"), "{outcome:?}");
    let trace = place.read_json("trace.json");
    let events = trace["traceEvents"].as_array().unwrap();

    let named = of_phase(events, "M").into_iter().filter(|event| event["name"] == "thread_name");
    let names: BTreeMap<u64, &str> = named
        .map(|event| (event["tid"].as_u64().unwrap(), event["args"]["name"].as_str().unwrap()))
        .collect();
    assert_eq!(names.keys().copied().collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert_eq!(names[&2], "rank 2 (dp 1, sp 0)");

    let tracks = slices(events);
    assert_eq!(tracks.keys().copied().collect::<Vec<_>>(), [0, 1, 2, 3]);
    for (rank, slices) in &tracks {
        let mut open: Vec<Slice<'_>> = Vec::new();
        for slice in slices {
            open.retain(|(_, end, _)| *end > slice.0);
            if let Some(parent) = open.last() {
                assert!(slice.1 <= parent.1, "rank {rank}: {slice:?} reaches out of {parent:?}");
            }
            open.push(*slice);
        }
        let told: BTreeSet<&str> = slices.iter().map(|(.., name)| *name).collect();
        for expected in [
            "step 1",
            "step 2",
            "forward",
            "layer 0",
            "layer backward 1",
            "qkv_seq_to_head",
            "sp all_to_all_strided",
            "gather 1",
            "dp all_gather",
            "reduce 1",
            "dp reduce_scatter",
            "optimizer",
        ] {
            assert!(told.contains(expected), "rank {rank} has no {expected:?}: {told:?}");
        }
        assert!(!told.contains("step 3"), "{told:?}");
    }

    let (from, to) = (of_phase(events, "s"), of_phase(events, "f"));
    assert!(!from.is_empty() && from.len() == to.len());
    let mut pairs = BTreeSet::new();
    for (from, to) in from.iter().zip(&to) {
        assert_eq!(from["id"], to["id"]);
        let (begin, end) = (nanoseconds(from, "ts"), nanoseconds(to, "ts"));
        let (of, at) = (from["tid"].as_u64().unwrap(), to["tid"].as_u64().unwrap());
        assert!(of != at && begin <= end, "{from} {to}");
        let ends_inside = tracks[&at]
            .iter()
            .any(|&(begin, until, name)| begin <= end && end <= until && to["name"] == name);
        assert!(ends_inside, "{to} ends in no slice of its name");
        pairs.insert((of / 2 == at / 2, of % 2 == at % 2));
    }
    assert!(pairs.contains(&(true, false)), "no arrow within an sp group");
    assert!(pairs.contains(&(false, true)), "no arrow within a dp group");
    assert!(!pairs.contains(&(false, false)), "an arrow between ranks that share no group");

    let traced = place.losses("out/metrics.jsonl");
    place.run(&["train", "c.json", "--output", "plain"]).assert_done();
    assert_eq!(place.losses("plain/metrics.jsonl"), traced);
}

#[test]
fn memory_counters_reach_the_peak_of_each_rank() {
    let place = Workplace::new();
    place.write_config(
        "c.json",
        json!({
            "mesh_param": [1, 2], "train_batch_size": 2,
            // Long enough that no other part of the run needs more memory.
            "ulysses": { "steps": 3, "seq_len": 2048 },
        }),
    );
    place.run(&["train", "c.json", "--trace", "trace.json"]).assert_done();
    let trace = place.read_json("trace.json");
    let events = trace["traceEvents"].as_array().unwrap();
    let counters = of_phase(events, "C");
    let number = |value: &Value| value.as_u64().unwrap();
    let of = |name: String| counters.iter().filter(move |event| event["name"] == name.as_str());
    let tracks = slices(events);
    let record = place.read_json("out/run.json");
    let num_layers = number(&record["model"]["config"]["num_hidden_layers"]) as usize;
    for rank in 0..2_u64 {
        let totals: Vec<_> = of(format!("rank {rank} allocated bytes")).collect();
        let by_category: Vec<_> = of(format!("rank {rank} allocated bytes by category")).collect();
        // Parts of a step: embedding, layers forward and backward, head, embedding backward, update, remainder.
        assert_eq!((totals.len(), by_category.len()), (3 * (2 * num_layers + 5), 3 * (2 * num_layers + 5)));
        let mut last = 0;
        for (total, parts) in totals.iter().zip(&by_category) {
            assert_eq!((total["tid"].as_u64(), total["ts"].as_f64()), (Some(rank), parts["ts"].as_f64()));
            let sum: u64 = parts["args"].as_object().unwrap().values().map(number).sum();
            assert_eq!(sum, number(&total["args"]["total"]), "{parts}");
            let at = nanoseconds(total, "ts");
            assert!(at >= last, "{total} goes back");
            last = at;
        }
        // Every part begins during its step.
        let steps: Vec<_> = tracks[&rank].iter().filter(|(.., name)| name.starts_with("step ")).collect();
        for total in &totals {
            let at = nanoseconds(total, "ts");
            assert!(steps.iter().any(|(begin, end, _)| (*begin..=*end).contains(&at)), "{total}");
        }
        let most = totals.iter().map(|total| number(&total["args"]["total"])).max().unwrap();
        let peak = number(&record["ranks"][rank as usize]["peak_bytes"]);
        // The allocator records every maximum within steps, and the peak of the run is in a step: only steps have
        // activations.
        assert_eq!(most, peak, "rank {rank}");
    }
    // Without a trace the report still has the memory of a step.
    let parts = record["memory_over_step"][0]["parts"].as_array().unwrap();
    assert_eq!((parts.len(), &parts[0]["at"]), (2 * num_layers + 4, &json!("embedding")));
}

#[test]
fn a_trace_that_cannot_be_written_is_refused_before_the_run() {
    let place = Workplace::new();
    place.write_config("c.json", json!({}));
    let outcome = place.run(&["train", "c.json", "--trace", "no/such/trace.json"]);
    outcome.assert_refused(2, &["--trace", "no/such/trace.json"]);
    assert!(!place.path("out/metrics.jsonl").exists());
}

#[test]
fn log_lines_of_the_library_have_rank_and_step() {
    let place = Workplace::new();
    place.write_config("c.json", json!({ "mesh_param": [1, 2], "checkpoint": {} }));
    let mut command = place.command(&["train", "c.json"]);
    let output = command.env("RUST_LOG", "ulysses=trace").output().unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && log.contains("rank{rank=1}: initialized"), "{log}");
    for rank in 0..2 {
        let of_rank = |line: &&str| {
            line.contains(&format!("rank{{rank={rank}}}:step{{step=3 ")) && line.contains("loss=")
        };
        assert_eq!(log.lines().filter(of_rank).count(), 1, "{log}");
    }
}
