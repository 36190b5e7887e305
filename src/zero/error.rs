//! Errors of the partitioned optimizer.

use crate::comm::CommError;
use ulysses_kernels::OpError;
use ulysses_kernels::offload::OffloadError;

/// What can go wrong in ZeRO.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ZeroError {
    /// A reduction or an update needs gradients that no backward pass has made.
    #[error("unit {unit}: its gradients were reduced before its backward pass made any")]
    NoGradients {
        /// The unit.
        unit: String,
    },
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// State could not be moved to a file or back.
    #[error(transparent)]
    Offload(#[from] OffloadError),
    /// An operation was refused.
    #[error(transparent)]
    Op(#[from] OpError),
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}
