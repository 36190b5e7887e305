//! Process groups around other process groups: timed, checked, recorded, faulty for a test.

use super::{CollectiveOp, CommError, GroupStats, Pending, ProcessGroup, ReduceOp, StridedPlan};
use candle_core::{Device, Tensor};
use std::fmt::Debug;
use std::slice::from_ref;
use std::sync::Arc;

/// A call of one of [`ProcessGroup`]'s `start_*` methods, with its arguments.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "the fields are the methods' arguments")]
pub enum StartCall<'a> {
    /// [`ProcessGroup::start_all_reduce`].
    AllReduce { tensor: &'a Tensor, op: ReduceOp },
    /// [`ProcessGroup::start_reduce_scatter`].
    ReduceScatter { input: &'a Tensor, output: &'a Tensor, op: ReduceOp },
    /// [`ProcessGroup::start_all_gather`].
    AllGather { input: &'a Tensor, output: &'a Tensor },
    /// [`ProcessGroup::start_all_to_all`].
    AllToAll { input: &'a Tensor, output: &'a Tensor, send_counts: &'a [usize], recv_counts: &'a [usize] },
    /// [`ProcessGroup::start_all_to_all_strided`].
    AllToAllStrided { inputs: &'a [Tensor], outputs: &'a [Tensor], plan: &'a Arc<StridedPlan> },
    /// [`ProcessGroup::start_broadcast`].
    Broadcast { tensor: &'a Tensor, root: usize },
    /// [`ProcessGroup::start_send`].
    Send { tensor: &'a Tensor, dst: usize },
    /// [`ProcessGroup::start_recv`].
    Recv { tensor: &'a Tensor, src: usize },
    /// [`ProcessGroup::start_barrier`].
    Barrier,
}

impl<'a> StartCall<'a> {
    /// Makes the call.
    ///
    /// # Errors
    /// Those of the method.
    pub fn on(self, group: &dyn ProcessGroup) -> Result<Pending, CommError> {
        match self {
            Self::AllReduce { tensor, op } => group.start_all_reduce(tensor, op),
            Self::ReduceScatter { input, output, op } => group.start_reduce_scatter(input, output, op),
            Self::AllGather { input, output } => group.start_all_gather(input, output),
            Self::AllToAll { input, output, send_counts, recv_counts } => {
                group.start_all_to_all(input, output, send_counts, recv_counts)
            }
            Self::AllToAllStrided { inputs, outputs, plan } => {
                group.start_all_to_all_strided(inputs, outputs, plan)
            }
            Self::Broadcast { tensor, root } => group.start_broadcast(tensor, root),
            Self::Send { tensor, dst } => group.start_send(tensor, dst),
            Self::Recv { tensor, src } => group.start_recv(tensor, src),
            Self::Barrier => group.start_barrier(),
        }
    }

    /// The operation that it starts.
    pub fn op(&self) -> CollectiveOp {
        match self {
            Self::AllReduce { .. } => CollectiveOp::AllReduce,
            Self::ReduceScatter { .. } => CollectiveOp::ReduceScatter,
            Self::AllGather { .. } => CollectiveOp::AllGather,
            Self::AllToAll { .. } => CollectiveOp::AllToAll,
            Self::AllToAllStrided { .. } => CollectiveOp::AllToAllStrided,
            Self::Broadcast { .. } => CollectiveOp::Broadcast,
            Self::Send { .. } => CollectiveOp::Send,
            Self::Recv { .. } => CollectiveOp::Recv,
            Self::Barrier => CollectiveOp::Barrier,
        }
    }

    /// The tensors that this rank puts in.
    pub fn inputs(&self) -> &'a [Tensor] {
        match *self {
            Self::AllReduce { tensor, .. } | Self::Broadcast { tensor, .. } | Self::Send { tensor, .. } => {
                from_ref(tensor)
            }
            Self::ReduceScatter { input, .. }
            | Self::AllGather { input, .. }
            | Self::AllToAll { input, .. } => from_ref(input),
            Self::AllToAllStrided { inputs, .. } => inputs,
            Self::Recv { .. } | Self::Barrier => &[],
        }
    }
}

/// A [`ProcessGroup`] around another one. It says only what it changes: whatever it does not
/// override, the inner group answers.
pub trait GroupWrapper: Send + Sync + Debug {
    /// The group that does the work.
    fn inner(&self) -> &Arc<dyn ProcessGroup>;

    /// Every `start_*` method.
    ///
    /// # Errors
    /// As [`StartCall::on`].
    fn start(&self, call: StartCall<'_>) -> Result<Pending, CommError> {
        call.on(&**self.inner())
    }

    /// [`ProcessGroup::split`]. The new group is not wrapped unless this is overridden.
    ///
    /// # Errors
    /// Those of the inner group.
    fn split(
        &self,
        name: &str,
        color: Option<usize>,
        key: usize,
    ) -> Result<Option<Arc<dyn ProcessGroup>>, CommError> {
        self.inner().split(name, color, key)
    }

    /// [`ProcessGroup::stats`].
    fn stats(&self) -> GroupStats {
        self.inner().stats()
    }
}

impl<W: GroupWrapper> ProcessGroup for W {
    fn name(&self) -> &str {
        self.inner().name()
    }

    fn rank(&self) -> usize {
        self.inner().rank()
    }

    fn global_ranks(&self) -> &[usize] {
        self.inner().global_ranks()
    }

    fn value_device(&self) -> Device {
        self.inner().value_device()
    }

    fn check(&self) -> Result<(), CommError> {
        self.inner().check()
    }

    fn start_all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<Pending, CommError> {
        self.start(StartCall::AllReduce { tensor, op })
    }

    fn start_reduce_scatter(
        &self,
        input: &Tensor,
        output: &Tensor,
        op: ReduceOp,
    ) -> Result<Pending, CommError> {
        self.start(StartCall::ReduceScatter { input, output, op })
    }

    fn start_all_gather(&self, input: &Tensor, output: &Tensor) -> Result<Pending, CommError> {
        self.start(StartCall::AllGather { input, output })
    }

    fn start_all_to_all(
        &self,
        input: &Tensor,
        output: &Tensor,
        send_counts: &[usize],
        recv_counts: &[usize],
    ) -> Result<Pending, CommError> {
        self.start(StartCall::AllToAll { input, output, send_counts, recv_counts })
    }

    fn start_all_to_all_strided(
        &self,
        inputs: &[Tensor],
        outputs: &[Tensor],
        plan: &Arc<StridedPlan>,
    ) -> Result<Pending, CommError> {
        self.start(StartCall::AllToAllStrided { inputs, outputs, plan })
    }

    fn start_broadcast(&self, tensor: &Tensor, root: usize) -> Result<Pending, CommError> {
        self.start(StartCall::Broadcast { tensor, root })
    }

    fn start_send(&self, tensor: &Tensor, dst: usize) -> Result<Pending, CommError> {
        self.start(StartCall::Send { tensor, dst })
    }

    fn start_recv(&self, tensor: &Tensor, src: usize) -> Result<Pending, CommError> {
        self.start(StartCall::Recv { tensor, src })
    }

    fn start_barrier(&self) -> Result<Pending, CommError> {
        self.start(StartCall::Barrier)
    }

    fn split(
        &self,
        name: &str,
        color: Option<usize>,
        key: usize,
    ) -> Result<Option<Arc<dyn ProcessGroup>>, CommError> {
        GroupWrapper::split(self, name, color, key)
    }

    fn stats(&self) -> GroupStats {
        GroupWrapper::stats(self)
    }

    fn abort(&self, reason: &str) {
        self.inner().abort(reason);
    }
}
