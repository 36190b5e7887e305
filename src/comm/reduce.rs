//! Reductions over ranks. The definition is that of the kernels, the leaf below this module: the GPU's kernel takes the
//! operator, and a second enum would only be mapped onto it.

pub use ulysses_kernels::rank_reduce::{ReduceOp, reduce};
