//! The best checkpoint, early stopping, and checkpoint retention.

use crate::support::cli::{Outcome, Workplace};
use serde_json::{Value, json};
use ulysses::checkpoint::saved_steps;

/// A workplace whose `c.json` evaluates every two steps, with these keys of `validation` and `checkpoint`. The learning
/// rate grows until the loss does too.
fn workplace(mesh: [usize; 2], validation: Value, checkpoint: Value) -> Workplace {
    let place = Workplace::new();
    write_config(&place, mesh, validation, checkpoint);
    place
}

fn write_config(place: &Workplace, mesh: [usize; 2], validation: Value, checkpoint: Value) {
    let mut held_out = json!({ "data": "text.txt", "eval_interval": 2, "eval_batches": 1 });
    held_out.as_object_mut().unwrap().extend(validation.as_object().unwrap().clone());
    let config = json!({
        "mesh_param": mesh,
        "optimizer": { "type": "AdamW", "params": { "lr": 1e-3 } },
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": 0.001, "warmup_max_lr": 1.0, "warmup_num_steps": 12, "warmup_type": "linear"
            },
        },
        "checkpoint": checkpoint,
        "ulysses": { "validation": held_out },
    });
    place.write_config("c.json", config);
}

fn train(place: &Workplace, arguments: &[&str]) -> Outcome {
    place.run(&[&["train", "c.json"], arguments].concat())
}

/// Returns steps and losses of the evaluations.
fn evaluations(place: &Workplace, name: &str) -> Vec<(u64, f64)> {
    let metrics = place.metrics(name);
    let evaluation = |line: &Value| Some((line["step"].as_u64()?, line.get("eval_loss")?.as_f64()?));
    metrics.iter().filter_map(evaluation).collect()
}

fn lowest(evaluations: &[(u64, f64)]) -> (u64, f64) {
    *evaluations.iter().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap()
}

#[test]
fn the_best_checkpoint_is_kept_and_found_on_another_mesh() {
    let checkpoint = json!({ "interval": 3, "keep_last": 1, "keep_best": true });
    let place = workplace([2, 1], json!({}), checkpoint.clone());
    let outcome = train(&place, &["--steps", "8"]);
    let announced = "checkpoints: saved every 3 steps and after the last step; keeping the last 1 (`checkpoint.keep_last`, 0 keeps \
                     all), and the one with the lowest evaluation loss (`checkpoint.keep_best`)";
    assert!(outcome.assert_done().stderr.contains(announced), "{outcome:?}");
    let (best, loss) = lowest(&evaluations(&place, "out/metrics.jsonl"));
    assert!(best < 8, "the loss must grow in the end: {:?}", evaluations(&place, "out/metrics.jsonl"));
    let name = format!("step_{best:08}");
    let expected = format!("best loss {loss:.4} at step {best}; best checkpoint out/{name}");
    assert!(outcome.stdout.contains(&expected), "no {expected:?} in {outcome:?}");
    assert_eq!(place.read("out/best"), format!("{name}\n"));
    assert_eq!(saved_steps(&place.path("out")).unwrap(), [8, best]);
    assert_eq!(place.read_json("out/run.json")["best_evaluation"]["step"], best);
    // Later losses are worse, on another mesh too.
    write_config(&place, [1, 2], json!({}), checkpoint);
    let outcome = train(&place, &["--steps", "12", "--resume"]);
    assert!(outcome.assert_done().stdout.contains(&expected), "no {expected:?} in {outcome:?}");
    assert_eq!(place.read("out/best"), format!("{name}\n"));
    assert_eq!(saved_steps(&place.path("out")).unwrap(), [12, best]);
    let inspected = place.run(&["checkpoint", "inspect", "out/best"]);
    assert!(inspected.assert_done().stdout.contains(&format!("out/{name}")), "{inspected:?}");
    place.run(&["checkpoint", "export", "out/best", "--output", "hf"]).assert_done();
    place.run(&["eval", "hf", "--data", "text.txt", "--seq-len", "64"]).assert_done();
    let eval = place.run(&["eval", "out/best", "--data", "text.txt"]);
    eval.assert_refused(2, &["`ulysses checkpoint export out/best --output DIR`"]);
    // Another directory has no best checkpoint until the next evaluation.
    let outcome = train(&place, &["--steps", "14", "--resume=out", "--output", "other"]);
    outcome.assert_done();
    assert_eq!(place.read("other/best"), "step_00000014\n");
}

#[test]
fn a_resumed_run_stops_early_at_the_same_step() {
    let validation = json!({ "early_stopping_patience": 2, "early_stopping_threshold": 100.0 });
    let place = workplace([2, 1], validation.clone(), json!({}));
    let outcome = train(&place, &["--steps", "20", "--output", "whole"]);
    let expected =
        "stopped early after step 6: the last 2 evaluations did not improve the loss by more than 100";
    assert!(outcome.assert_done().stdout.contains(expected), "{outcome:?}");
    assert_eq!(saved_steps(&place.path("whole")).unwrap(), [6], "the last step is saved");
    train(&place, &["--steps", "4"]).assert_done();
    write_config(&place, [1, 1], validation, json!({}));
    let outcome = train(&place, &["--steps", "20", "--resume"]);
    assert!(outcome.assert_done().stdout.contains(expected), "{outcome:?}");
    let outcome = train(&place, &["--steps", "20", "--resume"]);
    let expected = "nothing to do: 6 steps are complete, 20 are requested; the run stopped early: the last 2 evaluations";
    assert!(outcome.assert_done().stdout.contains(expected), "{outcome:?}");
    write_config(&place, [1, 1], json!({ "early_stopping_patience": 3 }), json!({}));
    train(&place, &["--steps", "7", "--resume"]).assert_done();
}

#[test]
fn the_model_is_evaluated_before_the_first_step_if_configured() {
    let place = workplace([1, 2], json!({ "eval_on_start": true }), json!({}));
    let outcome = train(&place, &["--steps", "3"]);
    assert!(outcome.assert_done().stderr.contains("step 0/3  evaluation: loss"), "{outcome:?}");
    let at = |name| evaluations(&place, name).into_iter().map(|(step, _)| step).collect::<Vec<_>>();
    assert_eq!(at("out/metrics.jsonl"), [0, 2, 3]);
    place.run(&["report", "out"]).assert_done();
    train(&place, &["--steps", "4", "--resume"]).assert_done();
    assert_eq!(at("out/metrics.jsonl"), [0, 2, 3, 4]);
}

#[test]
fn ten_checkpoints_are_kept_by_default_and_all_with_0() {
    for (keep, expected) in [(json!({}), 10), (json!({ "keep_last": 0 }), 12)] {
        let mut checkpoint = keep;
        checkpoint["interval"] = json!(1);
        let place = workplace([1, 1], json!({}), checkpoint);
        let outcome = train(&place, &["--steps", "12"]);
        let said = if expected == 10 { "keeping the last 10" } else { "keeping all" };
        assert!(outcome.assert_done().stderr.contains(said), "{outcome:?}");
        assert_eq!(saved_steps(&place.path("out")).unwrap().len(), expected);
    }
}

#[test]
fn the_best_checkpoint_needs_evaluations() {
    let place = Workplace::new();
    place.write_config("c.json", json!({ "checkpoint": { "keep_best": true } }));
    train(&place, &[]).assert_refused(2, &["`checkpoint.keep_best` requires `ulysses.validation`"]);
}
