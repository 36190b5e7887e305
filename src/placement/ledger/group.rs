//! Process groups that keep the ledger, and the account of the norm.

use super::{Fault, LedgerError, Placed, fault, place, placed, spanned_axes, with};
use crate::comm::{
    Call, CallSignature, CollectiveOp, CommError, GroupWrapper, Pending, ProcessGroup, ReduceOp,
};
use crate::placement::Placement::Shard;
use candle_core::{DType, Tensor};
use std::sync::{Arc, OnceLock};

/// The name of the norm in errors.
const NORM: &str = "the norm of the gradients";

/// Opens the account of a norm: the squares of gradients are computed, and are to be summed over exactly the axes that
/// shard them. Until [`close_norm`], collectives of f64 values are its sums.
///
/// # Errors
/// A gradient that is not reduced, or placed differently from the first one.
pub fn open_norm(gradients: impl Iterator<Item = Option<Placed>>) -> Result<(), LedgerError> {
    let mut first: Option<Placed> = None;
    for gradient in gradients.flatten() {
        gradient.check_summed()?;
        gradient.check_equal(first.get_or_insert_with(|| gradient.clone()))?;
    }
    let sharded = first.map(|first| first.axes_with(|placement| matches!(placement, Shard(_))));
    with(|ledger| ledger.norm = sharded);
    Ok(())
}

/// Closes the account of a norm, which is used now.
///
/// # Errors
/// A sum that is missing.
pub fn close_norm() -> Result<(), LedgerError> {
    let missing = with(|ledger| ledger.norm.take()?.first().copied()).flatten();
    missing.map_or(Ok(()), |axis| Err(fault(NORM, axis, Fault::NotSummed)))
}

/// A group of a dry run that keeps the ledger.
#[derive(Debug)]
pub struct LedgerGroup {
    inner: Arc<dyn ProcessGroup>,
    /// The axes of the ledger's mesh that it spans, once they are needed.
    axes: OnceLock<Vec<usize>>,
}

impl LedgerGroup {
    /// Wraps a group.
    pub fn new(inner: Arc<dyn ProcessGroup>) -> Self {
        Self { inner, axes: OnceLock::new() }
    }

    fn axes(&self) -> &[usize] {
        let spanned = || with(|ledger| spanned_axes(&ledger.mesh, &*self.inner)).unwrap_or_default();
        self.axes.get_or_init(spanned)
    }

    fn record(&self, call: &Call<'_>) -> Result<(), LedgerError> {
        let op = call.op();
        let ([input], [output]) = (call.inputs(), call.outputs()) else { return Ok(()) };
        if !matches!(op, CollectiveOp::AllReduce | CollectiveOp::ReduceScatter | CollectiveOp::AllGather) {
            return Ok(());
        }
        let is_sum = match call.signature() {
            CallSignature::AllReduce { op, .. } | CallSignature::ReduceScatter { op, .. } => {
                *op == ReduceOp::Sum
            }
            _ => true,
        };
        match placed(input) {
            Some(placed) if !is_sum => placed.refuse_at(self.axes().first().copied(), Fault::NotASum)?,
            Some(placed) => place(output, Some(placed.after(op, self.axes())?)),
            None if input.dtype() == DType::F64 => self.record_sum_of_norm(is_sum)?,
            None => {}
        }
        Ok(())
    }

    fn record_sum_of_norm(&self, is_sum: bool) -> Result<(), LedgerError> {
        let axes = self.axes();
        if !is_sum && with(|ledger| ledger.norm.is_some()).unwrap_or_default() {
            return axes.first().map_or(Ok(()), |axis| Err(fault(NORM, *axis, Fault::NotASum)));
        }
        let twice = with(|ledger| {
            let missing = ledger.norm.as_mut()?;
            let twice = axes.iter().find(|axis| !missing.contains(axis));
            missing.retain(|axis| !axes.contains(axis));
            twice.copied()
        });
        twice.flatten().map_or(Ok(()), |axis| Err(fault(NORM, axis, Fault::SummedTwice)))
    }
}

impl GroupWrapper for LedgerGroup {
    fn inner(&self) -> &Arc<dyn ProcessGroup> {
        &self.inner
    }

    fn start(&self, call: Call<'_>) -> Result<Pending, CommError> {
        self.record(&call).map_err(|error| {
            let (group, op, reason) = (self.inner.name().to_owned(), call.op(), error.to_string());
            CommError::InvalidArgument { group, op, reason }
        })?;
        let is_pending = |output: &&Tensor| placed(output).is_some_and(|placed| placed.pending.is_some());
        let outputs: Vec<Tensor> = call.outputs().iter().filter(is_pending).cloned().collect();
        let started = self.inner.start(call)?;
        if outputs.is_empty() {
            return Ok(started);
        }
        Ok(started.then(move || {
            let complete = |output| placed(output).map(|placed| Placed { pending: None, ..placed });
            outputs.iter().for_each(|output| place(output, complete(output)));
            Ok(())
        }))
    }
}
