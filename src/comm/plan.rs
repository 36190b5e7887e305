//! Plans of strided all-to-alls: plain integers.

use serde::{Deserialize, Serialize};
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

impl StridedPlan {
    /// Returns the element counts to and from every rank. The blocks must be validated first: sizes are
    /// multiplied without overflow checks.
    pub fn counts(&self) -> (Vec<usize>, Vec<usize>) {
        let elements = |block: &StridedBlock| block.batch * block.rows * block.run;
        let send = self.send.iter().map(|blocks| blocks.iter().map(elements).sum());
        let recv = self.recv.iter().map(|blocks| blocks.iter().map(|recv| elements(&recv.block)).sum());
        (send.collect(), recv.collect())
    }
}
