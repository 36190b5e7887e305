//! A collective in progress on one rank, with its stages.

use super::communicator::{Communicator, Round, Stage};
use super::peer_reader::PeerReader;
use crate::comm::buffer::{StorageId, copy_into, copy_of};
use crate::comm::diagnostics::OpLabel;
use crate::comm::progress_engine::{Operation, Progress, Published};
use crate::comm::traffic::{DIRECT_REDUCE_MAX_ELEMS, all_reduce_chunk};
use crate::comm::{CallSignature, CommError, Elements, Membership};
use candle_core::{Device, Tensor};
use std::sync::{Arc, OnceLock};
use ulysses_kernels::device::Fence;

/// The result of a split.
pub(super) type SplitResult = Arc<OnceLock<Child>>;

/// A group that a split creates.
#[derive(Debug)]
pub(super) struct Child {
    pub(super) comm: Arc<Communicator>,
    /// This rank's rank in it.
    pub(super) rank: usize,
}

/// A collective that this rank has published.
#[derive(Debug)]
pub(super) struct Collective {
    comm: Arc<Communicator>,
    round: Arc<Round>,
    rank: usize,
    label: OpLabel,
    call: CallSignature,
    outputs: Vec<Tensor>,
    published: Vec<StorageId>,
    /// Device of its tensors; the CPU if it has none.
    device: Device,
    reached: Stage,
    /// The result of a direct all_reduce, until all ranks have read this rank's elements.
    result: Option<Tensor>,
    split: SplitResult,
}

/// The tensors of a call.
pub(super) struct Buffers {
    inputs: Vec<Tensor>,
    outputs: Vec<Tensor>,
    device: Device,
    /// A fence after the GPU work launched before the call.
    fence: Option<Fence>,
}

impl Buffers {
    /// Captures the tensors, with a fence after the work launched so far.
    pub(super) fn new(inputs: Vec<Tensor>, outputs: Vec<Tensor>) -> Result<Self, CommError> {
        let first = inputs.iter().chain(&outputs).next();
        let device = first.map_or(Device::Cpu, |tensor| tensor.device().clone());
        let fence = Fence::after(&device)?;
        Ok(Self { inputs, outputs, device, fence })
    }
}

impl Collective {
    /// Publishes a call. From now on, peers may read the inputs.
    pub(super) fn publish(
        comm: &Arc<Communicator>,
        rank: usize,
        label: OpLabel,
        call: CallSignature,
        buffers: Buffers,
        split: SplitResult,
    ) -> Self {
        let Buffers { inputs, outputs, device, fence } = buffers;
        let round = comm.round(label.sequence);
        let published = inputs.iter().map(StorageId::of).collect();
        comm.count_call(rank, label.op);
        round.post(rank, call.clone(), inputs, fence);
        comm.notify();
        let (comm, reached, result) = (comm.clone(), Stage::Posted, None);
        Self { comm, round, rank, label, call, outputs, published, device, reached, result, split }
    }

    fn reach(&mut self, stage: Stage) -> Result<(), CommError> {
        self.reached = stage;
        self.round.reach(self.rank, stage, Fence::after(&self.device)?);
        self.comm.notify();
        Ok(())
    }

    /// Makes this rank's stream wait for the fences of all ranks at a stage, so their GPU work
    /// launched before it precedes this rank's later work.
    fn wait_fences(&self) -> Result<(), CommError> {
        self.round.wait_fences(self.rank, &self.device)
    }

    fn peer_reader(&self) -> PeerReader<'_> {
        PeerReader { comm: &self.comm, round: &self.round, rank: self.rank, op: self.label.op }
    }

    /// Moves this rank's data once all ranks have posted, and marks the stage that is then reached.
    fn pull_and_mark(&mut self, published: &Published<'_>) -> Result<(), CommError> {
        self.round.compare(&self.label)?;
        self.wait_fences()?;
        let stage = self.pull(published)?;
        self.reach(stage)
    }

    /// Moves this rank's data. Returns the stage that is then reached.
    fn pull(&mut self, published: &Published<'_>) -> Result<Stage, CommError> {
        match self.call {
            CallSignature::AllReduce { op, elements: Elements { count, .. } }
            | CallSignature::Reduce { op, elements: Elements { count, .. }, .. } => {
                if count == 0 || self.comm.world_size() == 1 {
                    return Ok(Stage::Done);
                }
                if count > DIRECT_REDUCE_MAX_ELEMS {
                    let own = all_reduce_chunk(self.comm.world_size(), self.rank, count);
                    let chunk = self.peer_reader().reduce(op, own, &self.outputs[0])?;
                    *self.round.slots[self.rank].reduced.write() = Some(chunk);
                    return Ok(Stage::Reduced);
                }
                if self.call.is_target(self.rank) {
                    self.result = Some(self.peer_reader().reduce(op, 0..count, &self.outputs[0])?);
                }
            }
            CallSignature::Broadcast { root, .. } if root == self.rank => {}
            CallSignature::Barrier => {}
            CallSignature::Split { .. } => self.join_child()?,
            _ => self.pull_into_outputs(published)?,
        }
        Ok(Stage::Done)
    }

    fn pull_into_outputs(&self, published: &Published<'_>) -> Result<(), CommError> {
        let targets = self.targets(published)?;
        let peer_reader = self.peer_reader();
        match &self.call {
            CallSignature::ReduceScatter { op, chunk } => {
                peer_reader.reduce_into(*op, self.rank * chunk.count, &targets[0])?;
            }
            CallSignature::AllGather { chunk } => peer_reader.all_gather(chunk.count, &targets)?,
            CallSignature::Gather { chunk, root } if *root == self.rank => {
                peer_reader.all_gather(chunk.count, &targets)?;
            }
            CallSignature::Scatter { chunk, root } => {
                peer_reader.pull_from(*root, self.rank * chunk.count, chunk.count, &targets)?;
            }
            CallSignature::AllToAll { recv, .. } => peer_reader.all_to_all(recv, &targets)?,
            CallSignature::AllToAllStrided { plan, .. } => peer_reader.all_to_all_strided(plan, &targets)?,
            CallSignature::Broadcast { elements, root } => {
                peer_reader.pull_from(*root, 0, elements.count, &targets)?;
            }
            // The other operations move no data, or not here.
            _ => {}
        }
        for (target, output) in targets.iter().zip(&self.outputs) {
            if StorageId::of(target) != StorageId::of(output) {
                copy_into(target, output)?;
            }
        }
        Ok(())
    }

    /// The tensors to write: the outputs, or copies of those whose storage peers may be
    /// reading. Writing holds the storage's lock while it waits for the lock of a peer's
    /// storage, so writing into a published storage could deadlock in a cycle of ranks.
    fn targets(&self, published: &Published<'_>) -> Result<Vec<Tensor>, CommError> {
        let target = |output: &Tensor| {
            if published.contains(StorageId::of(output)) { copy_of(output) } else { Ok(output.clone()) }
        };
        self.outputs.iter().map(target).collect()
    }

    /// Finds or creates the group of this rank's color.
    fn join_child(&self) -> Result<(), CommError> {
        let CallSignature::Split { name, color: Some(color), .. } = &self.call else { return Ok(()) };
        let places = (0..self.comm.world_size())
            .map(|rank| Ok(self.round.posting_of(rank)?.call.split_place()))
            .collect::<Result<Vec<_>, CommError>>()?;
        let own = Membership { group: self.comm.label.clone(), rank: self.rank };
        let Membership { group, rank } = own.after_split(name, *color, places)?;
        let mut children = self.round.children.lock();
        let create = || Arc::new(Communicator::new(group, self.comm.world.clone()));
        let comm = children.entry(*color).or_insert_with(create).clone();
        // A split is pulled once, so the cell is empty.
        let _ = self.split.set(Child { comm, rank });
        Ok(())
    }

    /// Frees this rank's published tensors after all ranks have read them.
    fn finish(&mut self) -> Result<(), CommError> {
        if let (Some(result), Some(output)) = (self.result.take(), self.outputs.first()) {
            copy_into(&result, output)?;
        }
        self.round.posting_of(self.rank)?.inputs.write().clear();
        self.round.slots[self.rank].reduced.write().take();
        self.comm.release(self.label.sequence);
        Ok(())
    }
}

impl Operation for Collective {
    fn label(&self) -> &OpLabel {
        &self.label
    }

    fn advance(&mut self, published: &Published<'_>) -> Result<Progress, CommError> {
        if self.reached == Stage::Posted {
            if !self.round.all_at(Stage::Posted) {
                return Ok(Progress::Blocked);
            }
            self.pull_and_mark(published)?;
        }
        if self.reached == Stage::Reduced {
            if !self.round.all_at(Stage::Reduced) {
                return Ok(Progress::Blocked);
            }
            self.wait_fences()?;
            if let CallSignature::AllReduce { elements, .. } | CallSignature::Reduce { elements, .. } =
                self.call
                && self.call.is_target(self.rank)
            {
                self.peer_reader().collect_chunks(elements.count, &self.outputs[0])?;
            }
            self.reach(Stage::Done)?;
        }
        // A rank without published tensors need not wait for ranks that are still reading.
        if !self.published.is_empty() && !self.round.all_at(Stage::Done) {
            return Ok(Progress::WaitingForPeers);
        }
        if !self.published.is_empty() {
            self.wait_fences()?;
        }
        self.finish()?;
        Ok(Progress::Complete)
    }

    fn pull_exchange(&mut self, published: &Published<'_>) -> Result<bool, CommError> {
        let is_exchange = matches!(self.call, CallSignature::AllToAllStrided { .. });
        if self.reached == Stage::Posted
            && is_exchange
            && self.device.is_cpu()
            && self.round.all_at(Stage::Posted)
        {
            self.pull_and_mark(published)?;
        }
        Ok(self.reached == Stage::Done)
    }

    fn published(&self) -> &[StorageId] {
        &self.published
    }

    fn missing(&self) -> Vec<usize> {
        self.round.missing(self.reached).map(|rank| self.comm.global_rank(rank)).collect()
    }
}
