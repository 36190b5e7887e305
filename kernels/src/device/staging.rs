//! Staging buffers for asynchronous copies.

use parking_lot::Mutex;

/// A buffer that a device copies from.
pub(super) trait Buffer: Sized {
    /// Returns whether the buffer is for this GPU and has room for so many bytes, without being far too large.
    fn suits(&self, gpu: usize, bytes: usize) -> bool;

    /// Returns whether no copy from it is pending.
    fn is_idle(&self) -> bool;
}

/// A pool of buffers, each reused when the copy from it is done, because page-locked memory is slow to
/// allocate.
///
/// The pool is as large as the largest number of concurrent copies. That is bounded, since every step waits
/// for its loss.
#[derive(Debug)]
pub(super) struct Staging<B>(Mutex<Vec<B>>);

impl<B: Buffer> Staging<B> {
    /// An empty pool.
    pub(super) const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// Returns a buffer to overwrite: one without a pending copy, or else the result of `make`. Never blocks.
    pub(super) fn acquire<E>(
        &self,
        gpu: usize,
        bytes: usize,
        make: impl FnOnce() -> Result<B, E>,
    ) -> Result<B, E> {
        let idle = {
            let mut buffers = self.0.lock();
            let found = buffers.iter().position(|buffer| buffer.suits(gpu, bytes) && buffer.is_idle());
            found.map(|at| buffers.swap_remove(at))
        };
        idle.map_or_else(make, Ok)
    }

    /// Returns a buffer to the pool, with its copy pending or done.
    pub(super) fn release(&self, buffer: B) {
        self.0.lock().push(buffer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::convert::Infallible;
    use std::rc::Rc;

    /// A buffer of a GPU whose copies complete when the test says so.
    #[derive(Clone)]
    struct Fake {
        name: &'static str,
        gpu: usize,
        bytes: usize,
        is_busy: Rc<Cell<bool>>,
    }

    impl Buffer for Fake {
        fn suits(&self, gpu: usize, bytes: usize) -> bool {
            self.gpu == gpu && self.bytes >= bytes
        }

        fn is_idle(&self) -> bool {
            !self.is_busy.get()
        }
    }

    fn buffer(name: &'static str, gpu: usize, bytes: usize) -> Fake {
        Fake { name, gpu, bytes, is_busy: Rc::default() }
    }

    /// The name of the buffer that is returned, or "new".
    fn acquired(staging: &Staging<Fake>, gpu: usize, bytes: usize) -> &'static str {
        let Ok(acquired) = staging.acquire::<Infallible>(gpu, bytes, || Ok(buffer("new", gpu, bytes)));
        acquired.name
    }

    #[test]
    fn a_buffer_is_not_overwritten_while_its_copy_is_pending() {
        let staging = Staging::new();
        let first = buffer("first", 0, 64);
        first.is_busy.set(true);
        staging.release(first.clone());
        assert_eq!(acquired(&staging, 0, 64), "new");
        first.is_busy.set(false);
        assert_eq!(acquired(&staging, 0, 64), "first");
        assert_eq!(acquired(&staging, 0, 64), "new", "it was acquired and not released");
    }

    #[test]
    fn only_a_buffer_of_the_same_gpu_with_room_is_reused() {
        let staging = Staging::new();
        for buffer in [buffer("small", 0, 8), buffer("elsewhere", 1, 64), buffer("large", 0, 64)] {
            staging.release(buffer);
        }
        assert_eq!(acquired(&staging, 0, 9), "large");
        assert_eq!(acquired(&staging, 0, 9), "new");
        assert_eq!(acquired(&staging, 0, 8), "small");
        assert_eq!(acquired(&staging, 1, 1), "elsewhere");
    }

    #[test]
    fn a_failed_allocation_is_returned() {
        let staging = Staging::<Fake>::new();
        assert_eq!(staging.acquire(0, 1, || Err("no memory")).err(), Some("no memory"));
    }
}
