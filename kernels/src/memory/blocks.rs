//! The category of each large block, in a table outside the blocks.
//!
//! The allocator uses the table, so it must neither allocate nor block. A block's entry is at one of
//! [`WINDOW`] slots that follow from its address; if all are taken, the block is [`Category::Other`].

use super::Category;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Smaller blocks are always [`Category::Other`].
pub(super) const SMALLEST: usize = 16 << 10;

const BITS: u32 = 15;
const WINDOW: usize = 64;

/// Addresses of blocks, which are multiples of 8, plus the category's number; 0 for a free slot.
static TABLE: [AtomicUsize; (1 << BITS) + WINDOW] = [const { AtomicUsize::new(0) }; (1 << BITS) + WINDOW];

/// The slots for an address.
fn places(address: usize) -> &'static [AtomicUsize] {
    // Fibonacci hashing: blocks of this size differ in their middle bits.
    let hash = (address as u64 >> 4).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let first = (hash >> (u64::BITS - BITS)) as usize;
    &TABLE[first..first + WINDOW]
}

fn category_of(entry: usize) -> Category {
    Category::ALL[(entry & 7).min(Category::ALL.len() - 1)]
}

/// Adds a block and returns the category that it counts as.
pub(super) fn enter(address: usize, category: Category) -> Category {
    if category == Category::Other || address & 7 != 0 {
        return Category::Other;
    }
    // Relaxed ordering is enough: a block's address passes from allocating to freeing thread with ordering of
    // its own.
    let take = |place: &AtomicUsize| {
        place.load(Relaxed) == 0
            && place.compare_exchange(0, address | category as usize, Relaxed, Relaxed).is_ok()
    };
    if places(address).iter().any(take) { category } else { Category::Other }
}

/// Removes a block before it is freed and returns its category.
pub(super) fn leave(address: usize) -> Category {
    for place in places(address) {
        let entry = place.load(Relaxed);
        if entry & !7 == address && entry != 0 {
            place.store(0, Relaxed);
            return category_of(entry);
        }
    }
    Category::Other
}

#[cfg(test)]
mod tests {
    use super::*;

    // Addresses that no real block has, since the table belongs to the process.
    const FAR: usize = 1 << 60;

    #[test]
    fn every_block_keeps_its_category_until_it_leaves() {
        let blocks = |category: Category| (0..100).map(move |i| FAR + (6 * i + category as usize) * 65_536);
        for category in Category::ALL {
            for address in blocks(category) {
                assert_eq!(enter(address, category), category);
            }
        }
        for category in Category::ALL {
            for address in blocks(category) {
                assert_eq!(leave(address), category);
                assert_eq!(leave(address), Category::Other);
            }
        }
    }

    #[test]
    fn a_block_without_a_slot_counts_as_other_on_entry_and_exit() {
        // Addresses that share one slot: those whose hashes are within one table step.
        let same = |address: &usize| std::ptr::eq(places(*address).as_ptr(), places(2 * FAR).as_ptr());
        let addresses: Vec<usize> = (0..).map(|i| 2 * FAR + i * 16).filter(same).take(WINDOW + 3).collect();
        let entered: Vec<_> = addresses.iter().map(|&address| enter(address, Category::Gradients)).collect();
        let num_known = entered.iter().filter(|category| **category == Category::Gradients).count();
        assert!((1..=WINDOW).contains(&num_known), "{num_known}");
        let left: Vec<_> = addresses.iter().map(|&address| leave(address)).collect();
        assert_eq!(left, entered);
    }
}
