//! Plans of strided all-to-alls: plain integers.

use serde::{Deserialize, Serialize};
use ulysses_kernels::strided_copy::BlockCopy;
pub use ulysses_kernels::strided_copy::StridedBlock;

/// A block of an output tensor to receive into.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RecvBlock {
    /// Position of the elements in the outputs.
    pub block: StridedBlock,
    /// Adds to the existing values instead of overwriting them. Blocks are filled in rank
    /// order, so sums are deterministic.
    pub accumulate: bool,
}

impl RecvBlock {
    /// A block whose elements are overwritten.
    pub fn overwritten(block: StridedBlock) -> Self {
        Self { block, accumulate: false }
    }

    /// The copy of a block of as many elements into this one.
    pub(crate) fn copy_from(&self, from: StridedBlock) -> BlockCopy {
        BlockCopy { from, to: self.block.clone(), accumulate: self.accumulate }
    }
}

/// Number of elements of a checked block, which cannot overflow.
pub(super) fn num_elems(block: &StridedBlock) -> usize {
    block.batch * block.rows * block.run
}

/// The blocks that one rank sends to and receives from every rank of a group. Its blocks for itself
/// are copied and not counted as traffic.
///
/// The k-th send block of rank i for rank j and the k-th receive block of rank j
/// for rank i have equal `batch`, `rows` and `run`. Elements are sent in block order,
/// then by batch, row and run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StridedPlan {
    /// `send[j]`: blocks of the inputs for rank j.
    pub send: Vec<Vec<StridedBlock>>,
    /// `recv[j]`: blocks of the outputs that rank j fills.
    pub recv: Vec<Vec<RecvBlock>>,
}

/// The elements that a rank sends to and receives from each rank of its group, itself included.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ElementCounts {
    /// Elements for each rank.
    pub send: Vec<usize>,
    /// Elements from each rank.
    pub recv: Vec<usize>,
}

impl StridedPlan {
    /// Returns the element counts to and from every rank. The blocks must be validated first: sizes are
    /// multiplied without overflow checks.
    pub fn counts(&self) -> ElementCounts {
        let send = self.send.iter().map(|blocks| blocks.iter().map(num_elems).sum());
        let recv = self.recv.iter().map(|blocks| blocks.iter().map(|recv| num_elems(&recv.block)).sum());
        ElementCounts { send: send.collect(), recv: recv.collect() }
    }
}
