//! [`ProcessGroup`] over the memory of one process.

use super::collective::{Buffers, Collective, SplitResult};
use super::communicator::Communicator;
use super::engine::{Operation, RankState};
use super::mailbox::{RecvOperation, SendOperation};
use crate::comm::arguments::Arguments;
use crate::comm::buffer::apart;
use crate::comm::call::Call;
use crate::comm::lane::{Lane, LaneKind, Sequences};
use crate::comm::{
    CollectiveOp, CommError, GroupStats, Pending, ProcessGroup, ReduceOp, StridedPlan, strided,
};
use candle_core::Tensor;
use parking_lot::Mutex;
use std::sync::{Arc, OnceLock};
use ulysses_kernels::device::Fence;

/// One rank's handle of a group whose ranks are threads of this process.
#[derive(Debug)]
pub(super) struct ThreadGroup {
    state: Arc<RankState>,
    comm: Arc<Communicator>,
    rank: usize,
    sequences: Mutex<Sequences>,
}

impl ThreadGroup {
    pub(super) fn new(state: Arc<RankState>, comm: Arc<Communicator>, rank: usize) -> Self {
        let sequences = Mutex::new(Sequences::new(comm.world_size()));
        Self { state, comm, rank, sequences }
    }

    fn arguments(&self, op: CollectiveOp) -> Arguments<'_> {
        Arguments { group: &self.comm.name, world_size: self.comm.world_size(), op }
    }

    /// Publishes a collective whose arguments were checked.
    fn start(&self, call: Call, inputs: Vec<Tensor>, outputs: &[&Tensor]) -> Result<Pending, CommError> {
        self.start_with(call, inputs, outputs, SplitResult::default())
    }

    fn start_with(
        &self,
        call: Call,
        inputs: Vec<Tensor>,
        outputs: &[&Tensor],
        split: SplitResult,
    ) -> Result<Pending, CommError> {
        let buffers = Buffers::new(inputs, outputs)?;
        self.issue(LaneKind::Collectives, |sequence| {
            Box::new(Collective::publish(&self.comm, self.rank, sequence, call, buffers, split))
        })
    }

    fn issue(
        &self,
        kind: LaneKind,
        publish: impl FnOnce(u64) -> Box<dyn Operation>,
    ) -> Result<Pending, CommError> {
        self.state.world.check()?;
        let lane = Lane { group: Arc::as_ptr(&self.comm).addr(), kind };
        let id = self.state.issue(lane, || publish(self.sequences.lock().next(kind)));
        if self.comm.world_size() == 1 && kind == LaneKind::Collectives {
            // Nobody to wait for.
            self.state.complete(id)?;
            return Ok(Pending::ready());
        }
        let (completing, failing) = (self.state.clone(), self.state.clone());
        Ok(Pending::new(
            move || completing.complete(id),
            move |error| {
                failing.fail(CommError::PeerFailed { rank: failing.global_rank, reason: error.to_string() });
            },
        ))
    }

    /// Replaces inputs that share memory with an output by copies: peers will read
    /// the inputs while the outputs are being written.
    fn apart(inputs: &[&Tensor], outputs: &[&Tensor]) -> Result<Vec<Tensor>, CommError> {
        inputs.iter().map(|input| apart(input, outputs)).collect()
    }
}

impl ProcessGroup for ThreadGroup {
    fn name(&self) -> &str {
        &self.comm.name
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn global_ranks(&self) -> &[usize] {
        &self.comm.global_ranks
    }

    fn check(&self) -> Result<(), CommError> {
        self.state.world.check()
    }

    fn start_all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<Pending, CommError> {
        let dtype = self.arguments(CollectiveOp::AllReduce).tensors(&[tensor])?;
        let count = tensor.elem_count();
        self.start(Call::AllReduce { op, dtype, count }, vec![tensor.clone()], &[tensor])
    }

    fn start_reduce_scatter(
        &self,
        input: &Tensor,
        output: &Tensor,
        op: ReduceOp,
    ) -> Result<Pending, CommError> {
        let arguments = self.arguments(CollectiveOp::ReduceScatter);
        let dtype = arguments.tensors(&[input, output])?;
        arguments.chunks(("input", input), ("output", output))?;
        let chunk = output.elem_count();
        self.start(Call::ReduceScatter { op, dtype, chunk }, Self::apart(&[input], &[output])?, &[output])
    }

    fn start_all_gather(&self, input: &Tensor, output: &Tensor) -> Result<Pending, CommError> {
        let arguments = self.arguments(CollectiveOp::AllGather);
        let dtype = arguments.tensors(&[input, output])?;
        arguments.chunks(("output", output), ("input", input))?;
        let count = input.elem_count();
        self.start(Call::AllGather { dtype, count }, Self::apart(&[input], &[output])?, &[output])
    }

    fn start_all_to_all(
        &self,
        input: &Tensor,
        output: &Tensor,
        send_counts: &[usize],
        recv_counts: &[usize],
    ) -> Result<Pending, CommError> {
        let arguments = self.arguments(CollectiveOp::AllToAll);
        let dtype = arguments.tensors(&[input, output])?;
        arguments.counts("send", send_counts, input)?;
        arguments.counts("recv", recv_counts, output)?;
        let call = Call::AllToAll { dtype, send: send_counts.to_vec(), recv: recv_counts.to_vec() };
        self.start(call, Self::apart(&[input], &[output])?, &[output])
    }

    fn start_all_to_all_strided(
        &self,
        inputs: &[Tensor],
        outputs: &[Tensor],
        plan: &Arc<StridedPlan>,
    ) -> Result<Pending, CommError> {
        let dtype = strided::validate(&self.comm.name, self.comm.world_size(), inputs, outputs, plan)?;
        let (inputs, outputs): (Vec<_>, Vec<_>) = (inputs.iter().collect(), outputs.iter().collect());
        let call = Call::AllToAllStrided { dtype, plan: plan.clone() };
        self.start(call, Self::apart(&inputs, &outputs)?, &outputs)
    }

    fn start_broadcast(&self, tensor: &Tensor, root: usize) -> Result<Pending, CommError> {
        let arguments = self.arguments(CollectiveOp::Broadcast);
        let dtype = arguments.tensors(&[tensor])?;
        arguments.rank("root", root)?;
        let call = Call::Broadcast { dtype, count: tensor.elem_count(), root };
        if root == self.rank {
            self.start(call, vec![tensor.clone()], &[])
        } else {
            self.start(call, Vec::new(), &[tensor])
        }
    }

    fn start_send(&self, tensor: &Tensor, dst: usize) -> Result<Pending, CommError> {
        let arguments = self.arguments(CollectiveOp::Send);
        arguments.tensors(&[tensor])?;
        arguments.rank("destination", dst)?;
        let fence = Fence::after(tensor.device())?;
        self.issue(LaneKind::SendTo(dst), |sequence| {
            Box::new(SendOperation::publish(&self.comm, self.rank, dst, sequence, tensor, fence))
        })
    }

    fn start_recv(&self, tensor: &Tensor, src: usize) -> Result<Pending, CommError> {
        let arguments = self.arguments(CollectiveOp::Recv);
        arguments.tensors(&[tensor])?;
        arguments.rank("source", src)?;
        self.issue(LaneKind::RecvFrom(src), |sequence| {
            Box::new(RecvOperation::new(&self.comm, self.rank, src, sequence, tensor))
        })
    }

    fn start_barrier(&self) -> Result<Pending, CommError> {
        self.start(Call::Barrier, Vec::new(), &[])
    }

    fn split(
        &self,
        name: &str,
        color: Option<usize>,
        key: usize,
    ) -> Result<Option<Arc<dyn ProcessGroup>>, CommError> {
        let result: SplitResult = Arc::new(OnceLock::new());
        let call = Call::Split { name: name.to_owned(), color, key };
        self.start_with(call, Vec::new(), &[], result.clone())?.wait()?;
        let Some((comm, rank)) = result.get() else { return Ok(None) };
        Ok(Some(Arc::new(ThreadGroup::new(self.state.clone(), comm.clone(), *rank))))
    }

    fn stats(&self) -> GroupStats {
        self.comm.stats(self.rank)
    }

    fn abort(&self, reason: &str) {
        let rank = self.state.global_rank;
        self.state.fail(CommError::PeerFailed { rank, reason: reason.to_owned() });
    }
}
