//! Hybrid sharding (HSDP, MiCS): partitions over a part of dp, with replicas over the rest. The math is the
//! same; memory is less than with replicas alone, and more than with partitions over all of dp.

use crate::support::doubles::{Fault, FaultyGroup};
use crate::support::mesh_run::{
    Doubles, Layout, Problem, Rule, assert_matches, bits, global_batch, layout, matches, micro_batches,
    on_mesh,
};
use crate::support::problems::{ADAMW, main_problem};
use std::sync::Arc;
use ulysses::comm::thread::LaunchOptions;
use ulysses::config::Config;
use ulysses::data::DataError;
use ulysses::engine::EngineError;
use ulysses::kernels::attention::FlashAttention;
use ulysses::zero::{HybridGroups, ZeroGroups};

/// dp × sp with the shard size: replicas without sp, with sp, with uneven sp, and of whole buffers.
const MESHES: [(usize, usize, usize); 4] = [(4, 1, 2), (4, 2, 2), (2, 3, 1), (4, 1, 1)];

fn hybrid((dp, sp, shard_size): (usize, usize, usize), stage: u8) -> Layout {
    Layout { shard_size: Some(shard_size), ..layout(dp, sp, stage) }
}

fn check(problem: &Problem, tolerance: f64) {
    let expected = problem.reference().unwrap();
    for (mesh, stage) in MESHES.into_iter().flat_map(|mesh| [0, 1, 2, 3].map(|stage| (mesh, stage))) {
        for accumulation in [1, 2] {
            let layout = Layout { accumulation, ..hybrid(mesh, stage) };
            let outcome = problem.run(layout).unwrap();
            assert_matches(&outcome, &expected, tolerance, &format!("{layout:?}"));
        }
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
    for mesh in MESHES {
        let of_stage = |stage| bits(&problem.run(hybrid(mesh, stage)).unwrap()).unwrap();
        let first = of_stage(0);
        for stage in 1..=3 {
            assert!(of_stage(stage) == first, "{mesh:?} stage {stage}");
        }
    }
}

#[test]
fn each_rank_has_the_partition_of_its_shard_rank() {
    let problem = main_problem(Rule::AdamW(ADAMW), None);
    let held = |layout: Layout| {
        let config = problem.json_config(layout, 4).unwrap();
        let seen = on_mesh(&config, &LaunchOptions::default(), |_, groups| {
            let engine = problem.engine(&config, groups, Arc::new(FlashAttention))?;
            Ok((engine.zero().world_size(), engine.zero().state_numel()))
        });
        seen.unwrap()
    };
    for stage in 1..=3 {
        // Two partitions equal those of a dp axis of two, for any number of replicas.
        let plain = held(layout(2, 1, stage));
        assert_eq!(held(hybrid((4, 1, 2), stage)), [plain[0], plain[1], plain[0], plain[1]]);
        assert_eq!(plain[0].0, 2);
    }
}

/// Replicas that do not sum their gradients.
fn without_the_sum(groups: ZeroGroups) -> ZeroGroups {
    let hybrid = groups.hybrid.map(|HybridGroups { shard, replicas }| HybridGroups {
        shard,
        replicas: FaultyGroup::wrap(replicas, Fault::SkipsTheSum),
    });
    ZeroGroups { hybrid, ..groups }
}

#[test]
fn a_group_that_skips_the_sum_over_replicas_is_detected() {
    let problem = main_problem(Rule::Sgd { lr: 0.1 }, None);
    let expected = problem.reference().unwrap();
    let doubles = Doubles { groups: without_the_sum, ..Doubles::default() };
    for stage in 0..=3 {
        let outcome = problem.run_with(hybrid((4, 2, 2), stage), &doubles).unwrap();
        assert!(!matches(&outcome, &expected, 2e-5), "stage {stage}");
    }
}

#[test]
fn replicas_that_drift_apart_are_named() {
    let problem = main_problem(Rule::Sgd { lr: 0.1 }, None);
    let global = global_batch(&problem.batch).unwrap();
    let config = problem.json_config(hybrid((4, 1, 2), 3), problem.batch.num_rows()).unwrap();
    let check = |wrap: fn(ZeroGroups) -> ZeroGroups| {
        let run = |_: usize, groups: ZeroGroups| {
            let mut engine = problem.engine(&config, wrap(groups), Arc::new(FlashAttention))?;
            let mut batches = micro_batches(&global, &engine)?.into_iter();
            engine.train_batch(|| Ok::<_, DataError>(batches.next().unwrap()))?;
            Ok(engine.check_replicas().err())
        };
        on_mesh(&config, &LaunchOptions::default(), run).unwrap()
    };
    assert!(check(|groups| groups).iter().all(Option::is_none));
    for (rank, error) in check(without_the_sum).into_iter().enumerate() {
        // Ranks 0 and 2 hold one partition, 1 and 3 the other.
        let (first, other) = (rank % 2, rank % 2 + 2);
        match error {
            Some(EngineError::ReplicasDiffer { what: "parameters", axis: "replicas", rank, first: of }) => {
                assert_eq!((rank, of), (other, first));
            }
            other => panic!("{other:?}"),
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
