//! A process group that notes what is asked of it.

use candle_core::Tensor;
use std::sync::{Arc, Mutex};
use ulysses::comm::{CollectiveArgs, CollectiveOp, CommError, GroupWrapper, Pending, ProcessGroup};
use ulysses::zero::ZeroGroups;

/// An operation that a rank has started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Started {
    pub op: CollectiveOp,
    pub axis: &'static str,
    /// Bytes of what the rank puts in.
    pub input_bytes: u64,
}

/// What one rank has started, over all its groups, in order.
pub type Log = Arc<Mutex<Vec<Started>>>;

/// Writes down what is asked of another group. A group of one rank moves nothing: nothing is noted of it,
/// nor of barriers.
#[derive(Debug)]
pub struct Recorded {
    inner: Arc<dyn ProcessGroup>,
    axis: &'static str,
    log: Log,
}

impl Recorded {
    /// All groups of a rank, which write to one log.
    pub fn groups(groups: &ZeroGroups, log: &Log) -> ZeroGroups {
        let wrap =
            |axis, inner| -> Arc<dyn ProcessGroup> { Arc::new(Self { inner, axis, log: log.clone() }) };
        groups.clone().map(wrap)
    }

    /// What the rank puts in, the part of it that a strided exchange sends.
    fn input_bytes(call: CollectiveArgs<'_>) -> usize {
        let bytes = |elements: usize, like: &Tensor| elements * like.dtype().size_in_bytes();
        match call {
            CollectiveArgs::AllToAllStrided { inputs, plan, .. } => {
                bytes(plan.counts().0.into_iter().sum(), &inputs[0])
            }
            _ => call.inputs().iter().map(|tensor| bytes(tensor.elem_count(), tensor)).sum(),
        }
    }
}

impl GroupWrapper for Recorded {
    fn inner(&self) -> &Arc<dyn ProcessGroup> {
        &self.inner
    }

    fn start(&self, call: CollectiveArgs<'_>) -> Result<Pending, CommError> {
        if self.inner.world_size() > 1 && call.op() != CollectiveOp::Barrier {
            let input_bytes = Self::input_bytes(call) as u64;
            self.log.lock().unwrap().push(Started { op: call.op(), axis: self.axis, input_bytes });
        }
        self.inner.start(call)
    }
}
