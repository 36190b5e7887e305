//! Ranks and collectives.
//!
//! A *rank* is one worker of a parallel run, here a thread. Ranks do not access each other's
//! memory. They communicate by *collectives*: operations that all ranks call in the same order,
//! each with its own data. This library uses the few below.
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
    // `launch` starts the ranks, runs the function on each and returns their results.
    for lines in launch(RANKS, &LaunchOptions::default(), collectives)? {
        println!("{lines}");
    }
    // When a rank fails, the ranks that wait for it get an error that names the rank and the
    // cause. (A rank that does not arrive is reported after `timeout`.)
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

    // The digits are rank and index: 20 and 21 belong to rank 2.
    let mine = Tensor::new(&[10.0 * me, 10.0 * me + 1.0], &Device::Cpu)?;

    // all_gather: every rank gets the data of all. ZeRO stage 3 gathers parameters with it.
    let gathered = zeros(2 * RANKS)?;
    group.all_gather(&mine, &gathered)?;

    // all_reduce: every rank gets the sum, added in rank order, so it is bit-identical.
    let sum = mine.copy()?;
    group.all_reduce(&sum, ReduceOp::Sum)?;

    // reduce_scatter: rank i gets only the i-th piece of the sum. ZeRO reduces gradients with it.
    let piece = zeros(2)?;
    group.reduce_scatter(&gathered, &piece, ReduceOp::Sum)?;

    // all_to_all: rank i sends its j-th piece to rank j, a transposition over ranks. Ulysses is
    // built on it. Here every rank sends 0, 1, 2, 3 elements to ranks 0, 1, 2, 3.
    let sent: Vec<f32> = (0..RANKS).flat_map(|to| vec![10.0 * me + to as f32; to]).collect();
    let received = zeros(RANKS * rank.rank)?;
    let counts: Vec<usize> = (0..RANKS).collect();
    group.all_to_all(&Tensor::new(sent, &Device::Cpu)?, &received, &counts, &[rank.rank; RANKS])?;

    // Every operation has an asynchronous form `start_…`; compute can overlap until `wait`.
    // A ring: send to the right-hand neighbor, receive from the left-hand one.
    let from_left = zeros(2)?;
    let sending = group.start_send(&mine, (rank.rank + 1) % RANKS)?;
    let receiving = group.start_recv(&from_left, (rank.rank + RANKS - 1) % RANKS)?;
    sending.wait()?;
    receiving.wait()?;

    // Each group counts the bytes that it moved.
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
