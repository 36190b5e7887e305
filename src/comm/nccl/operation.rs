//! How an operation is given to NCCL, and what is kept until it has ended.

use super::communicator::{CallResult, Communicator};
use super::rank::{NcclRank, UnderWay};
use super::traffic::MovedBytes;
use super::watch::Watched;
use crate::comm::call_signature::{CallSignature, Elements};
use crate::comm::diagnostics::GroupLabel;
use crate::comm::{CollectiveOp, CommError, GroupStats, Pending, ReduceOp};
use candle_core::{DType, Tensor};
use cudarc::driver::CudaEvent;
use cudarc::nccl::{result, sys};
use parking_lot::Mutex;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, OnceLock};
use std::time::Instant;
use ulysses_kernels::device::{Address, DeviceError, Launcher, Target};

/// A group, as its operations need it.
#[derive(Debug)]
pub(super) struct Inner {
    pub(super) own: Arc<NcclRank>,
    pub(super) guard: Arc<ShutdownGuard>,
    pub(super) communicator: Arc<Communicator>,
    pub(super) label: Arc<GroupLabel>,
    pub(super) rank: usize,
    pub(super) state: Mutex<State>,
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// The next numbers of collectives and of messages: not all ranks send.
    pub(super) collectives: u64,
    sent: u64,
    pub(super) stats: GroupStats,
    /// Messages that were issued and not yet given to NCCL. It carries one out at a time, unless they are given to
    /// it together: two ranks that first send and then receive would wait for each other for ever.
    messages: Vec<Message>,
}

#[derive(Debug)]
struct Message {
    tensor: Tensor,
    peer: usize,
    traffic: MovedBytes,
    /// When it is done, once NCCL has it.
    done: Arc<OnceLock<Arc<CudaEvent>>>,
}

impl Message {
    fn signature(&self) -> CallSignature {
        let (elements, peer) = (Elements::of(&self.tensor), self.peer);
        match self.traffic.op {
            CollectiveOp::Send => CallSignature::Send { elements, dst: peer },
            _ => CallSignature::Recv { elements, src: peer },
        }
    }
}

/// What an operation gives to NCCL: the communicator, the stream, and what was opened, outputs before inputs.
pub(super) type Enqueue<'a> = &'a dyn Fn(sys::ncclComm_t, sys::cudaStream_t, &[Address]) -> CallResult;

/// An operation that NCCL has.
#[derive(Debug)]
pub(super) struct Enqueued {
    pub(super) done: Arc<CudaEvent>,
    held: TensorGuard,
}

/// The tensors of an operation. Unless it ends as it should they go to the world: nobody knows when the GPUs, a
/// peer's among them, are done with an operation that was given up.
#[derive(Debug)]
struct TensorGuard {
    own: Arc<NcclRank>,
    tensors: Vec<Tensor>,
}

impl TensorGuard {
    fn new<'a>(own: &Arc<NcclRank>, tensors: impl Iterator<Item = &'a Tensor>) -> Self {
        Self { own: own.clone(), tensors: tensors.cloned().collect() }
    }

    /// The tensors may go: nothing uses them any more that they would not wait for.
    fn release(mut self) {
        self.tensors.clear();
    }
}

impl Drop for TensorGuard {
    fn drop(&mut self) {
        self.own.retain(std::mem::take(&mut self.tensors));
    }
}

/// What all groups of a rank hold and nothing else does: when the last of them goes, on the rank's own thread, it says
/// goodbye, unless that thread panics. The world itself may go on the thread that watches, which ends with the process.
#[derive(Debug)]
pub(super) struct ShutdownGuard(pub(super) Arc<NcclRank>);

impl Drop for ShutdownGuard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.skip_shutdown_notice();
        } else {
            self.0.end();
        }
    }
}

impl Inner {
    pub(super) fn check(&self, op: CollectiveOp) -> Result<(), CommError> {
        self.own.check()?;
        if self.own.is_own_thread() {
            return Ok(());
        }
        let reason = "NCCL's operations are issued by the thread that the group was made on".to_owned();
        Err(CommError::InvalidArgument { group: self.label.name.clone(), op, reason })
    }

    pub(super) fn pending(
        self: &Arc<Self>,
        complete: impl FnOnce() -> Result<(), CommError> + Send + 'static,
    ) -> Pending {
        let failing = self.clone();
        Pending::new(complete, move |error| {
            let rank = failing.own.rank;
            failing.own.fail(CommError::PeerFailed { rank, reason: error.to_string() });
        })
    }

    /// Lets what is started on the tensors' stream from now on wait for an operation.
    pub(super) fn complete(&self, given: Enqueued) -> Result<(), CommError> {
        self.join(&given.done)?;
        given.held.release();
        Ok(())
    }

    fn join(&self, done: &CudaEvent) -> Result<(), CommError> {
        self.own.check()?;
        self.own.compute.wait(done).map_err(|error| CommError::Tensor(error.to_string()))
    }

    /// Gives an operation to NCCL: a collective, or messages together.
    pub(super) fn enqueue(
        &self,
        traffic: MovedBytes,
        calls: impl IntoIterator<Item = CallSignature>,
        outputs: &[&Tensor],
        inputs: &[&Tensor],
        enqueue: Enqueue<'_>,
    ) -> Result<Enqueued, CommError> {
        self.check(traffic.op)?;
        let sequence = {
            let mut state = self.state.lock();
            traffic.count(&mut state.stats, self.label.members.len());
            let next = match traffic.op {
                op if op.is_message() => &mut state.sent,
                _ => &mut state.collectives,
            };
            *next += 1;
            *next - 1
        };
        let stream = &self.own.communication;
        let failed = |reason: String| {
            let (group, rank) = (self.label.name.clone(), self.own.rank);
            self.own.fail(CommError::Library {
                library: "NCCL",
                group,
                op: traffic.op,
                sequence,
                rank,
                reason,
            })
        };
        // Inputs are complete, and outputs no longer in use, when the tensors' stream has come here.
        stream.join(&self.own.compute).map_err(|error| failed(error.to_string()))?;
        let held = TensorGuard::new(&self.own, outputs.iter().chain(inputs).copied());
        let mut taken = Ok(());
        let opened = self.launcher()?.open_slices(outputs, inputs, |addresses| {
            let call = |comm| enqueue(comm, stream.cu_stream().cast(), addresses);
            taken = self.communicator.call(self.own.deadline(), call);
            Ok(())
        });
        if let Err(refused) = opened {
            held.release();
            return Err(refused.into());
        }
        taken.map_err(failed)?;
        let done = stream.record_event(None).map_err(|error| failed(error.to_string()))?;
        let done = Arc::new(done);
        let probe = UnderWay { done: done.clone(), communicator: Arc::downgrade(&self.communicator) };
        let (group, op, rank) = (self.label.name.clone(), traffic.op, self.own.rank);
        let watched = Watched { group, op, sequence, rank, started: Instant::now(), probe };
        self.own.watch(watched, &self.label, calls);
        Ok(Enqueued { done, held })
    }

    fn launcher(&self) -> Result<Launcher, DeviceError> {
        match Target::of(&self.own.device)? {
            Target::Kernels(launcher) => Ok(launcher),
            Target::Cpu | Target::Dry(_) => Err(DeviceError::MixedDevices),
        }
    }

    /// Issues a message, which is given to NCCL when somebody waits or a collective is started.
    pub(super) fn post(
        self: &Arc<Self>,
        traffic: MovedBytes,
        tensor: &Tensor,
        peer: usize,
    ) -> Result<Pending, CommError> {
        self.check(traffic.op)?;
        let done: Arc<OnceLock<_>> = Arc::default();
        let message = Message { tensor: tensor.clone(), peer, traffic, done: done.clone() };
        self.state.lock().messages.push(message);
        let (completing, held) = (self.clone(), TensorGuard::new(&self.own, std::iter::once(tensor)));
        Ok(self.pending(move || {
            completing.flush(traffic.op)?;
            if let Some(done) = done.get() {
                completing.join(done)?;
            }
            held.release();
            Ok(())
        }))
    }

    /// Gives all messages that wait to NCCL, together.
    pub(super) fn flush(&self, op: CollectiveOp) -> Result<(), CommError> {
        self.check(op)?;
        let messages = std::mem::take(&mut self.state.lock().messages);
        let Some(first) = messages.first() else { return Ok(()) };
        {
            let mut state = self.state.lock();
            messages
                .iter()
                .for_each(|message| message.traffic.count(&mut state.stats, self.label.members.len()));
        }
        let launcher = self.launcher()?;
        let nothing = MovedBytes { sent: 0, received: 0, ..first.traffic };
        let together = |comm, stream, _: &[Address]| {
            result::group_start()?;
            let given = messages.iter().try_for_each(|message| give(&launcher, message, comm, stream));
            let ended = result::group_end();
            given.and(ended)
        };
        let calls = messages.iter().map(Message::signature);
        let given = self.enqueue(nothing, calls, &[], &[], &together)?;
        messages.iter().for_each(|message| {
            // A message is flushed once, so the cell is empty.
            let _ = message.done.set(given.done.clone());
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
    if count == 0 {
        return Ok(());
    }
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

pub(super) fn source(address: Address) -> *const c_void {
    std::ptr::without_provenance(address.as_u64() as usize)
}

pub(super) fn target(address: Address) -> *mut c_void {
    std::ptr::without_provenance_mut(address.as_u64() as usize)
}

pub(super) fn data_type(dtype: DType) -> sys::ncclDataType_t {
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

pub(super) fn operator(op: ReduceOp) -> sys::ncclRedOp_t {
    match op {
        ReduceOp::Sum => sys::ncclRedOp_t::ncclSum,
        ReduceOp::Max => sys::ncclRedOp_t::ncclMax,
        ReduceOp::Min => sys::ncclRedOp_t::ncclMin,
    }
}
