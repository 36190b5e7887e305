//! The library through its public interface. One binary: linked once, and a suite's slow tests run beside the others'.

#![allow(clippy::unwrap_used)]

mod checkpoint;
mod config;
mod data;
mod memory;
mod parity;
mod support;
mod zero;

use std::alloc::System;
use ulysses::memory::CountingAllocator;

// It counts by thread, so tests do not see each other's memory.
#[global_allocator]
static ALLOCATOR: CountingAllocator<System> = CountingAllocator(System);
