//! The ledger of a dry run: the placements of gradients, parameters and optimizer state along every axis of the mesh.
//!
//! Within [`run`], [`LedgerGroup`]s and the code that owns the tensors keep a [`Placed`] with the storage of each. A
//! reduction that is missing or done twice is an error. Elsewhere, the functions of this module do nothing.

mod fault;
mod group;
#[cfg(test)]
mod tests;

pub use fault::{Fault, LedgerError};
pub use group::{LedgerGroup, close_norm, open_norm};

use super::Placement::{self, Partial, Replicate, Shard};
use crate::comm::{CollectiveOp, ProcessGroup};
use crate::mesh::{DeviceMesh, PP_AXIS, TP_AXIS};
use candle_core::Tensor;
use std::cell::RefCell;
use std::sync::Arc;
use ulysses_kernels::device::dry;

struct Ledger {
    mesh: DeviceMesh,
    /// The axes over which the norm of the gradients is yet to be summed; `None` while no norm is computed.
    norm: Option<Vec<usize>>,
}

impl Ledger {
    /// The placements of a summand that each rank has computed from its own tokens, of a tensor that the ranks of the groups
    /// `divided` divide.
    fn partial(&self, divided: &[&dyn ProcessGroup]) -> Vec<Placement> {
        let summand = |&size: &usize| if size > 1 { Partial } else { Replicate };
        let mut placements: Vec<_> = self.mesh.shape().iter().map(summand).collect();
        for axis in divided.iter().flat_map(|group| spanned_axes(&self.mesh, *group)) {
            placements[axis] = Shard(0);
        }
        placements
    }
}

thread_local! {
    static LEDGER: RefCell<Option<Ledger>> = const { RefCell::new(None) };
}

/// Runs `work`, of this dry thread, with a ledger of `mesh`: its axes are the smallest that any group spans.
pub fn run<R>(mesh: DeviceMesh, work: impl FnOnce() -> R) -> R {
    struct Close;
    impl Drop for Close {
        fn drop(&mut self) {
            LEDGER.set(None);
        }
    }
    LEDGER.set(Some(Ledger { mesh, norm: None }));
    let _close = Close;
    work()
}

fn with<R>(work: impl FnOnce(&mut Ledger) -> R) -> Option<R> {
    if !dry::is_dry() {
        return None;
    }
    LEDGER.with_borrow_mut(|ledger| ledger.as_mut().map(work))
}

fn fault(tensor: &str, axis: usize, fault: Fault) -> LedgerError {
    let axis = with(|ledger| ledger.mesh.axis_names()[axis].clone()).unwrap_or_default();
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

/// The placements of a tensor of a dry run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed {
    tensor: Arc<str>,
    /// One per axis of the mesh. `None` for a gradient that no backward pass has added to: zeros fit every placement.
    placements: Option<Vec<Placement>>,
    /// The axis of a collective that has not completed.
    pending: Option<usize>,
}

impl Placed {
    /// Those of a gradient with this name that no backward pass has added to.
    pub fn unwritten(tensor: impl FnOnce() -> String) -> Option<Self> {
        with(|_| ()).map(|()| Self { tensor: tensor().into(), placements: None, pending: None })
    }

    /// Those of a tensor with this name that is placed so along these groups, and replicated along other axes.
    pub fn along(tensor: impl FnOnce() -> String, groups: &[(&dyn ProcessGroup, Placement)]) -> Option<Self> {
        let placements = with(|ledger| {
            let mut placements = vec![Replicate; ledger.mesh.shape().len()];
            for (group, placement) in groups {
                let axes = spanned_axes(&ledger.mesh, *group);
                axes.into_iter().for_each(|axis| placements[axis] = *placement);
            }
            placements
        });
        Some(Self { placements: Some(placements?), tensor: tensor().into(), pending: None })
    }

    /// The same placements of a tensor with another name.
    #[must_use]
    pub fn named(&self, tensor: impl FnOnce() -> String) -> Self {
        Self { tensor: tensor().into(), ..self.clone() }
    }

    /// The axes with such a placement.
    fn axes_with(&self, is_meant: impl Fn(Placement) -> bool) -> Vec<usize> {
        let placements = self.placements.as_deref().unwrap_or_default();
        (0..placements.len()).filter(|&axis| is_meant(placements[axis])).collect()
    }

    /// A fault at the given axis, if there is one.
    fn refuse_at(&self, axis: Option<usize>, what: Fault) -> Result<(), LedgerError> {
        axis.map_or(Ok(()), |axis| Err(fault(&self.tensor, axis, what)))
    }

    fn check_complete(&self) -> Result<(), LedgerError> {
        self.refuse_at(self.pending, Fault::Incomplete)
    }

    /// Checks that a gradient is reduced: that it is no summand any more.
    ///
    /// # Errors
    /// A sum that is missing, or has not completed.
    pub fn check_summed(&self) -> Result<(), LedgerError> {
        self.check_complete()?;
        let summands = with(|ledger| ledger.partial(&[])).unwrap_or_default();
        let placements = self.placements.as_ref().unwrap_or(&summands);
        self.refuse_at(placements.iter().position(|placement| *placement == Partial), Fault::NotSummed)
    }

    /// Checks that all ranks have the same elements; those of tp and pp may each have a part, which is what they use.
    ///
    /// # Errors
    /// A gather that is missing, or has not completed.
    pub fn check_gathered(&self) -> Result<(), LedgerError> {
        self.check_complete()?;
        let is_divided = |axis: usize| {
            let name = with(|ledger| ledger.mesh.axis_names()[axis].clone());
            name.is_some_and(|name| [PP_AXIS, TP_AXIS].contains(&name.as_str()))
        };
        let placements = self.placements.as_deref().unwrap_or_default();
        let missing = (0..placements.len()).find(|&axis| match placements[axis] {
            Replicate => false,
            Shard(_) => !is_divided(axis),
            Partial => true,
        });
        self.refuse_at(missing, Fault::NotGathered)
    }

    /// Checks that another tensor is placed as this one.
    ///
    /// # Errors
    /// Tensors that are placed differently, or with a collective that is not complete.
    pub fn check_equal(&self, other: &Self) -> Result<(), LedgerError> {
        self.check_complete().and_then(|()| other.check_complete())?;
        let (Some(own), Some(others)) = (&self.placements, &other.placements) else { return Ok(()) };
        self.refuse_at((0..own.len()).find(|&axis| own[axis] != others[axis]), Fault::Mixed)
    }

    /// Checks that a tensor is compared along exactly the axes that replicate it, given the groups along which it is.
    ///
    /// # Errors
    /// A comparison that is missing, or one of shards.
    pub fn check_compared(&self, groups: &[&dyn ProcessGroup]) -> Result<(), LedgerError> {
        let (compared, sizes) = with(|ledger| {
            let compared = groups.iter().flat_map(|group| spanned_axes(&ledger.mesh, *group));
            (compared.collect::<Vec<_>>(), ledger.mesh.shape().to_vec())
        })
        .unwrap_or_default();
        let replicated = self.axes_with(|placement| placement == Replicate);
        let sharded = compared.iter().find(|axis| !replicated.contains(axis));
        self.refuse_at(sharded.copied(), Fault::ShardsCompared)?;
        let missing = replicated.into_iter().find(|axis| sizes[*axis] > 1 && !compared.contains(axis));
        self.refuse_at(missing, Fault::NotCompared)
    }

    /// The placements of the result of a collective over these axes.
    fn after(&self, op: CollectiveOp, axes: &[usize]) -> Result<Self, LedgerError> {
        self.check_complete()?;
        let is_gather = op == CollectiveOp::AllGather;
        let Some(mut placements) = self.placements.clone() else {
            self.refuse_at(axes.first().copied().filter(|_| !is_gather), Fault::NothingToSum)?;
            return Ok(self.clone());
        };
        for &axis in axes {
            placements[axis] = match (placements[axis], op) {
                (Shard(_), CollectiveOp::AllGather) | (Partial, CollectiveOp::AllReduce) => Replicate,
                (Partial, CollectiveOp::ReduceScatter) => Shard(0),
                _ => {
                    let what = if is_gather { Fault::NotSharded } else { Fault::SummedTwice };
                    return Err(fault(&self.tensor, axis, what));
                }
            };
        }
        Ok(Self { placements: Some(placements), pending: axes.first().copied(), ..self.clone() })
    }
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

/// Records that a backward pass adds to a gradient with this name: a summand, since every rank has other tokens, except along
/// the groups `divided` whose ranks divide the tensor.
///
/// # Errors
/// A gradient that is summed already.
pub fn add_tokens(
    gradient: &Tensor,
    divided: &[&dyn ProcessGroup],
    tensor: impl FnOnce() -> String,
) -> Result<(), LedgerError> {
    let Some(known) = placed(gradient).or_else(|| Placed::unwritten(tensor)) else { return Ok(()) };
    let partial = with(|ledger| ledger.partial(divided)).unwrap_or_default();
    let placements = known.placements.as_ref().unwrap_or(&partial);
    let summed = (0..partial.len()).find(|&axis| placements[axis] != partial[axis]);
    known.refuse_at(summed, Fault::AddedAfterSum)?;
    place(gradient, Some(Placed { placements: Some(partial), ..known }));
    Ok(())
}
