//! Plans of strided all-to-all exchanges: pure integers.

use serde::{Deserialize, Serialize};
pub use ulysses_kernels::strided_copy::StridedBlock;

/// A block to receive into.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RecvBlock {
    /// Where the elements go.
    pub block: StridedBlock,
    /// Add to what is there instead of overwriting it. Blocks are filled in rank
    /// order, so sums are deterministic.
    pub accumulate: bool,
}

/// What one rank sends to and receives from every rank of a group (itself included:
/// that part is copied and not counted as traffic).
///
/// The k-th send block of rank i for rank j and the k-th receive block of rank j
/// for rank i have equal `batch`, `rows` and `run`. Elements travel in block order,
/// then batch, row and run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StridedPlan {
    /// `send[j]`: blocks of the inputs for rank j.
    pub send: Vec<Vec<StridedBlock>>,
    /// `recv[j]`: blocks of the outputs that rank j fills.
    pub recv: Vec<Vec<RecvBlock>>,
}

impl StridedPlan {
    /// Elements for and from every rank. The blocks must have been validated: their sizes are
    /// multiplied unchecked.
    pub fn counts(&self) -> (Vec<usize>, Vec<usize>) {
        let elements = |block: &StridedBlock| block.batch * block.rows * block.run;
        let send = self.send.iter().map(|blocks| blocks.iter().map(elements).sum());
        let recv = self.recv.iter().map(|blocks| blocks.iter().map(|recv| elements(&recv.block)).sum());
        (send.collect(), recv.collect())
    }
}
