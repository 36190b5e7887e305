//! A training program of your own: a layer in candle ops, data that the program makes, evaluations, checkpoints that a
//! second start goes on from, an observer, and the model as a safetensors file.
//!
//! ```text
//! CANDLE_NUM_THREADS=1 cargo run --release --example 10_own_training_program [-- OUTPUT_DIR]
//! ```

use anyhow::{Context, Result};
use std::path::PathBuf;
use std::sync::Arc;
use ulysses::candle::{self, D};
use ulysses::checkpoint::{Checkpoint, ExportDtype, ExportOptions, LocalStorage, export};
use ulysses::prelude::*;

const CONFIG: &str = r#"{
    "train_batch_size": 4, "mesh_param": [2, 2], "zero_optimization": { "stage": 2 }, "gradient_clipping": 1.0,
    "optimizer": { "type": "AdamW", "params": { "lr": 3e-3 } }, "checkpoint": { "interval": 20, "keep_last": 2 },
    "ulysses": { "steps": 40, "validation": { "fraction": 0.1, "eval_interval": 20 } }
}"#;
const HIDDEN: usize = 64;

/// 1. The layer: causal attention over whole sequences, wherever their tokens lie, then an MLP.
fn block(params: &[Tensor], x: &Tensor, ctx: &BlockContext<'_>) -> candle::Result<Tensor> {
    let [qkv, out, up, down] = params else { candle::bail!("the block has four parameters") };
    let qkv = linear(&norm(x)?, qkv)?;
    let dims = (ctx.batch(), ctx.seq_len_local(), 4, HIDDEN / 4);
    let heads = |part: usize| qkv.narrow(D::Minus1, part * HIDDEN, HIDDEN)?.reshape(dims);
    let x = (x + linear(&ctx.attention(&heads(0)?, &heads(1)?, &heads(2)?)?.flatten_from(2)?, out)?)?;
    &x + linear(&linear(&norm(&x)?, up)?.gelu()?, down)?
}

fn norm(x: &Tensor) -> candle::Result<Tensor> {
    x.broadcast_div(&(x.sqr()?.mean_keepdim(D::Minus1)? + 1e-5)?.sqrt()?)
}

fn linear(x: &Tensor, weight: &Tensor) -> candle::Result<Tensor> {
    let (batch, seq_len, _) = x.dims3()?;
    x.flatten_to(1)?.matmul(&weight.t()?)?.reshape((batch, seq_len, ()))
}

fn layer(index: usize) -> Box<dyn Layer> {
    let name = format!("blocks.{index}");
    let shapes =
        [("qkv", [3 * HIDDEN, HIDDEN]), ("out", [HIDDEN; 2]), ("up", [HIDDEN; 2]), ("down", [HIDDEN; 2])];
    let spec =
        |(part, shape)| ParameterSpec::new(format!("{name}.{part}"), shape, Init::Normal { std: 0.02 });
    Box::new(AutogradLayer::new(&name, shapes.map(spec).to_vec(), block))
}

/// 2. The observer: an error of it would end the run.
struct Printer;

impl Observer for Printer {
    fn on_step_end(&mut self, _: &mut Engine, step: &mut StepEnd) -> Result<(), ObserverError> {
        if step.metrics.step.is_multiple_of(10) {
            println!("step {:3}  loss {:.4}", step.metrics.step, step.metrics.loss);
        }
        Ok(())
    }

    fn on_evaluate(&mut self, metrics: &EvalMetrics) -> Result<(), ObserverError> {
        println!("step {:3}  held-out loss {:.4}", metrics.step, metrics.eval_loss);
        Ok(())
    }
}

fn main() -> Result<()> {
    let scratch = tempfile::tempdir()?;
    let output = std::env::args_os().nth(1).map_or(scratch.path().join("run"), PathBuf::from);
    let config = Config::from_json_str(CONFIG, "the example's config")?;
    // 3. The data: documents of tokens, from wherever the program has them. A tenth is held out.
    let sums = (0..800).map(|n| format!("{n} plus {n} is {}. ", 2 * n).bytes().map(u32::from).collect());
    let [training, held_out] = Documents::split(Corpus::from_documents(sums)?, 0.1)?
        .map(|documents| PackedSequences::new(documents, 128).map(Arc::new));
    let data = TrainingData::new(training?, Some(held_out?.into()))?;
    // 4. The run, on four ranks. Started again with its output directory, it goes on from the newest checkpoint.
    let mesh = DeviceMesh::dp_sp(config.mesh.dp_size, config.mesh.sp_size)?;
    let saved = launch(mesh.world_size(), &LaunchOptions::default(), |rank| -> Result<_> {
        let groups = MeshGroups::new(&mesh, rank.group.clone())?;
        let model = Model {
            embedding: Embedding::new(256, HIDDEN, 0.02),
            layers: (0..2).map(layer).collect(),
            head: LossHead::new("lm_head.weight", 256, HIDDEN, 1e-5, 0.02),
        };
        let engine = initialize(model, &RandomWeights { seed: 1 }, &config, &groups)?;
        let (output, resume) = (Some(output.clone()), Some(Resume::Newest(None)));
        let options = TrainerOptions { output, resume, ..TrainerOptions::default() };
        let mut trainer = Trainer::new(engine, &groups, data.clone(), options)?;
        if rank.rank == 0 {
            trainer.observe(Printer);
        }
        Ok(trainer.train()?.checkpoint)
    })?;
    let saved = saved.into_iter().next().flatten().context("all steps were done before")?;
    // 5. The model: `model.safetensors`, for whatever knows the layer.
    let options = ExportOptions { dtype: ExportDtype::F32, max_file_bytes: u64::MAX, tokenizer: None };
    let exported = export(&Checkpoint::open(&saved)?, &output.join("model"), options, &LocalStorage)?;
    println!("exported {} bytes to model.safetensors", exported.bytes);
    Ok(())
}
