//! ZeRO: an optimizer that is partitioned over ranks.
//!
//! Data parallelism stores parameters, gradients and optimizer state on every rank: 16 bytes per
//! f32 parameter with Adam. ZeRO (arXiv 1910.02054) partitions them over the ranks: stage 1 the
//! optimizer state, stage 2 also the gradients, stage 3 also the parameters. The results are
//! bit-identical.
//!
//! The model is a least-squares fit of a line with a hand-written gradient, to focus on what each
//! rank stores.
//!
//! ```text
//! cargo run --release --example 04_zero
//! ```

use anyhow::Result;
use candle_core::{D, Device, Tensor};
use ulysses::comm::{LaunchOptions, MeshGroups, RankContext, TrainingGroups, launch};
use ulysses::config::{Config, ZeroStage};
use ulysses::mesh::DeviceMesh;
use ulysses::tensor::TensorOptions;
use ulysses::zero::{FlatLayout, StateBytes, ZeroOptimizer};

const DP: usize = 4;
/// Weights and a bias: 11 elements, not divisible by 4. The flat buffer is padded to 12.
const FEATURES: usize = 10;
const SAMPLES_PER_RANK: usize = 8;
const STEPS: u64 = 300;

fn main() -> Result<()> {
    let layout = layout();
    println!("{} elements in {} partitions, across parameter boundaries:", layout.numel(), DP);
    for rank in 0..DP {
        let pieces = layout.pieces(layout.partition(rank));
        let pieces = pieces.map(|p| format!("{}[{:?}]", layout.parameters()[p.parameter].name, p.elements));
        println!("  rank {rank}: {}", pieces.collect::<Vec<_>>().join(" "));
    }
    println!("\nstage  last loss             bytes per rank: parameters, gradients, Adam state");
    let mut losses = Vec::new();
    for stage in ZeroStage::ALL {
        let results = launch(DP, &LaunchOptions::default(), |rank| fit(&rank, stage))?;
        let (loss, held) = results[0];
        let StateBytes { parameters, gradients, optimizer } = held;
        println!("{:5}  {loss:<20e}  {parameters:10} {gradients:10} {optimizer:13}", u8::from(stage));
        losses.push(loss);
    }
    println!("\nbit-identical: {}", losses.iter().all(|loss| loss.to_bits() == losses[0].to_bits()));
    Ok(())
}

fn layout() -> FlatLayout {
    let parameters = [("weight", vec![FEATURES]), ("bias", vec![1])];
    FlatLayout::new("line", parameters.map(|(name, shape)| (name.to_owned(), shape)), DP)
}

/// Fits the line to the samples of all ranks; returns the last loss and the bytes of this rank.
fn fit(rank: &RankContext, stage: ZeroStage) -> Result<(f64, StateBytes)> {
    let mesh = DeviceMesh::dp_sp(DP, 1)?;
    let groups = MeshGroups::new(&mesh, rank.group.clone())?;
    let groups = TrainingGroups::new(&groups, None)?;
    let adam = r#"{ "train_batch_size": 1, "optimizer": { "type": "Adam", "params": { "lr": 0.2 } } }"#;
    let adam = Config::from_json_str(adam, "the example's config")?.optimizer;
    // Called for exactly the elements that this rank stores.
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
        // Stage 3 gathers the parameters here, until they are released.
        let parameters = zero.parameters(0)?;
        let prediction = x.broadcast_mul(&parameters[0])?.sum(D::Minus1)?.broadcast_add(&parameters[1])?;
        let error = (prediction - &y)?;
        zero.release(0);
        loss = f64::from(error.sqr()?.mean_all()?.to_scalar::<f32>()?);

        // The backward pass accumulates gradients; `reduce` sums them over the ranks. From stage 2
        // on, a rank stores only its partition of the sum.
        zero.zero_gradients()?;
        let by_weight = x.broadcast_mul(&error.unsqueeze(1)?)?.sum(0)?;
        let gradients = zero.gradients(0)?;
        for (gradient, value) in gradients.iter().flatten().zip([by_weight, error.sum_keepdim(0)?]) {
            ulysses::kernels::elementwise::accumulate(gradient, &value)?;
        }
        zero.reduce(0, true)?;
        zero.finish_reductions()?;
        // The update scales the sum over all samples to a mean.
        zero.update(step, 0.2, None, 2.0 / (DP * SAMPLES_PER_RANK) as f64)?;
    }
    Ok((loss, zero.expected_state_bytes()))
}
