//! The Ulysses exchange of the thread backend against a plain copy of the same bytes.
//!
//! `cargo bench --bench exchange [-- RANKS MIB_PER_RANK REPEATS]` prints, for the exchange of
//! one tensor in both directions, the best time of all repeats and its share of the speed at
//! which the same ranks, all at once, copy the same bytes.

use candle_core::{DType, Device, Tensor};
use std::sync::Arc;
use std::time::Instant;
use ulysses::comm::{LaunchOptions, ProcessGroup, ProcessGroupExt, launch};
use ulysses::ops::{Workspace, reduce};
use ulysses::ulysses::{AttentionShape, Exchange, ExchangePlan, HeadSharded, SeqSharded};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const HEAD_DIM: usize = 64;
const NUM_HEADS: usize = 16;

fn main() -> anyhow::Result<()> {
    // `cargo bench` passes `--bench`.
    let numbers: Vec<usize> = std::env::args().skip(1).filter_map(|argument| argument.parse().ok()).collect();
    let number = |index: usize, default| numbers.get(index).copied().unwrap_or(default);
    let (ranks, mib, repeats) = (number(0, 2), number(1, 16), number(2, 25));
    let seq_len_local = (mib << 20) / (NUM_HEADS * HEAD_DIM * size_of::<f32>());
    let seq_len = seq_len_local * ranks;
    let shape = AttentionShape {
        batch: 1,
        seq_len,
        num_heads: NUM_HEADS,
        num_kv_heads: NUM_HEADS,
        head_dim: HEAD_DIM,
    };
    let q_to_kv: Vec<usize> = (0..NUM_HEADS).collect();

    let times = launch(ranks, &LaunchOptions::default(), |rank| {
        let group = rank.group;
        let workspace = Arc::new(Workspace::default());
        let plan = ExchangePlan::new(shape, &q_to_kv, ranks, group.rank())?;
        let exchange = Exchange::new(plan, group.clone(), workspace.clone());
        let tokens = Tensor::ones((1, seq_len_local, NUM_HEADS, HEAD_DIM), DType::F32, &Device::Cpu)?;
        let copied = tokens.zeros_like()?;
        let copy = best(&*group, repeats, || Ok(reduce::copy(&copied, &tokens)?))?;
        let to_heads = best(&*group, repeats, || {
            let HeadSharded(heads) = exchange.out_seq_to_head(&SeqSharded(tokens.clone()))?;
            workspace.give(heads);
            Ok(())
        })?;
        let heads = exchange.out_seq_to_head(&SeqSharded(tokens.clone()))?;
        let to_tokens = best(&*group, repeats, || {
            let SeqSharded(tokens) = exchange.out_head_to_seq(&heads)?;
            workspace.give(tokens);
            Ok(())
        })?;
        anyhow::Ok([copy, to_heads, to_tokens])
    })?;

    // The slowest rank counts.
    let slowest = |op: usize| times.iter().map(|rank| rank[op]).fold(0.0, f64::max);
    println!("{ranks} ranks, {mib} MiB each, best of {repeats}");
    for (op, name) in ["copy", "seq→head", "head→seq"].into_iter().enumerate() {
        println!(
            "{name:10} {:7.3} ms  {:.2} of the copy's speed",
            slowest(op) * 1e3,
            slowest(0) / slowest(op)
        );
    }
    Ok(())
}

/// Seconds of the fastest repeat, all ranks starting together.
fn best(
    group: &dyn ProcessGroup,
    repeats: usize,
    mut run: impl FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<f64> {
    let mut best = f64::INFINITY;
    for _ in 0..repeats {
        group.barrier()?;
        let start = Instant::now();
        run()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}
