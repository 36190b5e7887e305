//! Memory of the thread backend: nothing grows with the number of operations, and the
//! buffers that a rank lends to its peers are freed by that rank itself. (Memory is
//! accounted by thread, so a peer that freed them would seem to shrink.)

use candle_core::{DType, Device, Tensor};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use ulysses::comm::{CommError, LaunchOptions, ProcessGroup, ProcessGroupExt, ReduceOp, launch};

/// Counts the bytes that each thread has allocated and not freed.
struct Counting;

thread_local! {
    static NET_BYTES: Cell<i64> = const { Cell::new(0) };
}

fn count(bytes: i64) {
    // A thread may free memory after its thread-locals are gone; that is not counted.
    let _ = NET_BYTES.try_with(|net| net.set(net.get() + bytes));
}

// SAFETY: every call goes to the system allocator unchanged; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's promises are those that `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: the pointer came from `System.alloc` with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const RANKS: usize = 4;
const ROUNDS: usize = 400;
const ELEMS: usize = 16_384;

/// One of everything, with inputs whose last clone is the one that was lent.
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
    // A part of the output, which the call copies before lending it.
    group.all_gather(&output.narrow(0, rank * ELEMS, ELEMS)?, &output)
}

#[test]
fn lent_buffers_are_freed_by_their_owner_and_nothing_grows() {
    let grown = launch(RANKS, &LaunchOptions::default(), |context| -> Result<i64, CommError> {
        round(&*context.group)?;
        context.group.barrier()?;
        let before = NET_BYTES.get();
        (0..ROUNDS).try_for_each(|_| round(&*context.group))?;
        context.group.barrier()?;
        Ok(NET_BYTES.get() - before)
    })
    .unwrap();
    // One lent buffer per round freed by another rank would show as 25 MiB. What may
    // pass from rank to rank is the few hundred bytes of an operation's seats.
    let one_buffer_per_round = (ROUNDS * ELEMS * size_of::<f32>()) as i64;
    for (rank, bytes) in grown.iter().enumerate() {
        assert!(bytes.abs() < one_buffer_per_round / 8, "rank {rank} grew by {bytes} bytes: {grown:?}");
    }
    let total: i64 = grown.iter().sum();
    assert!(total.abs() < 64 << 10, "all ranks together grew by {total} bytes: {grown:?}");
}
