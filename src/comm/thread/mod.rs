//! The backend whose ranks are threads of one process.
//!
//! Ranks read one another's tensors in place, so an all-to-all copies once, straight into
//! the final layout. `src/comm/README.md` describes how a collective works.

mod collective;
mod communicator;
mod group;
mod launch;
mod mailbox;
mod peer_reader;
mod progress_lane;
mod rank_state;
mod signal;
#[cfg(test)]
mod tests;
mod world;

pub use super::launch::{LaunchError, LaunchOptions, RankContext};
pub use launch::launch;
