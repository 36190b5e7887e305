//! The gradients that backward passes add to.

use super::{Fault, LedgerError, Placed, fault, place, placed, with};
use crate::placement::Placement::{self, Partial};
use candle_core::Tensor;
use std::sync::Arc;

/// A gradient that backward passes have added to since the last [`clear_gradients`].
pub(super) struct Written {
    /// Its name, as in [`Placed`].
    pub(super) tensor: Arc<str>,
    /// Its placements before any sum.
    pub(super) placements: Vec<Placement>,
}

/// The gradient of one parameter in a buffer.
pub struct GradientOf<'a> {
    /// Name of the parameter.
    pub parameter: &'a str,
    /// Whether it is frozen, and so has no gradient.
    pub is_frozen: bool,
    /// Names of the axes whose ranks divide the parameter, or have different ones. A mesh may lack them.
    pub divided_over: Vec<&'static str>,
}

/// Records that a backward pass adds to a buffer of gradients with this name: a partial sum, since every rank has other tokens,
/// except along the axes whose ranks divide the parameters.
///
/// # Errors
/// A gradient that is summed already, that of a frozen parameter, or parameters in one buffer that are divided differently.
pub fn add_tokens<'a>(
    buffer: &Tensor,
    parameters: impl FnOnce() -> Vec<GradientOf<'a>>,
    name: impl FnOnce() -> String,
) -> Result<(), LedgerError> {
    let Some(known) = placed(buffer).or_else(|| Placed::unwritten(name)) else { return Ok(()) };
    let parameters = parameters();
    let partial = placements_of(&parameters)?;
    let placements = known.placements.as_ref().unwrap_or(&partial);
    let summed = (0..partial.len()).find(|&axis| placements[axis] != partial[axis]);
    known.refuse_at(summed, Fault::AddedAfterSum)?;
    with(|ledger| {
        let gradients = &mut ledger.gradients;
        if !parameters.is_empty() && gradients.iter().all(|written| written.tensor != known.tensor) {
            gradients.push(Written { tensor: known.tensor.clone(), placements: partial.clone() });
        }
    });
    place(buffer, Some(Placed { placements: Some(partial), ..known }));
    Ok(())
}

/// Records that all gradients are zero, for the next step.
pub fn clear_gradients() {
    with(|ledger| ledger.gradients.clear());
}

/// The placements of the parameters' gradients before any sum.
fn placements_of(parameters: &[GradientOf<'_>]) -> Result<Vec<Placement>, LedgerError> {
    let placements = |divided: &[&str]| with(|ledger| ledger.partial(divided)).unwrap_or_default();
    let mut common: Option<Vec<Placement>> = None;
    for GradientOf { parameter, is_frozen, divided_over } in parameters {
        let tensor = format!("the gradient of `{parameter}`");
        if *is_frozen {
            return Err(LedgerError { tensor, axis: None, fault: Fault::Frozen });
        }
        let own = placements(divided_over);
        let common = common.get_or_insert_with(|| own.clone());
        if let Some(axis) = (0..own.len()).find(|&axis| own[axis] != common[axis]) {
            return Err(fault(&tensor, axis, Fault::Mixed));
        }
    }
    Ok(common.unwrap_or_else(|| placements(&[])))
}

impl Written {
    /// Returns whether several ranks along an axis have the gradient.
    pub(super) fn is_replicated(&self, axis: usize) -> bool {
        self.placements[axis] == Partial
    }
}
