//! Starts a run on one mesh and resumes it on others, with the same losses.
//!
//! The number of available machines may change during a run. A checkpoint therefore stores the
//! state of the *run*, not of its ranks: partitions of flat buffers, of which any rank of any mesh
//! reads the ranges that it needs. Initial weights and data order do not depend on the mesh, so a
//! resumed run has the same losses up to rounding, and bit-identical ones on the same mesh.
//!
//! ```text
//! cargo run --release --example 08_resume_on_another_mesh
//! ```
//!
//! The command line has it as `ulysses train … --resume --mesh 4x1`.

use anyhow::{Context, Result};
use std::path::Path;
use std::sync::Arc;
use ulysses::checkpoint::{SaveOptions, newest};
use ulysses::comm::{LaunchOptions, MeshGroups, RankContext, launch};
use ulysses::config::Config;
use ulysses::data::{Corpus, PackedSequences};
use ulysses::engine::{RunRecord, initialize};
use ulysses::mesh::DeviceMesh;
use ulysses::model::{Model, RandomWeights, preset};

/// Number of steps before the checkpoint, and after it.
const HALF: u64 = 5;

fn main() -> Result<()> {
    let directory = tempfile::tempdir()?;
    // Ten steps without interruption, with a checkpoint after five.
    let whole = run((2, 2), 1, Start::Afresh, directory.path())?;
    println!("dp 2 × sp 2, stage 1, uninterrupted: {}", show(&whole[HALF as usize..]));
    let expected = &whole[HALF as usize..];

    // The second half again, from the checkpoint, on several meshes.
    for (mesh, stage) in [((2, 2), 1), ((4, 1), 3), ((1, 4), 0), ((1, 1), 2), ((3, 1), 3), ((1, 3), 1)] {
        // Twelve sequences per step are divisible by 1 to 4.
        let losses = run(mesh, stage, Start::FromNewest, directory.path())?;
        let off = losses.iter().zip(expected).map(|(a, b)| ((a - b) / b).abs()).fold(0.0, f64::max);
        let (dp, sp) = mesh;
        println!("dp {dp} × sp {sp}, stage {stage}, resumed:       {}  off by {off:.0e}", show(&losses));
    }
    Ok(())
}

fn show(losses: &[f64]) -> String {
    losses.iter().map(|loss| format!("{loss:.6}")).collect::<Vec<_>>().join(" ")
}

#[derive(Clone, Copy, PartialEq)]
enum Start {
    Afresh,
    FromNewest,
}

/// Trains to step 10; returns the losses of its steps.
fn run((dp, sp): (usize, usize), stage: u8, start: Start, directory: &Path) -> Result<Vec<f64>> {
    let config = serde_json::json!({
        "train_batch_size": 12, "mesh_param": [dp, sp], "zero_optimization": { "stage": stage },
        "optimizer": { "type": "AdamW", "params": { "lr": 3e-3 } }, "gradient_clipping": 1.0,
    });
    let config = Config::from_json_str(&config.to_string(), "the example's config")?;
    let text = "the quick brown fox jumps over the lazy dog. ".repeat(50);
    let sequences =
        Arc::new(PackedSequences::new(Corpus::from_documents([text.bytes().map(u32::from).collect()])?, 64)?);
    let mesh = DeviceMesh::dp_sp(dp, sp)?;
    let losses = launch(mesh.world_size(), &LaunchOptions::default(), |rank: RankContext| -> Result<_> {
        let (groups, llama) = (MeshGroups::new(&mesh, rank.group.clone())?, preset("nano")?);
        let mut engine = initialize(Model::new(&llama)?, &RandomWeights { seed: 1 }, &config, &groups)?;
        let mut loader = engine.data_loader(sequences.clone())?;
        if start == Start::FromNewest {
            // The ranks verify the hashes of all files, each rank a share, before loading.
            let checkpoint = newest(directory, &*groups.whole()?)?.checkpoint.context("nothing was saved")?;
            engine.load_checkpoint(&checkpoint)?;
            loader.set_samples_consumed(checkpoint.manifest().progress.data.samples_consumed);
        }
        let mut saver = engine.saver(groups.whole()?, directory, SaveOptions::default())?;
        let mut losses = Vec::new();
        while engine.attempted_steps() < 2 * HALF {
            losses.push(engine.train_batch(|| loader.next_micro_batch())?.loss);
            if engine.attempted_steps() == HALF {
                let record = RunRecord::new("example", llama.to_hf_json(), &loader)?;
                engine.save_checkpoint(&mut saver, record)?;
                saver.finish()?;
            }
        }
        Ok(losses)
    })?;
    losses.into_iter().next().context("a mesh has a rank")
}
