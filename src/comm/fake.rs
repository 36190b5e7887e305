//! A group with one real rank: it reports what it would move, and moves no data.
//!
//! The real engine runs on it as one rank of a world of any size. That measures memory and traffic of meshes that no
//! available machine could hold. Outputs keep the values that they had before. [`FakeMeshGroups`] are those of a mesh.

mod mesh_groups;

pub use mesh_groups::{ENDS, FakeMeshGroups};

use super::arg_check::ArgCheck;
use super::stats::TrafficCounter;
use super::traffic::{DIRECT_REDUCE_MAX_ELEMS, all_reduce_chunk};
use super::{
    Call, CallSignature, CollectiveOp, CommError, GroupStats, Membership, Pending, ProcessGroup, Traffic,
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
    membership: Membership,
    traffic: Mutex<TrafficCounter>,
    observer: Option<Arc<FakeObserver>>,
}

/// A callback for every collective of a [`FakeGroup`] with several ranks.
pub type FakeObserver = dyn Fn(FakeCollective<'_>) + Send + Sync;

/// A collective of a [`FakeGroup`].
#[derive(Debug, Clone, Copy)]
pub struct FakeCollective<'a> {
    /// The name of the group.
    pub group: &'a str,
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
            .field("name", &self.name())
            .field("rank", &self.rank())
            .finish_non_exhaustive()
    }
}

impl FakeGroup {
    /// Creates member `rank` of the ordered `global_ranks`.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if `rank` is not below the number of ranks.
    pub fn new(name: impl Into<String>, global_ranks: Vec<usize>, rank: usize) -> Result<Self, CommError> {
        let traffic = Mutex::new(TrafficCounter::new(global_ranks.len()));
        let group = Self { membership: Membership::new(name, global_ranks, rank), traffic, observer: None };
        ArgCheck::new(&group, CollectiveOp::Split).rank("own", rank)?;
        Ok(group)
    }

    /// Calls `observer` for every collective.
    #[must_use]
    pub fn observed(self, observer: Arc<FakeObserver>) -> Self {
        Self { observer: Some(observer), ..self }
    }

    /// Counts a call with `input_elems` elements of input. It holds its `buffers` until it completes, when it allocates
    /// `scratch` elements.
    fn record(
        &self,
        call: &CallSignature,
        input_elems: usize,
        buffers: Vec<Tensor>,
        scratch: usize,
    ) -> Pending {
        let Membership { group, rank } = &self.membership;
        let (op, ranks) = (call.op(), self.world_size());
        let Some(first) = buffers.first().filter(|_| ranks > 1) else { return Pending::ready() };
        let (dtype, device) = (first.dtype(), first.device().clone());
        let traffic = Traffic::new(call, *rank, ranks);
        let sequence = {
            let mut counter = self.traffic.lock();
            let sequence = counter.num_calls();
            counter.call(op);
            let bytes = dtype.size_in_bytes() as u64;
            traffic.sent.iter().enumerate().for_each(|(to, sent)| counter.sent(op, to, sent * bytes));
            counter.received(op, traffic.stats(dtype).bytes_received);
            sequence
        };
        let Some(observer) = self.observer.clone() else { return Pending::ready() };
        let started = FakeTransfer { input_elems, traffic: &traffic };
        observer(FakeCollective { group: &group.name, op, dtype, sequence, started: Some(started) });
        let group = group.clone();
        let complete = move || {
            drop(zeros(scratch, dtype, &device)?);
            drop(buffers);
            observer(FakeCollective { group: &group.name, op, dtype, sequence, started: None });
            Ok(())
        };
        Pending::new(|| true, complete, |_| {})
    }
}

impl ProcessGroup for FakeGroup {
    fn membership(&self) -> &Membership {
        &self.membership
    }

    fn start(&self, call: Call<'_>) -> Result<Pending, CommError> {
        let Call { signature, inputs, outputs } = &call;
        match signature {
            // Backends that move data also compare the blocks with one another.
            CallSignature::AllToAllStrided { plan, .. } => {
                ArgCheck::new(self, call.op()).plan_bounds(inputs, outputs, plan)?;
            }
            _ => call.check(self)?,
        }
        let (rank, ranks) = (self.rank(), self.world_size());
        let mut input_elems = inputs.iter().map(Tensor::elem_count).sum();
        // Elements that are reduced into a buffer by threads, and received or packed by ranks without access to their peers.
        let (mut reduced, mut staged) = (0, Vec::new());
        match signature {
            CallSignature::AllReduce { elements, .. } | CallSignature::Reduce { elements, .. } => {
                reduced = match elements.count {
                    count if count > DIRECT_REDUCE_MAX_ELEMS => all_reduce_chunk(ranks, rank, count).len(),
                    count if signature.is_target(rank) => count,
                    _ => 0,
                };
            }
            CallSignature::ReduceScatter { chunk, .. } if chunk.dtype != outputs[0].dtype() => {
                staged = vec![input_elems];
            }
            CallSignature::AllToAllStrided { plan, .. } => {
                let counts = plan.counts();
                input_elems = counts.send.iter().sum();
                staged = vec![input_elems, counts.recv.iter().sum()];
            }
            _ => {}
        }
        let mut buffers = [*inputs, *outputs].concat();
        if let Some(like) = call.tensors().next().filter(|tensor| is_without_peer_access(tensor)) {
            for elems in staged {
                buffers.push(zeros(elems, like.dtype(), like.device())?);
            }
        }
        Ok(self.record(signature, input_elems, buffers, reduced))
    }

    fn split(
        &self,
        _name: &str,
        _color: Option<usize>,
        _key: usize,
    ) -> Result<Option<Arc<dyn ProcessGroup>>, CommError> {
        let reason =
            "not supported by a fake group, whose peers are simulated; create the group of each axis";
        Err(ArgCheck::new(self, CollectiveOp::Split).invalid(reason.to_owned()))
    }

    fn stats(&self) -> GroupStats {
        self.traffic.lock().stats()
    }

    fn sent_to(&self) -> Vec<u64> {
        self.traffic.lock().sent_to()
    }

    fn abort(&self, _reason: &str) {}
}

/// Returns whether the tensors of a dry run are those of a GPU, whose ranks communicate by NCCL.
fn is_without_peer_access(tensor: &Tensor) -> bool {
    dry::is_dry() && matches!(Target::of(tensor.device()), Ok(Target::Kernels(_)))
}
