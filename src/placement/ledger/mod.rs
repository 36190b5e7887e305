//! The ledger of a dry run: the placements of gradients, parameters and optimizer state along every axis of the mesh.
//!
//! Within [`run`], [`LedgerGroup`]s and the code that owns the tensors keep a [`Placed`] with the storage of each. A
//! reduction that is missing or done twice is an error. Elsewhere, the functions of this module do nothing.
//!
//! [`Placed`] is the account of one tensor, [`sums`] that of the numbers that all ranks add up: the norm and the loss.

mod fault;
mod gradient;
mod group;
mod placed;
pub mod sums;
#[cfg(test)]
mod tests;

pub use fault::{Fault, LedgerError};
pub use gradient::{GradientOf, add_tokens, clear_gradients};
pub use group::LedgerGroup;
pub use placed::{Placed, PlacedAlong};

use super::Placement::{self, Partial, Replicate, Shard};
use crate::comm::ProcessGroup;
use crate::mesh::{Axis, DeviceMesh, MeshError, PP_AXIS};
use candle_core::Tensor;
use std::cell::RefCell;
use ulysses_kernels::device::dry;

struct Ledger {
    mesh: DeviceMesh,
    /// This rank, along every axis.
    coordinate: Vec<usize>,
    /// The gradients of this step that backward passes have added to.
    gradients: Vec<gradient::Written>,
    /// The account of the norm, while it is computed.
    norm: Option<sums::Norm>,
    /// The sum that the next collectives of numbers belong to.
    sum: Option<sums::Sum>,
}

impl Ledger {
    /// The placements of a partial sum that each rank has computed from its own tokens, of a tensor that the ranks along the axes
    /// `divided_over` divide.
    fn partial(&self, divided_over: &[&str]) -> Vec<Placement> {
        let placement = |Axis { name, size }: &Axis| match size {
            1 => Replicate,
            _ if divided_over.contains(&name.as_str()) => Shard(0),
            _ => Partial,
        };
        self.mesh.axes().iter().map(placement).collect()
    }

    /// The axis whose ranks have different parts of the model, if there are several.
    fn stages(&self) -> Option<usize> {
        self.mesh.axes().iter().position(|axis| axis.name == PP_AXIS && axis.size > 1)
    }
}

thread_local! {
    static LEDGER: RefCell<Option<Ledger>> = const { RefCell::new(None) };
}

/// Runs `work`, of this dry thread, with the ledger of a rank of `mesh`: its axes are the smallest that any group spans.
///
/// # Errors
/// A rank outside of the mesh.
pub fn run<R>(mesh: DeviceMesh, rank: usize, work: impl FnOnce() -> R) -> Result<R, MeshError> {
    struct Close;
    impl Drop for Close {
        fn drop(&mut self) {
            LEDGER.set(None);
        }
    }
    let coordinate = mesh.coordinate(rank)?;
    LEDGER.set(Some(Ledger { mesh, coordinate, gradients: Vec::new(), norm: None, sum: None }));
    let _close = Close;
    Ok(work())
}

fn with<R>(work: impl FnOnce(&mut Ledger) -> R) -> Option<R> {
    if !dry::is_dry() {
        return None;
    }
    LEDGER.with_borrow_mut(|ledger| ledger.as_mut().map(work))
}

fn fault(tensor: &str, axis: usize, fault: Fault) -> LedgerError {
    let axis = with(|ledger| ledger.mesh.axes()[axis].name.clone());
    LedgerError { tensor: tensor.to_owned(), axis, fault }
}

/// The axes of more than one rank that a group spans. Its ranks are in the order of the mesh.
fn spanned_axes(mesh: &DeviceMesh, group: &dyn ProcessGroup) -> Vec<usize> {
    let ranks = group.global_ranks();
    let [Some(first), Some(last)] = [ranks.first(), ranks.last()].map(|rank| mesh.coordinate(*rank?).ok())
    else {
        return Vec::new();
    };
    (0..first.len()).filter(|&axis| first[axis] != last[axis]).collect()
}

/// The placements recorded for a tensor.
pub fn placed(tensor: &Tensor) -> Option<Placed> {
    if dry::is_dry() { dry::attached(tensor) } else { None }
}

/// Keeps placements, if any, with the storage of a tensor.
pub fn place(tensor: &Tensor, placed: Option<Placed>) {
    if let Some(placed) = placed {
        dry::attach(tensor, placed);
    }
}

/// Records that a tensor is overwritten by a copy of another one.
///
/// # Errors
/// A source with a collective that is not complete.
pub fn copy(from: &Tensor, to: &Tensor) -> Result<(), LedgerError> {
    let from = placed(from);
    from.iter().try_for_each(Placed::check_complete)?;
    place(to, from);
    Ok(())
}

/// Checks that a tensor may be added to another one.
///
/// # Errors
/// Tensors that are placed differently.
pub fn add(from: &Tensor, to: &Tensor) -> Result<(), LedgerError> {
    let (Some(from), Some(to)) = (placed(from), placed(to)) else { return Ok(()) };
    to.check_equal(&from)
}
