//! Ranks and what they say to each other.
//!
//! A *rank* is one worker of a parallel run; here it is a thread. Ranks never touch each
//! other's memory. They meet in *collectives*: operations that all of them call, in the same
//! order, each with its own part. Everything in this library is made of the few below.
//!
//! ```text
//! cargo run --release --example 01_collectives
//! ```

use anyhow::{Result, bail};
use candle_core::{DType, Device, Tensor};
use std::time::Duration;
use ulysses::comm::{LaunchOptions, ProcessGroupExt, RankContext, ReduceOp, launch};

const RANKS: usize = 4;

fn main() -> Result<()> {
    // `launch` starts the ranks, runs the function on each and returns what they return.
    for lines in launch(RANKS, &LaunchOptions::default(), collectives)? {
        println!("{lines}");
    }
    // A rank that fails takes nobody down with it in silence: whoever waits for it is told who
    // failed, and why. (A rank that never comes at all is named after `timeout`.)
    let options = LaunchOptions { timeout: Duration::from_secs(10), ..LaunchOptions::default() };
    let failed = launch(RANKS, &options, |rank| match rank.rank {
        2 => bail!("this rank has run out of disk"),
        _ => Ok(rank.group.barrier()?),
    });
    println!("a failure: {:#}", anyhow::Error::from(failed.expect_err("rank 2 fails")));
    Ok(())
}

fn collectives(rank: RankContext) -> Result<String> {
    let (me, group) = (rank.rank as f32, &*rank.group);
    let zeros = |n: usize| Tensor::zeros(n, DType::F32, &Device::Cpu);

    // The digits say whose number it is and which one: 20 and 21 are rank 2's.
    let mine = Tensor::new(&[10.0 * me, 10.0 * me + 1.0], &Device::Cpu)?;

    // all_gather: everybody gets everything. ZeRO stage 3 fetches parameters so.
    let gathered = zeros(2 * RANKS)?;
    group.all_gather(&mine, &gathered)?;

    // all_reduce: everybody gets the sum, added in rank order, so the same to the bit everywhere.
    let sum = mine.copy()?;
    group.all_reduce(&sum, ReduceOp::Sum)?;

    // reduce_scatter: the same sum, but rank i keeps the i-th piece only. ZeRO's gradients.
    let piece = zeros(2)?;
    group.reduce_scatter(&gathered, &piece, ReduceOp::Sum)?;

    // all_to_all: rank i sends its j-th piece to rank j: a transposition over ranks. It is the
    // heart of Ulysses. Here from 0, 1, 2, 3 elements of each rank to rank 0, 1, 2, 3.
    let sent: Vec<f32> = (0..RANKS).flat_map(|to| vec![10.0 * me + to as f32; to]).collect();
    let received = zeros(RANKS * rank.rank)?;
    let counts: Vec<usize> = (0..RANKS).collect();
    group.all_to_all(&Tensor::new(sent, &Device::Cpu)?, &received, &counts, &[rank.rank; RANKS])?;

    // Every operation also comes as `start_…`, which returns at once; computing goes on until
    // `wait`. A ring: to the right-hand neighbor, from the left-hand one.
    let from_left = zeros(2)?;
    let sending = group.start_send(&mine, (rank.rank + 1) % RANKS)?;
    let receiving = group.start_recv(&from_left, (rank.rank + RANKS - 1) % RANKS)?;
    sending.wait()?;
    receiving.wait()?;

    // Each group counts what it really moved.
    group.barrier()?;
    let moved = group.stats().total();
    let show = |tensor: &Tensor| Ok::<_, anyhow::Error>(format!("{:?}", tensor.to_vec1::<f32>()?));
    Ok(format!(
        "rank {}\n  all_gather      {}\n  all_reduce      {}\n  reduce_scatter  {}\n  all_to_all      {}\n  \
         from the left   {}\n  {} calls, {} bytes sent, {} received",
        rank.rank,
        show(&gathered)?,
        show(&sum)?,
        show(&piece)?,
        show(&received)?,
        show(&from_left)?,
        moved.calls,
        moved.bytes_sent,
        moved.bytes_received,
    ))
}
