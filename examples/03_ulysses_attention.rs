//! Ulysses: attention over a sequence that is sharded over ranks.
//!
//! All parts of a transformer process tokens independently, except attention, which processes
//! *heads* independently. Each rank therefore has a shard of the tokens; before attention, the
//! ranks exchange tokens for heads, and afterwards back (DeepSpeed-Ulysses, arXiv 2309.14509).
//!
//! ```text
//!  rank 0: tokens  0–21, 8 heads ┐                ┌ all 64 tokens, heads 0–2 ┐                ┌ tokens  0–21
//!  rank 1: tokens 22–42, 8 heads ┼─ all-to-all ──►┼ all 64 tokens, heads 3–5 ┼─ all-to-all ──►┼ tokens 22–42
//!  rank 2: tokens 43–63, 8 heads ┘                └ all 64 tokens, heads 6–7 ┘                └ tokens 43–63
//! ```
//!
//! Sizes need not be divisible: here 64 tokens and 8 heads over 3 ranks, with 4 KV heads, two of
//! which are needed by two ranks.
//!
//! ```text
//! cargo run --release --example 03_ulysses_attention
//! ```

use anyhow::Result;
use candle_core::{D, Device, Tensor};
use std::sync::Arc;
use ulysses::comm::{LaunchOptions, ProcessGroupExt, RankContext, launch};
use ulysses::kernels::Workspace;
use ulysses::kernels::attention::{Attention, AttentionLayout, FlashAttention, QkvGradients, grouped_heads};
use ulysses::mesh::shard_range;
use ulysses::sequence_parallel::{AttentionShape, ExchangePlan, UlyssesAttention};

const SP: usize = 3;
const SHAPE: AttentionShape =
    AttentionShape { batch: 1, seq_len: 64, num_heads: 8, num_kv_heads: 4, head_dim: 16, value_head_dim: 16 };

fn main() -> Result<()> {
    // The unsharded problem on one rank: queries, keys, values and the gradient of the output.
    let AttentionShape { batch, seq_len, num_heads, num_kv_heads, head_dim, .. } = SHAPE;
    let random = |heads| Tensor::randn(0.0_f32, 1.0, (batch, seq_len, heads, head_dim), &Device::Cpu);
    let whole = [random(num_heads)?, random(num_kv_heads)?, random(num_kv_heads)?, random(num_heads)?];
    let heads = grouped_heads(num_heads, num_kv_heads);
    let layout = AttentionLayout::causal(batch, seq_len as u32, heads.clone())?;
    let expected = forward_and_backward(&FlashAttention::default(), &whole, &layout)?;

    // The same problem on three ranks, each with its shard of the tokens.
    let options = LaunchOptions::default();
    let results = launch(SP, &options, |rank| sharded(&rank, &whole, &heads))?;
    for (rank, (_, bytes_sent, formula)) in results.iter().enumerate() {
        let plan = ExchangePlan::new(SHAPE, &heads, SP, rank)?;
        println!(
            "rank {rank}: tokens {:?}, query heads {:?}, KV heads {:?}; {bytes_sent} bytes sent, {formula} by formula",
            plan.seq_ranges()[rank],
            plan.q_head_ranges()[rank],
            plan.kv_head_ranges()[rank],
        );
    }
    println!("\nlargest difference from a single rank:");
    for (index, (name, expected)) in ["o", "dq", "dk", "dv"].into_iter().zip(&expected).enumerate() {
        let shards: Vec<&Tensor> = results.iter().map(|(shards, ..)| &shards[index]).collect();
        let difference = (Tensor::cat(&shards, 1)? - expected)?.abs()?.flatten_all()?.max(D::Minus1)?;
        println!("  {name:<2} {:.1e}", difference.to_scalar::<f32>()?);
    }
    Ok(())
}

/// Runs one rank: returns output and gradients of its tokens, bytes sent, and bytes by formula.
fn sharded(rank: &RankContext, whole: &[Tensor; 4], heads: &[usize]) -> Result<([Tensor; 4], u64, u64)> {
    let tokens = shard_range(SHAPE.seq_len, SP, rank.rank);
    let cut = |tensor: &Tensor| tensor.narrow(1, tokens.start, tokens.len())?.force_contiguous();
    let [q, k, v, dout] = whole;
    let local = [cut(q)?, cut(k)?, cut(v)?, cut(dout)?];
    // The positions of this rank's tokens, and the document bounds of the whole sequence.
    let positions: Arc<[u32]> = (tokens.start as u32..tokens.end as u32).collect();
    let documents = vec![vec![0, SHAPE.seq_len as u32]];
    let layout = AttentionLayout::new(positions.clone(), positions, documents, heads, None)?;

    // `UlyssesAttention` makes any local attention sequence-parallel, with the same interface.
    let attention = UlyssesAttention::new(Arc::new(FlashAttention::default()), rank.group.clone());
    let results = forward_and_backward(&attention, &local, &layout)?;
    rank.group.barrier()?;
    let volume = ExchangePlan::new(SHAPE, heads, SP, rank.rank)?.volume();
    let formula = volume.total_elems() * size_of::<f32>() as u64;
    Ok((results, rank.group.stats().total().bytes_sent, formula))
}

fn forward_and_backward(
    attention: &dyn Attention,
    [q, k, v, dout]: &[Tensor; 4],
    layout: &AttentionLayout,
) -> Result<[Tensor; 4]> {
    // Attention may overwrite its inputs and reuses its saved tensors: hence the copies.
    let workspace = Workspace::new();
    let (o, saved) = attention.forward(q.copy()?, k.copy()?, v.copy()?, layout, &workspace)?;
    let o = o.copy()?;
    let QkvGradients { dq, dk, dv } = attention.backward(saved, dout, layout, &workspace)?;
    Ok([o, dq, dk, dv])
}
