//! Errors of communication between ranks.

use super::CollectiveOp;
use crate::mesh::MeshError;
use ulysses_kernels::OpError;
use ulysses_kernels::device::DeviceError;

/// An error of a collective. All ranks are global ranks.
///
/// Errors are `Clone` because every rank of a failed world receives the same one. Errors that concern
/// several ranks can also be serialized, to be sent between processes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub enum CommError {
    /// Some ranks did not join an operation in time. Where the missing ranks themselves wait for others, the error names
    /// the operation and the ranks at the end of this chain of waits.
    #[error(
        "{op} #{sequence} of group \"{group}\" timed out after {waited_ms} ms: rank(s) {missing:?} did not join \
         it; they hang, are slower than the timeout, or took another code path"
    )]
    Timeout {
        /// The group's name.
        group: String,
        /// The operation that could not complete.
        op: CollectiveOp,
        /// Sequence number within the group (for send and recv: within the pair of ranks).
        sequence: u64,
        /// How long the reporting rank waited, in milliseconds: in this operation, or in one that depends on it.
        waited_ms: u64,
        /// The ranks that have not joined it and, as far as is known, wait for no other rank. If ranks wait in a cycle, these are
        /// the ranks that the reporting rank waits for.
        missing: Vec<usize>,
    },

    /// The ranks of a group made different calls at the same sequence number.
    #[error(
        "operation #{sequence} of group \"{group}\" diverges: rank {rank} called {called}, \
         but rank(s) {others:?} called {others_called}"
    )]
    Desync {
        /// The group's name.
        group: String,
        /// Sequence number within the group (send, recv: within the pair of ranks).
        sequence: u64,
        /// The rank in the minority. Of two ranks with different calls, the later
        /// one, or the sender.
        rank: usize,
        /// The call of that rank.
        called: String,
        /// The ranks that agree with one another.
        others: Vec<usize>,
        /// The call of those ranks.
        others_called: String,
    },

    /// A rank panicked, returned an error or aborted.
    #[error("rank {rank} failed: {reason}")]
    PeerFailed {
        /// The rank that failed first.
        rank: usize,
        /// Its error or panic message.
        reason: String,
    },

    /// A rank returned without error while others still waited for it.
    #[error("rank {rank} returned while others wait for it in {op} #{sequence} of group \"{group}\"")]
    PeerLeft {
        /// The group's name.
        group: String,
        /// The operation that can never complete.
        op: CollectiveOp,
        /// Sequence number within the group (send, recv: within the pair of ranks).
        sequence: u64,
        /// The rank that has left.
        rank: usize,
    },

    /// An argument that is invalid whatever the peers do. Nothing was published.
    #[error("{op} on group \"{group}\": {reason}")]
    InvalidArgument {
        /// The group's name.
        group: String,
        /// The operation.
        op: CollectiveOp,
        /// What is wrong and what would be valid.
        reason: String,
    },

    /// An error of the mesh, for example an unknown axis name.
    #[serde(skip)]
    #[error(transparent)]
    Mesh(#[from] MeshError),

    /// The calling rank is not a member of the mesh, and so of none of its groups.
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

    /// The underlying library failed in an operation, or timed out.
    #[serde(skip)]
    #[error("{library}, {op} #{sequence} of group \"{group}\" on rank {rank}: {reason}")]
    Library {
        /// Name of the library.
        #[serde(skip)]
        library: &'static str,
        /// The group's name.
        group: String,
        /// The operation.
        op: CollectiveOp,
        /// Sequence number within the group.
        sequence: u64,
        /// The rank that reports.
        rank: usize,
        /// The library's error message.
        reason: String,
    },

    /// A communication library could not be started on a rank.
    #[serde(skip)]
    #[error("cannot start {library}{}: {reason}", .rank.map_or_else(String::new, |rank| format!(" on rank {rank}")))]
    Start {
        /// Name of the library.
        #[serde(skip)]
        library: &'static str,
        /// The rank, where it is known.
        rank: Option<usize>,
        /// What is missing or wrong.
        reason: String,
    },

    /// Ranks were started with different meshes.
    #[error(
        "rank(s) {differing:?} have a different mesh than the other ranks; the mesh of rank {rank} is {mesh}"
    )]
    MeshMismatch {
        /// The ranks in the minority.
        differing: Vec<usize>,
        /// The rank that reports.
        rank: usize,
        /// Its own mesh.
        mesh: String,
    },

    /// The mesh has ranks that the parent group lacks.
    #[error("the mesh has ranks {missing:?} that are not in group \"{group}\" (ranks {members:?})")]
    MeshOutsideGroup {
        /// The group's name.
        group: String,
        /// Ranks of the mesh outside the group.
        missing: Vec<usize>,
        /// The group's ranks.
        members: Vec<usize>,
    },

    /// Not one group per axis of a mesh.
    #[error(
        "rank {rank} gives {given} group(s) for its axes [{}]; one per axis is needed, in this order", axes.join(", ")
    )]
    GroupCount {
        /// The rank.
        rank: usize,
        /// Number of groups given.
        given: usize,
        /// The axes along which the rank has groups; none on a rank outside the mesh.
        axes: Vec<String>,
    },

    /// A group with other ranks than those along its axis, or with another order of them.
    #[error(
        "the group for axis \"{axis}\" has ranks {given:?}, but rank {rank}'s group along it has ranks {expected:?}"
    )]
    WrongGroup {
        /// The axis.
        axis: String,
        /// The rank that gives the group.
        rank: usize,
        /// The group's ranks.
        given: Vec<usize>,
        /// The ranks along the axis.
        expected: Vec<usize>,
    },

    /// Ranks of a mesh that have no group, since slicing creates none.
    #[error(
        "mesh {mesh} has no group of its ranks {ranks:?}; flatten {} into one axis to create it", axes.join(", ")
    )]
    NoGroup {
        /// The mesh.
        mesh: String,
        /// The ranks without a group.
        ranks: Vec<usize>,
        /// The axes that they span.
        axes: Vec<String>,
    },

    /// Parts that are not slices of the mesh.
    #[error(
        "mesh {mesh} cannot be joined from these parts: they are not slices of it, since rank {rank} is in two results or none"
    )]
    NotSlices {
        /// A rank for which they do not fit together.
        rank: usize,
        /// The mesh.
        mesh: String,
    },

    /// candle failed to access a tensor, or an op failed to copy it.
    #[error("tensor access failed: {0}")]
    Tensor(String),
}

impl CommError {
    /// Returns the error as other ranks report it: they need to know whose tensor it was.
    pub(super) fn on_rank(self, rank: usize) -> Self {
        match self {
            Self::Tensor(reason) => Self::PeerFailed { rank, reason },
            named => named,
        }
    }
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

/// Returns the message joined with those of its sources, unless it includes them: a cloned error cannot carry them.
pub(crate) fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source()).map(ToString::to_string);
    causes.fold(error.to_string(), |message, cause| match message.contains(&cause) {
        true => message,
        false => format!("{message}: {cause}"),
    })
}
