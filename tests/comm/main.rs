//! Collectives: their definitions on every backend, what happens when ranks fail, and the bytes of the exchange.

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
