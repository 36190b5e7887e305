//! The [`ProcessGroup`] trait, which every backend implements.

use super::{
    Call, CallSignature, CommError, Elements, GroupStats, Membership, Pending, ReduceOp, StridedPlan,
};
use candle_core::{Device, Tensor};
use std::slice::from_ref;
use std::sync::Arc;

/// An ordered set of ranks that communicate with one another.
///
/// The trait is object-safe: the library passes it as `Arc<dyn ProcessGroup>`. A backend implements
/// [`start`](Self::start). Callers use the `start_*` methods or, if they have no work to overlap, the blocking
/// ones of [`ProcessGroupExt`](super::ProcessGroupExt).
///
/// A candle [`Tensor`] is the type-erased buffer: it knows its device and its
/// dtype, and cloning it increments a reference count. All tensors must be contiguous, and the tensors
/// of one call must be on one device.
/// Outputs are written in place. An output must not share storage with an input of the
/// same call, unless the method works in place. Shapes do not matter,
/// only element counts.
///
/// # Contract
/// - Every rank of the group issues the same operations in the same order.
/// - `start_*` publishes the operation and returns; the data is valid once
///   [`Pending::wait`] has returned. Until then the caller writes none of the inputs
///   and reads none of the outputs. On a GPU, "valid" refers to the order of the
///   tensors' stream: work launched after `wait` sees the data, but the host has not
///   waited for the GPU.
/// - Collectives of a group complete in the order in which they were issued. Messages
///   ([`start_send`](Self::start_send)) keep their order within a pair of ranks and
///   are independent of other pairs. With regard to collectives, of any group, both
///   ranks issue a message at the same place: NCCL has one order for all of them.
/// - While a rank waits for one operation, its other operations progress, in all groups: ranks may
///   wait in different orders.
/// - A failure on any rank (error, panic, timeout, mismatched call) becomes an
///   error on every rank, which names the rank that caused it.
/// - Reductions add in rank order 0, 1, 2 …, so results are bit-identical on all
///   ranks and from run to run. (NCCL uses its own order: see [`ReduceOp`].)
pub trait ProcessGroup: Send + Sync + std::fmt::Debug {
    /// Name and members of the group, and this rank's index among them. [`name`](Self::name), [`rank`](Self::rank),
    /// [`global_ranks`](Self::global_ranks) and [`world_size`](Self::world_size) follow from it and must not be overridden: the
    /// library uses either.
    fn membership(&self) -> &Membership;

    /// Group name used in messages and statistics, for example `"sp"`.
    fn name(&self) -> &str {
        &self.membership().group.name
    }

    /// This rank's index within the group.
    fn rank(&self) -> usize {
        self.membership().rank
    }

    /// Global ranks of the members, in group order.
    fn global_ranks(&self) -> &[usize] {
        &self.membership().group.members
    }

    /// Number of members.
    fn world_size(&self) -> usize {
        self.membership().world_size()
    }

    /// The device for collectives on plain values, such as
    /// [`all_reduce_values`](super::ProcessGroupExt::all_reduce_values). Backends that
    /// support no CPU tensors return their GPU.
    fn value_device(&self) -> Device {
        Device::Cpu
    }

    /// Returns the failure of the group, if there is one. Call it after waiting for a GPU and before
    /// using the result: an aborted operation ends too.
    ///
    /// # Errors
    /// That failure.
    fn check(&self) -> Result<(), CommError> {
        Ok(())
    }

    /// Asks for operations of this rank to progress while it computes, from now on, where that takes help of the CPU.
    /// Without it they progress in the rank's calls. A hint, which changes no result.
    fn progress_in_background(&self) {}

    /// Starts an operation; each of the `start_*` methods calls this. A backend that cannot access its peers' memory
    /// passes strided all-to-alls to [`pack_exchange_unpack`](super::pack_exchange_unpack).
    ///
    /// # Errors
    /// Invalid arguments, or a failure of the group.
    fn start(&self, call: Call<'_>) -> Result<Pending, CommError>;

    /// Reduces `tensor` over the group, in place, leaving the result on every rank.
    fn start_all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<Pending, CommError> {
        self.start(Call::in_place(CallSignature::AllReduce { op, elements: Elements::of(tensor) }, tensor))
    }

    /// Reduces `input` and leaves chunk `rank` of the result in `output`. A sum of 16-bit elements may go to an f32
    /// `output`: every backend then adds in f32 and in rank order, and does not round the sum.
    ///
    /// # Shapes
    /// `input`: `world_size · n` elements, `output`: `n`.
    fn start_reduce_scatter(
        &self,
        input: &Tensor,
        output: &Tensor,
        op: ReduceOp,
    ) -> Result<Pending, CommError> {
        let chunk = Elements { dtype: input.dtype(), count: output.elem_count() };
        let signature = CallSignature::ReduceScatter { op, chunk };
        self.start(Call { signature, inputs: from_ref(input), outputs: from_ref(output) })
    }

    /// Concatenates every rank's `input`, in rank order, into `output`.
    ///
    /// # Shapes
    /// `input`: `n` elements, `output`: `world_size · n`.
    fn start_all_gather(&self, input: &Tensor, output: &Tensor) -> Result<Pending, CommError> {
        let signature = CallSignature::AllGather { chunk: Elements::of(input) };
        self.start(Call { signature, inputs: from_ref(input), outputs: from_ref(output) })
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
        let (dtype, send, recv) = (input.dtype(), send_counts.into(), recv_counts.into());
        let signature = CallSignature::AllToAll { dtype, send, recv };
        self.start(Call { signature, inputs: from_ref(input), outputs: from_ref(output) })
    }

    /// Exchanges strided blocks of several tensors in one all-to-all. All tensors
    /// have the same dtype.
    ///
    /// A backend that can access its peers' memory copies once, straight into the final layout. Others pack, call
    /// [`start_all_to_all`](Self::start_all_to_all) and unpack on completion.
    fn start_all_to_all_strided(
        &self,
        inputs: &[Tensor],
        outputs: &[Tensor],
        plan: &Arc<StridedPlan>,
    ) -> Result<Pending, CommError> {
        self.start(Call::strided(inputs, outputs, plan))
    }

    /// Copies `tensor` of rank `root` into `tensor` of every other rank.
    fn start_broadcast(&self, tensor: &Tensor, root: usize) -> Result<Pending, CommError> {
        let elements = Elements::of(tensor);
        self.start(Call::in_place(CallSignature::Broadcast { elements, root }, tensor))
    }

    /// Reduces `tensor` over the group, in place, leaving the result on rank `root` only. The tensors of the other ranks
    /// keep their values.
    fn start_reduce(&self, tensor: &Tensor, op: ReduceOp, root: usize) -> Result<Pending, CommError> {
        let elements = Elements::of(tensor);
        self.start(Call::in_place(CallSignature::Reduce { op, elements, root }, tensor))
    }

    /// Concatenates every rank's `input`, in rank order, into `output` of rank `root`. The others pass no output.
    ///
    /// # Shapes
    /// `input`: `n` elements, `output`: `world_size · n`.
    fn start_gather(
        &self,
        input: &Tensor,
        output: Option<&Tensor>,
        root: usize,
    ) -> Result<Pending, CommError> {
        let signature = CallSignature::Gather { chunk: Elements::of(input), root };
        self.start(Call { signature, inputs: from_ref(input), outputs: output.map_or(&[], from_ref) })
    }

    /// Copies chunk `rank` of the `input` of rank `root` into every rank's `output`. The others pass no input.
    ///
    /// # Shapes
    /// `input`: `world_size · n` elements, `output`: `n`.
    fn start_scatter(
        &self,
        input: Option<&Tensor>,
        output: &Tensor,
        root: usize,
    ) -> Result<Pending, CommError> {
        let signature = CallSignature::Scatter { chunk: Elements::of(output), root };
        self.start(Call { signature, inputs: input.map_or(&[], from_ref), outputs: from_ref(output) })
    }

    /// Sends `tensor` to rank `dst`, which receives it with
    /// [`start_recv`](Self::start_recv). Messages between a pair keep their order.
    fn start_send(&self, tensor: &Tensor, dst: usize) -> Result<Pending, CommError> {
        self.start(Call::send(tensor, dst))
    }

    /// Receives a tensor of the same dtype and element count from rank `src`.
    fn start_recv(&self, tensor: &Tensor, src: usize) -> Result<Pending, CommError> {
        self.start(Call::recv(tensor, src))
    }

    /// Passes the messages issued so far to the backend's library without waiting for them, if it collects messages:
    /// NCCL must be given those of a ring together. (It does so by itself before a wait or a collective of the group.)
    ///
    /// # Errors
    /// A failure of the group.
    fn flush_messages(&self) -> Result<(), CommError> {
        Ok(())
    }

    /// Whether this rank's messages are sent and received one after another, and each waits for both of its ranks: on the one
    /// stream of NCCL.
    fn has_one_stream(&self) -> bool {
        false
    }

    /// Starts an operation that completes once every rank has issued it.
    fn start_barrier(&self) -> Result<Pending, CommError> {
        self.start(Call::barrier())
    }

    /// Splits the group collectively: ranks with the same `color` form a new
    /// group named `name`, ordered by `(key, rank)` (MPI_Comm_split). Ranks with `None` join
    /// no group. A group of one rank moves no data.
    fn split(
        &self,
        name: &str,
        color: Option<usize>,
        key: usize,
    ) -> Result<Option<Arc<dyn ProcessGroup>>, CommError>;

    /// Returns the traffic of this rank in this group so far.
    fn stats(&self) -> GroupStats;

    /// Returns the bytes that this rank has sent to each member so far, over all operations; final once the members have
    /// completed them too. Empty if the backend does not know, as NCCL, which chooses its own paths.
    fn sent_to(&self) -> Vec<u64> {
        Vec::new()
    }

    /// Marks the group and every group of the same world as failed: all ranks that
    /// wait, and all later calls, get an error with this rank and `reason`.
    fn abort(&self, reason: &str);
}
