//! Resuming with optimizer state and gradients offloaded to files.

use super::training::{ADAGRAD, ADAM, LAMB, Setup, on_mesh, setup};
use ulysses::checkpoint::{Checkpoint, Comparison, diff, step_name};

const IN_MEMORY: &str = r#"{ "zero_optimization": { "stage": 3 } }"#;
const IN_FILES: &str = r#"{ "zero_optimization": { "stage": 3,
    "offload_optimizer": { "device": "nvme" }, "offload_param": { "device": "nvme" } } }"#;
const BF16_IN_MEMORY: &str = r#"{ "bf16": { "enabled": true }, "zero_optimization": { "stage": 1 } }"#;
const BF16_IN_A_FILE: &str = r#"{ "bf16": { "enabled": true }, "zero_optimization": { "stage": 1,
    "offload_optimizer": { "device": "nvme" } } }"#;

#[test]
fn offload_does_not_change_checkpoints() {
    for (in_memory, in_files) in [(IN_MEMORY, IN_FILES), (BF16_IN_MEMORY, BF16_IN_A_FILE)] {
        for ((dp, sp), optimizer) in
            [(1, 1), (2, 2), (3, 1)].into_iter().flat_map(|mesh| [ADAM, ADAGRAD, LAMB].map(|o| (mesh, o)))
        {
            let directories = [in_memory, in_files].map(|extra| {
                let setup = Setup { optimizer, extra, ..setup(dp, sp, 0) };
                let dir = tempfile::tempdir().unwrap();
                let uninterrupted = on_mesh(setup, |rank| {
                    rank.train(2)?;
                    rank.save(dir.path())?;
                    rank.train(2)
                });
                // Each setting resumes from the checkpoint of the other.
                let other = if extra == in_files { in_memory } else { in_files };
                let resumed = on_mesh(Setup { extra: other, ..setup }, |rank| {
                    rank.resume(dir.path())?;
                    let reports = rank.train(2)?;
                    rank.save(dir.path())?;
                    Ok(reports)
                });
                assert_eq!(uninterrupted, resumed, "{setup:?}");
                dir
            });
            for step in [2, 4] {
                let open =
                    |dir: &tempfile::TempDir| Checkpoint::open(&dir.path().join(step_name(step))).unwrap();
                let [memory, files] = directories.each_ref().map(open);
                let comparisons = diff(&memory, &files).unwrap();
                assert!(comparisons.len() > 20);
                for (tensor, comparison) in comparisons {
                    assert_eq!(comparison, Comparison::Equal, "{optimizer} {dp}x{sp} {in_files}: {tensor:?}");
                }
            }
        }
    }
}
