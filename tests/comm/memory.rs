//! Memory of the thread backend: it does not grow with the number of operations, and the
//! buffers that a rank publishes to its peers are freed by that rank itself. (Memory is
//! counted by thread, so the count of a peer that freed them would shrink.)

use candle_core::{DType, Device, Tensor};
use ulysses::comm::{CommError, LaunchOptions, ProcessGroup, ProcessGroupExt, ReduceOp, launch};
use ulysses::memory::live_bytes;

const RANKS: usize = 4;
const ROUNDS: usize = 400;
const ELEMS: usize = 16_384;

/// Every operation once, with inputs whose last clone is the published one.
fn round(group: &dyn ProcessGroup) -> Result<(), CommError> {
    let rank = group.rank();
    let tensor = |count: usize| Tensor::ones(count, DType::F32, &Device::Cpu);
    let (output, part) = (tensor(RANKS * ELEMS)?, tensor(ELEMS)?);
    let gathering = group.start_all_gather(&tensor(ELEMS)?, &output)?;
    let scattering = group.start_reduce_scatter(&tensor(RANKS * ELEMS)?, &part, ReduceOp::Sum)?;
    gathering.wait()?;
    scattering.wait()?;
    group.all_reduce(&output, ReduceOp::Max)?;
    group.all_to_all(&tensor(RANKS * ELEMS)?, &output, &[ELEMS; RANKS], &[ELEMS; RANKS])?;
    group.broadcast(&part, 1)?;
    let sending = group.start_send(&tensor(ELEMS)?, (rank + 1) % RANKS)?;
    group.recv(&part, (rank + RANKS - 1) % RANKS)?;
    sending.wait()?;
    // A part of the output, which the call copies before publishing it.
    group.all_gather(&output.narrow(0, rank * ELEMS, ELEMS)?, &output)
}

#[test]
fn published_buffers_are_freed_by_their_owner_and_memory_does_not_grow() {
    let grown = launch(RANKS, &LaunchOptions::default(), |context| -> Result<i64, CommError> {
        round(&*context.group)?;
        context.group.barrier()?;
        let before = live_bytes();
        (0..ROUNDS).try_for_each(|_| round(&*context.group))?;
        context.group.barrier()?;
        Ok(live_bytes() - before)
    })
    .unwrap();
    // One published buffer per round freed by another rank would show as 25 MiB. Only
    // the few hundred bytes of an operation's slots may move between ranks.
    let one_buffer_per_round = (ROUNDS * ELEMS * size_of::<f32>()) as i64;
    for (rank, bytes) in grown.iter().enumerate() {
        assert!(bytes.abs() < one_buffer_per_round / 8, "rank {rank} grew by {bytes} bytes: {grown:?}");
    }
    let total: i64 = grown.iter().sum();
    assert!(total.abs() < 64 << 10, "all ranks together grew by {total} bytes: {grown:?}");
}
