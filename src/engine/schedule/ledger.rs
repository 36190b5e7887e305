//! The memory of a rank, buffer by buffer, told in events.
//!
//! It follows [`Workspace`](ulysses_kernels::Workspace) to the letter: what is given back waits for the next
//! tensor of as many elements, and no more is kept than was taken. So recycled storage counts, as it
//! does in the allocator.

use super::event::Event;
use std::collections::HashMap;
use std::collections::VecDeque;
use ulysses_kernels::device::DeviceKind;
use ulysses_kernels::linear::ProductMemory;
use ulysses_kernels::memory::Category;
use ulysses_kernels::offload::READ_AHEAD_BYTES;

/// A buffer in use. It ends in [`Ledger::free`] or [`Ledger::give`].
#[derive(Debug)]
#[must_use]
pub(super) struct Buffer {
    category: Category,
    elems: usize,
    element: ElementType,
}

impl Buffer {
    pub(super) fn elems(&self) -> usize {
        self.elems
    }
}

/// What elements of a tensor are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum ElementType {
    /// Parameters and activations: of the config's precision.
    Stored,
    /// f32, whatever that is.
    F32,
}

/// Where offloaded tensors wait between their uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Away {
    /// In a file, of a rank on a CPU.
    File,
    /// In the host's memory, of a rank on a GPU. What is read ahead takes memory of the GPU.
    Host,
}

impl Away {
    /// Where ranks on such a device offload to.
    pub(super) fn from(device: DeviceKind) -> Self {
        match device {
            DeviceKind::Cpu => Self::File,
            DeviceKind::Cuda => Self::Host,
        }
    }

    /// Memory that reading ahead takes throughout.
    pub(super) fn read_ahead_bytes(self) -> usize {
        match self {
            Self::File => READ_AHEAD_BYTES,
            Self::Host => 0,
        }
    }
}

/// The tensors of one size that wait for their next use, and how many were taken and not given back.
#[derive(Debug, Default, Clone)]
struct Shelf {
    free: usize,
    taken: usize,
    /// Whether a tensor was given back and not kept, since [`Ledger::mark`].
    has_refused: bool,
}

impl Shelf {
    /// Whether it will serve the same requests as it did since it was `before`.
    fn repeats(&self, before: &Self) -> bool {
        // More that were taken change nothing where nothing was refused.
        let serves_alike = self.taken == before.taken || (self.taken > before.taken && !self.has_refused);
        self.free == before.free && serves_alike
    }
}

/// The state of a ledger at a moment.
#[derive(Debug)]
pub(super) struct LedgerMark {
    shelves: HashMap<(usize, usize), Shelf>,
    packed_bytes: usize,
    copied_bytes: usize,
}

/// What a rank holds, and the events of which that follows.
#[derive(Debug)]
pub(super) struct Ledger {
    events: VecDeque<Event>,
    stored_bytes: usize,
    /// By bytes of an element and number of elements.
    shelves: HashMap<(usize, usize), Shelf>,
    /// Bytes that threads keep for the next product of packed elements.
    packed_bytes: usize,
    /// And of f32 copies and their sums.
    copied_bytes: usize,
}

impl Ledger {
    /// Of a rank whose parameters and activations have elements of `stored_bytes`.
    pub(super) fn new(stored_bytes: usize) -> Self {
        let (events, shelves) = (VecDeque::new(), HashMap::new());
        Self { events, stored_bytes, shelves, packed_bytes: 0, copied_bytes: 0 }
    }

    pub(super) fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    pub(super) fn push(&mut self, event: Event) {
        self.events.push_back(event);
    }

    /// Bytes of an element.
    pub(super) fn bytes_of(&self, element: ElementType) -> usize {
        match element {
            ElementType::Stored => self.stored_bytes,
            ElementType::F32 => size_of::<f32>(),
        }
    }

    /// A tensor of its own storage.
    pub(super) fn allocate(&mut self, category: Category, element: ElementType, elems: usize) -> Buffer {
        self.hold(category, (elems * self.bytes_of(element)) as i64);
        Buffer { category, elems, element }
    }

    /// The end of a tensor whose storage nobody recycles.
    pub(super) fn free(&mut self, buffer: Buffer) {
        self.hold(buffer.category, -((buffer.elems * self.bytes_of(buffer.element)) as i64));
    }

    /// A tensor from the workspace.
    pub(super) fn take(&mut self, category: Category, element: ElementType, elems: usize) -> Buffer {
        let shelf = self.shelves.entry((self.bytes_of(element), elems)).or_default();
        shelf.taken += 1;
        if shelf.free > 0 {
            shelf.free -= 1;
            self.hold(Category::Other, -((elems * self.bytes_of(element)) as i64));
        }
        self.allocate(category, element, elems)
    }

    /// A tensor to the workspace, which keeps it if it has handed out one of that size.
    pub(super) fn give(&mut self, buffer: Buffer) {
        let (bytes, elems) = (self.bytes_of(buffer.element), buffer.elems);
        self.free(buffer);
        let Some(shelf) = self.shelves.get_mut(&(bytes, elems)) else { return };
        if shelf.taken == 0 {
            shelf.has_refused = true;
            return;
        }
        shelf.taken -= 1;
        shelf.free += 1;
        self.hold(Category::Other, (elems * bytes) as i64);
    }

    /// Its present state, to check later whether it [repeats](Self::repeats).
    pub(super) fn mark(&mut self) -> LedgerMark {
        let Self { packed_bytes, copied_bytes, .. } = *self;
        let mark = LedgerMark { shelves: self.shelves.clone(), packed_bytes, copied_bytes };
        self.shelves.values_mut().for_each(|shelf| shelf.has_refused = false);
        mark
    }

    /// Whether the same requests as since `before`, the last mark, will have the same events again.
    pub(super) fn repeats(&self, before: &LedgerMark) -> bool {
        let LedgerMark { shelves, packed_bytes, copied_bytes } = before;
        (self.packed_bytes, self.copied_bytes) == (*packed_bytes, *copied_bytes)
            && self.shelves.len() == shelves.len()
            && self
                .shelves
                .iter()
                .all(|(size, shelf)| shelves.get(size).is_some_and(|old| shelf.repeats(old)))
    }

    /// Frees what waits in the workspace.
    pub(super) fn trim(&mut self) {
        let shelves = self.shelves.iter_mut();
        let freed: usize =
            shelves.map(|((bytes, elems), shelf)| bytes * elems * std::mem::take(&mut shelf.free)).sum();
        self.hold(Category::Other, -(freed as i64));
    }

    /// Memory that an operation needs while it runs.
    pub(super) fn scratch(&mut self, bytes: usize) {
        self.scratch_for(Category::Other, bytes);
    }

    /// As [`scratch`](Self::scratch), of another category.
    pub(super) fn scratch_for(&mut self, category: Category, bytes: usize) {
        self.hold(category, bytes as i64);
        self.hold(category, -(bytes as i64));
    }

    /// Threads keep the memory of a product, and make room anew where it is too small.
    pub(super) fn keep(&mut self, memory: ProductMemory) {
        let (kept, bytes) = match memory {
            ProductMemory::Panels => return,
            ProductMemory::Packed(bytes) => (&mut self.packed_bytes, bytes),
            ProductMemory::Copied(bytes) => (&mut self.copied_bytes, bytes),
        };
        let more = bytes.saturating_sub(*kept);
        *kept += more;
        self.hold(Category::Other, more as i64);
    }

    /// An operation on single elements with `scratch` bytes of its own, done `times` times in the same memory. It
    /// reads or writes every element of its operands once, and widens 16-bit ones piece by piece.
    pub(super) fn sweep(&mut self, operands: &[usize], scratch: usize, times: usize) {
        self.scratch(scratch);
        self.touch(times * operands.iter().sum::<usize>() * self.stored_bytes);
    }

    /// Bytes that operations on single elements read and write.
    pub(super) fn touch(&mut self, bytes: usize) {
        if bytes > 0 {
            self.push(Event::Sweep { bytes: bytes as u64 });
        }
    }

    /// Bytes that go to where tensors wait, or come from there.
    pub(super) fn move_to_or_from(&mut self, place: Away, bytes: usize) {
        let bytes = bytes as u64;
        match place {
            _ if bytes == 0 => {}
            Away::File => self.push(Event::File { bytes }),
            Away::Host => self.push(Event::HostCopy { bytes }),
        }
    }

    /// Bytes more, or less, that wait elsewhere than where the rank computes.
    pub(super) fn offload(&mut self, bytes: i64) {
        if bytes != 0 {
            self.push(Event::Offloaded { bytes });
        }
    }

    /// Bytes more, or less, of a category.
    pub(super) fn hold(&mut self, category: Category, bytes: i64) {
        if bytes != 0 {
            self.push(Event::Memory { category, bytes });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(ledger: &mut Ledger) -> i64 {
        std::iter::from_fn(|| ledger.next_event())
            .map(|event| if let Event::Memory { bytes, .. } = event { bytes } else { 0 })
            .sum()
    }

    #[test]
    fn a_given_tensor_is_taken_again_and_a_foreign_one_takes_the_place_of_a_dropped_one() {
        let mut ledger = Ledger::new(4);
        let taken = ledger.take(Category::Activations, ElementType::Stored, 8);
        ledger.give(taken);
        assert_eq!(held(&mut ledger), 32, "it waits");
        let taken = ledger.take(Category::Activations, ElementType::F32, 8);
        assert_eq!(held(&mut ledger), 0, "of one size in bytes, so the same storage");
        ledger.free(taken);
        let foreign = ledger.allocate(Category::Activations, ElementType::F32, 8);
        ledger.give(foreign);
        assert_eq!(held(&mut ledger), 0, "freed one, kept another");
        let foreign = ledger.allocate(Category::Activations, ElementType::F32, 8);
        ledger.give(foreign);
        assert_eq!(held(&mut ledger), 0, "no more is kept than was taken");
    }

    #[test]
    fn the_memory_of_products_grows_to_the_largest_of_each_kind() {
        let mut ledger = Ledger::new(2);
        for (memory, grown) in [
            (ProductMemory::Packed(5), 5),
            (ProductMemory::Copied(7), 7),
            (ProductMemory::Packed(3), 0),
            (ProductMemory::Copied(9), 2),
            (ProductMemory::Panels, 0),
        ] {
            ledger.keep(memory);
            assert_eq!(held(&mut ledger), grown, "{memory:?}");
        }
    }
}
