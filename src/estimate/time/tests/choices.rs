//! The times of single changes and of other meshes, and which of them is preferred.

use super::*;
use crate::estimate::{Candidate, Criteria, MeshChoice};

#[test]
fn every_change_and_mesh_is_timed_and_the_fastest_mesh_that_fits_is_marked() {
    // A second for each collective, and nothing else takes time.
    let slow_to_begin = with_link(|link| link.latency_seconds = 1.0);
    let machine = MachineProfile { file_bytes_per_second: None, ..slow_to_begin };
    let criteria = Criteria { budget: None, machine: Some(&machine) };
    let changes = nano(2, 1, json!({})).alternatives(criteria).unwrap();
    let changed = |change: &str| {
        let found = changes.iter().find(|known| known.change == change);
        &found.unwrap_or_else(|| panic!("no {change}")).candidate
    };
    let speed = |change: &str| {
        let time = changed(change).time.as_ref().unwrap();
        (time.total_seconds, time.tokens_per_second)
    };
    // Two sequences of 64 tokens. Four units are reduced, the losses summed.
    assert_eq!(speed("as configured"), (5.0, 128.0 / 5.0));
    // Besides, the norms are summed and four units published.
    assert_eq!(speed("ZeRO stage 1"), (10.0, 12.8));
    let in_file = "ZeRO stage 1 with optimizer state in a file";
    for (change, key) in [("bf16", "rates.bf16"), (in_file, "file_bytes_per_second")] {
        assert_eq!((changed(change).profile_lacks, &changed(change).time), (Some(key), &None));
    }

    // The sums of all-reduce alone take time: stages without it are faster though they send more.
    let slow_sums = with_link(|link| link.all_reduce_bytes_per_second = 1e6);
    let four_sequences = nano(4, 1, json!({}));
    let timed = Criteria { budget: None, machine: Some(&slow_sums) };
    let choices = four_sequences.meshes(timed).unwrap();
    let settings = |choice: &MeshChoice| {
        let config = &choice.candidate.workload.config;
        (config.mesh.dp_size, u8::from(config.zero.stage))
    };
    let seconds = |dp: usize, zero_stage: u8| {
        let found = choices.iter().find(|choice| settings(choice) == (dp, zero_stage));
        found.unwrap().candidate.step_seconds().unwrap()
    };
    let parameters = preset("nano").unwrap().num_parameters() as f64;
    // Of four ranks each sends three quarters of its sums and three quarters of its results, 4 bytes each.
    assert!((seconds(4, 0) * 1e6 / (6.0 * parameters) - 1.0).abs() < 1e-3, "{choices:?}");
    // What stage 3 all-reduces are some numbers; nothing of dp 1 is partitioned.
    assert!(seconds(4, 3) * 1e6 < 200.0 && seconds(1, 0) > seconds(4, 3), "{choices:?}");
    let reasons = |choices: &[MeshChoice]| -> Vec<_> {
        let reasons = choices.iter().filter_map(|choice| Some((settings(choice), choice.reason.clone()?)));
        reasons.map(|((dp, zero_stage), reason)| (dp, zero_stage, reason)).collect()
    };
    // Over dp and sp nothing is all-reduced either, and the losses are summed in two small groups.
    assert_eq!(reasons(&choices), [(2, 3, format!("fastest of all {}", choices.len()))]);
    let untimed = four_sequences.meshes(Criteria::default()).unwrap();
    assert_eq!(reasons(&untimed), [(4, 0, format!("sends the fewest bytes of all {}", untimed.len()))]);
    assert!(untimed.iter().all(|choice| choice.candidate.time.is_none()));

    // Where collectives count it is data parallelism at stage 0; within less memory it is the fastest of the others.
    let choices = four_sequences.meshes(criteria).unwrap();
    assert_eq!(reasons(&choices), [(4, 0, format!("fastest of all {}", choices.len()))]);
    let fastest = choices.iter().find(|choice| choice.reason.is_some()).unwrap();
    assert_eq!(fastest.candidate.step_seconds(), Some(5.0));
    let peak = |choice: &MeshChoice| choice.candidate.plan.peak_bytes;
    let smaller: Vec<_> = choices.iter().filter(|choice| peak(choice) < peak(fastest)).collect();
    let budget = smaller.iter().map(|choice| peak(choice)).max().map(Into::into);
    let within = four_sequences.meshes(Criteria { budget, ..criteria }).unwrap();
    let (dp, zero_stage) = settings(smaller.iter().min_by(|a, b| a.compare(b)).unwrap());
    assert!(smaller.len() > 1);
    let reason = format!("fastest of the {} that fit", smaller.len());
    assert_eq!(reasons(&within), [(dp, zero_stage, reason)]);
}

/// Between nodes a pipeline sends only hidden states.
#[test]
fn a_pipeline_is_chosen_where_its_stages_idle_for_less_than_gradients_take() {
    let mut machine = with_rates(|rates| rates.product_flops_per_second = 1e9);
    let link = |bytes: f64| LinkRates {
        all_to_all_bytes_per_second: 1e9,
        all_reduce_bytes_per_second: bytes,
        reduce_scatter_bytes_per_second: bytes,
        all_gather_bytes_per_second: bytes,
        ..INSTANT
    };
    let workload = Workload { ranks_per_node: 1, ..nano(2, 1, json!({ "gradient_accumulation_steps": 8 })) };
    let mut chosen = |bytes: f64| {
        machine.links.inter_node = Some(link(bytes));
        let choices = workload.meshes(Criteria { budget: None, machine: Some(&machine) }).unwrap();
        let best = choices.into_iter().find(|choice| choice.reason.is_some()).unwrap();
        let Candidate { workload, time, .. } = best.candidate;
        (workload.config.mesh.pp_size, time.unwrap().pipeline_idle)
    };
    assert_eq!(chosen(1e12), (1, None));
    let (pp, idle) = chosen(1e5);
    assert_eq!(pp, 2);
    // 16 micro batches, and a head that makes the second stage slower.
    assert!((1.0 / 17.0..0.2).contains(&idle.unwrap()), "{idle:?}");
    // Without a machine no time speaks for it.
    let untimed = workload.meshes(Criteria::default()).unwrap();
    assert!(untimed.iter().all(|choice| choice.candidate.workload.config.mesh.pp_size == 1), "{untimed:?}");
}

#[test]
fn a_missing_rate_is_reported_by_its_key() {
    let machine = with_link(|link| link.latency_seconds = 1.0);
    // Four ranks on nodes of two: every mesh communicates between them.
    let workload = Workload { ranks_per_node: 2, ..nano(4, 1, json!({})) };
    let choices = workload.meshes(Criteria { budget: None, machine: Some(&machine) }).unwrap();
    let lacks = Some("links.inter_node");
    assert!(choices.iter().all(|choice| choice.candidate.profile_lacks == lacks), "{choices:?}");
    assert!(choices.iter().all(|choice| choice.candidate.time.is_none()), "{choices:?}");
    assert_eq!(choices.iter().filter(|choice| choice.reason.is_some()).count(), 1);
}
