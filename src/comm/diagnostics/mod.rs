//! Hang and desync diagnostics, shared by all backends.
//!
//! 1. `flight_recorder.rs`: the last operations of a rank. `divergence.rs`: the first call in which ranks differ.
//!    `op_label.rs`: the name of an operation.
//! 2. `hang_report.rs`: who waits for whom, and the rank that blocks all others.
//! 3. `control_message.rs`: messages about failures and hangs between processes.
//! 4. `desync.rs`: the comparison of calls. `desync_check.rs`: a wrapper that compares calls for backends that do not.

#[cfg_attr(not(any(feature = "mpi", feature = "nccl")), allow(dead_code, reason = "threads share memory"))]
mod control_message;
mod desync;
#[cfg_attr(not(feature = "nccl"), allow(dead_code, reason = "the other backends compare calls themselves"))]
mod desync_check;
mod divergence;
mod flight_recorder;
mod hang_report;
mod op_label;
#[cfg(test)]
pub(super) mod tests;

#[cfg_attr(
    not(any(feature = "mpi", feature = "nccl")),
    allow(unused_imports, reason = "threads share memory")
)]
pub(super) use control_message::ControlMessage;
pub(super) use desync::{compare, compare_message};
#[cfg(feature = "nccl")]
pub(super) use desync_check::{CallLog, DesyncCheck};
#[cfg_attr(
    not(any(feature = "mpi", feature = "nccl")),
    allow(unused_imports, reason = "threads share memory")
)]
pub(super) use flight_recorder::lines;
pub(super) use flight_recorder::{Entry, EntryReport, FlightRecorder};
pub(super) use hang_report::{CallReport, HangReport, Wait};
pub(super) use op_label::OpLabel;
