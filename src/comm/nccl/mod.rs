//! The backend whose ranks have a GPU each and communicate by NCCL.
//!
//! Reading order:
//!
//! 1. `environment.rs`: which GPU is a rank's, and where the ranks meet: in a [`store`](super::store).
//! 2. `control_plane.rs`: what a rank hears of the others there, failures and who keeps the others waiting.
//! 3. `traffic.rs`, `watch.rs`, `recorder.rs`: what an operation moves, when it has failed, which one keeps a rank.
//! 4. `communicator.rs`: NCCL's calls. `rank.rs`: a rank's stream, what is in progress on it, its failure.
//! 5. `operation.rs`: how an operation is given to NCCL. `group.rs`: [`ProcessGroup`](super::ProcessGroup) on it.
//!    `launch.rs`, `session.rs`: the ways to start.
//!
//! The first three need no NCCL and are compiled and tested always, the rest with the feature `nccl`.
//! `src/comm/README.md` tells how operations, streams and failures go together.
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

#[cfg(feature = "nccl")]
pub use launch::{from_env, launch, over};
#[cfg(feature = "nccl")]
pub use session::Session;
