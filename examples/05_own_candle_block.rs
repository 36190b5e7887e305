//! A custom transformer block, written in plain candle ops, trained on a 2 × 2 mesh: sequences
//! are sharded over two ranks, optimizer state and gradients partitioned over two (ZeRO stage 2).
//! candle differentiates the block; the library does the rest. With `"tensor_parallel_size": 2` in
//! the config, a plan of one line per weight divides the block over two ranks more.
//!
//! ```text
//! CANDLE_NUM_THREADS=1 cargo run --release --example 05_own_candle_block
//! ```

use anyhow::Result;
use candle_core::{D, Tensor, bail};
use std::sync::Arc;
use ulysses::comm::{LaunchOptions, MeshGroups, launch};
use ulysses::config::Config;
use ulysses::data::{Corpus, PackedSequences};
use ulysses::engine::initialize;
use ulysses::model::{Model, RandomWeights};
use ulysses::nn::ParallelStyle::{Colwise, Rowwise};
use ulysses::nn::{AutogradLayer, BlockContext, Embedding, Init, Layer, ParameterSpec};
use ulysses::objective::CausalLm;

pub(crate) const VOCAB_SIZE: usize = 256;
pub(crate) const HIDDEN: usize = 64;
const NUM_HEADS: usize = 4;
const HEAD_DIM: usize = HIDDEN / NUM_HEADS;
const MLP: usize = 4 * HIDDEN;
const STD: f64 = 0.02;

// 1. The block: LayerNorm, attention, LayerNorm, GELU MLP, as in GPT-2.
//
// `x` is `[batch, seq_local, HIDDEN]`: **this rank's** tokens of every sequence. Ops on single
// tokens need no change. Ops that mix tokens use `ctx.attention`, which sees whole sequences
// across ranks; it is causal, so the order of tokens is known without position embeddings.
fn block(params: &[Tensor], x: &Tensor, ctx: &BlockContext<'_>) -> candle_core::Result<Tensor> {
    let [norm1, bias1, norm2, bias2, ..] = params else { bail!("the block has norms") };
    let normed = layer_norm(x, norm1, bias1)?;
    // All heads, or this rank's if tp divides them.
    let heads =
        |name: &str| ctx.linear(name, &normed)?.reshape((ctx.batch(), ctx.seq_len_local(), (), HEAD_DIM));
    let attended = ctx.attention(&heads("q")?, &heads("k")?, &heads("v")?)?.flatten_from(2)?;
    let x = (x + ctx.linear("out", &attended)?)?;
    let hidden = ctx.linear("up", &layer_norm(&x, norm2, bias2)?)?.gelu()?;
    &x + ctx.linear("down", &hidden)?
}

/// Written out: candle's fused norms have no gradient.
fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor) -> candle_core::Result<Tensor> {
    let centered = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
    let variance = centered.sqr()?.mean_keepdim(D::Minus1)?;
    centered.broadcast_div(&(variance + 1e-5)?.sqrt()?)?.broadcast_mul(weight)?.broadcast_add(bias)
}

// 2. The block as a layer, with its parameters: the engine initializes, partitions, gathers and
// updates them. The plan is that of torch's `parallelize_module`, and has an effect on meshes with tp.
pub(crate) fn layer(index: usize) -> Result<Box<dyn Layer>> {
    let name = format!("blocks.{index}");
    let spec = |part: &str, shape: &[usize], init| ParameterSpec::new(format!("{name}.{part}"), shape, init);
    let normal = Init::Normal { std: STD };
    let parameters = vec![
        spec("norm1.weight", &[HIDDEN], Init::Ones),
        spec("norm1.bias", &[HIDDEN], Init::Zeros),
        spec("norm2.weight", &[HIDDEN], Init::Ones),
        spec("norm2.bias", &[HIDDEN], Init::Zeros),
        spec("q.weight", &[HIDDEN, HIDDEN], normal).in_parts(NUM_HEADS),
        spec("k.weight", &[HIDDEN, HIDDEN], normal).in_parts(NUM_HEADS),
        spec("v.weight", &[HIDDEN, HIDDEN], normal).in_parts(NUM_HEADS),
        spec("out.weight", &[HIDDEN, HIDDEN], normal).in_parts(NUM_HEADS),
        spec("up.weight", &[MLP, HIDDEN], normal),
        spec("up.bias", &[MLP], Init::Zeros),
        spec("down.weight", &[HIDDEN, MLP], normal),
        spec("down.bias", &[HIDDEN], Init::Zeros),
    ];
    let plan = [
        ("q", Colwise),
        ("k", Colwise),
        ("v", Colwise),
        ("out", Rowwise),
        ("up", Colwise),
        ("down", Rowwise),
    ];
    Ok(Box::new(AutogradLayer::new(name, parameters, block).parallelize(plan)?))
}

// 3. The model: the library's embedding, two blocks, the library's head with its tiled loss.
pub(crate) fn model() -> Result<Model> {
    Ok(Model {
        input: Box::new(Embedding::new(VOCAB_SIZE, HIDDEN, STD)),
        layers: (0..2).map(layer).collect::<Result<_>>()?,
        objective: Box::new(CausalLm::new("lm_head.weight", VOCAB_SIZE, HIDDEN, 1e-5, STD)),
    })
}

const CONFIG: &str = r#"{
    "train_batch_size": 4, "mesh_param": [2, 2], "zero_optimization": { "stage": 2 }, "gradient_clipping": 1.0,
    "optimizer": { "type": "AdamW", "params": { "lr": 3e-3 } }
}"#;

fn main() -> Result<()> {
    // 4. The data: bytes of a text, packed into sequences of 128 tokens.
    let config = Config::from_json_str(CONFIG, "the example's config")?;
    let text = "the quick brown fox jumps over the lazy dog, and the dog does not mind. ".repeat(60);
    let sequences = Arc::new(PackedSequences::new(
        Corpus::from_documents([text.bytes().map(u32::from).collect()])?,
        128,
    )?);

    // 5. Four ranks, which are threads of this process.
    let mesh = config.placed_mesh(None)?.mesh;
    launch(mesh.world_size(), &LaunchOptions::default(), |rank| -> Result<()> {
        let groups = MeshGroups::new(&mesh, rank.group.clone())?;
        let mut engine = initialize(model()?, &RandomWeights { seed: 1 }, &config, &groups)?;
        let mut loader = engine.data_loader(sequences.clone())?;
        for _ in 0..30 {
            let report = engine.train_batch(|| loader.next_micro_batch())?;
            if rank.rank == 0 && (report.step == 1 || report.step % 5 == 0) {
                println!(
                    "step {:3}  loss {:.4}  grad norm {:.3}",
                    report.step, report.loss, report.grad_norm
                );
            }
        }
        // Ranks with the same parameters must have updated them equally.
        Ok(engine.check_replicas()?)
    })?;
    Ok(())
}
