//! Why ranks do not come together, told alike by every backend.
//!
//! 1. `flight_recorder.rs`: the last operations of a rank. `divergence.rs`: where those of several ranks part.
//! 2. `hang_report.rs`: who waits for whom, and the rank that blocks all others.
//! 3. `control_message.rs`: what ranks that are processes send each other of failures and hangs.
//! 4. `desync.rs`: the comparison of calls. `desync_check.rs`: the group that makes it, around one that does not.

#[cfg_attr(
    not(any(feature = "mpi", feature = "nccl")),
    allow(dead_code, reason = "threads share what they know")
)]
mod control_message;
mod desync;
#[cfg_attr(
    not(feature = "nccl"),
    allow(dead_code, reason = "the other backends compare calls by themselves")
)]
mod desync_check;
mod divergence;
mod flight_recorder;
mod hang_report;
#[cfg(test)]
pub(super) mod tests;

#[cfg_attr(
    not(any(feature = "mpi", feature = "nccl")),
    allow(unused_imports, reason = "threads share what they know")
)]
pub(super) use control_message::ControlMessage;
pub(super) use desync::compare;
#[cfg(feature = "nccl")]
pub(super) use desync_check::{CallLog, DesyncCheck};
#[cfg_attr(
    not(any(feature = "mpi", feature = "nccl")),
    allow(unused_imports, reason = "threads share what they know")
)]
pub(super) use flight_recorder::lines;
pub(super) use flight_recorder::{Entry, EntryReport, FlightRecorder, GroupLabel};
pub(super) use hang_report::{HangReport, Wait};
