//! A process group that notes what is asked of it.

use candle_core::Tensor;
use std::sync::{Arc, Mutex};
use ulysses::comm::{CollectiveOp, CommError, GroupStats, Pending, ProcessGroup, ReduceOp, StridedPlan};
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

/// Passes everything on to another group and writes it down. A group of one rank moves nothing: nothing
/// is noted of it.
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

    fn note(&self, op: CollectiveOp, elements: usize, like: &Tensor) {
        if self.inner.world_size() > 1 {
            let input_bytes = (elements * like.dtype().size_in_bytes()) as u64;
            self.log.lock().unwrap().push(Started { op, axis: self.axis, input_bytes });
        }
    }
}

impl ProcessGroup for Recorded {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn global_ranks(&self) -> &[usize] {
        self.inner.global_ranks()
    }

    fn start_all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<Pending, CommError> {
        self.note(CollectiveOp::AllReduce, tensor.elem_count(), tensor);
        self.inner.start_all_reduce(tensor, op)
    }

    fn start_reduce_scatter(
        &self,
        input: &Tensor,
        output: &Tensor,
        op: ReduceOp,
    ) -> Result<Pending, CommError> {
        self.note(CollectiveOp::ReduceScatter, input.elem_count(), input);
        self.inner.start_reduce_scatter(input, output, op)
    }

    fn start_all_gather(&self, input: &Tensor, output: &Tensor) -> Result<Pending, CommError> {
        self.note(CollectiveOp::AllGather, input.elem_count(), input);
        self.inner.start_all_gather(input, output)
    }

    fn start_all_to_all(
        &self,
        input: &Tensor,
        output: &Tensor,
        send_counts: &[usize],
        recv_counts: &[usize],
    ) -> Result<Pending, CommError> {
        self.note(CollectiveOp::AllToAll, input.elem_count(), input);
        self.inner.start_all_to_all(input, output, send_counts, recv_counts)
    }

    fn start_all_to_all_strided(
        &self,
        inputs: &[Tensor],
        outputs: &[Tensor],
        plan: &Arc<StridedPlan>,
    ) -> Result<Pending, CommError> {
        self.note(CollectiveOp::AllToAllStrided, plan.counts().0.into_iter().sum(), &inputs[0]);
        self.inner.start_all_to_all_strided(inputs, outputs, plan)
    }

    fn start_broadcast(&self, tensor: &Tensor, root: usize) -> Result<Pending, CommError> {
        self.note(CollectiveOp::Broadcast, tensor.elem_count(), tensor);
        self.inner.start_broadcast(tensor, root)
    }

    fn start_send(&self, tensor: &Tensor, dst: usize) -> Result<Pending, CommError> {
        self.note(CollectiveOp::Send, tensor.elem_count(), tensor);
        self.inner.start_send(tensor, dst)
    }

    fn start_recv(&self, tensor: &Tensor, src: usize) -> Result<Pending, CommError> {
        self.note(CollectiveOp::Recv, 0, tensor);
        self.inner.start_recv(tensor, src)
    }

    fn start_barrier(&self) -> Result<Pending, CommError> {
        self.inner.start_barrier()
    }

    fn split(
        &self,
        name: &str,
        color: Option<usize>,
        key: usize,
    ) -> Result<Option<Arc<dyn ProcessGroup>>, CommError> {
        self.inner.split(name, color, key)
    }

    fn stats(&self) -> GroupStats {
        self.inner.stats()
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }
}
