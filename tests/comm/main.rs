//! Collectives: the conformance suite on every backend, failures of ranks, and the bytes of Ulysses exchanges.

#![allow(clippy::unwrap_used)]

mod conformance;
mod exchange_volume;
mod failures;
mod memory;
#[path = "../support/mod.rs"]
mod support;

use std::alloc::System;
use ulysses::memory::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator<System> = CountingAllocator(System);
