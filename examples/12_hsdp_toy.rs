//! A model without a vocabulary, with a loss of its own: the toy of PyTorch's HSDP recipe on its mesh of (2, 4) ranks.
//! Parameters, gradients and optimizer state are sharded over four ranks (ZeRO stage 3), with two replicas.
//!
//! ```text
//! CANDLE_NUM_THREADS=1 cargo run --release --example 12_hsdp_toy
//! ```

use anyhow::Result;
use ulysses::candle::{self, D, bail};
use ulysses::prelude::*;

const CONFIG: &str = r#"{
    "train_batch_size": 8, "mesh_param": [8, 1], "zero_optimization": { "stage": 3, "mics_shard_size": 4 },
    "optimizer": { "type": "AdamW", "params": { "lr": 0.02 } }
}"#;
/// Samples per row of the batch, which take the place of tokens.
pub(crate) const SAMPLES: usize = 16;

/// `Linear(10, 10)`, `ReLU`, `Linear(10, 5)`.
fn net(params: &[Tensor], x: &Tensor, _: &BlockContext<'_>) -> candle::Result<Tensor> {
    let [weight1, bias1, weight2, bias2] = params else { bail!("the net has four parameters") };
    let (rows, samples, _) = x.dims3()?;
    let hidden = x.flatten_to(1)?.matmul(&weight1.t()?)?.broadcast_add(bias1)?.relu()?;
    hidden.matmul(&weight2.t()?)?.broadcast_add(bias2)?.reshape((rows, samples, ()))
}

/// The mean squared error: the sum over this rank's samples, and their number.
fn squared_error(_: &[Tensor], y: &Tensor, batch: &LocalBatch<'_>) -> candle::Result<LossTerms> {
    let error = (y - batch.tensor("target", y.dtype(), y.device())?)?;
    Ok(LossTerms { sum: error.sqr()?.mean(D::Minus1)?.sum_all()?, tokens: batch.num_labels() })
}

pub(crate) fn toy() -> Model {
    let spec = |name: &str, shape: &[usize]| ParameterSpec::new(name, shape, Init::Normal { std: 0.3 });
    let parameters = vec![
        spec("net1.weight", &[10, 10]),
        spec("net1.bias", &[10]),
        spec("net2.weight", &[5, 10]),
        spec("net2.bias", &[5]),
    ];
    Model {
        input: Box::new(Features::new("x")),
        layers: vec![Box::new(AutogradLayer::new("net", parameters, net).with_output_width(5).token_wise())],
        objective: Box::new(AutogradObjective::new("mse", vec![], squared_error)),
    }
}

/// The largest of each two neighbors among ten numbers.
pub(crate) fn batch(rows: usize, samples: usize) -> Result<GlobalBatch> {
    let x: Vec<f32> = (0..rows * samples * 10).map(|at| (at as f32 * 1.7).sin()).collect();
    let target = x.chunks_exact(2).map(|pair| pair[0].max(pair[1])).collect();
    Ok(GlobalBatch::without_ids(rows, samples)?.with_values("x", 10, x)?.with_values("target", 5, target)?)
}

fn main() -> Result<()> {
    let (config, batch) = (Config::from_json_str(CONFIG, "the example's config")?, batch(8, SAMPLES)?);
    let mesh = DeviceMesh::dp_sp(config.mesh.dp_size, config.mesh.sp_size)?;
    launch(mesh.world_size(), &LaunchOptions::default(), |rank| -> Result<()> {
        let groups = MeshGroups::new(&mesh, rank.group.clone())?;
        let mut engine = initialize(toy(), &RandomWeights { seed: 1 }, &config, &groups)?;
        for _ in 0..200 {
            let mut micro_batches = engine.shard(&batch)?.into_iter();
            let report = engine.train_batch(|| micro_batches.next().ok_or("the batch has ended"))?;
            if rank.rank == 0 && (report.step == 1 || report.step % 50 == 0) {
                println!("step {:3}  mean squared error {:.5}", report.step, report.loss);
            }
        }
        // Replicas must have updated their shards equally.
        engine.check_replicas()?;
        if rank.rank == 0 {
            println!("rank 0 holds {} of 165 elements of each moment", engine.zero().state_numel());
        }
        Ok(())
    })?;
    Ok(())
}
