//! The instructions of tensor cores, of TMA and of `mbarrier`, with exact expected results; the places of blocks.

mod places;
mod tensor_cores;
mod tma;
mod warpgroups;
