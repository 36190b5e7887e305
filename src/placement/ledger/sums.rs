//! The accounts of numbers that all ranks add up: the squares of gradients, and the losses of tokens.
//!
//! Numbers have no placements. Instead, the code says what it adds up, and the ledger then expects that collectives of f64
//! values sum it over exactly the axes along which ranks have partial sums.

use super::{Fault, LedgerError, Placed, fault, with};
use crate::placement::Placement::{Replicate, Shard};
use std::sync::Arc;

/// The name of the norm in errors.
const NORM: &str = "the norm of the gradients";

/// The account of a norm.
#[derive(Default)]
pub(super) struct Norm {
    /// The gradients whose squares are counted.
    counted: Vec<Arc<str>>,
}

/// A sum of numbers over ranks.
pub(super) struct Sum {
    what: &'static str,
    /// The axes over which it is yet to be summed.
    missing: Vec<usize>,
    /// Those over which it may be summed, because this rank adds 0.
    optional: Vec<usize>,
}

/// A fault of a sum along an axis.
pub(super) struct SumFault {
    pub(super) what: &'static str,
    pub(super) axis: usize,
    pub(super) fault: Fault,
}

impl Sum {
    /// Takes a sum over some axes into account. Returns a fault, if there is one.
    pub(super) fn add(&mut self, axes: &[usize], is_sum: bool) -> Option<SumFault> {
        let is_expected = |axis: &&usize| self.missing.contains(axis) || self.optional.contains(axis);
        let fault = match is_sum {
            false => axes.first().map(|axis| (*axis, Fault::NotASum)),
            true => axes.iter().find(|axis| !is_expected(axis)).map(|axis| (*axis, Fault::SummedTwice)),
        };
        self.missing.retain(|axis| !axes.contains(axis));
        self.optional.retain(|axis| !axes.contains(axis));
        fault.map(|(axis, fault)| SumFault { what: self.what, axis, fault })
    }
}

/// Begins a norm: the squares of all gradients that backward passes have added to are to be counted, each once.
pub fn begin_norm() {
    with(|ledger| ledger.norm = Some(Norm::default()));
}

/// Begins a sum of squares of some gradients, which are counted on this rank. It is to be summed over exactly the axes that
/// shard them, and over the stages of a pipeline: of a gradient that several stages have, the first one counts it.
///
/// # Errors
/// A gradient that is not reduced, is placed differently from another one, or is counted twice.
pub fn begin_squares(gradients: impl IntoIterator<Item = Placed>) -> Result<(), LedgerError> {
    let stages = with(|ledger| ledger.stages().map(|axis| (axis, ledger.coordinate[axis]))).flatten();
    let (mut first, mut axes) = (None, Vec::new());
    for gradient in gradients {
        gradient.check_summed()?;
        if let Some((axis, stage)) = stages {
            let is_on_others = gradient.axes_with(|placement| placement == Replicate).contains(&axis);
            gradient.refuse_at((is_on_others && stage > 0).then_some(axis), Fault::CountedByReplicas)?;
        }
        let along_others = gradient.without_axis(stages.map(|(axis, _)| axis));
        along_others.check_equal(first.get_or_insert_with(|| along_others.clone()))?;
        axes = along_others.axes_with(|placement| matches!(placement, Shard(_)));
        count(&gradient)?;
    }
    with(|ledger| {
        let all = 0..ledger.mesh.axes().len();
        let optional = if first.is_none() { all.collect() } else { Vec::new() };
        let missing = axes.into_iter().chain(ledger.stages()).collect();
        ledger.sum = Some(Sum { what: NORM, missing, optional });
    });
    Ok(())
}

fn count(gradient: &Placed) -> Result<(), LedgerError> {
    let is_first = with(|ledger| {
        let counted = &mut ledger.norm.as_mut()?.counted;
        let is_first = !counted.contains(&gradient.tensor);
        counted.push(gradient.tensor.clone());
        Some(is_first)
    });
    match is_first.flatten() {
        Some(false) => Err(gradient.fault(Fault::CountedTwice)),
        _ => Ok(()),
    }
}

/// Begins a sum over the tokens of all ranks, such as that of their losses.
pub fn begin_tokens(what: &'static str) {
    with(|ledger| {
        let axes = ledger.mesh.axes().iter().enumerate();
        let missing = axes.filter(|(_, axis)| axis.size > 1).map(|(index, _)| index).collect();
        ledger.sum = Some(Sum { what, missing, optional: Vec::new() });
    });
}

/// Ends a sum, which is used now.
///
/// # Errors
/// An axis over which it is not summed.
pub fn end() -> Result<(), LedgerError> {
    let missing = with(|ledger| ledger.sum.take().and_then(|sum| Some((sum.what, *sum.missing.first()?))));
    missing.flatten().map_or(Ok(()), |(what, axis)| Err(fault(what, axis, Fault::NotSummed)))
}

/// Ends a norm, which is used now.
///
/// # Errors
/// A gradient that is not counted.
pub fn end_norm() -> Result<(), LedgerError> {
    let missing = with(|ledger| {
        let counted = ledger.norm.take()?.counted;
        let stages = ledger.stages().filter(|axis| ledger.coordinate[*axis] > 0);
        let is_counted_by_first =
            |gradient: &super::gradient::Written| stages.is_some_and(|axis| gradient.is_replicated(axis));
        let mut gradients = ledger.gradients.iter();
        let missing =
            gradients.find(|gradient| !counted.contains(&gradient.tensor) && !is_counted_by_first(gradient));
        missing.map(|gradient| gradient.tensor.to_string())
    });
    match missing.flatten() {
        Some(tensor) => Err(LedgerError { tensor, axis: None, fault: Fault::NotCounted }),
        None => Ok(()),
    }
}
