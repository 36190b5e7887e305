//! The backend whose ranks have one GPU each and communicate through NCCL.
//!
//! Reading order:
//!
//! 1. `environment.rs`: the GPU of a rank, and the endpoint of the job's [`store`](super::store).
//! 2. `control_plane.rs`: failures and hang reports between ranks, through the store.
//! 3. `traffic.rs`, `watch.rs`, `recorder.rs`: bytes moved by an operation, failure detection, the blocking operation.
//! 4. `communicator.rs`: NCCL calls. `rank.rs`: a rank's stream, its operations in progress, its failure.
//! 5. `operation.rs`: enqueueing operations. `group.rs`: the [`ProcessGroup`](super::ProcessGroup).
//!    `launch.rs`, `session.rs`: entry points.
//!
//! The first three need no NCCL and are always compiled and tested, the rest only with the feature `nccl`.
//! `src/comm/README.md` describes how operations, streams and failures work together.

#![allow(unsafe_code, reason = "calls of NCCL")]
#![cfg_attr(
    not(feature = "nccl"),
    allow(dead_code, reason = "tested without NCCL, but only its groups use them")
)]

#[cfg(feature = "nccl")]
mod communicator;
mod control_plane;
mod environment;
#[cfg(feature = "nccl")]
mod group;
#[cfg(feature = "nccl")]
mod launch;
#[cfg(feature = "nccl")]
mod operation;
#[cfg(feature = "nccl")]
mod rank;
mod recorder;
#[cfg(feature = "nccl")]
mod session;
mod traffic;
mod watch;

pub use environment::may_share_gpus;
#[cfg(feature = "nccl")]
pub use launch::{from_env, launch, over, version};
#[cfg(feature = "nccl")]
pub use session::Session;
