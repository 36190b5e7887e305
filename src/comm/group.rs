//! The [`ProcessGroup`] trait: what every backend offers.

use super::{CollectiveArgs, CommError, GroupStats, Pending, ReduceOp, StridedPlan};
use candle_core::{Device, Tensor};
use std::sync::Arc;

/// An ordered set of ranks that communicate with one another.
///
/// The trait is object-safe: the library passes `Arc<dyn ProcessGroup>` about. A backend implements
/// [`start`](Self::start); callers use the `start_*` methods, which are forms of it, and where they have nothing to do
/// meanwhile the blocking ones of [`ProcessGroupExt`](super::ProcessGroupExt).
///
/// A candle [`Tensor`] is the type-erased buffer: it knows its device and its
/// dtype, and cloning it is a reference count. All tensors must be contiguous, and those
/// of one call on one device.
/// Outputs are written in place; an output shares storage with no input of the
/// same call, except where a method is in place by nature. Shapes do not matter,
/// only element counts.
///
/// # Contract
/// - Every rank of the group issues the same operations in the same order.
/// - `start_*` publishes the operation and returns; the data is valid once
///   [`Pending::wait`] returned. Until then the caller writes none of the inputs
///   and reads none of the outputs. On a GPU "valid" is meant in the order of the
///   tensors' stream: what is started after `wait` sees the data, and the host has not
///   waited for the GPU.
/// - Collectives of a group complete in the order in which they were issued. Messages
///   ([`start_send`](Self::start_send)) keep their order within a pair of ranks and
///   are independent of other pairs. With regard to collectives, of any group, both
///   ranks issue a message at the same place: NCCL has one order for all of them.
/// - While a rank waits for one operation its others go on, in all groups: ranks may
///   wait in different orders.
/// - A failure on any rank (error, panic, timeout, diverging call) ends in an
///   error on every rank that names the culprit.
/// - Reductions add in rank order 0, 1, 2 …, so results are bit-identical on all
///   ranks and from run to run. (NCCL has an order of its own: see [`ReduceOp`].)
pub trait ProcessGroup: Send + Sync + std::fmt::Debug {
    /// Name used in messages and statistics, for example `"sp"`.
    fn name(&self) -> &str;

    /// This rank's index within the group.
    fn rank(&self) -> usize;

    /// Global ranks of the members, in group order.
    fn global_ranks(&self) -> &[usize];

    /// Number of members.
    fn world_size(&self) -> usize {
        self.global_ranks().len()
    }

    /// The device that plain values travel on
    /// ([`all_reduce_values`](super::ProcessGroupExt::all_reduce_values) and its like), for
    /// backends that carry no CPU tensors.
    fn value_device(&self) -> Device {
        Device::Cpu
    }

    /// The failure of the group, once there is one. Who has waited for a GPU asks, before
    /// it trusts what it got: an operation that was given up has ended too.
    ///
    /// # Errors
    /// That failure.
    fn check(&self) -> Result<(), CommError> {
        Ok(())
    }

    /// Starts an operation: each of the `start_*` methods calls this. A backend that cannot address its peers' memory
    /// leaves strided exchanges to [`pack_exchange_unpack`](super::pack_exchange_unpack).
    ///
    /// # Errors
    /// Arguments that are wrong, or a failure of the group.
    fn start(&self, call: CollectiveArgs<'_>) -> Result<Pending, CommError>;

    /// Reduces `tensor` over the group, in place, leaving the result on every rank.
    fn start_all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<Pending, CommError> {
        self.start(CollectiveArgs::AllReduce { tensor, op })
    }

    /// Reduces `input` and leaves chunk `rank` of the result in `output`.
    ///
    /// # Shapes
    /// `input`: `world_size · n` elements, `output`: `n`.
    fn start_reduce_scatter(
        &self,
        input: &Tensor,
        output: &Tensor,
        op: ReduceOp,
    ) -> Result<Pending, CommError> {
        self.start(CollectiveArgs::ReduceScatter { input, output, op })
    }

    /// Concatenates every rank's `input`, in rank order, into `output`.
    ///
    /// # Shapes
    /// `input`: `n` elements, `output`: `world_size · n`.
    fn start_all_gather(&self, input: &Tensor, output: &Tensor) -> Result<Pending, CommError> {
        self.start(CollectiveArgs::AllGather { input, output })
    }

    /// Sends `send_counts[j]` consecutive elements to rank `j` and receives
    /// `recv_counts[j]` from it, both laid out in rank order (MPI_Alltoallv).
    ///
    /// # Shapes
    /// `input`: sum of `send_counts`, `output`: sum of `recv_counts`.
    fn start_all_to_all(
        &self,
        input: &Tensor,
        output: &Tensor,
        send_counts: &[usize],
        recv_counts: &[usize],
    ) -> Result<Pending, CommError> {
        self.start(CollectiveArgs::AllToAll { input, output, send_counts, recv_counts })
    }

    /// All-to-all between strided blocks of several tensors: one exchange, however
    /// many tensors take part. All tensors share one dtype.
    ///
    /// A backend that can address its peers' memory makes a single copy into the final layout of it; others pack, call
    /// [`start_all_to_all`](Self::start_all_to_all) and unpack on completion.
    fn start_all_to_all_strided(
        &self,
        inputs: &[Tensor],
        outputs: &[Tensor],
        plan: &Arc<StridedPlan>,
    ) -> Result<Pending, CommError> {
        self.start(CollectiveArgs::AllToAllStrided { inputs, outputs, plan })
    }

    /// Copies `tensor` of rank `root` into `tensor` of every other rank.
    fn start_broadcast(&self, tensor: &Tensor, root: usize) -> Result<Pending, CommError> {
        self.start(CollectiveArgs::Broadcast { tensor, root })
    }

    /// Sends `tensor` to rank `dst`, which receives it with
    /// [`start_recv`](Self::start_recv). Messages between a pair keep their order.
    fn start_send(&self, tensor: &Tensor, dst: usize) -> Result<Pending, CommError> {
        self.start(CollectiveArgs::Send { tensor, dst })
    }

    /// Receives a tensor of the same dtype and element count from rank `src`.
    fn start_recv(&self, tensor: &Tensor, src: usize) -> Result<Pending, CommError> {
        self.start(CollectiveArgs::Recv { tensor, src })
    }

    /// Completes once every rank has issued it.
    fn start_barrier(&self) -> Result<Pending, CommError> {
        self.start(CollectiveArgs::Barrier)
    }

    /// Divides the group, collectively: ranks with the same `color` form a new
    /// group named `name`, ordered by `(key, rank)` (MPI_Comm_split). `None` takes
    /// part in no group. A group of one rank moves nothing.
    fn split(
        &self,
        name: &str,
        color: Option<usize>,
        key: usize,
    ) -> Result<Option<Arc<dyn ProcessGroup>>, CommError>;

    /// What this rank has moved in this group so far.
    fn stats(&self) -> GroupStats;

    /// Marks the group and every group of the same world as failed: all ranks that
    /// wait, and all that call later, get an error with this rank and `reason`.
    fn abort(&self, reason: &str);
}
