//! Persistent tensors of a rank: parameters, gradients and optimizer state, resident or offloaded.

mod gradient_partition;
mod replicas;
mod restore;
mod state_bytes;
mod state_tensor;
mod storage;

pub(super) use gradient_partition::GradientPartition;
pub(crate) use replicas::Comparison;
pub use restore::{RestoreState, StateIndex};
pub use state_bytes::StateBytes;
pub use state_tensor::StateSlice;
pub(super) use state_tensor::{SlotSlice, StateTensor, with_bytes};
pub use storage::Storage;
