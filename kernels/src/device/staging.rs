//! Buffers that copies are under way from.

use parking_lot::Mutex;

/// A buffer that a device copies from.
pub(super) trait Buffer: Sized {
    /// Whether it is for copies to this GPU and has room for so many bytes, without most of it staying empty.
    fn suits(&self, gpu: usize, bytes: usize) -> bool;

    /// Whether no copy from it is under way.
    fn is_idle(&self) -> bool;
}

/// Buffers that are used again, each when the copy from it is done: page-locked memory takes the driver long to make.
///
/// There are as many as copies have ever been under way at a time. That has an end, for every step waits for its loss.
#[derive(Debug)]
pub(super) struct Staging<B>(Mutex<Vec<B>>);

impl<B: Buffer> Staging<B> {
    /// Without a buffer.
    pub(super) const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// A buffer to overwrite: one whose copy is done, else what `make` returns. Nobody waits.
    pub(super) fn take<E>(
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

    /// Takes a buffer back, the copy from it under way or done.
    pub(super) fn give(&self, buffer: B) {
        self.0.lock().push(buffer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::convert::Infallible;
    use std::rc::Rc;

    /// A buffer of a GPU whose copies are done when the test says so.
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

    /// The name of the buffer that is taken, or "new".
    fn taken(staging: &Staging<Fake>, gpu: usize, bytes: usize) -> &'static str {
        let Ok(taken) = staging.take::<Infallible>(gpu, bytes, || Ok(buffer("new", gpu, bytes)));
        taken.name
    }

    #[test]
    fn a_buffer_is_not_overwritten_while_its_copy_is_under_way() {
        let staging = Staging::new();
        let first = buffer("first", 0, 64);
        first.is_busy.set(true);
        staging.give(first.clone());
        assert_eq!(taken(&staging, 0, 64), "new");
        first.is_busy.set(false);
        assert_eq!(taken(&staging, 0, 64), "first");
        assert_eq!(taken(&staging, 0, 64), "new", "it was taken and not given back");
    }

    #[test]
    fn only_a_buffer_of_the_gpu_with_room_is_used_again() {
        let staging = Staging::new();
        for buffer in [buffer("small", 0, 8), buffer("elsewhere", 1, 64), buffer("large", 0, 64)] {
            staging.give(buffer);
        }
        assert_eq!(taken(&staging, 0, 9), "large");
        assert_eq!(taken(&staging, 0, 9), "new");
        assert_eq!(taken(&staging, 0, 8), "small");
        assert_eq!(taken(&staging, 1, 1), "elsewhere");
    }

    #[test]
    fn a_failure_to_make_a_buffer_is_passed_on() {
        let staging = Staging::<Fake>::new();
        assert_eq!(staging.take(0, 1, || Err("no memory")).err(), Some("no memory"));
    }
}
