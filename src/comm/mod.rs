//! Collective communication between ranks.
//!
//! Reading order:
//!
//! 1. [`ProcessGroup`] (`group.rs`): the contract that every backend fulfils, and
//!    [`ProcessGroupExt`] (`ext.rs`): the blocking and typed forms that callers use.
//! 2. [`CollectiveArgs`] (`args.rs`): a call with its arguments, and their checks. `call_signature.rs`: what is compared,
//!    recorded, printed and sent of it.
//! 3. [`Pending`]: an operation under way. [`StridedPlan`]: the integers of a
//!    strided all-to-all, the exchange that Ulysses lives on.
//! 4. [`thread`]: the backend whose ranks are threads of one process; [`launch`]
//!    starts them.
//! 5. [`nccl`]: the backend whose ranks have a GPU each (feature `nccl`).
//! 6. `mpi`: the backend whose ranks are processes (feature `mpi`).
//! 7. [`fake`]: one real rank of a world that is pretended; it counts and moves nothing.
//! 8. `diagnostics/`: the flight recorder, the desync check and the hang report of all backends. [`store`]: keys and
//!    values that the processes of a job share.
//! 9. [`MeshGroups`]: the groups along the axes of a device mesh.
//! 10. [`GroupWrapper`]: a group around another one; [`CommTimer`]: such a one, which measures what a
//!     rank's calls cost it in time.
//! 11. [`ProcessInfo`]: which process this is, by flags and launchers.
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
mod args;
mod buffer;
mod call_signature;
mod diagnostics;
mod discovery;
mod error;
mod ext;
pub mod fake;
mod group;
mod launch;
mod mesh_groups;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod nccl;
mod ordered_channel;
mod pending;
mod plan;
pub mod reduce;
mod serde_arc;
mod stats;
pub mod store;
mod strided;
pub mod thread;
mod timed;
pub mod traffic;
mod wrapper;

pub use crate::mesh::{REPLICAS_AXIS, SHARD_AXIS};
pub use args::CollectiveArgs;
pub use discovery::{DiscoveryError, Launcher, ProcessFlags, ProcessInfo, Stated};
pub use error::CommError;
pub use ext::ProcessGroupExt;
pub use group::ProcessGroup;
pub use launch::{LaunchError, LaunchOptions, RankContext};
pub use mesh_groups::MeshGroups;
pub use pending::Pending;
pub use plan::{RecvBlock, StridedBlock, StridedPlan};
pub use reduce::ReduceOp;
pub use stats::{CollectiveOp, GroupStats, OpStats};
pub use strided::pack_exchange_unpack;
pub use thread::launch;
pub use timed::{CallTimes, CommSeconds, CommTimer, EachCall};
pub use traffic::Traffic;
pub use wrapper::GroupWrapper;
