//! Errors of the partitioned optimizer.

use crate::comm::CommError;
use crate::placement::ledger::LedgerError;
use ulysses_kernels::OpError;
use ulysses_kernels::offload::OffloadError;

/// An error of ZeRO.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ZeroError {
    /// A reduction or an update ran before any backward pass produced gradients.
    #[error("unit {unit}: reduced before its backward pass produced gradients")]
    NoGradients {
        /// The unit.
        unit: String,
    },
    /// In a dry run: a reduction or gather that is missing, or one too many.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// Offloading failed.
    #[error(transparent)]
    Offload(#[from] OffloadError),
    /// An operation was refused.
    #[error(transparent)]
    Op(#[from] OpError),
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}
