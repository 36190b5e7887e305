//! Enqueueing an operation to NCCL, and keeping its tensors until it ends.

use super::communicator::{CallResult, Communicator};
use super::rank::{InProgress, NcclRank, Position};
use super::traffic::count;
use super::watch::Watched;
use crate::comm::diagnostics::OpLabel;
use crate::comm::{CallSignature, CollectiveOp, CommError, GroupStats, Membership, Pending, ReduceOp};
use candle_core::{DType, Tensor};
use cudarc::driver::CudaEvent;
use cudarc::nccl::{result, sys};
use parking_lot::Mutex;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use ulysses_kernels::device::{Address, DeviceError, Launcher, Target};

/// The state of a group that its operations use.
#[derive(Debug)]
pub(super) struct Inner {
    pub(super) own: Arc<NcclRank>,
    pub(super) guard: Arc<ShutdownGuard>,
    pub(super) communicator: Arc<Communicator>,
    pub(super) membership: Membership,
    pub(super) state: Mutex<State>,
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// The next sequence numbers of collectives and of messages, counted separately since not all ranks send.
    pub(super) collectives: u64,
    sent: u64,
    pub(super) stats: GroupStats,
    /// Messages issued but not yet enqueued. NCCL runs one at a time, unless they are enqueued in
    /// one group: otherwise two ranks that first send and then receive would deadlock.
    messages: Vec<Message>,
}

#[derive(Debug)]
struct Message {
    call: CallSignature,
    tensor: Tensor,
    /// The completion event, once enqueued.
    done: Arc<OnceLock<Arc<CudaEvent>>>,
}

/// Enqueues an operation, given the communicator, the stream, and the addresses of outputs, then inputs.
pub(super) type Enqueue<'a> = &'a dyn Fn(sys::ncclComm_t, sys::cudaStream_t, &[Address]) -> CallResult;

/// An operation enqueued to NCCL.
#[derive(Debug)]
pub(super) struct Enqueued {
    pub(super) done: Arc<CudaEvent>,
    guard: TensorGuard,
}

/// The tensors of an operation. Unless the operation completes, the rank keeps them: it is unknown when the GPUs,
/// including a peer's, stop using the tensors of an aborted operation.
#[derive(Debug)]
struct TensorGuard {
    own: Arc<NcclRank>,
    tensors: Vec<Tensor>,
}

impl TensorGuard {
    fn new<'a>(own: &Arc<NcclRank>, tensors: impl Iterator<Item = &'a Tensor>) -> Self {
        Self { own: own.clone(), tensors: tensors.cloned().collect() }
    }

    /// Drops the tensors: later users of their memory wait for the operation.
    fn release(mut self) {
        self.tensors.clear();
    }
}

impl Drop for TensorGuard {
    fn drop(&mut self) {
        self.own.retain(std::mem::take(&mut self.tensors));
    }
}

/// A guard held by all groups of a rank. When the last one is dropped, on the rank's own thread, it announces the
/// rank's shutdown, unless that thread panics. (The rank itself may be dropped on the watching thread.)
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

impl Drop for Inner {
    /// Waits for operations in progress. After a failure they may never end, so they are aborted, on all communicators.
    fn drop(&mut self) {
        let has_failed = || std::thread::panicking() || self.own.check().is_err();
        if !has_failed() {
            self.communicator.finalize(|| !has_failed());
        }
        if has_failed() {
            self.own.abort_communicators();
        }
    }
}

impl Inner {
    pub(super) fn check(&self, op: CollectiveOp) -> Result<(), CommError> {
        self.own.check()?;
        if self.own.is_own_thread() {
            return Ok(());
        }
        let reason = "NCCL operations must be issued by the thread that created the group".to_owned();
        Err(CommError::InvalidArgument { group: self.membership.group.name.clone(), op, reason })
    }

    pub(super) fn pending(
        self: &Arc<Self>,
        poll: impl Fn() -> bool + Send + 'static,
        complete: impl FnOnce() -> Result<(), CommError> + Send + 'static,
    ) -> Pending {
        let failing = self.clone();
        Pending::new(poll, complete, move |error| failing.own.abort(error.to_string()))
    }

    /// Returns whether the GPU has completed an operation, or the rank has failed.
    pub(super) fn is_over(&self, done: &CudaEvent) -> bool {
        // An error of the driver shows in the wait.
        self.own.check().is_err() || done.try_is_complete().unwrap_or(true)
    }

    /// Makes later work on the tensors' stream wait for an operation.
    pub(super) fn complete(&self, given: Enqueued) -> Result<(), CommError> {
        self.join(&given.done)?;
        given.guard.release();
        Ok(())
    }

    fn join(&self, done: &CudaEvent) -> Result<(), CommError> {
        self.own.check()?;
        self.own.compute.wait(done).map_err(|error| CommError::Tensor(error.to_string()))
    }

    /// Enqueues an operation to NCCL: a collective, or a group of messages.
    pub(super) fn enqueue(
        &self,
        op: CollectiveOp,
        calls: impl IntoIterator<Item = CallSignature>,
        outputs: &[&Tensor],
        inputs: &[&Tensor],
        enqueue: Enqueue<'_>,
    ) -> Result<Enqueued, CommError> {
        self.check(op)?;
        let sequence = {
            let mut state = self.state.lock();
            let next = if op.is_message() { &mut state.sent } else { &mut state.collectives };
            *next += 1;
            *next - 1
        };
        let (launcher, stream) = (self.launcher()?, &self.own.communication);
        let (group, rank) = (self.membership.group.clone(), self.own.rank);
        let label = OpLabel { group, op, sequence };
        let failed = |reason: String| self.own.fail(label.failed_in("NCCL", rank, reason));
        // At this point of the tensors' stream, inputs are complete, and outputs no longer in use.
        stream.join(&self.own.compute).map_err(|error| failed(error.to_string()))?;
        let reached = stream.record_event(None).map_err(|error| failed(error.to_string()))?;
        let guard = TensorGuard::new(&self.own, outputs.iter().chain(inputs).copied());
        let watch = |position: Position| {
            let probe = InProgress { position, communicator: Arc::downgrade(&self.communicator) };
            self.own.watch(Watched { label: label.clone(), rank, started: None, probe });
        };
        self.own.record(&label, calls);
        let has_ended = Arc::new(AtomicBool::new(false));
        watch(Position::Accepting(has_ended.clone()));
        let mut taken = Ok(());
        let opened = launcher.open_slices(outputs, inputs, |addresses| {
            let call = |comm| enqueue(comm, stream.cu_stream().cast(), addresses);
            taken = self.communicator.call(self.own.watched_deadline(), call);
            Ok(())
        });
        if let Err(refused) = opened {
            has_ended.store(true, Ordering::Relaxed);
            guard.release();
            return Err(refused.into());
        }
        taken.map_err(failed)?;
        let done = Arc::new(stream.record_event(None).map_err(|error| failed(error.to_string()))?);
        watch(Position::Enqueued { reached, done: done.clone() });
        has_ended.store(true, Ordering::Relaxed);
        Ok(Enqueued { done, guard })
    }

    fn launcher(&self) -> Result<Launcher, DeviceError> {
        match Target::of(&self.own.device)? {
            Target::Kernels(launcher) => Ok(launcher),
            Target::Cpu | Target::Dry(_) => Err(DeviceError::MixedDevices),
        }
    }

    /// Counts a call that moves elements of `dtype`.
    pub(super) fn count(&self, call: &CallSignature, dtype: DType) {
        let Membership { group, rank } = &self.membership;
        count(&mut self.state.lock().stats, call, dtype, *rank, group.members.len());
    }

    /// Issues a message, which is enqueued on the next wait or collective.
    pub(super) fn post(self: &Arc<Self>, call: CallSignature, tensor: &Tensor) -> Result<Pending, CommError> {
        let op = call.op();
        self.check(op)?;
        let done: Arc<OnceLock<_>> = Arc::default();
        let message = Message { call, tensor: tensor.clone(), done: done.clone() };
        self.state.lock().messages.push(message);
        let (completing, guard) = (self.clone(), TensorGuard::new(&self.own, std::iter::once(tensor)));
        let (polling, polled) = (self.clone(), done.clone());
        let poll =
            move || polling.flush(op).is_err() || polled.get().is_none_or(|done| polling.is_over(done));
        let complete = move || {
            completing.flush(op)?;
            if let Some(done) = done.get() {
                completing.join(done)?;
            }
            guard.release();
            Ok(())
        };
        Ok(self.pending(poll, complete))
    }

    /// Enqueues all waiting messages as one group.
    pub(super) fn flush(&self, op: CollectiveOp) -> Result<(), CommError> {
        self.check(op)?;
        let messages = std::mem::take(&mut self.state.lock().messages);
        let Some(first) = messages.first() else { return Ok(()) };
        messages.iter().for_each(|message| self.count(&message.call, message.tensor.dtype()));
        let launcher = self.launcher()?;
        let together = |comm, stream, _: &[Address]| {
            result::group_start()?;
            let given = messages.iter().try_for_each(|message| give(&launcher, message, comm, stream));
            let ended = result::group_end();
            given.and(ended)
        };
        let calls = messages.iter().map(|message| message.call.clone());
        let given = self.enqueue(first.call.op(), calls, &[], &[], &together)?;
        messages.iter().for_each(|message| {
            // A message is flushed once, so the cell is empty.
            let _ = message.done.set(given.done.clone());
        });
        Ok(())
    }
}

/// Enqueues one message of a group.
fn give(
    launcher: &Launcher,
    Message { call, tensor, .. }: &Message,
    comm: sys::ncclComm_t,
    stream: sys::cudaStream_t,
) -> Result<(), result::NcclError> {
    let (count, of) = (tensor.elem_count(), data_type(tensor.dtype()));
    if count == 0 {
        return Ok(());
    }
    let mut given = Ok(());
    let opened = match *call {
        CallSignature::Send { dst, .. } => launcher.open_slices(&[], &[tensor], |at| {
            // SAFETY: `count` elements that the message keeps alive until the stream has passed the call.
            given = unsafe { result::send(source(at[0]), count, of, dst as c_int, comm, stream) }.map(drop);
            Ok(())
        }),
        CallSignature::Recv { src, .. } => launcher.open_slices(&[tensor], &[], |at| {
            // SAFETY: as above, for writing.
            given = unsafe { result::recv(target(at[0]), count, of, src as c_int, comm, stream) }.map(drop);
            Ok(())
        }),
        // Only messages are posted.
        _ => return Ok(()),
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
        // Other dtypes were rejected by the argument checks.
        _ => sys::ncclDataType_t::ncclFloat32,
    }
}

pub(super) fn operator(op: ReduceOp) -> sys::ncclRedOp_t {
    match op {
        ReduceOp::Sum => sys::ncclRedOp_t::ncclSum,
        ReduceOp::Max => sys::ncclRedOp_t::ncclMax,
        ReduceOp::Min => sys::ncclRedOp_t::ncclMin,
        ReduceOp::Average => sys::ncclRedOp_t::ncclAvg,
        ReduceOp::Product => sys::ncclRedOp_t::ncclProd,
    }
}
