//! What the allocator holds, counted per thread, and how often it was asked for much.
//!
//! A rank of the thread backend is one OS thread, so a rank's memory is its thread's; what the
//! further threads of its pool allocate is counted as theirs. Blocks from 16 KiB on are counted by what they are for, too:
//! whoever allocates says so ([`with_category`]). The count
//! costs some additions per allocation and exists only in programs that install it:
//!
//! ```
//! use ulysses_kernels::memory::CountingAllocator;
//!
//! #[global_allocator]
//! static ALLOCATOR: CountingAllocator<std::alloc::System> = CountingAllocator(std::alloc::System);
//!
//! let meter = ulysses_kernels::memory::AllocationMeter::start();
//! let buffer = vec![0_u8; 1000];
//! assert_eq!(meter.bytes(), 1000);
//! drop(buffer);
//! assert_eq!(meter.bytes(), 0);
//!
//! use ulysses_kernels::memory::{Category, with_category, live_by_category};
//! let gradients = with_category(Category::Gradients, || vec![0_f32; 10_000]);
//! assert_eq!(live_by_category().gradients, 40_000);
//! # drop(gradients);
//! ```

mod blocks;
mod category;
mod peaks;

pub use category::{ByCategory, Category, current, with_category, with_default_category};
pub use peaks::{Peak, Peaks};

use crate::device::dry;
use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// From so many bytes on an allocation is large.
pub const LARGE_BYTES: usize = 2 << 20;

/// Large allocations of all threads.
static LARGE_ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

use blocks::SMALLEST;

thread_local! {
    /// Bytes that this thread allocated minus bytes that it freed. Constant initialisation
    /// and no destructor: the allocator may use it at any time in a thread's life.
    static LIVE_BYTES: Cell<i64> = const { Cell::new(0) };
    /// The same of what was really allocated and freed within a dry run.
    static DRY_BYTES: Cell<i64> = const { Cell::new(0) };
    /// The most of them at any time since [`reset_peak`].
    static PEAK_BYTES: Cell<i64> = const { Cell::new(0) };
    /// Both of them by category.
    static LIVE: Counts = const { [const { Cell::new(0) }; Category::ALL.len()] };
    static PEAK: Counts = const { [const { Cell::new(0) }; Category::ALL.len()] };
}

type Counts = [Cell<i64>; Category::ALL.len()];

fn values(counts: &Counts) -> ByCategory {
    ByCategory::from_counts(counts.each_ref().map(Cell::get))
}

/// Bytes that this thread has allocated and not freed. Zero or meaningless unless the
/// program's global allocator is a [`CountingAllocator`].
pub fn live_bytes() -> i64 {
    LIVE_BYTES.get()
}

/// The most bytes that this thread held at a time since its start or [`reset_peak`].
/// Meaningless where [`live_bytes`] is.
pub fn peak_bytes() -> i64 {
    PEAK_BYTES.get()
}

/// [`live_bytes`] by what they are for.
pub fn live_by_category() -> ByCategory {
    LIVE.with(values)
}

/// What the [`peak_bytes`] were for: the categories as they were then.
pub fn peak_by_category() -> ByCategory {
    PEAK.with(values)
}

/// Forgets what this thread held at a time before now.
pub fn reset_peak() {
    PEAK_BYTES.set(LIVE_BYTES.get());
    keep_peak();
}

fn keep_peak() {
    LIVE.with(|live| PEAK.with(|peak| peak.iter().zip(live).for_each(|(peak, live)| peak.set(live.get()))));
}

/// How often any thread of the program has allocated at least [`LARGE_BYTES`] at once. Zero unless the program's global
/// allocator is a [`CountingAllocator`].
pub fn large_allocations() -> u64 {
    LARGE_ALLOCATIONS.load(Ordering::Relaxed)
}

/// Measures what a piece of code keeps.
#[derive(Debug)]
pub struct AllocationMeter {
    start: i64,
}

impl AllocationMeter {
    /// Starts at what is held now.
    pub fn start() -> Self {
        Self { start: live_bytes() }
    }

    /// Bytes that this thread holds more than at the start; zero when it holds less.
    pub fn bytes(&self) -> u64 {
        u64::try_from(live_bytes() - self.start).unwrap_or(0)
    }
}

/// Measures the most that a piece of code holds at any time. A thread has one at a time: starting another ends it.
#[derive(Debug)]
pub struct PeakMeter {
    start: i64,
}

impl PeakMeter {
    /// Starts at what is held now.
    pub fn start() -> Self {
        reset_peak();
        Self { start: live_bytes() }
    }

    /// The most bytes that this thread held at any time since the start, above what it held then.
    pub fn bytes(&self) -> u64 {
        u64::try_from(peak_bytes() - self.start).unwrap_or(0)
    }
}

/// An allocator that counts what every thread holds, around another one.
#[derive(Debug, Default)]
pub struct CountingAllocator<A>(pub A);

pub(crate) fn count(category: Category, bytes: i64) {
    let live = LIVE_BYTES.get() + bytes;
    LIVE_BYTES.set(live);
    LIVE.with(|of| of[category as usize].set(of[category as usize].get() + bytes));
    if live > PEAK_BYTES.get() {
        PEAK_BYTES.set(live);
        keep_peak();
    }
}

/// Counters of this thread that begin at zero, until it is dropped: then they are what they were, and what a dry run
/// has really allocated and kept besides.
pub(crate) struct Fresh {
    bytes: [i64; 2],
    by_category: [[i64; Category::ALL.len()]; 2],
}

impl Fresh {
    pub(crate) fn start() -> Self {
        let replaced = |counts: &Counts| counts.each_ref().map(|count| count.replace(0));
        let by_category = [LIVE.with(replaced), PEAK.with(replaced)];
        Self { bytes: [LIVE_BYTES.replace(0), PEAK_BYTES.replace(0)], by_category }
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        [&LIVE_BYTES, &PEAK_BYTES]
            .into_iter()
            .zip(self.bytes)
            .for_each(|(counter, bytes)| counter.set(bytes));
        for (counters, values) in [&LIVE, &PEAK].into_iter().zip(self.by_category) {
            counters.with(|counts| counts.iter().zip(values).for_each(|(count, value)| count.set(value)));
        }
        count(Category::Other, DRY_BYTES.replace(0));
    }
}

fn count_large(bytes: usize) {
    if bytes >= LARGE_BYTES {
        LARGE_ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    }
}

/// Counts a block that has been allocated, for `category`.
fn enter(block: *mut u8, size: usize, category: Category) {
    if block.is_null() {
        return;
    }
    // A dry thread is counted by what it would hold.
    if dry::is_dry() {
        DRY_BYTES.set(DRY_BYTES.get() + size as i64);
    } else {
        let category = if size < SMALLEST { Category::Other } else { blocks::enter(block.addr(), category) };
        count(category, size as i64);
    }
}

/// Counts a block that will be freed, and returns what it was for. Before it is freed: its address may be another
/// thread's block the moment after.
fn leave(block: *mut u8, size: usize) -> Category {
    let category = if size < SMALLEST { Category::Other } else { blocks::leave(block.addr()) };
    match dry::is_dry() {
        true => DRY_BYTES.set(DRY_BYTES.get() - size as i64),
        false => count(category, -(size as i64)),
    }
    category
}

// SAFETY: every method forwards to the inner allocator with the arguments it got, and
// returns what that returns; counting touches thread-local integers and a table of atomics only and cannot unwind.
unsafe impl<A: GlobalAlloc> GlobalAlloc for CountingAllocator<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count_large(layout.size());
        // SAFETY: the caller's obligations are those of the inner allocator.
        let block = unsafe { self.0.alloc(layout) };
        enter(block, layout.size(), category::current());
        block
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count_large(layout.size());
        // SAFETY: as above.
        let block = unsafe { self.0.alloc_zeroed(layout) };
        enter(block, layout.size(), category::current());
        block
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        leave(ptr, layout.size());
        // SAFETY: as above.
        unsafe { self.0.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count_large(new_size);
        let before = leave(ptr, layout.size());
        let category = if layout.size() < SMALLEST { category::current() } else { before };
        // SAFETY: as above.
        let block = unsafe { self.0.realloc(ptr, layout, new_size) };
        match block.is_null() {
            // The old block stays.
            true => enter(ptr, layout.size(), before),
            false => enter(block, new_size, category),
        }
        block
    }
}
