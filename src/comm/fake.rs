//! A group of which one rank is real: it counts what it would move, and moves nothing.
//!
//! The real engine runs on it as one rank of any world, so that its memory and its counters can be had
//! for meshes that no machine at hand could hold. The numbers that it computes mean nothing: what other ranks
//! would send is zero, or what this one has.

use super::arg_check::ArgCheck;
use super::{CollectiveArgs, CollectiveOp, CommError, GroupStats, Pending, ProcessGroup, Traffic};
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
        group.check_of(CollectiveOp::Split).rank("own", rank)?;
        Ok(group)
    }

    fn check_of(&self, op: CollectiveOp) -> ArgCheck<'_> {
        ArgCheck { group: &self.name, world_size: self.global_ranks.len(), op }
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
        self.check_of(op).invalid(reason.to_owned())
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

    fn start(&self, call: CollectiveArgs<'_>) -> Result<Pending, CommError> {
        let (rank, ranks) = (self.rank, self.world_size());
        call.check(&self.name, ranks)?;
        let op = call.op();
        Ok(match call {
            CollectiveArgs::AllReduce { tensor, .. } => {
                self.count(op, &Traffic::all_reduce(ranks, rank, tensor.elem_count()), tensor)
            }
            CollectiveArgs::ReduceScatter { input, output, .. } => {
                let chunk = output.elem_count();
                strided_copy::copy(&input.flatten_all()?.narrow(0, rank * chunk, chunk)?, output)?;
                self.count(op, &Traffic::reduce_scatter(ranks, rank, chunk), input)
            }
            CollectiveArgs::AllGather { input, output } => {
                let (count, input) = (input.elem_count(), super::buffer::apart(input, &[output])?);
                for chunk in 0..ranks {
                    strided_copy::copy(&input, &output.flatten_all()?.narrow(0, chunk * count, count)?)?;
                }
                self.count(op, &Traffic::all_gather(ranks, rank, count), output)
            }
            CollectiveArgs::AllToAll { output, send_counts, recv_counts, .. } => {
                elementwise::fill(output, 0.0)?;
                self.count(op, &Traffic::all_to_all(rank, send_counts, recv_counts), output)
            }
            CollectiveArgs::AllToAllStrided { inputs, outputs, plan } => {
                outputs.iter().try_for_each(|output| elementwise::fill(output, 0.0))?;
                self.count(op, &Traffic::strided(rank, plan), &inputs[0])
            }
            CollectiveArgs::Broadcast { tensor, root } => {
                self.count(op, &Traffic::broadcast(ranks, rank, root, tensor.elem_count()), tensor)
            }
            CollectiveArgs::Barrier => Pending::ready(),
            CollectiveArgs::Send { .. } | CollectiveArgs::Recv { .. } => return Err(self.unsupported(op)),
        })
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
