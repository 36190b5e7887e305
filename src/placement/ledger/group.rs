//! Process groups that keep the ledger.

use super::sums::SumFault;
use super::{Fault, LedgerError, Placed, fault, place, placed, spanned_axes, with};
use crate::comm::{
    Call, CallSignature, CollectiveOp, CommError, GroupWrapper, Pending, ProcessGroup, ReduceOp,
};
use candle_core::{DType, Tensor};
use std::sync::{Arc, OnceLock};

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
            None if input.dtype() == DType::F64 => self.record_sum(is_sum)?,
            None => {}
        }
        Ok(())
    }

    fn record_sum(&self, is_sum: bool) -> Result<(), LedgerError> {
        let axes = self.axes();
        let wrong = with(|ledger| ledger.sum.as_mut()?.add(axes, is_sum)).flatten();
        wrong.map_or(Ok(()), |SumFault { what, axis, fault: mistake }| Err(fault(what, axis, mistake)))
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
