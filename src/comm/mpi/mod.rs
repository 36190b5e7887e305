//! The backend whose ranks are processes that MPI connects, on one machine or many.
//!
//! Reading order:
//!
//! 1. `library.rs`, `memory.rs`: MPI's calls, with their return codes checked, and where tensors are.
//! 2. `transfers.rs`, `operation.rs`: the messages of an operation, and its steps.
//! 3. `collective.rs`, `exchange.rs`, `message.rs`: the steps of each, with the buffers of `staging.rs`.
//! 4. `control.rs`, `backoff.rs`, `rank.rs`: a rank, how it waits and how it fails.
//! 5. `group.rs`: [`ProcessGroup`](super::ProcessGroup) on them. `session.rs`: the way to start.
//!
//! `src/comm/README.md` tells how they go together.

mod backoff;
mod collective;
mod control;
mod strided_all_to_all;
mod group;
mod library;
mod memory;
mod message;
mod operation;
mod rank;
mod session;
mod staging;
mod transfers;

pub use session::Session;
