//! Pipeline parallelism: ranks that divide the layers of a model into stages of consecutive ones.
//!
//! - [`balanced_stages`]: the layers of each stage.
//! - [`Schedule`]: the order of the passes of every rank, as data that is checked before it runs.
//! - [`rank_model`]: the part of a model that one rank has. It is a [`Model`](crate::model::Model) like any other, whose input receives hidden states
//!   of the previous stage, and whose objective sends them to the next one: the engine runs it as a whole model.
//! - [`Neighbors`]: the messages between the stages.
//!
//! A rank exchanges its own tokens with the ranks of the other stages that have the same place on all other axes.
//!
//! **Sends do not wait.** With 1F1B the last stage sends a gradient while the previous one sends hidden states, so blocking sends
//! would wait for each other. A sent tensor stays alive until it is received. Where one stream has all messages of a rank (NCCL),
//! [`due_messages`] puts them in an order in which no rank waits for a later one.

mod balance;
mod draw;
mod neighbors;
mod one_stream;
mod schedule;
mod stage;
#[cfg(test)]
mod tests;

pub use balance::balanced_stages;
pub use neighbors::Neighbors;
pub use one_stream::{DueMessages, due_messages};
pub use schedule::{Action, Pass, PassTimes, Schedule, ScheduleError, ScheduleKind, TimedAction, Timeline};
pub use stage::{RankModel, rank_model};
