//! [`ProcessGroup`] on a communicator.

use super::communicator::Communicator;
use super::operation::{Enqueue, Farewell, Inner, data_type, operator, source, target};
use super::traffic::{MovedBytes, offsets};
use crate::comm::arguments::Arguments;
use crate::comm::buffer::apart;
use crate::comm::call::Call;
use crate::comm::history::Label;
use crate::comm::{CollectiveOp, CommError, GroupStats, Pending, ProcessGroup, ProcessGroupExt, ReduceOp};
use candle_core::{DType, Device, Tensor};
use cudarc::nccl::result;
use parking_lot::Mutex;
use std::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;
use ulysses_kernels::tensor::bytes;

/// Between two looks of a host that waits for the GPU.
const PAUSE: Duration = Duration::from_micros(50);

/// One rank's handle of a group.
#[derive(Debug)]
pub(super) struct NcclGroup(Arc<Inner>);

impl NcclGroup {
    pub(super) fn new(
        farewell: Arc<Farewell>,
        communicator: Arc<Communicator>,
        name: String,
        rank: usize,
        global_ranks: Vec<usize>,
    ) -> Self {
        let label = Arc::new(Label { name, members: global_ranks });
        let world = farewell.0.clone();
        Self(Arc::new(Inner { world, farewell, communicator, label, rank, state: Mutex::default() }))
    }

    /// Starts a collective on checked tensors.
    fn start(
        &self,
        call: &Call,
        traffic: MovedBytes,
        outputs: &[&Tensor],
        inputs: &[&Tensor],
        enqueue: Enqueue<'_>,
    ) -> Result<Pending, CommError> {
        let inner = &self.0;
        inner.flush(traffic.op)?;
        let given = inner.enqueue(traffic, call.to_string(), outputs, inputs, enqueue)?;
        let completing = inner.clone();
        Ok(inner.pending(move || completing.complete(given)))
    }

    fn checked(&self, op: CollectiveOp, tensors: &[&Tensor]) -> Result<DType, CommError> {
        let arguments = self.arguments(op);
        let dtype = arguments.tensors(tensors)?;
        let (own, got) = (self.0.world.device.location(), tensors[0].device().location());
        if got != own {
            return Err(arguments.invalid(format!("needs tensors on {own:?}, the rank's GPU, got {got:?}")));
        }
        Ok(dtype)
    }

    fn arguments(&self, op: CollectiveOp) -> Arguments<'_> {
        Arguments { group: &self.0.label.name, world_size: self.0.label.members.len(), op }
    }

    fn message(&self, op: CollectiveOp, tensor: &Tensor, peer: usize) -> Result<Pending, CommError> {
        self.checked(op, &[tensor])?;
        self.arguments(op).rank(if op == CollectiveOp::Send { "destination" } else { "source" }, peer)?;
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
        self.0.world.device.clone()
    }

    fn check(&self) -> Result<(), CommError> {
        self.0.world.check()
    }

    fn start_all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<Pending, CommError> {
        let dtype = self.checked(CollectiveOp::AllReduce, &[tensor])?;
        let traffic = MovedBytes::ring(CollectiveOp::AllReduce, bytes(tensor), self.world_size());
        let call = Call::AllReduce { op, dtype, count: tensor.elem_count() };
        let (count, of, op) = (tensor.elem_count(), data_type(dtype), operator(op));
        self.start(&call, traffic, &[tensor], &[], &|comm, stream, at| {
            // SAFETY: `count` elements, opened for writing; `Given` keeps the tensor until the end.
            unsafe { result::all_reduce(source(at[0]), target(at[0]), count, of, op, comm, stream) }
        })
    }

    fn start_reduce_scatter(
        &self,
        input: &Tensor,
        output: &Tensor,
        op: ReduceOp,
    ) -> Result<Pending, CommError> {
        let dtype = self.checked(CollectiveOp::ReduceScatter, &[input, output])?;
        self.arguments(CollectiveOp::ReduceScatter).chunks(("input", input), ("output", output))?;
        let traffic = MovedBytes::ring(CollectiveOp::ReduceScatter, bytes(input), self.world_size());
        let call = Call::ReduceScatter { op, dtype, chunk: output.elem_count() };
        let (count, of, op) = (output.elem_count(), data_type(dtype), operator(op));
        let input = &apart(input, &[output])?;
        self.start(&call, traffic, &[output], &[input], &|comm, stream, at| {
            // SAFETY: `count` elements of the output, as many for each rank of the input; kept as above.
            unsafe { result::reduce_scatter(source(at[1]), target(at[0]), count, of, op, comm, stream) }
        })
    }

    fn start_all_gather(&self, input: &Tensor, output: &Tensor) -> Result<Pending, CommError> {
        let dtype = self.checked(CollectiveOp::AllGather, &[input, output])?;
        self.arguments(CollectiveOp::AllGather).chunks(("output", output), ("input", input))?;
        let traffic = MovedBytes::ring(CollectiveOp::AllGather, bytes(output), self.world_size());
        let call = Call::AllGather { dtype, count: input.elem_count() };
        let (count, of) = (input.elem_count(), data_type(dtype));
        let input = &apart(input, &[output])?;
        self.start(&call, traffic, &[output], &[input], &|comm, stream, at| {
            // SAFETY: `count` elements of the input, as many for each rank of the output; kept as above.
            unsafe { result::all_gather(source(at[1]), target(at[0]), count, of, comm, stream) }
        })
    }

    /// As grouped sends and receives, of which NCCL makes one kernel.
    fn start_all_to_all(
        &self,
        input: &Tensor,
        output: &Tensor,
        send_counts: &[usize],
        recv_counts: &[usize],
    ) -> Result<Pending, CommError> {
        let dtype = self.checked(CollectiveOp::AllToAll, &[input, output])?;
        let arguments = self.arguments(CollectiveOp::AllToAll);
        arguments.counts("send", send_counts, input)?;
        arguments.counts("recv", recv_counts, output)?;
        let traffic = MovedBytes::all_to_all(send_counts, recv_counts, self.rank(), dtype.size_in_bytes());
        let call = Call::AllToAll { dtype, send: send_counts.to_vec(), recv: recv_counts.to_vec() };
        let (send_offsets, recv_offsets, of) = (offsets(send_counts), offsets(recv_counts), data_type(dtype));
        let input = &apart(input, &[output])?;
        self.start(&call, traffic, &[output], &[input], &|comm, stream, at| {
            let exchange = |peer: usize| {
                let (to, from) = (at[0].offset(recv_offsets[peer]), at[1].offset(send_offsets[peer]));
                let (received, sent, peer) = (recv_counts[peer], send_counts[peer], peer as c_int);
                // Nothing is no message: both sides leave it out.
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

    fn start_broadcast(&self, tensor: &Tensor, root: usize) -> Result<Pending, CommError> {
        let dtype = self.checked(CollectiveOp::Broadcast, &[tensor])?;
        self.arguments(CollectiveOp::Broadcast).rank("root", root)?;
        let traffic = MovedBytes::broadcast(bytes(tensor), root == self.rank(), self.world_size());
        let call = Call::Broadcast { dtype, count: tensor.elem_count(), root };
        let (count, of, root) = (tensor.elem_count(), data_type(dtype), root as c_int);
        self.start(&call, traffic, &[tensor], &[], &|comm, stream, at| {
            // SAFETY: `count` elements, opened for writing; kept as above.
            unsafe { result::broadcast(source(at[0]), target(at[0]), count, of, root, comm, stream) }
        })
    }

    fn start_send(&self, tensor: &Tensor, dst: usize) -> Result<Pending, CommError> {
        self.message(CollectiveOp::Send, tensor, dst)
    }

    fn start_recv(&self, tensor: &Tensor, src: usize) -> Result<Pending, CommError> {
        self.message(CollectiveOp::Recv, tensor, src)
    }

    /// Unlike the other operations' its `wait` makes the host wait for the GPU.
    fn start_barrier(&self) -> Result<Pending, CommError> {
        let token = Tensor::zeros(1, DType::U32, &self.0.world.device)?;
        let (traffic, of) =
            (MovedBytes::ring(CollectiveOp::Barrier, 0, self.world_size()), data_type(DType::U32));
        let sum = operator(ReduceOp::Sum);
        self.0.flush(CollectiveOp::Barrier)?;
        let given =
            self.0.enqueue(traffic, Call::Barrier.to_string(), &[&token], &[], &|comm, stream, at| {
                // SAFETY: one element, which `Given` keeps until the end.
                unsafe { result::all_reduce(source(at[0]), target(at[0]), 1, of, sum, comm, stream) }
            })?;
        let waiting = self.0.clone();
        Ok(self.0.pending(move || {
            loop {
                waiting.world.check()?;
                match given.done.try_is_complete() {
                    Ok(true) => break,
                    Ok(false) => std::thread::sleep(PAUSE),
                    Err(error) => return Err(CommError::Tensor(error.to_string())),
                }
            }
            waiting.complete(given)
        }))
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
        let child = self.0.communicator.split(color, key, self.0.world.deadline()).map_err(|reason| {
            let (group, rank, sequence) =
                (self.0.label.name.clone(), self.0.world.rank, self.0.state.lock().collectives);
            self.0.world.fail(CommError::Library { library: "NCCL", group, op, sequence, rank, reason })
        })?;
        let Some(child) = child else { return Ok(None) };
        self.0.world.adopt(&child)?;
        let asked = all.chunks(2).enumerate();
        let mut members: Vec<(i64, usize)> =
            asked.filter(|(_, asked)| asked[0] == color_code).map(|(rank, asked)| (asked[1], rank)).collect();
        members.sort_unstable();
        let rank = members.iter().position(|&(_, rank)| rank == self.rank()).unwrap_or(0);
        let global_ranks = members.iter().map(|&(_, rank)| self.global_ranks()[rank]).collect();
        let farewell = self.0.farewell.clone();
        Ok(Some(Arc::new(NcclGroup::new(farewell, child, name.to_owned(), rank, global_ranks))))
    }

    fn stats(&self) -> GroupStats {
        self.0.state.lock().stats.clone()
    }

    fn abort(&self, reason: &str) {
        let rank = self.0.world.rank;
        self.0.world.fail(CommError::PeerFailed { rank, reason: reason.to_owned() });
    }
}
