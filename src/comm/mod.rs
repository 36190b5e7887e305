//! Collective communication between ranks.
//!
//! Reading order:
//!
//! 1. [`ProcessGroup`] (`group.rs`): the contract of every backend, and
//!    [`ProcessGroupExt`] (`ext.rs`): the blocking and typed methods that callers use.
//! 2. [`Call`] (`call.rs`): a call with its tensors, and its [`CallSignature`], which is compared, recorded, printed and
//!    sent. `arg_check.rs`: argument checks.
//! 3. [`Pending`]: an operation in progress; `progress_engine.rs`: all those of a rank. [`StridedPlan`]: the integers of a
//!    strided all-to-all, the collective behind Ulysses.
//! 4. [`thread`]: the backend whose ranks are threads of one process; [`launch`]
//!    starts them.
//! 5. [`nccl`]: the backend whose ranks have one GPU each (feature `nccl`).
//! 6. `mpi`: the backend whose ranks are processes (feature `mpi`).
//! 7. [`fake`]: one real rank of a simulated world; it counts traffic and moves no data.
//! 8. `diagnostics/`: flight recorder, desync check and hang report, shared by all backends. [`store`]: a key-value
//!    store shared by the processes of a job.
//! 9. [`MeshGroups`] (`mesh_groups/`): the process groups along the axes of a device mesh.
//! 10. [`GroupWrapper`]: a group around another group; [`CommTimer`]: a wrapper that measures the time of
//!     a rank's calls.
//! 11. [`ProcessInfo`]: rank and world size of this process, from flags and launchers. [`Session`]: this process as a rank,
//!     whatever connects it to the others.
//!
//! ```
//! use ulysses::comm::{CommError, LaunchOptions, ProcessGroupExt, ReduceOp, launch};
//!
//! let sums = launch(4, &LaunchOptions::default(), |context| -> Result<f32, CommError> {
//!     let sum = context.group.all_reduce_values(&[context.rank as f32], ReduceOp::Sum)?;
//!     Ok(sum[0])
//! })?;
//! assert_eq!(sums, [6.0; 4]);
//! # Ok::<(), ulysses::comm::LaunchError>(())
//! ```

mod arg_check;
mod axis_groups;
mod buffer;
mod call;
mod diagnostics;
mod discovery;
mod error;
mod ext;
pub mod fake;
mod group;
mod launch;
mod membership;
mod mesh_groups;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod nccl;
mod ordered_channel;
mod pending;
mod plan;
mod progress_engine;
pub mod reduce;
mod session;
mod stats;
pub mod store;
mod strided;
pub mod thread;
mod timed;
pub mod traffic;
mod training_groups;
mod wrapper;

pub use crate::mesh::{
    MeshShape, PP_AXIS, REPLICAS_AXIS, RING_AXIS, SHARD_AXIS, ShardShape, TP_AXIS, ULYSSES_AXIS,
};
pub use axis_groups::AxisGroups;
pub use call::{Call, CallSignature, Elements};
pub use discovery::{
    DiscoveryError, HOSTS_VARIABLE, Launcher, NamedValue, ProcessFlags, ProcessInfo, host_name, stated_hosts,
};
pub use error::CommError;
pub(crate) use error::with_causes;
pub use ext::{Disagreement, ProcessGroupExt};
pub use group::ProcessGroup;
pub use launch::{LaunchError, LaunchOptions, RankContext};
pub use membership::{GroupLabel, Membership};
pub use mesh_groups::MeshGroups;
pub use pending::Pending;
pub use plan::{ElementCounts, RecvBlock, StridedBlock, StridedPlan};
pub use reduce::ReduceOp;
pub use session::{RankMain, Session, all_gather_object};
pub use stats::{CollectiveOp, GroupStats, OpStats};
pub use strided::pack_exchange_unpack;
pub use thread::launch;
pub use timed::{CallTimes, CommSeconds, CommTimer, EachCall};
pub use traffic::Traffic;
pub use training_groups::{PipelineGroups, RingGroups, ShardGroups, TensorGroups, TrainingGroups};
pub use wrapper::GroupWrapper;
