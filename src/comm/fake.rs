//! A group of which one rank is real: it counts what it would move, and moves nothing.
//!
//! The real engine runs on it as one rank of any world, so that its memory and its counters can be had
//! for meshes that no machine at hand could hold. The numbers that it computes mean nothing: what other ranks
//! would send is zero, or what this one has.

use super::arguments::Arguments;
use super::{
    CollectiveOp, CommError, GroupStats, Pending, ProcessGroup, ReduceOp, StridedPlan, Traffic, strided,
};
use candle_core::Tensor;
use parking_lot::Mutex;
use std::sync::Arc;
use ulysses_kernels::{elementwise, strided_copy};

/// One real rank of a group whose other members are pretended.
///
/// Reductions leave what this rank has, gathers repeat it, and exchanges bring zeros: all finite where the inputs
/// are. A split fails, since nobody knows the colours of the others: make the groups along each axis.
#[derive(Debug)]
pub struct FakeGroup {
    name: String,
    rank: usize,
    global_ranks: Vec<usize>,
    stats: Mutex<GroupStats>,
}

impl FakeGroup {
    /// Member number `rank` of the ordered `global_ranks`.
    ///
    /// # Errors
    /// A `rank` that is not below their number.
    pub fn new(name: impl Into<String>, global_ranks: Vec<usize>, rank: usize) -> Result<Self, CommError> {
        let group = Self { name: name.into(), rank, global_ranks, stats: Mutex::default() };
        group.arguments(CollectiveOp::Split).rank("own", rank)?;
        Ok(group)
    }

    fn arguments(&self, op: CollectiveOp) -> Arguments<'_> {
        Arguments { group: &self.name, world_size: self.global_ranks.len(), op }
    }

    /// Counts a call that would move `traffic` of elements like those of `like`.
    fn count(&self, op: CollectiveOp, traffic: &Traffic, like: &Tensor) -> Pending {
        if self.global_ranks.len() > 1 {
            let bytes = like.dtype().size_in_bytes() as u64;
            let mut stats = self.stats.lock();
            let counted = stats.ops.entry(op).or_default();
            counted.calls += 1;
            counted.bytes_sent += traffic.total_sent() * bytes;
            counted.bytes_received += traffic.total_received() * bytes;
        }
        Pending::ready()
    }

    fn unsupported(&self, op: CollectiveOp) -> CommError {
        let reason = "a pretended peer does not answer; a fake group has collectives only";
        self.arguments(op).invalid(reason.to_owned())
    }
}

impl ProcessGroup for FakeGroup {
    fn name(&self) -> &str {
        &self.name
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn global_ranks(&self) -> &[usize] {
        &self.global_ranks
    }

    fn start_all_reduce(&self, tensor: &Tensor, _op: ReduceOp) -> Result<Pending, CommError> {
        let op = CollectiveOp::AllReduce;
        self.arguments(op).tensors(&[tensor])?;
        let traffic = Traffic::all_reduce(self.world_size(), self.rank, tensor.elem_count());
        Ok(self.count(op, &traffic, tensor))
    }

    fn start_reduce_scatter(
        &self,
        input: &Tensor,
        output: &Tensor,
        _op: ReduceOp,
    ) -> Result<Pending, CommError> {
        let (op, chunk) = (CollectiveOp::ReduceScatter, output.elem_count());
        self.arguments(op).tensors(&[input, output])?;
        self.arguments(op).chunks(("input", input), ("output", output))?;
        strided_copy::copy(&input.flatten_all()?.narrow(0, self.rank * chunk, chunk)?, output)?;
        Ok(self.count(op, &Traffic::reduce_scatter(self.world_size(), self.rank, chunk), input))
    }

    fn start_all_gather(&self, input: &Tensor, output: &Tensor) -> Result<Pending, CommError> {
        let (op, count) = (CollectiveOp::AllGather, input.elem_count());
        self.arguments(op).tensors(&[input, output])?;
        self.arguments(op).chunks(("output", output), ("input", input))?;
        let input = super::buffer::apart(input, &[output])?;
        for chunk in 0..self.world_size() {
            strided_copy::copy(&input, &output.flatten_all()?.narrow(0, chunk * count, count)?)?;
        }
        Ok(self.count(op, &Traffic::all_gather(self.world_size(), self.rank, count), output))
    }

    fn start_all_to_all(
        &self,
        input: &Tensor,
        output: &Tensor,
        send_counts: &[usize],
        recv_counts: &[usize],
    ) -> Result<Pending, CommError> {
        let op = CollectiveOp::AllToAll;
        self.arguments(op).tensors(&[input, output])?;
        self.arguments(op).counts("send", send_counts, input)?;
        self.arguments(op).counts("recv", recv_counts, output)?;
        elementwise::fill(output, 0.0)?;
        Ok(self.count(op, &Traffic::all_to_all(self.rank, send_counts, recv_counts), output))
    }

    fn start_all_to_all_strided(
        &self,
        inputs: &[Tensor],
        outputs: &[Tensor],
        plan: &Arc<StridedPlan>,
    ) -> Result<Pending, CommError> {
        strided::validate(&self.name, self.world_size(), inputs, outputs, plan)?;
        outputs.iter().try_for_each(|output| elementwise::fill(output, 0.0))?;
        Ok(self.count(CollectiveOp::AllToAllStrided, &Traffic::strided(self.rank, plan), &inputs[0]))
    }

    fn start_broadcast(&self, tensor: &Tensor, root: usize) -> Result<Pending, CommError> {
        let op = CollectiveOp::Broadcast;
        self.arguments(op).tensors(&[tensor])?;
        self.arguments(op).rank("root", root)?;
        let traffic = Traffic::broadcast(self.world_size(), self.rank, root, tensor.elem_count());
        Ok(self.count(op, &traffic, tensor))
    }

    fn start_send(&self, _tensor: &Tensor, _dst: usize) -> Result<Pending, CommError> {
        Err(self.unsupported(CollectiveOp::Send))
    }

    fn start_recv(&self, _tensor: &Tensor, _src: usize) -> Result<Pending, CommError> {
        Err(self.unsupported(CollectiveOp::Recv))
    }

    fn start_barrier(&self) -> Result<Pending, CommError> {
        Ok(Pending::ready())
    }

    fn split(
        &self,
        _name: &str,
        _color: Option<usize>,
        _key: usize,
    ) -> Result<Option<Arc<dyn ProcessGroup>>, CommError> {
        Err(self.unsupported(CollectiveOp::Split))
    }

    fn stats(&self) -> GroupStats {
        self.stats.lock().clone()
    }

    fn abort(&self, _reason: &str) {}
}
