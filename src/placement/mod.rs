//! Layouts: where the elements of a tensor lie on a mesh, and what moves them into another layout.
//!
//! A [`Layout`] has a [`Placement`] along every axis of a mesh, as PyTorch's `DTensor`: `Shard(dim)`, `Replicate` or
//! `Partial`, a pending sum. [`redistribute`] plans the [`Step`]s between two layouts of a tensor as integers, and
//! [`Plan::execute`] runs them on the process groups of the mesh. A [`ShardedTensor`] is a tensor in such a layout, with
//! operations that propagate placements: PyTorch's `DTensor`.
//!
//! Most exchanges of tensor parallelism run by these plans. Those of ZeRO, Ulysses and rings do not; a test of dry runs compares ZeRO's
//! reduction with the plan of its layouts.
//! In a dry run, gradients and parameters carry their placements: the [`ledger`] refuses a reduction that is missing or
//! done twice.

mod axis;
mod draw;
mod error;
mod execute;
mod layout;
pub mod ledger;
mod notation;
mod plan;
mod sharded_tensor;
#[cfg(test)]
mod tests;

pub use axis::{LayoutAxis, Placement};
pub use draw::draw;
pub use error::PlacementError;
pub(crate) use execute::transfers;
pub use layout::Layout;
pub use plan::{Plan, Step, StepKind, redistribute};
pub use sharded_tensor::{PendingTensor, ShardedTensor};
