//! The placements of one tensor, and what collectives do to them.

use super::{Fault, LedgerError, fault, spanned_axes, with};
use crate::comm::{CollectiveOp, ProcessGroup};
use crate::mesh::{PP_AXIS, TP_AXIS};
use crate::placement::Placement::{self, Partial, Replicate, Shard};
use std::sync::Arc;

/// The placements of a tensor of a dry run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed {
    pub(super) tensor: Arc<str>,
    /// One per axis of the mesh. `None` for a gradient that no backward pass has added to: zeros fit every placement.
    pub(super) placements: Option<Vec<Placement>>,
    /// The axis of a collective that has not completed.
    pub(super) pending: Option<usize>,
}

/// A group, and the placement of a tensor along it.
#[derive(Debug, Clone, Copy)]
pub struct PlacedAlong<'a> {
    /// The group.
    pub group: &'a dyn ProcessGroup,
    /// The placement.
    pub placement: Placement,
}

impl Placed {
    /// Those of a gradient with this name that no backward pass has added to.
    pub fn unwritten(tensor: impl FnOnce() -> String) -> Option<Self> {
        with(|_| ()).map(|()| Self { tensor: tensor().into(), placements: None, pending: None })
    }

    /// Those of a tensor with this name that is placed so along these groups, and replicated along other axes.
    pub fn along<'a>(
        tensor: impl FnOnce() -> String,
        groups: impl IntoIterator<Item = PlacedAlong<'a>>,
    ) -> Option<Self> {
        let placements = with(|ledger| {
            let mut placements = vec![Replicate; ledger.mesh.axes().len()];
            for PlacedAlong { group, placement } in groups {
                let axes = spanned_axes(&ledger.mesh, group);
                axes.into_iter().for_each(|axis| placements[axis] = placement);
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
    pub(super) fn axes_with(&self, is_meant: impl Fn(Placement) -> bool) -> Vec<usize> {
        let placements = self.placements.as_deref().unwrap_or_default();
        (0..placements.len()).filter(|&axis| is_meant(placements[axis])).collect()
    }

    /// A fault at the given axis, if there is one.
    pub(super) fn refuse_at(&self, axis: Option<usize>, what: Fault) -> Result<(), LedgerError> {
        axis.map_or(Ok(()), |axis| Err(fault(&self.tensor, axis, what)))
    }

    /// A fault along no axis.
    pub(super) fn fault(&self, fault: Fault) -> LedgerError {
        LedgerError { tensor: self.tensor.to_string(), axis: None, fault }
    }

    /// The same placements, replicated along an axis.
    pub(super) fn without_axis(&self, axis: Option<usize>) -> Self {
        let mut placed = self.clone();
        if let (Some(placements), Some(axis)) = (&mut placed.placements, axis) {
            placements[axis] = Replicate;
        }
        placed
    }

    pub(super) fn check_complete(&self) -> Result<(), LedgerError> {
        self.refuse_at(self.pending, Fault::Incomplete)
    }

    /// Checks that a gradient is reduced: that it is no partial sum any more.
    ///
    /// # Errors
    /// A sum that is missing, or has not completed.
    pub fn check_summed(&self) -> Result<(), LedgerError> {
        self.check_complete()?;
        let partial = with(|ledger| ledger.partial(&[])).unwrap_or_default();
        let placements = self.placements.as_ref().unwrap_or(&partial);
        self.refuse_at(placements.iter().position(|placement| *placement == Partial), Fault::NotSummed)
    }

    /// Checks that all ranks have the same elements; those of tp and pp may each have a part, which is what they use.
    ///
    /// # Errors
    /// A gather that is missing, or has not completed.
    pub fn check_gathered(&self) -> Result<(), LedgerError> {
        self.check_complete()?;
        let is_divided = |axis: usize| {
            let name = with(|ledger| ledger.mesh.axes()[axis].name.clone());
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
            (compared.collect::<Vec<_>>(), ledger.mesh.shape())
        })
        .unwrap_or_default();
        let replicated = self.axes_with(|placement| placement == Replicate);
        let sharded = compared.iter().find(|axis| !replicated.contains(axis));
        self.refuse_at(sharded.copied(), Fault::ShardsCompared)?;
        let missing = replicated.into_iter().find(|axis| sizes[*axis] > 1 && !compared.contains(axis));
        self.refuse_at(missing, Fault::NotCompared)
    }

    /// The placements of the result of a collective over these axes.
    pub(super) fn after(&self, op: CollectiveOp, axes: &[usize]) -> Result<Self, LedgerError> {
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
