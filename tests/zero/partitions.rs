//! Partitions over ranks other than dp: over a part of it (hybrid sharding: HSDP, MiCS), and over sp too. The math is the
//! same; memory is less the more ranks share the partitions.

use crate::support::compare::{assert_all_close, max_rel_error, values};
use crate::support::device::offload_target;
use crate::support::doubles::{Fault, FaultyGroup};
use crate::support::mesh_run::{
    Doubles, Layout, Problem, Rule, assert_matches, bits, by_name, global_batch, layout, matches,
    micro_batches, on_mesh,
};
use crate::support::problems::{ADAMW, CONFIG, LAMB, main_problem, packed_batch, problem};
use crate::support::reference::ReferenceConfig;
use crate::support::sample::sampled;
use serde_json::json;
use std::sync::Arc;
use ulysses::comm::thread::LaunchOptions;
use ulysses::comm::{ShardGroups, TrainingGroups};
use ulysses::config::Config;
use ulysses::data::DataError;
use ulysses::engine::EngineError;
use ulysses::kernels::attention::FlashAttention;

/// dp × sp with the shard size along dp, and whether partitions span sp.
type Sharding = (usize, usize, usize, bool);

/// Replicas without sp, with sp, with uneven sp, and of whole buffers.
const HYBRID: [Sharding; 4] = [(4, 1, 2, false), (4, 2, 2, false), (2, 3, 1, false), (4, 1, 1, false)];

/// Partitions over sp, alone, with dp, with uneven sizes, and with replicas along dp.
const OVER_SP: [Sharding; 7] = [
    (1, 2, 1, true),
    (1, 3, 1, true),
    (1, 4, 1, true),
    (2, 2, 2, true),
    (2, 3, 2, true),
    (4, 1, 4, true),
    (4, 2, 2, true),
];

fn meshes() -> impl Iterator<Item = Sharding> {
    HYBRID.into_iter().chain(OVER_SP)
}

fn sharded((dp, sp, shard_size, spans_sp): Sharding, stage: u8) -> Layout {
    Layout { shard_size: Some(shard_size), spans_sp, ..layout(dp, sp, stage) }
}

#[track_caller]
fn check(problem: &Problem, tolerance: f64) {
    let expected = problem.reference().unwrap();
    let layouts = meshes().flat_map(|mesh| [0, 1, 2, 3].map(|stage| sharded(mesh, stage)));
    let layouts = layouts.flat_map(|layout| [1, 2].map(|accumulation| Layout { accumulation, ..layout }));
    for layout in sampled(layouts, Layout::axes) {
        let outcome = problem.run(layout).unwrap();
        assert_matches(&outcome, &expected, tolerance, &format!("{layout:?}"));
    }
}

#[test]
fn clipped_sgd_is_the_same_with_replicas_of_partitions() {
    check(&main_problem(Rule::Sgd { lr: 0.1 }, Some(0.25)), 2e-5);
}

#[test]
fn adamw_is_the_same_with_replicas_of_partitions() {
    check(&main_problem(Rule::AdamW(ADAMW), None), 5e-5);
}

#[test]
fn without_accumulation_all_stages_give_the_same_bits() {
    let problem = main_problem(Rule::AdamW(ADAMW), Some(0.25));
    let layouts = meshes().flat_map(|mesh| [1, 2, 3].map(|stage| sharded(mesh, stage)));
    for layout in sampled(layouts, Layout::axes) {
        let [zero, other] = [Layout { stage: 0, ..layout }, layout]
            .map(|layout| bits(&problem.run(layout).unwrap()).unwrap());
        assert!(other == zero, "{layout:?}");
    }
}

#[test]
fn on_one_axis_partitions_over_sp_give_the_same_bits() {
    // Without clipping, which uses the norm: its sum has one term per partition.
    let problem = main_problem(Rule::AdamW(ADAMW), None);
    let bits_without_norms = |layout: Layout| {
        let mut outcome = problem.run(layout).unwrap();
        outcome.reports.iter_mut().for_each(|report| report.grad_norm = 0.0);
        bits(&outcome).unwrap()
    };
    let meshes = [(1, 2), (1, 3), (1, 4), (4, 1)].into_iter();
    let layouts = meshes.flat_map(|(dp, sp)| [0, 1, 2, 3].map(|stage| layout(dp, sp, stage)));
    let layouts = layouts.flat_map(|layout| [1, 2].map(|accumulation| Layout { accumulation, ..layout }));
    // With accumulation, stages 2 and 3 add up micro steps after the sum over sp instead of before it.
    let is_equal = |layout: &Layout| layout.accumulation == 1 || layout.stage < 2 || layout.sp == 1;
    for over_dp in sampled(layouts.filter(is_equal), Layout::axes) {
        let over_sp = Layout { spans_sp: true, ..over_dp };
        assert!(bits_without_norms(over_dp) == bits_without_norms(over_sp), "{over_dp:?}");
    }
}

#[test]
fn gradients_sent_in_bf16_are_the_same_bits_at_all_stages_and_near_those_in_f32() {
    let keys = json!({ "communication_data_type": "bf16", "seq_parallel_communication_data_type": "bf16" });
    let exact = main_problem(Rule::AdamW(ADAMW), Some(0.25));
    let rounded = Problem { extra: keys, ..exact.clone() };
    let over_dp = [(2, 1), (1, 3), (2, 3)].map(|(dp, sp)| (dp, sp, dp, false));
    for mesh in over_dp.into_iter().chain([(4, 2, 2, false), (1, 3, 1, true), (2, 2, 2, true)]) {
        let runs = [0, 1, 2, 3].map(|stage| rounded.run(sharded(mesh, stage)).unwrap());
        for stage in 1..=3 {
            assert!(bits(&runs[stage]).unwrap() == bits(&runs[0]).unwrap(), "{mesh:?} stage {stage}");
        }
        let expected = by_name(&exact.run(sharded(mesh, 0)).unwrap().gradients);
        let gradients = by_name(&runs[0].gradients);
        // Two sums, each of contributions rounded by at most 2⁻⁸, and which may cancel.
        assert_all_close(&format!("{mesh:?}: gradient"), &gradients, &expected, 2e-2);
        let error = |(name, gradient)| max_rel_error(&values(gradient), &expected[name]);
        assert!(gradients.iter().map(error).any(|error| error > 1e-4), "{mesh:?}: no gradient was rounded");
    }
}

#[test]
fn other_features_are_the_same_over_sp() {
    let frozen = json!({ "ulysses": { "parameter_groups": [{ "match": "layers.0.", "frozen": true }] } });
    let offloaded =
        json!({ "zero_optimization": { "stage": 3, "offload_optimizer": { "device": offload_target() } } });
    let tied = ReferenceConfig { tie_word_embeddings: true, ..CONFIG };
    let adamw = || main_problem(Rule::AdamW(ADAMW), Some(0.25));
    for (label, problem, tolerance) in [
        ("frozen", Problem { extra: frozen, ..adamw() }, 2e-5),
        ("tied", Problem { rule: Rule::AdamW(ADAMW), ..problem(tied, packed_batch()) }, 2e-5),
        ("LAMB", main_problem(Rule::Lamb(LAMB), Some(0.25)), 5e-5),
        ("offloaded", Problem { extra: offloaded, ..adamw() }, 2e-5),
    ] {
        let single = by_name(&problem.run(layout(1, 1, 3)).unwrap().parameters);
        for (mesh, stage) in [((1, 3, 1, true), 3), ((2, 2, 2, true), 2), ((1, 4, 1, true), 1)] {
            let parameters = by_name(&problem.run(sharded(mesh, stage)).unwrap().parameters);
            assert_all_close(&format!("{label} on {mesh:?}"), &parameters, &single, tolerance);
        }
    }
}

#[test]
fn each_rank_has_the_partition_of_its_shard_rank() {
    let problem = main_problem(Rule::AdamW(ADAMW), None);
    let held = |layout: Layout| {
        let config = problem.json_config(layout, 12).unwrap();
        let seen = on_mesh(&config, &LaunchOptions::default(), |_, groups| {
            let engine = problem.engine(&config, groups, Arc::new(FlashAttention::default()))?;
            Ok((engine.zero().world_size(), engine.zero().state_numel()))
        });
        seen.unwrap()
    };
    for stage in 1..=3 {
        // Partitions over sp equal those over as many dp ranks.
        for (mesh, partitions) in [((1, 4, 1, true), 4), ((2, 2, 2, true), 4), ((2, 3, 2, true), 6)] {
            assert_eq!(held(sharded(mesh, stage)), held(layout(partitions, 1, stage)), "{mesh:?} {stage}");
        }
        // Two partitions equal those of a dp axis of two, for any number of replicas.
        let plain = held(layout(2, 1, stage));
        assert_eq!(held(sharded((4, 1, 2, false), stage)), [plain[0], plain[1], plain[0], plain[1]]);
        assert_eq!(plain[0].0, 2);
    }
}

/// Replicas that do not sum their gradients.
fn without_the_sum(groups: TrainingGroups) -> TrainingGroups {
    let sharding = groups.sharding.map(|ShardGroups { shard, replicas }| ShardGroups {
        shard,
        replicas: FaultyGroup::wrap(replicas, Fault::SkipsTheSum),
    });
    TrainingGroups { sharding, ..groups }
}

#[test]
fn a_group_that_skips_the_sum_over_replicas_is_detected() {
    let problem = main_problem(Rule::Sgd { lr: 0.1 }, None);
    let expected = problem.reference().unwrap();
    let doubles = Doubles { groups: without_the_sum, ..Doubles::default() };
    for (stage, spans_sp) in [0, 1, 2, 3].into_iter().flat_map(|stage| [(stage, false), (stage, true)]) {
        let outcome = problem.run_with(sharded((4, 2, 2, spans_sp), stage), &doubles).unwrap();
        assert!(!matches(&outcome, &expected, 2e-5), "stage {stage}, over sp: {spans_sp}");
    }
}

#[test]
fn replicas_that_drift_apart_are_named() {
    let problem = main_problem(Rule::Sgd { lr: 0.1 }, None);
    let global = global_batch(&problem.batch).unwrap();
    // Of two replicas with two partitions each, and with four partitions each.
    for (mesh, partitions) in [((4, 1, 2, false), 2), ((4, 2, 2, true), 4)] {
        let config = problem.json_config(sharded(mesh, 3), problem.batch.num_rows()).unwrap();
        let check = |wrap: fn(TrainingGroups) -> TrainingGroups| {
            let run = |_: usize, groups: TrainingGroups| {
                let mut engine =
                    problem.engine(&config, wrap(groups), Arc::new(FlashAttention::default()))?;
                let mut batches = micro_batches(&global, &engine)?.into_iter();
                engine.train_batch(|| Ok::<_, DataError>(batches.next().unwrap()))?;
                Ok(engine.check_replicas().err())
            };
            on_mesh(&config, &LaunchOptions::default(), run).unwrap()
        };
        assert!(check(|groups| groups).iter().all(Option::is_none));
        for (rank, error) in check(without_the_sum).into_iter().enumerate() {
            let first = rank % partitions;
            match error {
                Some(EngineError::ReplicasDiffer {
                    what: "parameters",
                    axis: "replicas",
                    rank,
                    first: of,
                }) => {
                    assert_eq!((rank, of), (first + partitions, first));
                }
                other => panic!("{mesh:?}: {other:?}"),
            }
        }
    }
}

#[test]
fn a_shard_size_that_does_not_divide_dp_is_refused_by_key_and_line() {
    let message = |zero: &str| {
        let text = format!(
            "{{ \"train_batch_size\": 8, \"mesh_param\": [4, 1],\n  \"zero_optimization\": {zero} }}"
        );
        Config::from_json_str(&text, "run.json")
            .map(|config| config.zero_shard_size())
            .map_err(|error| error.to_string())
    };
    let refused = message(r#"{ "stage": 2, "mics_shard_size": 3 }"#).unwrap_err();
    assert!(
        ["run.json", "mics_shard_size", "dp 4 is not", "3 by", "line 2"]
            .iter()
            .all(|part| refused.contains(part)),
        "{refused}"
    );
    let both = message(r#"{ "stage": 3, "mics_shard_size": 2, "zero_hpz_partition_size": 4 }"#).unwrap_err();
    assert!(both.contains("mics_shard_size") && both.contains("zero_hpz_partition_size"), "{both}");
    assert_eq!(message(r#"{ "stage": 3, "zero_hpz_partition_size": 2 }"#), Ok(Some(2)));
    // All of dp, and the defaults of both keys, are not hybrid sharding.
    assert_eq!(message(r#"{ "stage": 3, "mics_shard_size": 4 }"#), Ok(None));
    assert_eq!(message(r#"{ "stage": 3, "mics_shard_size": -1, "zero_hpz_partition_size": 1 }"#), Ok(None));
}

#[test]
fn the_resolved_config_has_the_shard_size() {
    let text = r#"{ "train_batch_size": 4, "mesh_param": [4, 1], "zero_optimization": { "stage": 3, "mics_shard_size": 2 } }"#;
    let config = Config::from_json_str(text, "run.json").unwrap();
    let again = Config::from_json_str(&serde_json::to_string(&config).unwrap(), "again.json").unwrap();
    assert_eq!((again.zero_shard_size(), again.zero_world_size()), (Some(2), 2));
}
