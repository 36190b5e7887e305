//! Config files: hostile input, DeepSpeed's users' files, and the generated reference.

#![allow(clippy::unwrap_used)]

mod deepspeed;
mod files;
mod properties;
mod recipes;
mod reference;
#[path = "../support/sample.rs"]
mod sample;

use std::alloc::System;
use ulysses::memory::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator<System> = CountingAllocator(System);
