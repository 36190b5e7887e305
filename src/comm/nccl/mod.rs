//! The backend whose ranks have a GPU each and communicate by NCCL.
//!
//! Reading order:
//!
//! 1. `environment.rs`, `rendezvous.rs`: who the ranks are and how they come by the id of their communicator.
//! 2. `traffic.rs`, `watch.rs`: what an operation moves, and when it has failed.
//! 3. `communicator.rs`: NCCL's calls. `world.rs`: a rank's stream, what is under way on it, its failure.
//! 4. `operation.rs`: how an operation is given to NCCL. `group.rs`: [`ProcessGroup`](super::ProcessGroup) on it.
//!    `launch.rs`, `session.rs`: the ways to start.
//!
//! The first two need no NCCL and are compiled and tested always, the rest with the feature `nccl`.
//! `src/comm/README.md` tells how operations, streams and failures go together.
#![cfg_attr(
    not(feature = "nccl"),
    allow(dead_code, reason = "tested without NCCL, but only its groups use them")
)]

#[cfg(feature = "nccl")]
mod communicator;
mod environment;
#[cfg(feature = "nccl")]
mod group;
#[cfg(feature = "nccl")]
mod launch;
#[cfg(feature = "nccl")]
mod operation;
mod rendezvous;
#[cfg(feature = "nccl")]
mod session;
mod traffic;
mod watch;
#[cfg(feature = "nccl")]
mod world;

#[cfg(feature = "nccl")]
pub use launch::{from_env, launch, over};
#[cfg(feature = "nccl")]
pub use session::Session;
