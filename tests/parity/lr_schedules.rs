//! The schedules against values of DeepSpeed 0.19.8 (`fixtures/golden/lr_schedules.json`).

use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use ulysses::config::{Config, LrSchedule};

const GOLDEN: &str = include_str!("../fixtures/golden/lr_schedules.json");

#[derive(Deserialize)]
struct Golden {
    schedules: BTreeMap<String, Vec<Entry>>,
}

#[derive(Deserialize)]
struct Entry {
    params: Value,
    optimizer_lr: f64,
    lr_used_at_optimizer_step: Vec<f64>,
    beta1_used_at_optimizer_step: Vec<f64>,
    lr_after_60_scheduler_steps: f64,
}

/// The schedule of a `scheduler` section, read from a config file.
fn schedule(scheduler_type: &str, params: &Value, base_lr: f64) -> LrSchedule {
    let file = json!({
        "train_batch_size": 1,
        "optimizer": { "type": "AdamW", "params": { "lr": base_lr } },
        "scheduler": { "type": scheduler_type, "params": params },
    });
    Config::from_json_str(&file.to_string(), "golden").unwrap_or_else(|error| panic!("{error}")).lr_schedule()
}

#[track_caller]
fn assert_close(actual: f64, expected: f64, context: &str) {
    let tolerance = 1e-6 * expected.abs();
    assert!((actual - expected).abs() <= tolerance, "{context}: {actual} instead of {expected}");
}

#[test]
fn every_schedule_has_deepspeeds_rates_and_betas() {
    let golden: Golden = serde_json::from_str(GOLDEN).unwrap();
    let mut num_schedules = 0;
    for (scheduler_type, entries) in &golden.schedules {
        for entry in entries {
            let schedule = schedule(scheduler_type, &entry.params, entry.optimizer_lr);
            assert_eq!(entry.lr_used_at_optimizer_step.len(), 60);
            for (step, &rate) in (0..).zip(&entry.lr_used_at_optimizer_step) {
                assert_close(schedule.lr_at(step), rate, &format!("lr of {scheduler_type} at step {step}"));
            }
            assert_close(schedule.lr_at(60), entry.lr_after_60_scheduler_steps, scheduler_type);
            let cycles_momentum = entry.params["cycle_momentum"] == true;
            for (step, &beta) in (0..).zip(&entry.beta1_used_at_optimizer_step) {
                let context = format!("beta of {scheduler_type} at step {step}");
                match schedule.momentum_at(step) {
                    Some([beta1, beta2]) => {
                        assert!(cycles_momentum, "{context}");
                        assert_close(beta1, beta, &context);
                        assert_eq!(beta2, 0.99, "{context}");
                    }
                    // 0.9 is the optimizer's own.
                    None => assert!(!cycles_momentum && beta == 0.9, "{context}"),
                }
            }
            num_schedules += 1;
        }
    }
    assert_eq!(num_schedules, 9);
}

#[test]
fn the_range_test_grows_by_its_rate_per_interval() {
    let params = |staircase: bool| {
        json!({
            "lr_range_test_min_lr": 0.002,
            "lr_range_test_step_size": 4,
            "lr_range_test_step_rate": 3.0,
            "lr_range_test_staircase": staircase,
        })
    };
    // 0.002 · (1 + 3 · step / 4), and with whole intervals 0.002 · (1 + 3 · ⌊step / 4⌋)
    let smooth = schedule("LRRangeTest", &params(false), 1.0);
    let stairs = schedule("LRRangeTest", &params(true), 1.0);
    let by_hand =
        [(0, 0.002, 0.002), (1, 0.0035, 0.002), (3, 0.0065, 0.002), (4, 0.008, 0.008), (9, 0.0155, 0.014)];
    for (step, smooth_lr, stairs_lr) in by_hand {
        assert_close(smooth.lr_at(step), smooth_lr, "smooth");
        assert_close(stairs.lr_at(step), stairs_lr, "stairs");
    }
    assert_eq!(smooth.momentum_at(3), None);
}

/// Of DeepSpeed 0.19.8, driven as its engine does.
#[test]
fn a_cycle_without_a_falling_half_ends_at_its_minimum() {
    let params = json!({
        "cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 2, "cycle_second_step_size": 0,
    });
    let schedule = schedule("OneCycle", &params, 1e-3);
    for (step, lr) in [(0, 1e-4), (1, 5.5e-4), (2, 1e-4), (3, 1e-4), (4, 1e-4)] {
        assert_close(schedule.lr_at(step), lr, &format!("step {step}"));
    }
}

#[test]
fn warmup_without_a_maximum_rises_to_the_optimizers_rate() {
    let schedule = schedule("WarmupLR", &json!({ "warmup_num_steps": 4, "warmup_type": "linear" }), 0.08);
    let rates: Vec<_> = (0..7).map(|step| schedule.lr_at(step)).collect();
    assert_eq!(rates, [0.0, 0.0, 0.02, 0.04, 0.06, 0.08, 0.08]);
}

#[test]
fn rates_stay_finite_for_ever() {
    for (scheduler_type, params) in [
        ("WarmupLR", json!({})),
        ("WarmupDecayLR", json!({ "total_num_steps": 1 })),
        ("WarmupCosineLR", json!({ "total_num_steps": 1, "warmup_num_steps": 1 })),
        ("WarmupCosineLR", json!({ "total_num_steps": u64::MAX, "warmup_num_steps": u64::MAX })),
        ("OneCycle", json!({ "cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_second_step_size": 0 })),
        ("OneCycle", json!({ "cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": u64::MAX })),
        ("LRRangeTest", json!({ "lr_range_test_step_size": 1 })),
    ] {
        let schedule = schedule(scheduler_type, &params, 1e-3);
        for step in [0, 1, 2, 3, 1999, 2000, 2001, 1 << 40, u64::MAX] {
            let rate = schedule.lr_at(step);
            assert!(rate.is_finite() && rate >= 0.0, "{scheduler_type} {params} at {step}: {rate}");
        }
    }
}
