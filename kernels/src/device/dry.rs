//! Dry runs: all of a rank's host code, on tensors without elements.
//!
//! Within [`run`], a thread's tensors have shapes and types, but no elements. Ops check their arguments,
//! report the work that they would do, and return. The thread's [memory counters](crate::memory) count each
//! tensor from its creation until its last view is dropped, plus the working memory that CPU kernels report.
//! So the real engine reports what it needs for a model of any shape, like PyTorch's `FakeTensor` with a
//! memory tracker.
//!
//! A dry thread runs either the CPU path of the ops, or the host code of the CUDA kernels, whose launches and
//! matmuls do nothing. Both use candle's CPU device, so no build needs a feature for it.
//!
//! The counters are those of the counting allocator, but programs need not install it: a tensor is counted by
//! a guard in the operation that candle considers it the result of, which every view keeps alive. (A reserved
//! but untouched range of addresses would require the program's global allocator to create and free it.)

use super::DeviceKind;
use crate::memory::{self, Category};
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Result, Shape, Storage, Tensor, Var, bail};
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

/// An event of a dry run: work that a real run would have done.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Event {
    /// Matmuls.
    Compute {
        /// The op.
        op: MatmulOp,
        /// Whether they belong to its backward pass.
        is_backward: bool,
        /// Floating-point operations; a multiply-add counts as two.
        flops: f64,
    },
    /// Element-wise operations.
    Elementwise {
        /// Bytes read plus bytes written.
        bytes: u64,
    },
    /// A tensor is offloaded, or loaded back.
    Copy {
        /// Size of the tensor.
        bytes: u64,
    },
    /// The next exchange around attention belongs to its forward or backward pass.
    Exchange {
        /// Whether it is the backward pass.
        is_backward: bool,
    },
    /// Storage for offloaded tensors is allocated (positive) or freed (negative).
    Offloaded {
        /// Change in bytes.
        bytes: i64,
    },
}

/// The ops with matmuls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MatmulOp {
    /// [`linear`](crate::linear).
    Linear,
    /// [`attention`](crate::attention).
    Attention,
    /// [`lm_head_loss`](crate::lm_head_loss). Its backward pass recomputes the logits, which is not reported.
    LmHead,
}

/// The device that a dry thread simulates.
#[derive(Debug, Clone, Copy)]
pub struct DryDevice {
    /// Kind of device.
    pub kind: DeviceKind,
    /// CPU threads, each with its own working memory.
    pub threads: usize,
}

struct State {
    device: DryDevice,
    sink: Box<dyn FnMut(Event)>,
    /// The tensor that candle considers this thread's tensors to be derived from.
    seed: Tensor,
    /// The tensors by the addresses of their empty storages.
    live: HashMap<usize, Live>,
    /// Persistent working memory, by purpose.
    persistent: HashMap<&'static str, usize>,
}

/// A storage in use: its memory, and a value that the caller attached.
struct Live {
    allocation: Weak<Allocation>,
    attached: Option<Box<dyn Any>>,
}

thread_local! {
    /// Constant initialization and no destructor: the allocator reads it at any time in a thread's life.
    static KIND: Cell<Option<DeviceKind>> = const { Cell::new(None) };
    static STATE: RefCell<Option<State>> = const { RefCell::new(None) };
    /// Number of equal pieces of work that the current one represents.
    static TIMES: Cell<u64> = const { Cell::new(1) };
}

/// Runs `work` with this thread dry and its [memory counters](crate::memory) at zero. Calls `sink` with each
/// event; `sink` must not call back into this module. Afterwards the counters are restored. Tensors of a dry
/// run must not leave `work`.
///
/// # Panics
/// If the thread is already dry.
pub fn run<R>(device: DryDevice, sink: impl FnMut(Event) + 'static, work: impl FnOnce() -> R) -> Result<R> {
    struct Restore;
    impl Drop for Restore {
        fn drop(&mut self) {
            // Still dry, so that memory that was allocated dry is freed dry.
            STATE.take();
            TIMES.set(1);
            KIND.set(None);
        }
    }
    assert!(KIND.get().is_none(), "a dry run within a dry run");
    let _counters = memory::FreshCounters::start();
    KIND.set(Some(device.kind));
    let _restore = Restore;
    let seed = Var::zeros(1, DType::F32, &Device::Cpu)?.as_tensor().clone();
    STATE.set(Some(State {
        device,
        sink: Box::new(sink),
        seed,
        live: HashMap::new(),
        persistent: HashMap::new(),
    }));
    Ok(work())
}

/// Returns whether this thread is dry.
pub fn is_dry() -> bool {
    KIND.get().is_some()
}

pub(super) fn kind() -> Option<DeviceKind> {
    KIND.get()
}

fn with_state<R>(work: impl FnOnce(&mut State) -> R) -> Option<R> {
    STATE.with_borrow_mut(|state| state.as_mut().map(work))
}

fn report(event: Event) {
    with_state(|state| (state.sink)(event));
}

/// Reports [`Event::Exchange`] in a dry run.
pub fn report_exchange(is_backward: bool) {
    report(Event::Exchange { is_backward });
}

pub(crate) fn report_flops(op: MatmulOp, is_backward: bool, flops: f64) {
    if is_dry() && flops > 0.0 {
        report(Event::Compute { op, is_backward, flops: flops * TIMES.get() as f64 });
    }
}

/// Reports an element-wise operation that reads or writes each of these tensors once.
pub fn report_elementwise<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) {
    if is_dry() {
        report_elementwise_bytes(tensors.into_iter().map(crate::tensor::bytes).sum::<usize>() as u64);
    }
}

pub(crate) fn report_elementwise_bytes(bytes: u64) {
    report(Event::Elementwise { bytes: bytes.saturating_mul(TIMES.get()) });
}

/// Iterates over `0..tokens` in tiles of `tile` tokens of equal work. In a dry run the second tile stands for
/// all up to the last, so that the cost does not grow with their number.
#[derive(Debug)]
pub struct Tiles {
    tokens: usize,
    tile: usize,
    next: usize,
}

impl Tiles {
    /// Tiles of at least one token.
    pub fn new(tokens: usize, tile: usize) -> Self {
        Self { tokens, tile: tile.max(1), next: 0 }
    }
}

impl Iterator for Tiles {
    type Item = Range<usize>;

    fn next(&mut self) -> Option<Range<usize>> {
        let start = self.next;
        let end = start.saturating_add(self.tile).min(self.tokens);
        self.next = end;
        if is_dry() {
            let left = (self.tokens - start).div_ceil(self.tile);
            let times = if start == self.tile && left > 2 { left - 1 } else { 1 };
            TIMES.set(times as u64);
            self.next = start.saturating_add(times * self.tile).min(self.tokens);
        }
        (start < end).then_some(start..end)
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        TIMES.set(1);
    }
}

pub(crate) fn report_copy(bytes: u64) {
    if bytes > 0 {
        report(Event::Copy { bytes });
    }
}

pub(crate) fn report_offloaded(bytes: i64) {
    if is_dry() {
        report(Event::Offloaded { bytes });
    }
}

/// Memory that is counted until it is dropped.
#[derive(Debug)]
pub struct Allocation {
    category: Category,
    bytes: usize,
}

impl Allocation {
    fn new(bytes: usize) -> Self {
        let category = memory::current();
        memory::count(category, bytes as i64);
        Self { category, bytes }
    }

    /// Counts host memory of a rank that a dry run does not allocate. `None` if the rank's memory is a GPU's,
    /// or outside of a dry run.
    #[must_use]
    pub fn on_host(bytes: usize) -> Option<Self> {
        (KIND.get() == Some(DeviceKind::Cpu)).then(|| Self::new(bytes))
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if is_dry() {
            memory::count(self.category, -(self.bytes as i64));
        }
    }
}

/// The operation that a dry tensor is the result of.
struct Root {
    /// Shared by tensors that take over each other's memory.
    _allocation: Arc<Allocation>,
    shape: Shape,
    dtype: DType,
    /// Address of the storage.
    address: Arc<AtomicUsize>,
}

impl CustomOp1 for Root {
    fn name(&self) -> &'static str {
        "dry"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        let storage = match self.dtype {
            DType::U8 => CpuStorage::U8(Vec::new()),
            DType::U32 => CpuStorage::U32(Vec::new()),
            DType::I64 => CpuStorage::I64(Vec::new()),
            DType::BF16 => CpuStorage::BF16(Vec::new()),
            DType::F16 => CpuStorage::F16(Vec::new()),
            DType::F32 => CpuStorage::F32(Vec::new()),
            DType::F64 => CpuStorage::F64(Vec::new()),
            dtype => bail!("no tensors of {dtype:?} in a dry run"),
        };
        Ok((storage, self.shape.clone()))
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        let address = self.address.load(Ordering::Relaxed);
        with_state(|state| state.live.remove(&address));
    }
}

fn tensor_of(allocation: Arc<Allocation>, shape: Shape, dtype: DType) -> Result<Tensor> {
    let Some(seed) = with_state(|state| state.seed.clone()) else { bail!("not a dry thread") };
    let (address, known) = (Arc::new(AtomicUsize::new(0)), Arc::downgrade(&allocation));
    let tensor = seed.apply_op1(Root { _allocation: allocation, shape, dtype, address: address.clone() })?;
    let at = address_of(&tensor);
    address.store(at, Ordering::Relaxed);
    with_state(|state| state.live.insert(at, Live { allocation: known, attached: None }));
    Ok(tensor)
}

fn address_of(tensor: &Tensor) -> usize {
    std::ptr::from_ref::<Storage>(&tensor.storage_and_layout().0).addr()
}

fn allocation_of(tensor: &Tensor) -> Option<Arc<Allocation>> {
    let address = address_of(tensor);
    with_state(|state| state.live.get(&address)?.allocation.upgrade()).flatten()
}

/// Keeps a value with the storage of a dry tensor, in place of one that was attached before. Views share it. Does nothing
/// for other tensors.
pub fn attach<T: 'static>(tensor: &Tensor, value: T) {
    let address = address_of(tensor);
    with_state(|state| state.live.get_mut(&address).map(|live| live.attached.replace(Box::new(value))));
}

/// Returns the value of this type that is [attached](attach) to the storage of a tensor.
pub fn attached<T: Clone + 'static>(tensor: &Tensor) -> Option<T> {
    let address = address_of(tensor);
    with_state(|state| state.live.get(&address)?.attached.as_ref()?.downcast_ref::<T>().cloned()).flatten()
}

/// A tensor that is counted and has no elements.
pub(crate) fn tensor(shape: Shape, dtype: DType) -> Result<Tensor> {
    tensor_of(Arc::new(Allocation::new(shape.elem_count() * dtype.size_in_bytes())), shape, dtype)
}

/// Returns whether a tensor belongs to a dry run. Some values that ranks exchange are real.
pub(crate) fn is_tensor(tensor: &Tensor) -> bool {
    is_dry() && allocation_of(tensor).is_some()
}

/// A flat tensor over the memory of one that covers all of it. Unlike a view, it does not keep that one
/// alive.
pub(crate) fn take_over(tensor: &Tensor) -> Option<Tensor> {
    let allocation = allocation_of(tensor)?;
    let covers = tensor.is_contiguous() && crate::tensor::bytes(tensor) == allocation.bytes;
    let flat = covers.then(|| tensor_of(allocation, tensor.elem_count().into(), tensor.dtype()));
    flat?.ok()
}

/// Returns whether two tensors share their memory.
pub(crate) fn share_memory(a: &Tensor, b: &Tensor) -> bool {
    matches!((allocation_of(a), allocation_of(b)), (Some(a), Some(b)) if Arc::ptr_eq(&a, &b))
}

/// The CPU of a dry thread, to which kernels report their working memory.
#[derive(Debug, Clone, Copy)]
pub struct DryCpu {
    pub(crate) threads: usize,
}

impl DryCpu {
    pub(super) fn of_thread() -> Self {
        Self { threads: with_state(|state| state.device.threads).unwrap_or(1) }
    }

    /// Counts memory that an op allocates while it runs.
    pub(crate) fn alloc_temporary(self, bytes: usize) {
        drop(Allocation::new(bytes));
    }

    /// Counts working memory that threads keep between calls, and reallocate if it is too small.
    pub(crate) fn alloc_persistent(self, what: &'static str, bytes: usize) {
        let more = with_state(|state| {
            let persistent = state.persistent.entry(what).or_default();
            let more = bytes.saturating_sub(*persistent);
            *persistent += more;
            more
        });
        memory::count(Category::Other, more.unwrap_or(0) as i64);
    }
}
