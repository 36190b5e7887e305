//! Trains over three axes: data (dp), sequence (sp) and tensor parallelism (tp). The losses are those of one rank.
//!
//! Each axis divides something else: dp the sequences, sp the tokens of each sequence, tp the heads and the MLP of every
//! layer. tp is the innermost axis: its ranks communicate most, around every attention and every MLP. Between those, they
//! divide the tokens of their sp rank, so norms and residual stream are divided too (Megatron's sequence parallelism).
//!
//! ```text
//! cargo run --release --example 14_three_axes
//! ```
//!
//! The command line has it as `ulysses train … --mesh dp=2,sp=2,tp=2`.

use anyhow::{Context, Result};
use std::sync::Arc;
use ulysses::comm::{LaunchOptions, MeshGroups, RankContext, launch};
use ulysses::config::Config;
use ulysses::data::{Corpus, PackedSequences};
use ulysses::engine::initialize;
use ulysses::mesh::draw;
use ulysses::model::{Model, RandomWeights, preset};

/// Losses of a run, with what its first rank stores and sends.
struct Outcome {
    losses: Vec<f64>,
    state_bytes: u64,
    /// Bytes sent by axis.
    sent: Vec<(&'static str, u64)>,
}

fn main() -> Result<()> {
    println!("{}", draw(&config([2, 2, 2], 1)?.placed_mesh(None)?.mesh));
    let alone = run([1, 1, 1], 0)?;
    let meshes = [[1, 1, 2], [1, 2, 2], [2, 1, 2], [2, 2, 2], [1, 1, 3]];
    println!("one rank:              {}  {} KB of state", show(&alone.losses), alone.state_bytes / 1000);
    for (mesh, stage) in meshes.into_iter().zip([0, 0, 3, 1, 0]) {
        let Outcome { losses, state_bytes, sent } = run(mesh, stage)?;
        let off = losses.iter().zip(&alone.losses).map(|(a, b)| ((a - b) / b).abs()).fold(0.0, f64::max);
        let [dp, sp, tp] = mesh;
        println!(
            "dp {dp} × sp {sp} × tp {tp}, stage {stage}: {}  {} KB of state, off by {off:.0e}",
            show(&losses),
            state_bytes / 1000
        );
        let sent: Vec<_> = sent.iter().map(|(axis, bytes)| format!("{axis} {} KB", bytes / 1000)).collect();
        println!("    the first rank sent: {}", sent.join(", "));
    }
    Ok(())
}

fn show(losses: &[f64]) -> String {
    losses.iter().map(|loss| format!("{loss:.5}")).collect::<Vec<_>>().join(" ")
}

fn config([dp, sp, tp]: [usize; 3], stage: u8) -> Result<Config> {
    let config = serde_json::json!({
        "train_batch_size": 4, "mesh_param": [dp, sp], "tensor_parallel": { "autotp_size": tp },
        "zero_optimization": { "stage": stage },
        "optimizer": { "type": "AdamW", "params": { "lr": 3e-3 } }, "gradient_clipping": 1.0,
    });
    Ok(Config::from_json_str(&config.to_string(), "the example's config")?)
}

fn run(mesh: [usize; 3], stage: u8) -> Result<Outcome> {
    let config = config(mesh, stage)?;
    let mesh = config.placed_mesh(None)?.mesh;
    let text = "the quick brown fox jumps over the lazy dog. ".repeat(50);
    let corpus = Corpus::from_documents([text.bytes().map(u32::from).collect()])?;
    let sequences = Arc::new(PackedSequences::new(corpus, 64)?);
    let on_ranks = launch(mesh.world_size(), &LaunchOptions::default(), |rank: RankContext| -> Result<_> {
        let groups = MeshGroups::new(&mesh, rank.group.clone())?;
        // The engine keeps this rank's part of the model, and reads only that from the weights.
        let model = Model::new(&preset("nano")?)?;
        let mut engine = initialize(model, &RandomWeights { seed: 1 }, &config, &groups)?;
        let mut loader = engine.data_loader(sequences.clone())?;
        let losses = (0..4).map(|_| Ok(engine.train_batch(|| loader.next_micro_batch())?.loss));
        let losses = losses.collect::<Result<_>>()?;
        let sent = engine.groups().by_axis().into_iter();
        let sent = sent.map(|(axis, group)| (axis, group.stats().total().bytes_sent)).collect();
        Ok(Outcome { losses, state_bytes: engine.zero().expected_state_bytes().total(), sent })
    })?;
    on_ranks.into_iter().next().context("a mesh has a rank")
}
