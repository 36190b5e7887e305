//! What can go wrong between ranks.

use super::CollectiveOp;
use crate::mesh::MeshError;
use ulysses_kernels::OpError;
use ulysses_kernels::device::DeviceError;

/// Why a collective failed. All ranks are global ones.
///
/// Errors can be cloned because every rank of a failed world receives the same one. Those that concern
/// several ranks can be written, too, to travel between processes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub enum CommError {
    /// Some ranks did not take part in time. Where those that one rank waited for waited themselves for others, it is
    /// these that are told of, with the operation that keeps all others waiting.
    #[error(
        "{op} #{sequence} of group \"{group}\" timed out after {waited_ms} ms: rank(s) {missing:?} did not take \
         part; they are stuck, slower than the timeout, or took another path through the program"
    )]
    Timeout {
        /// The group's name.
        group: String,
        /// The operation that could not complete.
        op: CollectiveOp,
        /// Its number within the group (for send and recv: within the pair of ranks).
        sequence: u64,
        /// How long the reporting rank waited, in milliseconds: in this operation, or in one that waits for it.
        waited_ms: u64,
        /// The ranks that have not come to it and, as far as is known, wait for nobody. Ranks that wait in a circle are
        /// told of as one of them sees it.
        missing: Vec<usize>,
    },

    /// The ranks of a group called different things at the same place in the order.
    #[error(
        "operation #{sequence} of group \"{group}\" diverges: rank {rank} called {called}, \
         but rank(s) {others:?} called {others_called}"
    )]
    Desync {
        /// The group's name.
        group: String,
        /// Number of the operation within the group (send, recv: within the pair of ranks).
        sequence: u64,
        /// The rank in the minority. Of two ranks with different calls, the later
        /// one, or the sender.
        rank: usize,
        /// What it called.
        called: String,
        /// The ranks that agree with one another.
        others: Vec<usize>,
        /// What they called.
        others_called: String,
    },

    /// A rank panicked, returned an error or aborted.
    #[error("rank {rank} failed: {reason}")]
    PeerFailed {
        /// The rank that failed first.
        rank: usize,
        /// What it said.
        reason: String,
    },

    /// A rank returned, without error, while others still counted on it.
    #[error("rank {rank} has returned while others wait for it in {op} #{sequence} of group \"{group}\"")]
    PeerLeft {
        /// The group's name.
        group: String,
        /// The operation that can never complete.
        op: CollectiveOp,
        /// Its number within the group (send, recv: within the pair of ranks).
        sequence: u64,
        /// The rank that has left.
        rank: usize,
    },

    /// An argument that is wrong whatever the peers do. Nothing was published.
    #[error("{op} on group \"{group}\": {reason}")]
    InvalidArgument {
        /// The group's name.
        group: String,
        /// The operation.
        op: CollectiveOp,
        /// What is wrong and what would be valid.
        reason: String,
    },

    /// The mesh itself says no: for one, that it has no axis of a name.
    #[serde(skip)]
    #[error(transparent)]
    Mesh(#[from] MeshError),

    /// The calling rank is no member of the mesh, hence of none of its groups.
    #[serde(skip)]
    #[error("rank {rank} is not in the mesh (ranks {members:?}), so it has no group along \"{axis}\"")]
    NotMember {
        /// The axis whose group was asked for.
        axis: String,
        /// The calling rank.
        rank: usize,
        /// The mesh's ranks.
        members: Vec<usize>,
    },

    /// The library underneath could not carry an operation out, or not in time.
    #[serde(skip)]
    #[error("{library}, {op} #{sequence} of group \"{group}\" on rank {rank}: {reason}")]
    Library {
        /// Its name.
        #[serde(skip)]
        library: &'static str,
        /// The group's name.
        group: String,
        /// The operation.
        op: CollectiveOp,
        /// Its number within the group.
        sequence: u64,
        /// The rank that reports.
        rank: usize,
        /// What the library says.
        reason: String,
    },

    /// A rank could not start to communicate.
    #[serde(skip)]
    #[error("cannot start {library}{}: {reason}", .rank.map_or_else(String::new, |rank| format!(" on rank {rank}")))]
    Start {
        /// The library underneath.
        #[serde(skip)]
        library: &'static str,
        /// The rank, where it is known.
        rank: Option<usize>,
        /// What is missing or wrong.
        reason: String,
    },

    /// Ranks were started with different meshes.
    #[error("rank(s) {differing:?} were given another mesh than the other ranks; rank {rank} has {mesh}")]
    MeshMismatch {
        /// The ranks in the minority.
        differing: Vec<usize>,
        /// The rank that reports.
        rank: usize,
        /// Its own mesh.
        mesh: String,
    },

    /// The mesh names ranks that the group it was to be laid over lacks.
    #[error("the mesh holds ranks {missing:?}, which group \"{group}\" (ranks {members:?}) lacks")]
    MeshOutsideGroup {
        /// The group's name.
        group: String,
        /// Ranks of the mesh outside the group.
        missing: Vec<usize>,
        /// The group's ranks.
        members: Vec<usize>,
    },

    /// candle refused to give access to a tensor, or an op to copy it.
    #[error("tensor access failed: {0}")]
    Tensor(String),
}

impl From<candle_core::Error> for CommError {
    fn from(error: candle_core::Error) -> Self {
        CommError::Tensor(error.to_string())
    }
}

impl From<OpError> for CommError {
    fn from(error: OpError) -> Self {
        CommError::Tensor(with_causes(&error))
    }
}

impl From<DeviceError> for CommError {
    fn from(error: DeviceError) -> Self {
        CommError::Tensor(with_causes(&error))
    }
}

/// The message and those of its sources, which a cloned error cannot carry.
fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |message, cause| format!("{message}: {cause}"))
}
