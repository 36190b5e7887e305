//! The instructions of tensor cores, of TMA and of `mbarrier`, with exact expected results; the places of blocks.

mod block_place;
mod tensor_cores;
mod tma;
mod warpgroups;
