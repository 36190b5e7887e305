//! Resuming after skipped steps.

use super::training::{Setup, on_mesh, setup};
use ulysses::checkpoint::{Checkpoint, step_name};

/// Every gradient of this loss overflows fp16.
const OVERFLOWING: &str = r#"{ "fp16": { "enabled": true, "loss_scale": 1e30 } }"#;

/// A job that restarts repeatedly must not skip steps forever.
#[test]
fn consecutive_overflows_are_counted_across_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    let setup = Setup { extra: OVERFLOWING, ..setup(2, 1, 2) };
    on_mesh(setup, |rank| {
        assert!(rank.train(40)?.iter().all(|report| report.skipped && report.overflow));
        rank.save(dir.path())
    });
    let saved = Checkpoint::open(&dir.path().join(step_name(40))).unwrap();
    assert_eq!(saved.manifest().progress.consecutive_skips, 40);
    on_mesh(setup, |rank| {
        rank.resume(dir.path())?;
        assert_eq!(rank.train(23)?.len(), 23);
        let error = rank.train(1).unwrap_err().to_string();
        assert!(error.contains("step 64") && error.contains("64 step(s) in a row"), "{error}");
        Ok(())
    });
}
