//! Launching ranks that communicate through NCCL.

use super::communicator::{self, Communicator, ID_BYTES, Id, unique_id};
use super::control_plane::ControlPlane;
use super::environment::{Environment, Rendezvous, check_gpus, may_share_gpus, process_gpu};
use super::group::NcclGroup;
use super::operation::ShutdownGuard;
use super::rank::NcclRank;
use crate::comm::diagnostics::DesyncCheck;
use crate::comm::error::with_causes;
use crate::comm::store::{ControlChannel, Store};
use crate::comm::{
    CommError, LaunchError, LaunchOptions, Membership, ProcessGroup, ProcessGroupExt, ProcessInfo,
    RankContext, thread,
};
use candle_core::Device;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;
use ulysses_kernels::device::{allow_peer_access, gpu_count, open_gpu};

/// The first NCCL version that copies to and from memory pools of another GPU of the process without access to them.
const SEPARATE_POOLS_VERSION: i32 = 22_300;

/// Runs `run` on one thread per GPU of `gpus`, the ordinals of this machine's GPUs, all in one process.
///
/// As [`thread::launch`], but the group of a rank's context is an NCCL group, for tensors on
/// [`value_device`](ProcessGroup::value_device), the rank's GPU. If a rank fails or panics, the waits of the other ranks
/// end with an error.
///
/// # Errors
/// As for [`thread::launch`]; two ranks on one GPU if NCCL rejects that; a missing GPU or driver.
pub fn launch<T, E, F>(gpus: &[usize], options: &LaunchOptions, run: F) -> Result<Vec<T>, LaunchError>
where
    T: Send,
    E: Into<Box<dyn Error + Send + Sync>>,
    F: Fn(RankContext) -> Result<T, E> + Sync,
{
    thread::launch(gpus.len(), options, |context| -> Result<T, Box<dyn Error + Send + Sync>> {
        let device = open_gpu(gpus[context.rank])?;
        let bootstrap = context.group.clone();
        let (own, group) = join_over(bootstrap.clone(), &device, options.timeout)?;
        let group = if options.check { checked(&own, group)? } else { group };
        let outcome = run(RankContext { group: group.clone(), ..context }).map_err(Into::into);
        // Notify the other ranks before the groups are dropped, which waits for operations in progress.
        outcome.inspect_err(|error| bootstrap.abort(&with_causes(&**error)))
    })
}

/// Returns NCCL's version: major, minor, patch.
///
/// # Errors
/// NCCL's error.
pub fn version() -> Result<[i32; 3], CommError> {
    let refuse = |reason: String| CommError::Start { library: "NCCL", rank: None, reason };
    let version = communicator::version().map_err(refuse)?;
    Ok([version / 10_000, version / 100 % 100, version % 100])
}

/// Creates an NCCL group of the ranks of `bootstrap`, a group that supports CPU tensors. Collective. `device` is this
/// rank's GPU, on whose stream its tensors are used.
///
/// # Errors
/// [`CommError::Start`] when NCCL cannot start, or two ranks are on one GPU.
pub fn over(
    bootstrap: Arc<dyn ProcessGroup>,
    device: &Device,
    timeout: Duration,
) -> Result<Arc<dyn ProcessGroup>, CommError> {
    join_over(bootstrap, device, timeout).map(|(_, group)| group)
}

/// A rank, and its handle of the group of all ranks.
type Joined = (Arc<NcclRank>, Arc<dyn ProcessGroup>);

/// Wraps a group so that its ranks compare their calls. Collective.
pub(super) fn checked(
    own: &Arc<NcclRank>,
    group: Arc<dyn ProcessGroup>,
) -> Result<Arc<dyn ProcessGroup>, CommError> {
    own.set_checked();
    DesyncCheck::over(group, own.clone())
}

fn join_over(
    bootstrap: Arc<dyn ProcessGroup>,
    device: &Device,
    timeout: Duration,
) -> Result<Joined, CommError> {
    let rank = bootstrap.membership().global_rank();
    let refuse = |reason: String| CommError::Start { library: "NCCL", rank: Some(rank), reason };
    let own_rank = NcclRank::new(rank, device, timeout, Some(bootstrap.clone()))?;
    let own_uuid = gpu_uuid(&own_rank).map_err(refuse)?;
    let uuids = bootstrap.all_gather_values(&own_uuid)?;
    let uuids: Vec<&[u8]> = uuids.chunks(own_uuid.len()).collect();
    let version = communicator::version().map_err(refuse)?;
    check_gpus(&uuids, version, may_share_gpus())?;
    if version < SEPARATE_POOLS_VERSION {
        allow_peer_access(device).map_err(|error| refuse(error.to_string()))?;
    }
    let own = if bootstrap.rank() == 0 { unique_id().map_err(refuse)? } else { [0; ID_BYTES] };
    let ids = bootstrap.all_gather_values(&own)?;
    let mut id = own;
    id.copy_from_slice(&ids[..ID_BYTES]);
    let group = join(&own_rank, &id, bootstrap.membership().clone())?;
    Ok((own_rank, group))
}

/// Creates the group of all processes of a job in which every process drives one GPU.
///
/// `info` identifies this process. The local rank is the GPU's ordinal, unless the process sees a single GPU. NCCL_COMM_ID (`host:port`, the same everywhere) or
/// MASTER_ADDR gives the host of rank 0; for SLURM's tasks it is known. The ranks connect to port ULYSSES_MASTER_PORT, or
/// else MASTER_PORT + 1, since torchrun's own store uses MASTER_PORT. Rank 0 listens on the address of MASTER_ADDR
/// (ULYSSES_MASTER_BIND sets another), and accepts only processes with the same ULYSSES_JOB_SECRET.
///
/// # Errors
/// [`CommError::Start`] naming the variable that is missing or invalid, or why NCCL or the GPU cannot be used.
pub fn from_env(info: &ProcessInfo, timeout: Duration) -> Result<Arc<dyn ProcessGroup>, CommError> {
    join_from_env(info, timeout).map(|(_, group)| group)
}

pub(super) fn join_from_env(info: &ProcessInfo, timeout: Duration) -> Result<Joined, CommError> {
    let environment = Environment::read(info, |name| std::env::var(name).ok())?;
    let Environment { rank, world_size, local_rank, meeting } = environment;
    let refuse = |reason: String| CommError::Start { library: "NCCL", rank: Some(rank), reason };
    let gpus = gpu_count().map_err(|error| refuse(error.to_string()))?;
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let ordinal = process_gpu(local_rank, gpus, visible.as_deref()).map_err(refuse)?;
    let device = open_gpu(ordinal).map_err(|error| refuse(error.to_string()))?;
    let own_rank = NcclRank::new(rank, &device, timeout, None)?;
    let id = match meeting {
        Rendezvous::Nccl => unique_id().map_err(refuse)?,
        Rendezvous::At(point) => {
            let mut store = Store::meet(&point, rank, timeout).map_err(refuse)?;
            let gpus = share_gpus(&mut store, &own_rank, world_size, timeout).map_err(refuse)?;
            let version = communicator::version().map_err(refuse)?;
            if let Err(refused) = check_gpus(&gpus, version, may_share_gpus()) {
                // The other processes must have received all GPUs, so that they end with the same error.
                store.disconnect();
                return Err(refused);
            }
            let id = share_id(&mut store, timeout).map_err(refuse)?;
            own_rank.set_control(ControlPlane::new(rank, world_size, ControlChannel::new(store)));
            id
        }
    };
    let group = join(&own_rank, &id, Membership::new("world", (0..world_size).collect(), rank))?;
    Ok((own_rank, group))
}

/// Returns the UUID of the rank's GPU, which is the same in all processes.
fn gpu_uuid(own: &NcclRank) -> Result<[u8; 16], String> {
    let uuid = own.compute.context().uuid().map_err(|error| error.to_string())?;
    Ok(uuid.bytes.map(|byte| byte as u8))
}

/// Returns the UUID of the GPU of every rank.
fn share_gpus(
    store: &mut Store,
    own: &NcclRank,
    world_size: usize,
    timeout: Duration,
) -> Result<Vec<Arc<[u8]>>, String> {
    let key = |rank: usize| format!("nccl/gpu/{rank}");
    store.set(&key(own.rank), gpu_uuid(own)?);
    (0..world_size).map(|rank| store.wait(&key(rank), timeout)).collect()
}

/// Returns the id of the communicator of all ranks, which rank 0 creates.
fn share_id(store: &mut Store, timeout: Duration) -> Result<Id, String> {
    const KEY: &str = "nccl/id";
    if store.rank() == 0 {
        let id = unique_id()?;
        store.set(KEY, id);
        return Ok(id);
    }
    let id = store.wait(KEY, timeout)?;
    (*id).try_into().map_err(|_| format!("rank 0 set an id of {} bytes, expected {ID_BYTES}", id.len()))
}

fn join(own: &Arc<NcclRank>, id: &Id, membership: Membership) -> Result<Arc<dyn ProcessGroup>, CommError> {
    let refuse = |reason| own.fail(CommError::Start { library: "NCCL", rank: Some(own.rank), reason });
    let communicator = Communicator::join(id, membership.rank, membership.world_size()).map_err(refuse)?;
    // From now on, a failure elsewhere ends the wait for the other ranks.
    own.adopt(&communicator)?;
    communicator.wait_ready(own.deadline()).map_err(refuse)?;
    Ok(Arc::new(NcclGroup::new(Arc::new(ShutdownGuard(own.clone())), communicator, membership)))
}
