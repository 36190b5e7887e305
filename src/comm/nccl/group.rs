//! [`ProcessGroup`] on a communicator.

use super::communicator::{CallResult, Communicator};
use super::traffic::{Traffic, offsets};
use super::watch::Watched;
use super::world::{UnderWay, World};
use crate::comm::arguments::Arguments;
use crate::comm::buffer::apart;
use crate::comm::{CollectiveOp, CommError, GroupStats, Pending, ProcessGroup, ProcessGroupExt, ReduceOp};
use crate::device::{Address, DeviceError, Launcher, Target};
use crate::tensor::bytes;
use candle_core::{DType, Device, Tensor};
use cudarc::driver::CudaEvent;
use cudarc::nccl::{result, sys};
use parking_lot::Mutex;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Between two looks of a host that waits for the GPU.
const PAUSE: Duration = Duration::from_micros(50);

/// One rank's handle of a group.
#[derive(Debug)]
pub(super) struct NcclGroup(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    world: Arc<World>,
    communicator: Arc<Communicator>,
    name: String,
    rank: usize,
    global_ranks: Vec<usize>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The next operation's number.
    sequence: u64,
    stats: GroupStats,
    /// Messages that were issued and not yet given to NCCL. It carries one out at a time, unless they are given to
    /// it together: two ranks that first send and then receive would wait for each other for ever.
    messages: Vec<Message>,
}

#[derive(Debug)]
struct Message {
    tensor: Tensor,
    peer: usize,
    traffic: Traffic,
    /// When it is done, once NCCL has it.
    done: Arc<OnceLock<Arc<CudaEvent>>>,
}

/// What an operation gives to NCCL: the communicator, the stream, and what was opened, outputs before inputs.
type Enqueue<'a> = &'a dyn Fn(sys::ncclComm_t, sys::cudaStream_t, &[Address]) -> CallResult;

impl NcclGroup {
    pub(super) fn new(
        world: Arc<World>,
        communicator: Arc<Communicator>,
        name: String,
        rank: usize,
        global_ranks: Vec<usize>,
    ) -> Self {
        Self(Arc::new(Inner { world, communicator, name, rank, global_ranks, state: Mutex::default() }))
    }

    /// Starts a collective on checked tensors.
    fn start(
        &self,
        traffic: Traffic,
        outputs: &[&Tensor],
        inputs: &[&Tensor],
        enqueue: Enqueue<'_>,
    ) -> Result<Pending, CommError> {
        let inner = &self.0;
        inner.flush(traffic.op)?;
        let done = inner.enqueue(traffic, outputs, inputs, enqueue)?;
        let held: Vec<Tensor> = outputs.iter().chain(inputs).map(|&tensor| tensor.clone()).collect();
        let completing = inner.clone();
        Ok(inner.pending(move || {
            completing.join(&done)?;
            drop(held);
            Ok(())
        }))
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
        Arguments { group: &self.0.name, world_size: self.0.global_ranks.len(), op }
    }

    fn message(&self, op: CollectiveOp, tensor: &Tensor, peer: usize) -> Result<Pending, CommError> {
        self.checked(op, &[tensor])?;
        self.arguments(op).rank(if op == CollectiveOp::Send { "destination" } else { "source" }, peer)?;
        let inner = &self.0;
        inner.check(op)?;
        let bytes = bytes(tensor) as u64;
        let (sent, received) = if op == CollectiveOp::Send { (bytes, 0) } else { (0, bytes) };
        let done: Arc<OnceLock<_>> = Arc::default();
        let message = Message {
            tensor: tensor.clone(),
            peer,
            traffic: Traffic { op, sent, received },
            done: done.clone(),
        };
        inner.state.lock().messages.push(message);
        let (completing, held) = (inner.clone(), tensor.clone());
        Ok(inner.pending(move || {
            completing.flush(op)?;
            if let Some(done) = done.get() {
                completing.join(done)?;
            }
            drop(held);
            Ok(())
        }))
    }
}

impl Inner {
    fn check(&self, op: CollectiveOp) -> Result<(), CommError> {
        self.world.check()?;
        if self.world.is_own_thread() {
            return Ok(());
        }
        let reason = "NCCL's operations are issued by the thread that the group was made on".to_owned();
        Err(CommError::InvalidArgument { group: self.name.clone(), op, reason })
    }

    fn pending(
        self: &Arc<Self>,
        complete: impl FnOnce() -> Result<(), CommError> + Send + 'static,
    ) -> Pending {
        let failing = self.clone();
        Pending::new(complete, move |error| {
            let rank = failing.world.rank;
            failing.world.fail(CommError::PeerFailed { rank, reason: error.to_string() });
        })
    }

    /// Lets what is started on the tensors' stream from now on wait for an operation.
    fn join(&self, done: &CudaEvent) -> Result<(), CommError> {
        self.world.check()?;
        self.world.compute.wait(done).map_err(|error| CommError::Tensor(error.to_string()))
    }

    /// Gives an operation to NCCL; returns the event of its end.
    fn enqueue(
        &self,
        traffic: Traffic,
        outputs: &[&Tensor],
        inputs: &[&Tensor],
        enqueue: Enqueue<'_>,
    ) -> Result<Arc<CudaEvent>, CommError> {
        self.check(traffic.op)?;
        let sequence = {
            let mut state = self.state.lock();
            traffic.count(&mut state.stats, self.global_ranks.len());
            state.sequence += 1;
            state.sequence - 1
        };
        let stream = &self.world.communication;
        let failed = |reason: String| {
            let (group, rank) = (self.name.clone(), self.world.rank);
            self.world.fail(CommError::Library {
                library: "NCCL",
                group,
                op: traffic.op,
                sequence,
                rank,
                reason,
            })
        };
        // Inputs are complete, and outputs no longer in use, when the tensors' stream has come here.
        stream.join(&self.world.compute).map_err(|error| failed(error.to_string()))?;
        let mut taken = Ok(());
        self.launcher()?.open_slices(outputs, inputs, |addresses| {
            let call = |comm| enqueue(comm, stream.cu_stream().cast(), addresses);
            taken = self.communicator.call(self.world.deadline(), call);
            Ok(())
        })?;
        taken.map_err(failed)?;
        let done = stream.record_event(None).map_err(|error| failed(error.to_string()))?;
        let done = Arc::new(done);
        let probe = UnderWay { done: done.clone(), communicator: Arc::downgrade(&self.communicator) };
        let (group, op, rank, started) = (self.name.clone(), traffic.op, self.world.rank, Instant::now());
        self.world.watch(Watched { group, op, sequence, rank, started, probe });
        Ok(done)
    }

    fn launcher(&self) -> Result<Launcher, DeviceError> {
        match Target::of(&self.world.device)? {
            Target::Kernels(launcher) => Ok(launcher),
            Target::Cpu => Err(DeviceError::MixedDevices),
        }
    }

    /// Gives all messages that wait to NCCL, together.
    fn flush(&self, op: CollectiveOp) -> Result<(), CommError> {
        self.check(op)?;
        let messages = std::mem::take(&mut self.state.lock().messages);
        let Some(first) = messages.first() else { return Ok(()) };
        {
            let mut state = self.state.lock();
            messages
                .iter()
                .for_each(|message| message.traffic.count(&mut state.stats, self.global_ranks.len()));
        }
        let launcher = self.launcher()?;
        let nothing = Traffic { sent: 0, received: 0, ..first.traffic };
        let together = |comm, stream, _: &[Address]| {
            result::group_start()?;
            let given = messages.iter().try_for_each(|message| give(&launcher, message, comm, stream));
            let ended = result::group_end();
            given.and(ended)
        };
        let done = self.enqueue(nothing, &[], &[], &together)?;
        messages.iter().for_each(|message| {
            // A message is flushed once, so the cell is empty.
            let _ = message.done.set(done.clone());
        });
        Ok(())
    }
}

/// Gives one message of a group of calls to NCCL.
fn give(
    launcher: &Launcher,
    message: &Message,
    comm: sys::ncclComm_t,
    stream: sys::cudaStream_t,
) -> Result<(), result::NcclError> {
    let Message { tensor, peer, traffic, .. } = message;
    let (count, of, peer) = (tensor.elem_count(), data_type(tensor.dtype()), *peer as c_int);
    let mut given = Ok(());
    let opened = if traffic.op == CollectiveOp::Send {
        launcher.open_slices(&[], &[tensor], |at| {
            // SAFETY: `count` elements that the message keeps alive until the stream has passed the call.
            given = unsafe { result::send(source(at[0]), count, of, peer, comm, stream) }.map(drop);
            Ok(())
        })
    } else {
        launcher.open_slices(&[tensor], &[], |at| {
            // SAFETY: as above, for writing.
            given = unsafe { result::recv(target(at[0]), count, of, peer, comm, stream) }.map(drop);
            Ok(())
        })
    };
    opened.map_err(|_| result::NcclError(sys::ncclResult_t::ncclInvalidArgument))?;
    given
}

fn source(address: Address) -> *const c_void {
    std::ptr::without_provenance(address.as_u64() as usize)
}

fn target(address: Address) -> *mut c_void {
    std::ptr::without_provenance_mut(address.as_u64() as usize)
}

fn data_type(dtype: DType) -> sys::ncclDataType_t {
    match dtype {
        DType::F64 => sys::ncclDataType_t::ncclFloat64,
        DType::BF16 => sys::ncclDataType_t::ncclBfloat16,
        DType::F16 => sys::ncclDataType_t::ncclFloat16,
        DType::I64 => sys::ncclDataType_t::ncclInt64,
        DType::U32 => sys::ncclDataType_t::ncclUint32,
        DType::U8 => sys::ncclDataType_t::ncclUint8,
        // The arguments were checked: nothing else is left.
        _ => sys::ncclDataType_t::ncclFloat32,
    }
}

fn operator(op: ReduceOp) -> sys::ncclRedOp_t {
    match op {
        ReduceOp::Sum => sys::ncclRedOp_t::ncclSum,
        ReduceOp::Max => sys::ncclRedOp_t::ncclMax,
        ReduceOp::Min => sys::ncclRedOp_t::ncclMin,
    }
}

impl ProcessGroup for NcclGroup {
    fn name(&self) -> &str {
        &self.0.name
    }

    fn rank(&self) -> usize {
        self.0.rank
    }

    fn global_ranks(&self) -> &[usize] {
        &self.0.global_ranks
    }

    fn value_device(&self) -> Device {
        self.0.world.device.clone()
    }

    fn check(&self) -> Result<(), CommError> {
        self.0.world.check()
    }

    fn start_all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<Pending, CommError> {
        let dtype = self.checked(CollectiveOp::AllReduce, &[tensor])?;
        let traffic = Traffic::ring(CollectiveOp::AllReduce, bytes(tensor), self.world_size());
        let (count, of, op) = (tensor.elem_count(), data_type(dtype), operator(op));
        self.start(traffic, &[tensor], &[], &|comm, stream, at| {
            // SAFETY: `count` elements, opened for writing; `start` keeps the tensor until the end.
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
        let traffic = Traffic::ring(CollectiveOp::ReduceScatter, bytes(input), self.world_size());
        let (count, of, op) = (output.elem_count(), data_type(dtype), operator(op));
        let input = &apart(input, &[output])?;
        self.start(traffic, &[output], &[input], &|comm, stream, at| {
            // SAFETY: `count` elements of the output, as many for each rank of the input; kept as above.
            unsafe { result::reduce_scatter(source(at[1]), target(at[0]), count, of, op, comm, stream) }
        })
    }

    fn start_all_gather(&self, input: &Tensor, output: &Tensor) -> Result<Pending, CommError> {
        let dtype = self.checked(CollectiveOp::AllGather, &[input, output])?;
        self.arguments(CollectiveOp::AllGather).chunks(("output", output), ("input", input))?;
        let traffic = Traffic::ring(CollectiveOp::AllGather, bytes(output), self.world_size());
        let (count, of) = (input.elem_count(), data_type(dtype));
        let input = &apart(input, &[output])?;
        self.start(traffic, &[output], &[input], &|comm, stream, at| {
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
        let traffic = Traffic::all_to_all(send_counts, recv_counts, self.rank(), dtype.size_in_bytes());
        let (send_offsets, recv_offsets, of) = (offsets(send_counts), offsets(recv_counts), data_type(dtype));
        let input = &apart(input, &[output])?;
        self.start(traffic, &[output], &[input], &|comm, stream, at| {
            let exchange = |peer: usize| {
                let (to, from) = (at[0].offset(recv_offsets[peer]), at[1].offset(send_offsets[peer]));
                let (received, sent, peer) = (recv_counts[peer], send_counts[peer], peer as c_int);
                // SAFETY: the counts add up to the tensors' elements; kept as above.
                unsafe {
                    result::send(source(from), sent, of, peer, comm, stream)?;
                    result::recv(target(to), received, of, peer, comm, stream)
                }
                .map(drop)
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
        let traffic = Traffic::broadcast(bytes(tensor), root == self.rank(), self.world_size());
        let (count, of, root) = (tensor.elem_count(), data_type(dtype), root as c_int);
        self.start(traffic, &[tensor], &[], &|comm, stream, at| {
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
            (Traffic::ring(CollectiveOp::Barrier, 0, self.world_size()), data_type(DType::U32));
        let sum = operator(ReduceOp::Sum);
        self.0.flush(CollectiveOp::Barrier)?;
        let done = self.0.enqueue(traffic, &[&token], &[], &|comm, stream, at| {
            // SAFETY: one element, which the completion keeps until the end.
            unsafe { result::all_reduce(source(at[0]), target(at[0]), 1, of, sum, comm, stream) }
        })?;
        let waiting = self.0.clone();
        Ok(self.0.pending(move || {
            loop {
                waiting.world.check()?;
                match done.try_is_complete() {
                    Ok(true) => break,
                    Ok(false) => std::thread::sleep(PAUSE),
                    Err(error) => return Err(CommError::Tensor(error.to_string())),
                }
            }
            drop(token);
            waiting.join(&done)
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
                (self.0.name.clone(), self.0.world.rank, self.0.state.lock().sequence);
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
        let world = self.0.world.clone();
        Ok(Some(Arc::new(NcclGroup::new(world, child, name.to_owned(), rank, global_ranks))))
    }

    fn stats(&self) -> GroupStats {
        self.0.state.lock().stats.clone()
    }

    fn abort(&self, reason: &str) {
        let rank = self.0.world.rank;
        self.0.world.fail(CommError::PeerFailed { rank, reason: reason.to_owned() });
    }
}
