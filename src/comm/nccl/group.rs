//! [`ProcessGroup`] on an NCCL communicator.

use super::communicator::Communicator;
use super::operation::{Enqueue, Enqueued, Inner, ShutdownGuard, data_type, operator, source, target};
use super::traffic::offsets;
use crate::comm::arg_check::ArgCheck;
use crate::comm::buffer::copy_if_shared;
use crate::comm::diagnostics::OpLabel;
use crate::comm::membership::SplitPlace;
use crate::comm::reduce::{is_unrounded_sum, reduce};
use crate::comm::{
    Call, CallSignature, CollectiveOp, CommError, ElementCounts, GroupStats, Membership, Pending,
    ProcessGroup, ProcessGroupExt, ReduceOp, pack_exchange_unpack,
};
use candle_core::{DType, Device, Tensor};
use cudarc::nccl::result;
use parking_lot::Mutex;
use std::ffi::c_int;
use std::slice::from_ref;
use std::sync::Arc;
use std::time::Duration;
use ulysses_kernels::tensor::zeros;

/// Interval between polls of a host that waits for the GPU.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// One rank's handle of a group.
#[derive(Debug)]
pub(super) struct NcclGroup(Arc<Inner>);

impl NcclGroup {
    pub(super) fn new(
        guard: Arc<ShutdownGuard>,
        communicator: Arc<Communicator>,
        membership: Membership,
    ) -> Self {
        let own = guard.0.clone();
        Self(Arc::new(Inner { own, guard, communicator, membership, state: Mutex::default() }))
    }

    /// Runs the checks that need no peer, and checks that the tensors are on the rank's GPU.
    fn check_args(&self, call: &Call<'_>) -> Result<(), CommError> {
        call.check(self)?;
        let own = self.0.own.device.location();
        let mut locations = call.tensors().map(|tensor| tensor.device().location());
        let Some(got) = locations.find(|location| *location != own) else { return Ok(()) };
        let reason = format!("tensors must be on the rank's GPU {own:?}, got {got:?}");
        Err(ArgCheck::new(self, call.op()).invalid(reason))
    }

    /// Enqueues a collective on checked tensors; `outputs` has at least one.
    fn enqueue(
        &self,
        call: CallSignature,
        outputs: &[&Tensor],
        inputs: &[&Tensor],
        enqueue: Enqueue<'_>,
    ) -> Result<Enqueued, CommError> {
        let op = call.op();
        self.0.flush(op)?;
        self.0.count(&call, outputs[0].dtype());
        self.0.enqueue(op, [call], outputs, inputs, enqueue)
    }

    /// Starts a collective on checked tensors.
    fn begin(
        &self,
        call: CallSignature,
        outputs: &[&Tensor],
        inputs: &[&Tensor],
        enqueue: Enqueue<'_>,
    ) -> Result<Pending, CommError> {
        let given = self.enqueue(call, outputs, inputs, enqueue)?;
        let (polling, done, completing) = (self.0.clone(), given.done.clone(), self.0.clone());
        Ok(self.0.pending(move || polling.is_over(&done), move || completing.complete(given)))
    }

    fn all_reduce(&self, call: CallSignature, tensor: &Tensor, op: ReduceOp) -> Result<Pending, CommError> {
        let (count, of, op) = (tensor.elem_count(), data_type(tensor.dtype()), operator(op));
        self.begin(call, &[tensor], &[], &|comm, stream, at| {
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
        let (count, of, op) = (output.elem_count(), data_type(output.dtype()), operator(op));
        let input = &copy_if_shared(input, from_ref(output))?;
        self.begin(call, &[output], &[input], &|comm, stream, at| {
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
        let (chunk, ranks) = (output.elem_count(), self.world_size());
        let pending = self.exchange(call, input, &received)?;
        let output = output.clone();
        Ok(pending.then(move || {
            let chunks: Vec<Tensor> =
                (0..ranks).map(|rank| received.narrow(0, rank * chunk, chunk)).collect::<Result<_, _>>()?;
            Ok(reduce(ReduceOp::Sum, &chunks.iter().collect::<Vec<_>>(), 0, &output)?)
        }))
    }

    fn all_gather(&self, call: CallSignature, input: &Tensor, output: &Tensor) -> Result<Pending, CommError> {
        let (count, of) = (input.elem_count(), data_type(input.dtype()));
        let input = &copy_if_shared(input, from_ref(output))?;
        self.begin(call, &[output], &[input], &|comm, stream, at| {
            // SAFETY: `count` elements of the input, and `count` per rank of the output; kept as above.
            unsafe { result::all_gather(source(at[1]), target(at[0]), count, of, comm, stream) }
        })
    }

    /// Sends and receives the counts of a call, in rank order, as one group, which NCCL fuses into one kernel.
    fn exchange(&self, call: CallSignature, input: &Tensor, output: &Tensor) -> Result<Pending, CommError> {
        let ElementCounts { send, recv } = call.counts(self.rank(), self.world_size());
        let (send_offsets, recv_offsets) = (offsets(&send), offsets(&recv));
        let of = data_type(input.dtype());
        let input = &copy_if_shared(input, from_ref(output))?;
        self.begin(call, &[output], &[input], &|comm, stream, at| {
            let exchange = |peer: usize| {
                let (to, from) = (at[0].offset(recv_offsets[peer]), at[1].offset(send_offsets[peer]));
                let (received, sent, peer) = (recv[peer], send[peer], peer as c_int);
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
            let given = (0..send.len()).try_for_each(exchange);
            let ended = result::group_end();
            given.and(ended)
        })
    }

    fn broadcast(&self, call: CallSignature, tensor: &Tensor, root: usize) -> Result<Pending, CommError> {
        let (count, of, root) = (tensor.elem_count(), data_type(tensor.dtype()), root as c_int);
        self.begin(call, &[tensor], &[], &|comm, stream, at| {
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
        let (count, of) = (tensor.elem_count(), data_type(tensor.dtype()));
        let (op, root) = (operator(op), root as c_int);
        self.begin(call, &[tensor], &[], &|comm, stream, at| {
            // SAFETY: `count` elements, accessed for writing; kept as above.
            unsafe { result::reduce(source(at[0]), target(at[0]), count, of, op, root, comm, stream) }
        })
    }

    /// Unlike for other operations, `wait` makes the host wait for the GPU.
    fn barrier(&self, call: CallSignature) -> Result<Pending, CommError> {
        let token = Tensor::zeros(1, DType::U32, &self.0.own.device)?;
        let (of, sum) = (data_type(DType::U32), operator(ReduceOp::Sum));
        let given = self.enqueue(call, &[&token], &[], &|comm, stream, at| {
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
}

impl ProcessGroup for NcclGroup {
    fn membership(&self) -> &Membership {
        &self.0.membership
    }

    fn value_device(&self) -> Device {
        self.0.own.device.clone()
    }

    fn check(&self) -> Result<(), CommError> {
        self.0.own.check()
    }

    fn has_one_stream(&self) -> bool {
        true
    }

    fn flush_messages(&self) -> Result<(), CommError> {
        self.0.flush(CollectiveOp::Send)
    }

    fn start(&self, call: Call<'_>) -> Result<Pending, CommError> {
        if let CallSignature::AllToAllStrided { plan, .. } = &call.signature {
            // It checks the call.
            return pack_exchange_unpack(self, call.inputs, call.outputs, plan);
        }
        self.check_args(&call)?;
        let (inputs, outputs) = (call.inputs, call.outputs);
        match call.signature {
            CallSignature::AllReduce { op, .. } => self.all_reduce(call.signature, &outputs[0], op),
            CallSignature::ReduceScatter { op, .. } => {
                self.reduce_scatter(call.signature, &inputs[0], &outputs[0], op)
            }
            CallSignature::AllGather { .. } => self.all_gather(call.signature, &inputs[0], &outputs[0]),
            CallSignature::AllToAll { .. }
            | CallSignature::AllToAllStrided { .. }
            | CallSignature::Gather { .. }
            | CallSignature::Scatter { .. } => {
                let [input, output] = call.input_and_output()?;
                self.exchange(call.signature, &input, &output)
            }
            CallSignature::Broadcast { root, .. } => self.broadcast(call.signature, &outputs[0], root),
            CallSignature::Reduce { op, root, .. } => self.reduce(call.signature, &outputs[0], op, root),
            CallSignature::Barrier | CallSignature::Split { .. } => self.barrier(call.signature),
            CallSignature::Send { .. } => self.0.post(call.signature, &inputs[0]),
            CallSignature::Recv { .. } => self.0.post(call.signature, &outputs[0]),
        }
    }

    fn split(
        &self,
        name: &str,
        color: Option<usize>,
        key: usize,
    ) -> Result<Option<Arc<dyn ProcessGroup>>, CommError> {
        let color_code = color.map_or(-1, |color| color as i64);
        let all = self.all_gather_values(&[color_code, key as i64])?;
        let child = self.0.communicator.split(color, key, self.0.own.deadline()).map_err(|reason| {
            let (group, sequence) = (self.membership().group.clone(), self.0.state.lock().collectives);
            let label = OpLabel { group, op: CollectiveOp::Split, sequence };
            self.0.own.fail(label.failed_in("NCCL", self.0.own.rank, reason))
        })?;
        let (Some(child), Some(color)) = (child, color) else { return Ok(None) };
        self.0.own.adopt(&child)?;
        let place =
            |asked: &[i64]| SplitPlace { color: usize::try_from(asked[0]).ok(), key: asked[1] as usize };
        let membership = self.membership().after_split(name, color, all.chunks(2).map(place))?;
        Ok(Some(Arc::new(NcclGroup::new(self.0.guard.clone(), child, membership))))
    }

    fn stats(&self) -> GroupStats {
        self.0.state.lock().stats.clone()
    }

    fn abort(&self, reason: &str) {
        self.0.own.abort(reason.to_owned());
    }
}
