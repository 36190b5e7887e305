//! A collective under way on one rank: its stages.

use super::call::Call;
use super::communicator::{Communicator, Round, Stage};
use super::engine::{Operation, Step, StorageId, Stuck};
use super::exchange::{DIRECT_REDUCE_MAX_ELEMS, Exchange};
use crate::comm::CommError;
use crate::comm::dtype::{copy_into, copy_of};
use candle_core::Tensor;
use std::sync::{Arc, OnceLock};

/// Where a split leaves the new group: its members and its own rank in it.
pub(super) type SplitResult = Arc<OnceLock<(Arc<Communicator>, usize)>>;

/// A collective that this rank has published.
#[derive(Debug)]
pub(super) struct Collective {
    comm: Arc<Communicator>,
    round: Arc<Round>,
    rank: usize,
    sequence: u64,
    call: Call,
    outputs: Vec<Tensor>,
    lent: Vec<StorageId>,
    reached: Stage,
    /// The result of a direct all_reduce, until all have read this rank's elements.
    result: Option<Tensor>,
    split: SplitResult,
}

impl Collective {
    /// Publishes a call: from here on peers may read `inputs`.
    pub(super) fn publish(
        comm: &Arc<Communicator>,
        rank: usize,
        sequence: u64,
        call: Call,
        inputs: Vec<Tensor>,
        outputs: Vec<Tensor>,
        split: SplitResult,
    ) -> Self {
        let round = comm.round(sequence);
        let lent = inputs.iter().map(StorageId::of).collect();
        comm.count_call(rank, call.op());
        round.post(rank, call.clone(), inputs);
        comm.notify();
        let (comm, reached, result) = (comm.clone(), Stage::Posted, None);
        Self { comm, round, rank, sequence, call, outputs, lent, reached, result, split }
    }

    fn reach(&mut self, stage: Stage) {
        self.reached = stage;
        self.round.reach(self.rank, stage);
        self.comm.notify();
    }

    fn exchange(&self) -> Exchange<'_> {
        Exchange { comm: &self.comm, round: &self.round, rank: self.rank, op: self.call.op() }
    }

    /// Everyone has posted: moves this rank's data. Returns the stage it is then at.
    fn pull(&mut self, lent: &[StorageId]) -> Result<Stage, CommError> {
        match self.call {
            Call::AllReduce { count, .. } if count == 0 || self.comm.world_size() == 1 => {}
            Call::AllReduce { op, dtype, count } if count <= DIRECT_REDUCE_MAX_ELEMS => {
                self.result = Some(self.exchange().reduce(op, dtype, 0..count)?);
            }
            Call::AllReduce { op, dtype, count } => {
                let own = self.exchange().chunk_of(self.rank, count);
                let chunk = self.exchange().reduce(op, dtype, own)?;
                *self.round.seats[self.rank].reduced.write() = Some(chunk);
                return Ok(Stage::Reduced);
            }
            Call::Broadcast { root, .. } if root == self.rank => {}
            Call::Barrier => {}
            Call::Split { .. } => self.join_child()?,
            _ => self.pull_into_outputs(lent)?,
        }
        Ok(Stage::Done)
    }

    fn pull_into_outputs(&self, lent: &[StorageId]) -> Result<(), CommError> {
        let targets = self.targets(lent)?;
        let exchange = self.exchange();
        match &self.call {
            Call::ReduceScatter { op, dtype, chunk } => {
                exchange.reduce_scatter(*op, *dtype, self.rank * chunk, &targets[0])?;
            }
            Call::AllGather { dtype, count } => exchange.all_gather(*dtype, *count, &targets[0])?,
            Call::AllToAll { dtype, recv, .. } => exchange.all_to_all(*dtype, recv, &targets[0])?,
            Call::AllToAllStrided { dtype, plan } => exchange.all_to_all_strided(*dtype, plan, &targets)?,
            Call::Broadcast { dtype, root, .. } => exchange.broadcast(*dtype, *root, &targets[0])?,
            Call::AllReduce { .. } | Call::Barrier | Call::Split { .. } => {}
        }
        for (target, output) in targets.iter().zip(&self.outputs) {
            if StorageId::of(target) != StorageId::of(output) {
                copy_into(target, output)?;
            }
        }
        Ok(())
    }

    /// Where to write: the outputs, or copies of those whose storage peers may be
    /// reading. Writing holds the storage's lock while it waits for that of a peer's
    /// storage, so writing into a lent one could close a circle of waiting ranks.
    fn targets(&self, lent: &[StorageId]) -> Result<Vec<Tensor>, CommError> {
        let target = |output: &Tensor| {
            if lent.contains(&StorageId::of(output)) { copy_of(output) } else { Ok(output.clone()) }
        };
        self.outputs.iter().map(target).collect()
    }

    /// Finds, or makes, the group of this rank's colour.
    fn join_child(&self) -> Result<(), CommError> {
        let Call::Split { name, color: Some(color), .. } = &self.call else { return Ok(()) };
        let mut members: Vec<(usize, usize)> = Vec::new();
        for rank in 0..self.comm.world_size() {
            if let Call::Split { color: theirs, key, .. } = self.round.post_of(rank)?.call
                && theirs == Some(*color)
            {
                members.push((key, rank));
            }
        }
        members.sort_unstable();
        let child_rank = members.iter().position(|&(_, rank)| rank == self.rank).unwrap_or(0);
        let child = self
            .round
            .children
            .lock()
            .entry(*color)
            .or_insert_with(|| {
                let global_ranks = members.iter().map(|&(_, rank)| self.comm.global_ranks[rank]).collect();
                Arc::new(Communicator::new(name, self.comm.world.clone(), global_ranks))
            })
            .clone();
        // A split is pulled once, so the cell is empty.
        let _ = self.split.set((child, child_rank));
        Ok(())
    }

    /// Frees what this rank has lent, all having read it.
    fn finish(&mut self) -> Result<(), CommError> {
        if let (Some(result), Some(output)) = (self.result.take(), self.outputs.first()) {
            copy_into(&result, output)?;
        }
        self.round.post_of(self.rank)?.inputs.write().clear();
        self.round.seats[self.rank].reduced.write().take();
        self.comm.release(self.sequence);
        Ok(())
    }
}

impl Operation for Collective {
    fn advance(&mut self, lent: &[StorageId]) -> Result<Step, CommError> {
        if self.reached == Stage::Posted {
            if !self.round.all_at(Stage::Posted) {
                return Ok(Step::Blocked);
            }
            self.round.compare(&self.comm, self.sequence)?;
            let stage = self.pull(lent)?;
            self.reach(stage);
        }
        if self.reached == Stage::Reduced {
            if !self.round.all_at(Stage::Reduced) {
                return Ok(Step::Blocked);
            }
            if let Call::AllReduce { dtype, count, .. } = self.call {
                self.exchange().collect_chunks(dtype, count, &self.outputs[0])?;
            }
            self.reach(Stage::Done);
        }
        // Who has lent nothing owes nothing to those who are still reading.
        if !self.lent.is_empty() && !self.round.all_at(Stage::Done) {
            return Ok(Step::Settling);
        }
        self.finish()?;
        Ok(Step::Complete)
    }

    fn lent(&self) -> &[StorageId] {
        &self.lent
    }

    fn stuck(&self) -> Stuck {
        Stuck {
            group: self.comm.name.clone(),
            op: self.call.op(),
            sequence: self.sequence,
            missing: self.round.missing(self.reached).map(|rank| self.comm.global_ranks[rank]).collect(),
        }
    }
}
