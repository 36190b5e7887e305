//! A group with one real rank: it reports what it would move, and moves no data.
//!
//! The real engine runs on it as one rank of a world of any size. That measures memory and traffic of meshes that no
//! available machine could hold. Outputs keep the values that they had before.

use super::arg_check::ArgCheck;
use super::args::RootedExchange;
use super::traffic::{DIRECT_REDUCE_MAX_ELEMS, all_reduce_chunk};
use super::{
    CollectiveArgs, CollectiveOp, CommError, GroupStats, Pending, ProcessGroup, StridedPlan, Traffic,
};
use candle_core::{DType, Tensor};
use parking_lot::Mutex;
use std::fmt;
use std::sync::Arc;
use ulysses_kernels::device::{Target, dry};
use ulysses_kernels::tensor::zeros;

/// One real rank of a group whose other members are simulated.
///
/// As with other backends, an operation holds its tensors until `wait`. `split` fails, since the colors of the
/// simulated ranks are unknown: create the group of each axis directly.
pub struct FakeGroup {
    name: String,
    rank: usize,
    global_ranks: Vec<usize>,
    stats: Mutex<GroupStats>,
    sent_to: Mutex<Vec<u64>>,
    observer: Option<Arc<FakeObserver>>,
}

/// A callback for every collective of a [`FakeGroup`] with several ranks.
pub type FakeObserver = dyn Fn(FakeCollective<'_>) + Send + Sync;

/// A collective of a [`FakeGroup`].
#[derive(Debug, Clone, Copy)]
pub struct FakeCollective<'a> {
    /// The operation.
    pub op: CollectiveOp,
    /// The dtype of its elements.
    pub dtype: DType,
    /// The number of collectives of the group before it.
    pub sequence: u64,
    /// The traffic, when the collective starts; `None` when it completes.
    pub started: Option<FakeTransfer<'a>>,
}

/// The data that a collective moves.
#[derive(Debug, Clone, Copy)]
pub struct FakeTransfer<'a> {
    /// Number of input elements of this rank.
    pub input_elems: usize,
    /// Elements sent and received.
    pub traffic: &'a Traffic,
}

impl fmt::Debug for FakeGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FakeGroup")
            .field("name", &self.name)
            .field("rank", &self.rank)
            .finish_non_exhaustive()
    }
}

impl FakeGroup {
    /// Creates member `rank` of the ordered `global_ranks`.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if `rank` is not below the number of ranks.
    pub fn new(name: impl Into<String>, global_ranks: Vec<usize>, rank: usize) -> Result<Self, CommError> {
        let (stats, sent_to) = (Mutex::default(), Mutex::new(vec![0; global_ranks.len()]));
        let group = Self { name: name.into(), rank, global_ranks, stats, sent_to, observer: None };
        group.check_of(CollectiveOp::Split).rank("own", rank)?;
        Ok(group)
    }

    /// Calls `observer` for every collective.
    #[must_use]
    pub fn observed(self, observer: Arc<FakeObserver>) -> Self {
        Self { observer: Some(observer), ..self }
    }

    fn check_of(&self, op: CollectiveOp) -> ArgCheck<'_> {
        ArgCheck { group: &self.name, world_size: self.global_ranks.len(), op }
    }

    /// Starts a call that would move `traffic`, with elements like those of the first of `buffers`. Allocates
    /// `scratch` elements when it completes.
    fn record(
        &self,
        op: CollectiveOp,
        (input_elems, traffic): (usize, &Traffic),
        buffers: Vec<Tensor>,
        scratch: usize,
    ) -> Pending {
        if self.global_ranks.len() == 1 {
            return Pending::ready();
        }
        let (dtype, device) = (buffers[0].dtype(), buffers[0].device().clone());
        let bytes = dtype.size_in_bytes() as u64;
        let sequence = {
            let mut stats = self.stats.lock();
            let sequence = stats.ops.values().map(|counted| counted.calls).sum();
            let counted = stats.ops.entry(op).or_default();
            counted.calls += 1;
            counted.bytes_sent += traffic.total_sent() * bytes;
            counted.bytes_received += traffic.total_received() * bytes;
            sequence
        };
        self.sent_to.lock().iter_mut().zip(&traffic.sent).for_each(|(sum, sent)| *sum += sent * bytes);
        let Some(observer) = self.observer.clone() else { return Pending::ready() };
        let started = FakeTransfer { input_elems, traffic };
        observer(FakeCollective { op, dtype, sequence, started: Some(started) });
        let complete = move || {
            drop(zeros(scratch, dtype, &device)?);
            drop(buffers);
            observer(FakeCollective { op, dtype, sequence, started: None });
            Ok(())
        };
        Pending::new(|| true, complete, |_| {})
    }

    fn start_strided(
        &self,
        inputs: &[Tensor],
        outputs: &[Tensor],
        plan: &StridedPlan,
    ) -> Result<Pending, CommError> {
        let (send_counts, recv_counts) = plan.counts();
        let [sent, received] = [send_counts, recv_counts].map(|counts| counts.into_iter().sum::<usize>());
        let mut buffers = [inputs, outputs].concat();
        if is_without_peer_access(&inputs[0]) {
            // The blocks are packed.
            for elems in [sent, received] {
                buffers.push(zeros(elems, inputs[0].dtype(), inputs[0].device())?);
            }
        }
        let traffic = Traffic::strided(self.rank, plan);
        Ok(self.record(CollectiveOp::AllToAllStrided, (sent, &traffic), buffers, 0))
    }

    fn unsupported(&self, op: CollectiveOp) -> CommError {
        let reason =
            "not supported by a fake group, whose peers are simulated; create the group of each axis";
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
        let op = call.op();
        match &call {
            // Backends that move data also compare the blocks with one another.
            CollectiveArgs::AllToAllStrided { inputs, outputs, plan } => {
                self.check_of(op).plan_bounds(inputs, outputs, plan).map(drop)?;
            }
            _ => call.check(&self.name, rank, ranks).map(drop)?,
        }
        Ok(match call {
            CollectiveArgs::AllReduce { tensor, .. } => {
                let elems = tensor.elem_count();
                // The thread backend reduces into its own buffer.
                let reduced = match elems <= DIRECT_REDUCE_MAX_ELEMS {
                    true => elems,
                    false => all_reduce_chunk(ranks, rank, elems).len(),
                };
                let traffic = Traffic::all_reduce(ranks, rank, elems);
                self.record(op, (elems, &traffic), vec![tensor.clone()], reduced)
            }
            CollectiveArgs::ReduceScatter { input, output, .. } => {
                let traffic = Traffic::reduce_scatter(ranks, rank, output.elem_count());
                let mut buffers = vec![input.clone(), output.clone()];
                if input.dtype() != output.dtype() && is_without_peer_access(input) {
                    // The ranks' elements are received before they are summed.
                    buffers.push(zeros(input.elem_count(), input.dtype(), input.device())?);
                }
                self.record(op, (input.elem_count(), &traffic), buffers, 0)
            }
            CollectiveArgs::AllGather { input, output } => {
                let traffic = Traffic::all_gather(ranks, rank, input.elem_count());
                self.record(op, (input.elem_count(), &traffic), vec![input.clone(), output.clone()], 0)
            }
            CollectiveArgs::AllToAll { input, output, send_counts, recv_counts } => {
                let traffic = Traffic::all_to_all(rank, send_counts, recv_counts);
                self.record(op, (input.elem_count(), &traffic), vec![input.clone(), output.clone()], 0)
            }
            CollectiveArgs::AllToAllStrided { inputs, outputs, plan } => {
                self.start_strided(inputs, outputs, plan)?
            }
            CollectiveArgs::Broadcast { tensor, root } => {
                let traffic = Traffic::broadcast(ranks, rank, root, tensor.elem_count());
                self.record(op, (tensor.elem_count(), &traffic), vec![tensor.clone()], 0)
            }
            CollectiveArgs::Reduce { tensor, root, .. } => {
                let elems = tensor.elem_count();
                let reduced = match elems <= DIRECT_REDUCE_MAX_ELEMS {
                    true if rank != root => 0,
                    true => elems,
                    false => all_reduce_chunk(ranks, rank, elems).len(),
                };
                let traffic = Traffic::reduce(ranks, rank, root, elems);
                self.record(op, (elems, &traffic), vec![tensor.clone()], reduced)
            }
            CollectiveArgs::Gather { .. } | CollectiveArgs::Scatter { .. } => {
                let Some(exchange) = call.as_all_to_all(rank, ranks)? else { return Ok(Pending::ready()) };
                let RootedExchange { input, output, send_counts, recv_counts } = exchange;
                let traffic = Traffic::all_to_all(rank, &send_counts, &recv_counts);
                self.record(op, (input.elem_count(), &traffic), vec![input, output], 0)
            }
            CollectiveArgs::Barrier => Pending::ready(),
            CollectiveArgs::Send { tensor, dst } => {
                let (elems, ends) = (tensor.elem_count(), (rank, dst));
                let traffic = Traffic::message(ranks, rank, ends, elems);
                self.record(op, (elems, &traffic), vec![tensor.clone()], 0)
            }
            CollectiveArgs::Recv { tensor, src } => {
                let traffic = Traffic::message(ranks, rank, (src, rank), tensor.elem_count());
                self.record(op, (0, &traffic), vec![tensor.clone()], 0)
            }
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

    fn sent_to(&self) -> Vec<u64> {
        self.sent_to.lock().clone()
    }

    fn abort(&self, _reason: &str) {}
}

/// Returns whether the tensors of a dry run are those of a GPU, whose ranks communicate by NCCL.
fn is_without_peer_access(tensor: &Tensor) -> bool {
    dry::is_dry() && matches!(Target::of(tensor.device()), Ok(Target::Kernels(_)))
}
