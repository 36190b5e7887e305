//! A process group that records its operations.

use candle_core::Tensor;
use std::sync::{Arc, Mutex};
use ulysses::comm::{
    Call, CallSignature, CollectiveOp, CommError, GroupWrapper, Pending, ProcessGroup, TrainingGroups,
};

/// An operation that a rank started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Started {
    pub op: CollectiveOp,
    pub axis: &'static str,
    /// Bytes of the rank's input.
    pub input_bytes: u64,
}

/// The operations of one rank over all its groups, in order.
pub type Log = Arc<Mutex<Vec<Started>>>;

/// A process group that records the operations of another group, except barriers and those of one-rank groups.
#[derive(Debug)]
pub struct Recorded {
    inner: Arc<dyn ProcessGroup>,
    axis: &'static str,
    log: Log,
}

impl Recorded {
    /// Wraps all groups of a rank, with a common log.
    pub fn groups(groups: &TrainingGroups, log: &Log) -> TrainingGroups {
        let wrap =
            |axis, inner| -> Arc<dyn ProcessGroup> { Arc::new(Self { inner, axis, log: log.clone() }) };
        groups.clone().map(wrap)
    }

    /// Returns the bytes of the rank's input. For a strided exchange, only the sent elements count.
    fn input_bytes(call: &Call<'_>) -> usize {
        let bytes = |elements: usize, like: &Tensor| elements * like.dtype().size_in_bytes();
        match call.signature() {
            CallSignature::AllToAllStrided { plan, .. } => {
                // A rank that only receives has no inputs.
                let elements = plan.counts().send.into_iter().sum();
                call.inputs().first().map_or(0, |first| bytes(elements, first))
            }
            _ => call.inputs().iter().map(|tensor| bytes(tensor.elem_count(), tensor)).sum(),
        }
    }
}

impl GroupWrapper for Recorded {
    fn inner(&self) -> &Arc<dyn ProcessGroup> {
        &self.inner
    }

    fn start(&self, call: Call<'_>) -> Result<Pending, CommError> {
        if self.inner.world_size() > 1 && call.op() != CollectiveOp::Barrier {
            let input_bytes = Self::input_bytes(&call) as u64;
            self.log.lock().unwrap().push(Started { op: call.op(), axis: self.axis, input_bytes });
        }
        self.inner.start(call)
    }
}
