//! The allocator of the command: exits with an error message if an allocation fails.

#![allow(unsafe_code, reason = "an allocator")]

use std::alloc::{GlobalAlloc, Layout};
use std::fmt::{self, Display, Formatter};
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use ulysses::memory;

/// An allocator that exits with a message and code 1 if an allocation fails, where Rust would abort.
pub(crate) struct OrExit<A>(pub(crate) A);

impl<A> OrExit<A> {
    fn checked(block: *mut u8, bytes: usize) -> *mut u8 {
        if block.is_null() {
            out_of_memory(bytes);
        }
        block
    }
}

// SAFETY: every method forwards its arguments to the inner allocator and returns the result, or does not return.
unsafe impl<A: GlobalAlloc> GlobalAlloc for OrExit<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's obligations are those of the inner allocator.
        Self::checked(unsafe { self.0.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        Self::checked(unsafe { self.0.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { self.0.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: as above.
        Self::checked(unsafe { self.0.realloc(ptr, layout, new_size) }, new_size)
    }
}

/// Reports the failed allocation without allocating, and exits. Only the first thread reports; others wait.
#[cold]
fn out_of_memory(bytes: usize) -> ! {
    static IS_REPORTED: AtomicBool = AtomicBool::new(false);
    const SIZE: usize = 1024;
    while IS_REPORTED.swap(true, Ordering::Relaxed) {
        std::thread::sleep(Duration::from_secs(1));
    }
    let mut message = [0_u8; SIZE];
    let mut rest = &mut message[..];
    let (category, live_bytes) = (memory::current().name(), memory::live_bytes());
    let planned = crate::settings::PLANNED_PEAK.get().map_or("", String::as_str);
    // The message fits: thread names have at most 15 bytes.
    let _ = writeln!(
        rest,
        "error: out of memory: a memory allocation of {bytes} bytes ({category}) failed on thread {thread}; allocated by \
         this thread: {live_bytes} bytes{planned}; `ulysses plan` predicts the memory of a run, `ulimit -v` and `ulimit -d` show the \
         limits of this process",
        thread = ThreadName::current(),
    );
    let length = SIZE - rest.len();
    // SAFETY: the bytes are initialized and live through the call; `_exit` runs nothing that could allocate.
    unsafe {
        libc::write(libc::STDERR_FILENO, message.as_ptr().cast(), length as _);
        libc::_exit(1)
    }
}

/// The system's name of this thread, such as `rank-0`. `std::thread::current` may allocate.
struct ThreadName([u8; 16]);

impl ThreadName {
    #[cfg(target_os = "linux")]
    fn current() -> Self {
        let mut name = [0; 16];
        // SAFETY: the system writes at most 16 bytes, the last of them 0.
        unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
        Self(name)
    }

    #[cfg(not(target_os = "linux"))]
    fn current() -> Self {
        Self([0; 16])
    }
}

impl Display for ThreadName {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let name = self.0.split(|byte| *byte == 0).next().unwrap_or_default();
        f.write_str(std::str::from_utf8(name).unwrap_or_default())
    }
}
