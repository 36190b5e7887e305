//! The backend whose ranks are processes connected by MPI, on one or several machines.
//!
//! Reading order:
//!
//! 1. `library.rs`, `memory.rs`: MPI calls with checked return codes, and addresses of tensors.
//! 2. `transfers.rs`, `operation.rs`: the messages of an operation, and its steps.
//! 3. `collective.rs`, `strided_all_to_all.rs`, `message.rs`: the steps of each operation, with the buffers of `staging.rs`.
//! 4. `control.rs`, `backoff.rs`, `rank.rs`: a rank, its waits and its failures. `progress.rs`: messages while it computes.
//! 5. `group.rs`: the [`ProcessGroup`](super::ProcessGroup). `session.rs`: the entry point.
//!
//! `src/comm/README.md` describes how they work together.

#![allow(unsafe_code, reason = "calls of MPI")]

mod backoff;
mod collective;
mod control;
mod group;
mod library;
mod memory;
mod message;
mod operation;
mod progress;
mod rank;
mod session;
mod staging;
mod strided_all_to_all;
mod transfers;

pub use session::Session;
