//! The instructions of tensor cores, of TMA and of `mbarrier`, with exact expected results.

mod tensor_cores;
mod tma;
mod warpgroups;
