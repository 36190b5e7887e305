//! Begins a run on one mesh and finishes it on others, as if nothing had happened.
//!
//! A cluster rarely gives back the machines it took. So a checkpoint here is the state of the
//! *run*, not of its ranks: flat buffers cut into partitions, of which any rank of any mesh reads
//! the ranges that it needs. And since neither the initial weights nor the order of the data know
//! the mesh, a run that moves house goes on with the same numbers, to rounding; on the same mesh,
//! to the bit.
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

/// The run is saved after so many steps, and goes on for as many.
const HALF: u64 = 5;

fn main() -> Result<()> {
    let directory = tempfile::tempdir()?;
    // Ten steps without a break, saving after five.
    let whole = run((2, 2), 1, Start::Afresh, directory.path())?;
    println!("dp 2 × sp 2, stage 1, uninterrupted: {}", show(&whole[HALF as usize..]));
    let expected = &whole[HALF as usize..];

    // The second half again, from the checkpoint, on whatever is at hand.
    for (mesh, stage) in [((2, 2), 1), ((4, 1), 3), ((1, 4), 0), ((1, 1), 2), ((3, 1), 3), ((1, 3), 1)] {
        // Twelve rows a step divide by 1 to 4.
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

/// Trains up to step 10 and returns the losses of the steps it did.
fn run((dp, sp): (usize, usize), stage: u8, start: Start, directory: &Path) -> Result<Vec<f64>> {
    let config = serde_json::json!({
        "train_batch_size": 12, "mesh_param": [dp, sp], "zero_optimization": { "stage": stage },
        "optimizer": { "type": "AdamW", "params": { "lr": 3e-3 } }, "gradient_clipping": 1.0,
    });
    let config = Config::from_json_str(&config.to_string(), "the example's config")?;
    let text = "the quick brown fox jumps over the lazy dog. ".repeat(50);
    let rows =
        Arc::new(PackedSequences::new(Corpus::from_documents([text.bytes().map(u32::from).collect()])?, 64)?);
    let mesh = DeviceMesh::dp_sp(dp, sp)?;
    let losses = launch(mesh.world_size(), &LaunchOptions::default(), |rank: RankContext| -> Result<_> {
        let (groups, llama) = (MeshGroups::new(&mesh, rank.group.clone())?, preset("nano")?);
        let mut engine = initialize(Model::llama(&llama)?, &RandomWeights { seed: 1 }, &config, &groups)?;
        let mut loader = engine.data_loader(rows.clone())?;
        if start == Start::FromNewest {
            // All ranks verify the hashes of their share of the files before one is trusted.
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
