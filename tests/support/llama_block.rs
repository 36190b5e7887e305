//! The Llama block in plain candle ops, as a user would write it.

use candle_core::{D, Result, Tensor, bail};
use ulysses::model::{DecoderLayer, ModelConfig};
use ulysses::nn::{AutogradLayer, BlockContext, Layer};

/// Layer `index` with the parameters of [`DecoderLayer`], under candle's autograd.
pub fn autograd_decoder_layer(config: &ModelConfig, index: usize) -> Box<dyn Layer> {
    let specs = DecoderLayer::new(config, index).parameters().to_vec();
    let config = config.clone();
    let block = move |params: &[Tensor], x: &Tensor, ctx: &BlockContext<'_>| block(&config, params, x, ctx);
    Box::new(AutogradLayer::new(format!("model.layers.{index}"), specs, block))
}

fn block(config: &ModelConfig, params: &[Tensor], x: &Tensor, ctx: &BlockContext<'_>) -> Result<Tensor> {
    let [q, k, v, o, gate, up, down, norm_in, norm_mid] = params else { bail!("nine parameters") };
    let layer = *config.attention();
    let heads = |t: Tensor, n: usize| t.reshape((ctx.batch(), ctx.seq_len_local(), n, layer.head_dim));
    let normed = rms_norm(x, norm_in, config.rms_norm_eps)?;
    let tables = ctx.rope_tables(layer.head_dim, layer.rope.unwrap().theta)?;
    let q = rotate(&heads(linear(&normed, q)?, layer.num_heads)?, &tables)?;
    let k = rotate(&heads(linear(&normed, k)?, layer.num_kv_heads)?, &tables)?;
    let v = heads(linear(&normed, v)?, layer.num_kv_heads)?;
    let mid = (x + linear(&ctx.attention(&q, &k, &v)?.flatten_from(2)?, o)?)?;
    let normed = rms_norm(&mid, norm_mid, config.rms_norm_eps)?;
    let (gate, up) = (linear(&normed, gate)?, linear(&normed, up)?);
    let silu = (&gate / (gate.neg()?.exp()? + 1.0)?)?;
    &mid + linear(&(silu * up)?, down)?
}

fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let mean_square = x.sqr()?.mean_keepdim(D::Minus1)?;
    x.broadcast_div(&(mean_square + eps)?.sqrt()?)?.broadcast_mul(weight)
}

fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let (batch, seq_len, _) = x.dims3()?;
    x.flatten_to(1)?.matmul(&weight.t()?)?.reshape((batch, seq_len, ()))
}

fn rotate(x: &Tensor, (cos, sin): &(Tensor, Tensor)) -> Result<Tensor> {
    let half = x.dim(D::Minus1)? / 2;
    let (a, b) = (x.narrow(D::Minus1, 0, half)?, x.narrow(D::Minus1, half, half)?);
    let first = (a.broadcast_mul(cos)? - b.broadcast_mul(sin)?)?;
    let second = (b.broadcast_mul(cos)? + a.broadcast_mul(sin)?)?;
    Tensor::cat(&[first, second], D::Minus1)
}
