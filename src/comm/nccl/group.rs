//! [`ProcessGroup`] on an NCCL communicator.

use super::communicator::Communicator;
use super::operation::{Enqueue, Inner, ShutdownGuard, data_type, operator, source, target};
use super::traffic::{MovedBytes, offsets};
use crate::comm::arg_check::ArgCheck;
use crate::comm::args::RootedExchange;
use crate::comm::buffer::copy_if_shared;
use crate::comm::call_signature::CallSignature;
use crate::comm::diagnostics::GroupLabel;
use crate::comm::reduce::{is_unrounded_sum, reduce};
use crate::comm::{
    CollectiveArgs, CollectiveOp, CommError, GroupStats, Pending, ProcessGroup, ProcessGroupExt, ReduceOp,
    pack_exchange_unpack,
};
use candle_core::{DType, Device, Tensor};
use cudarc::nccl::result;
use parking_lot::Mutex;
use std::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;
use ulysses_kernels::tensor::{bytes, zeros};

/// Interval between polls of a host that waits for the GPU.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// One rank's handle of a group.
#[derive(Debug)]
pub(super) struct NcclGroup(Arc<Inner>);

impl NcclGroup {
    pub(super) fn new(
        guard: Arc<ShutdownGuard>,
        communicator: Arc<Communicator>,
        name: String,
        rank: usize,
        global_ranks: Vec<usize>,
    ) -> Self {
        let label = Arc::new(GroupLabel { name, members: global_ranks });
        let own = guard.0.clone();
        Self(Arc::new(Inner { own, guard, communicator, label, rank, state: Mutex::default() }))
    }

    /// Runs the checks that need no peer, and checks that the tensors are on the rank's GPU.
    fn check_args(&self, call: &CollectiveArgs<'_>) -> Result<CallSignature, CommError> {
        let (group, world_size) = (self.name(), self.world_size());
        let signature = call.check(group, self.rank(), world_size)?;
        let own = self.0.own.device.location();
        let tensors = call.inputs().iter().chain(call.outputs());
        match tensors.map(|tensor| tensor.device().location()).find(|location| *location != own) {
            None => Ok(signature),
            Some(got) => {
                let check = ArgCheck { group, world_size, op: call.op() };
                Err(check.invalid(format!("tensors must be on the rank's GPU {own:?}, got {got:?}")))
            }
        }
    }

    /// Starts a collective on checked tensors.
    fn begin(
        &self,
        call: CallSignature,
        traffic: MovedBytes,
        outputs: &[&Tensor],
        inputs: &[&Tensor],
        enqueue: Enqueue<'_>,
    ) -> Result<Pending, CommError> {
        let inner = &self.0;
        inner.flush(traffic.op)?;
        let given = inner.enqueue(traffic, [call], outputs, inputs, enqueue)?;
        let (polling, done, completing) = (inner.clone(), given.done.clone(), inner.clone());
        Ok(inner.pending(move || polling.is_over(&done), move || completing.complete(given)))
    }

    fn all_reduce(&self, call: CallSignature, tensor: &Tensor, op: ReduceOp) -> Result<Pending, CommError> {
        let traffic = MovedBytes::ring(CollectiveOp::AllReduce, bytes(tensor), self.world_size());
        let (count, of, op) = (tensor.elem_count(), data_type(tensor.dtype()), operator(op));
        self.begin(call, traffic, &[tensor], &[], &|comm, stream, at| {
            // SAFETY: `count` elements, accessed for writing; `Enqueued` keeps the tensor until the end.
            unsafe { result::all_reduce(source(at[0]), target(at[0]), count, of, op, comm, stream) }
        })
    }

    fn reduce_scatter(
        &self,
        call: CallSignature,
        input: &Tensor,
        output: &Tensor,
        op: ReduceOp,
    ) -> Result<Pending, CommError> {
        if is_unrounded_sum(op, &[input], output) {
            return self.reduce_scatter_unrounded(call, input, output);
        }
        let traffic = MovedBytes::ring(CollectiveOp::ReduceScatter, bytes(input), self.world_size());
        let (count, of, op) = (output.elem_count(), data_type(output.dtype()), operator(op));
        let input = &copy_if_shared(input, &[output])?;
        self.begin(call, traffic, &[output], &[input], &|comm, stream, at| {
            // SAFETY: `count` elements of the output, and `count` per rank of the input; kept as above.
            unsafe { result::reduce_scatter(source(at[1]), target(at[0]), count, of, op, comm, stream) }
        })
    }

    /// Sums 16-bit elements in f32 and in rank order, as NCCL's kernels do not: each rank receives its chunk of all ranks.
    fn reduce_scatter_unrounded(
        &self,
        call: CallSignature,
        input: &Tensor,
        output: &Tensor,
    ) -> Result<Pending, CommError> {
        let received = zeros(input.elem_count(), input.dtype(), input.device())?;
        let chunk = output.elem_count();
        let counts = vec![chunk; self.world_size()];
        let op = CollectiveOp::ReduceScatter;
        let pending = self.all_to_all(op, call, (input, &counts), (&received, &counts))?;
        let output = output.clone();
        Ok(pending.then(move || {
            let chunks: Vec<Tensor> = (0..counts.len())
                .map(|rank| received.narrow(0, rank * chunk, chunk))
                .collect::<Result<_, _>>()?;
            Ok(reduce(ReduceOp::Sum, &chunks.iter().collect::<Vec<_>>(), 0, &output)?)
        }))
    }

    fn all_gather(&self, call: CallSignature, input: &Tensor, output: &Tensor) -> Result<Pending, CommError> {
        let traffic = MovedBytes::ring(CollectiveOp::AllGather, bytes(output), self.world_size());
        let (count, of) = (input.elem_count(), data_type(input.dtype()));
        let input = &copy_if_shared(input, &[output])?;
        self.begin(call, traffic, &[output], &[input], &|comm, stream, at| {
            // SAFETY: `count` elements of the input, and `count` per rank of the output; kept as above.
            unsafe { result::all_gather(source(at[1]), target(at[0]), count, of, comm, stream) }
        })
    }

    /// Runs grouped sends and receives, which NCCL fuses into one kernel, and counts them as `op`.
    fn all_to_all(
        &self,
        op: CollectiveOp,
        call: CallSignature,
        (input, send_counts): (&Tensor, &[usize]),
        (output, recv_counts): (&Tensor, &[usize]),
    ) -> Result<Pending, CommError> {
        let dtype = input.dtype();
        let moved = MovedBytes::all_to_all(send_counts, recv_counts, self.rank(), dtype.size_in_bytes());
        let traffic = MovedBytes { op, ..moved };
        let (send_offsets, recv_offsets, of) = (offsets(send_counts), offsets(recv_counts), data_type(dtype));
        let input = &copy_if_shared(input, &[output])?;
        self.begin(call, traffic, &[output], &[input], &|comm, stream, at| {
            let exchange = |peer: usize| {
                let (to, from) = (at[0].offset(recv_offsets[peer]), at[1].offset(send_offsets[peer]));
                let (received, sent, peer) = (recv_counts[peer], send_counts[peer], peer as c_int);
                // Both sides skip empty messages.
                if sent > 0 {
                    // SAFETY: the counts add up to the tensors' elements; kept as above.
                    unsafe { result::send(source(from), sent, of, peer, comm, stream)? };
                }
                if received > 0 {
                    // SAFETY: as above.
                    unsafe { result::recv(target(to), received, of, peer, comm, stream)? };
                }
                Ok(())
            };
            result::group_start()?;
            let given = (0..send_counts.len()).try_for_each(exchange);
            let ended = result::group_end();
            given.and(ended)
        })
    }

    fn broadcast(&self, call: CallSignature, tensor: &Tensor, root: usize) -> Result<Pending, CommError> {
        let traffic = MovedBytes::broadcast(bytes(tensor), root == self.rank(), self.world_size());
        let (count, of, root) = (tensor.elem_count(), data_type(tensor.dtype()), root as c_int);
        self.begin(call, traffic, &[tensor], &[], &|comm, stream, at| {
            // SAFETY: `count` elements, accessed for writing; kept as above.
            unsafe { result::broadcast(source(at[0]), target(at[0]), count, of, root, comm, stream) }
        })
    }

    fn reduce(
        &self,
        call: CallSignature,
        tensor: &Tensor,
        op: ReduceOp,
        root: usize,
    ) -> Result<Pending, CommError> {
        let traffic = MovedBytes::reduce(bytes(tensor), root == self.rank(), self.world_size());
        let (count, of) = (tensor.elem_count(), data_type(tensor.dtype()));
        let (op, root) = (operator(op), root as c_int);
        self.begin(call, traffic, &[tensor], &[], &|comm, stream, at| {
            // SAFETY: `count` elements, accessed for writing; kept as above.
            unsafe { result::reduce(source(at[0]), target(at[0]), count, of, op, root, comm, stream) }
        })
    }

    /// Unlike for other operations, `wait` makes the host wait for the GPU.
    fn barrier(&self, call: CallSignature) -> Result<Pending, CommError> {
        let token = Tensor::zeros(1, DType::U32, &self.0.own.device)?;
        let (traffic, of) =
            (MovedBytes::ring(CollectiveOp::Barrier, 0, self.world_size()), data_type(DType::U32));
        let sum = operator(ReduceOp::Sum);
        self.0.flush(CollectiveOp::Barrier)?;
        let given = self.0.enqueue(traffic, [call], &[&token], &[], &|comm, stream, at| {
            // SAFETY: one element, which `Enqueued` keeps until the end.
            unsafe { result::all_reduce(source(at[0]), target(at[0]), 1, of, sum, comm, stream) }
        })?;
        let (polling, done, waiting) = (self.0.clone(), given.done.clone(), self.0.clone());
        let complete = move || {
            loop {
                waiting.own.check()?;
                match given.done.try_is_complete() {
                    Ok(true) => break,
                    Ok(false) => std::thread::sleep(POLL_INTERVAL),
                    Err(error) => return Err(CommError::Tensor(error.to_string())),
                }
            }
            waiting.complete(given)
        };
        Ok(self.0.pending(move || polling.is_over(&done), complete))
    }

    fn message(&self, op: CollectiveOp, tensor: &Tensor, peer: usize) -> Result<Pending, CommError> {
        let bytes = bytes(tensor) as u64;
        let (sent, received) = if op == CollectiveOp::Send { (bytes, 0) } else { (0, bytes) };
        self.0.post(MovedBytes { op, sent, received }, tensor, peer)
    }
}

impl ProcessGroup for NcclGroup {
    fn name(&self) -> &str {
        &self.0.label.name
    }

    fn rank(&self) -> usize {
        self.0.rank
    }

    fn global_ranks(&self) -> &[usize] {
        &self.0.label.members
    }

    fn value_device(&self) -> Device {
        self.0.own.device.clone()
    }

    fn check(&self) -> Result<(), CommError> {
        self.0.own.check()
    }

    fn flush_messages(&self) -> Result<(), CommError> {
        self.0.flush(CollectiveOp::Send)
    }

    fn start(&self, call: CollectiveArgs<'_>) -> Result<Pending, CommError> {
        // Evaluated lazily: a strided all-to-all is checked by `pack_exchange_unpack`.
        let signature = || self.check_args(&call);
        match call {
            CollectiveArgs::AllReduce { tensor, op } => self.all_reduce(signature()?, tensor, op),
            CollectiveArgs::ReduceScatter { input, output, op } => {
                self.reduce_scatter(signature()?, input, output, op)
            }
            CollectiveArgs::AllGather { input, output } => self.all_gather(signature()?, input, output),
            CollectiveArgs::AllToAll { input, output, send_counts, recv_counts } => {
                let (sent, received) = ((input, send_counts), (output, recv_counts));
                self.all_to_all(call.op(), signature()?, sent, received)
            }
            CollectiveArgs::AllToAllStrided { inputs, outputs, plan } => {
                pack_exchange_unpack(self, inputs, outputs, plan)
            }
            CollectiveArgs::Broadcast { tensor, root } => self.broadcast(signature()?, tensor, root),
            CollectiveArgs::Reduce { tensor, op, root } => self.reduce(signature()?, tensor, op, root),
            CollectiveArgs::Gather { .. } | CollectiveArgs::Scatter { .. } => {
                let signature = signature()?;
                let exchange = call.as_all_to_all(self.rank(), self.world_size())?;
                let Some(exchange) = exchange else { return Ok(Pending::ready()) };
                let RootedExchange { input, output, send_counts, recv_counts } = exchange;
                self.all_to_all(call.op(), signature, (&input, &send_counts), (&output, &recv_counts))
            }
            CollectiveArgs::Barrier => self.barrier(signature()?),
            CollectiveArgs::Send { tensor, dst: peer } | CollectiveArgs::Recv { tensor, src: peer } => {
                signature()?;
                self.message(call.op(), tensor, peer)
            }
        }
    }

    fn split(
        &self,
        name: &str,
        color: Option<usize>,
        key: usize,
    ) -> Result<Option<Arc<dyn ProcessGroup>>, CommError> {
        let op = CollectiveOp::Split;
        let color_code = color.map_or(-1, |color| color as i64);
        let all = self.all_gather_values(&[color_code, key as i64])?;
        let child = self.0.communicator.split(color, key, self.0.own.deadline()).map_err(|reason| {
            let (group, rank, sequence) =
                (self.0.label.name.clone(), self.0.own.rank, self.0.state.lock().collectives);
            self.0.own.fail(CommError::Library { library: "NCCL", group, op, sequence, rank, reason })
        })?;
        let Some(child) = child else { return Ok(None) };
        self.0.own.adopt(&child)?;
        let asked = all.chunks(2).enumerate();
        let mut members: Vec<(i64, usize)> =
            asked.filter(|(_, asked)| asked[0] == color_code).map(|(rank, asked)| (asked[1], rank)).collect();
        members.sort_unstable();
        let rank = members.iter().position(|&(_, rank)| rank == self.rank()).unwrap_or(0);
        let global_ranks = members.iter().map(|&(_, rank)| self.global_ranks()[rank]).collect();
        let guard = self.0.guard.clone();
        Ok(Some(Arc::new(NcclGroup::new(guard, child, name.to_owned(), rank, global_ranks))))
    }

    fn stats(&self) -> GroupStats {
        self.0.state.lock().stats.clone()
    }

    fn abort(&self, reason: &str) {
        let rank = self.0.own.rank;
        self.0.own.fail(CommError::PeerFailed { rank, reason: reason.to_owned() });
    }
}
