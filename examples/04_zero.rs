//! ZeRO, alone: an optimizer that no rank holds whole.
//!
//! Data parallelism keeps a copy of parameters, gradients and optimizer state on every rank: 16
//! bytes for each f32 parameter under Adam. ZeRO (arXiv 1910.02054) cuts them into as many
//! partitions as there are ranks: with stage 1 the optimizer state, with 2 also the gradients,
//! with 3 also the parameters. What is computed stays the same, to the bit.
//!
//! The model here is a line fitted by least squares, its gradient written by hand, so that
//! nothing distracts from who holds what.
//!
//! ```text
//! cargo run --release --example 04_zero
//! ```

use anyhow::Result;
use candle_core::{D, Device, Tensor};
use ulysses::comm::{LaunchOptions, MeshGroups, RankContext, launch};
use ulysses::config::{Config, ZeroStage};
use ulysses::mesh::DeviceMesh;
use ulysses::tensor::TensorOptions;
use ulysses::zero::{FlatLayout, StateBytes, ZeroGroups, ZeroOptimizer};

const DP: usize = 4;
/// Weights and a bias: 11 elements, which 4 does not divide. The flat buffer is padded to 12.
const FEATURES: usize = 10;
const SAMPLES_PER_RANK: usize = 8;
const STEPS: u64 = 300;

fn main() -> Result<()> {
    let layout = layout();
    println!("{} elements in {} partitions, whatever parameter they are of:", layout.numel(), DP);
    for rank in 0..DP {
        let pieces = layout.pieces(layout.partition(rank));
        let pieces = pieces.map(|p| format!("{}[{:?}]", layout.parameters()[p.parameter].name, p.elements));
        println!("  rank {rank}: {}", pieces.collect::<Vec<_>>().join(" "));
    }
    println!("\nstage  last loss             bytes held: parameters, gradients, Adam's state");
    let mut losses = Vec::new();
    for stage in ZeroStage::ALL {
        let results = launch(DP, &LaunchOptions::default(), |rank| fit(&rank, stage))?;
        let (loss, held) = results[0];
        let StateBytes { parameters, gradients, optimizer } = held;
        println!("{:5}  {loss:<20e}  {parameters:10} {gradients:10} {optimizer:13}", u8::from(stage));
        losses.push(loss);
    }
    println!("\nequal to the bit: {}", losses.iter().all(|loss| loss.to_bits() == losses[0].to_bits()));
    Ok(())
}

fn layout() -> FlatLayout {
    let parameters = [("weight", vec![FEATURES]), ("bias", vec![1])];
    FlatLayout::new("line", parameters.map(|(name, shape)| (name.to_owned(), shape)), DP)
}

/// Fits the line to all ranks' samples and returns the last loss and what this rank holds.
fn fit(rank: &RankContext, stage: ZeroStage) -> Result<(f64, StateBytes)> {
    let mesh = DeviceMesh::dp_sp(DP, 1)?;
    let groups = MeshGroups::new(&mesh, rank.group.clone())?;
    let groups = ZeroGroups::new(&groups, None)?;
    let adam = r#"{ "train_batch_size": 1, "optimizer": { "type": "Adam", "params": { "lr": 0.2 } } }"#;
    let adam = Config::from_json_str(adam, "the example's config")?.optimizer;
    // A rank is asked for exactly the initial elements that it keeps.
    let zeros = |_: (usize, usize), _: std::ops::Range<usize>, out: &mut [f32]| {
        out.fill(0.0);
        Ok::<_, anyhow::Error>(())
    };
    let (units, options) = (vec![layout()], TensorOptions::default());
    let mut zero = ZeroOptimizer::new(units, stage, adam, &[], groups, options, &zeros)?;

    // This rank's samples of y = Σ (i + 1)·xᵢ + 3.
    let value = |at: usize| ((at * 7919 + 13) % 101) as f32 / 50.5 - 1.0;
    let first = rank.rank * SAMPLES_PER_RANK * FEATURES;
    let x: Vec<f32> = (first..first + SAMPLES_PER_RANK * FEATURES).map(value).collect();
    let x = Tensor::from_vec(x, (SAMPLES_PER_RANK, FEATURES), &Device::Cpu)?;
    let truth = Tensor::arange(1.0_f32, FEATURES as f32 + 1.0, &Device::Cpu)?;
    let y = (x.broadcast_mul(&truth)?.sum(D::Minus1)? + 3.0)?;

    let mut loss = 0.0;
    for step in 1..=STEPS {
        // Stage 3 gathers the parameters here, for as long as they are needed.
        let parameters = zero.parameters(0)?;
        let prediction = x.broadcast_mul(&parameters[0])?.sum(D::Minus1)?.broadcast_add(&parameters[1])?;
        let error = (prediction - &y)?;
        zero.release(0);
        loss = f64::from(error.sqr()?.mean_all()?.to_scalar::<f32>()?);

        // A backward pass adds to the gradients; `reduce` sums them over the ranks, and from stage
        // 2 on a rank keeps its own partition of the sum only.
        zero.zero_gradients()?;
        let by_weight = x.broadcast_mul(&error.unsqueeze(1)?)?.sum(0)?;
        let gradients = zero.gradients(0)?;
        for (gradient, value) in gradients.iter().flatten().zip([by_weight, error.sum_keepdim(0)?]) {
            ulysses::kernels::elementwise::accumulate(gradient, &value)?;
        }
        zero.reduce(0, true)?;
        zero.finish_reductions()?;
        // The sum over all samples, made a mean on the way.
        zero.update(step, 0.2, None, 2.0 / (DP * SAMPLES_PER_RANK) as f64)?;
    }
    Ok((loss, zero.expected_state_bytes()))
}
