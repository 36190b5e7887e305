//! The times of single changes and of other meshes, and which of them is preferred.

use super::*;
use crate::estimate::{Criteria, MeshChoice, Throughput};

#[test]
fn every_change_and_mesh_is_timed_and_the_fastest_mesh_that_fits_is_marked() {
    // A second for each collective, and nothing else takes time.
    let slow_to_begin = with_link(|link| link.latency_seconds = 1.0);
    let machine = MachineProfile { file_bytes_per_second: None, ..slow_to_begin };
    let criteria = Criteria { budget: None, machine: Some(&machine) };
    let changes = nano(2, 1, json!({})).alternatives(criteria).unwrap();
    let throughput = |change: &str| {
        let found = changes.iter().find(|known| known.change == change);
        found.unwrap_or_else(|| panic!("no {change}")).throughput.clone().unwrap()
    };
    // Two sequences of 64 tokens. Four units are reduced, the losses summed.
    assert_eq!(
        throughput("as configured"),
        Throughput::Known { step_seconds: 5.0, tokens_per_second: 128.0 / 5.0 }
    );
    // Besides, the norms are summed and four units published.
    assert_eq!(throughput("ZeRO stage 1"), Throughput::Known { step_seconds: 10.0, tokens_per_second: 12.8 });
    assert_eq!(throughput("bf16"), Throughput::Unknown { profile_lacks: "rates.bf16" });
    let in_file = throughput("ZeRO stage 1 with optimizer state in a file");
    assert_eq!(in_file, Throughput::Unknown { profile_lacks: "file_bytes_per_second" });

    // The sums of all-reduce alone take time: stages without it are faster though they send more.
    let slow_sums = with_link(|link| link.all_reduce_bytes_per_second = 1e6);
    let four_sequences = nano(4, 1, json!({}));
    let timed = Criteria { budget: None, machine: Some(&slow_sums) };
    let choices = four_sequences.meshes(timed).unwrap();
    let seconds = |dp: usize, zero_stage: u8| {
        let found = choices.iter().find(|choice| (choice.dp, choice.zero_stage.into()) == (dp, zero_stage));
        found.unwrap().throughput.as_ref().unwrap().step_seconds().unwrap()
    };
    let parameters = preset("nano").unwrap().num_parameters() as f64;
    // Of four ranks each sends three quarters of its sums and three quarters of its results, 4 bytes each.
    assert!((seconds(4, 0) * 1e6 / (6.0 * parameters) - 1.0).abs() < 1e-3, "{choices:?}");
    // What stage 3 all-reduces are some numbers; nothing of dp 1 is partitioned.
    assert!(seconds(4, 3) * 1e6 < 200.0 && seconds(1, 0) > seconds(4, 3), "{choices:?}");
    let reasons = |choices: &[MeshChoice]| -> Vec<_> {
        let reasons = choices.iter().filter_map(|choice| Some((choice.clone(), choice.reason.clone()?)));
        reasons.map(|(choice, reason)| (choice.dp, u8::from(choice.zero_stage), reason)).collect()
    };
    // Over dp and sp nothing is all-reduced either, and the losses are summed in two small groups.
    assert_eq!(reasons(&choices), [(2, 3, format!("fastest of all {}", choices.len()))]);
    let untimed = four_sequences.meshes(Criteria::default()).unwrap();
    assert_eq!(reasons(&untimed), [(4, 0, format!("sends the fewest bytes of all {}", untimed.len()))]);
    assert!(untimed.iter().all(|choice| choice.throughput.is_none()));

    // Where collectives count it is data parallelism at stage 0; within less memory it is the fastest of the others.
    let choices = four_sequences.meshes(criteria).unwrap();
    assert_eq!(reasons(&choices), [(4, 0, format!("fastest of all {}", choices.len()))]);
    let fastest = choices.iter().find(|choice| choice.reason.is_some()).unwrap();
    assert_eq!(fastest.throughput.as_ref().and_then(Throughput::step_seconds), Some(5.0));
    let smaller: Vec<_> = choices.iter().filter(|choice| choice.peak_bytes < fastest.peak_bytes).collect();
    let budget = smaller.iter().map(|choice| choice.peak_bytes).max().map(Into::into);
    let within = four_sequences.meshes(Criteria { budget, ..criteria }).unwrap();
    let best = smaller.iter().min_by(|a, b| a.compare(b)).unwrap();
    assert!(smaller.len() > 1);
    assert_eq!(
        reasons(&within),
        [(best.dp, best.zero_stage.into(), format!("fastest of the {} that fit", smaller.len()))]
    );
}

#[test]
fn a_missing_rate_is_reported_by_its_key() {
    let machine = with_link(|link| link.latency_seconds = 1.0);
    // Four ranks on nodes of two: every mesh communicates between them.
    let workload = Workload { ranks_per_node: 2, ..nano(4, 1, json!({})) };
    let choices = workload.meshes(Criteria { budget: None, machine: Some(&machine) }).unwrap();
    let lacks = Some(Throughput::Unknown { profile_lacks: "links.inter_node" });
    assert!(choices.iter().all(|choice| choice.throughput == lacks), "{choices:?}");
    assert_eq!(choices.iter().filter(|choice| choice.reason.is_some()).count(), 1);
    let written = serde_json::to_value(&choices[0]).unwrap();
    assert_eq!(
        (&written["profile_lacks"], &written["step_seconds"]),
        (&json!("links.inter_node"), &Value::Null)
    );
}
