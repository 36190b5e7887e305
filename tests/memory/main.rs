//! The memory of ranks, by the allocator: against formulas, against the plan, and for single ops.

#![allow(clippy::unwrap_used)]

mod dry_run;
mod engine;
mod exchange_overlap;
mod features;
mod node_traffic;
mod ops;
mod plan;
mod saved_state;
#[path = "../support/mod.rs"]
mod support;

use std::alloc::System;
use ulysses::memory::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator<System> = CountingAllocator(System);
