//! Reduction operators over ranks. The type is defined in the kernels crate, below this module, because the GPU kernel
//! takes it too.

pub use ulysses_kernels::rank_reduce::{ReduceOp, is_unrounded_sum, reduce};
