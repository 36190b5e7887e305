//! [`ProcessGroup`] over the processes of a job.

use super::exchange::{Exchange, all_to_all_strided};
use super::operation::{Operation, Step};
use super::transfers::{Members, OpPlace, Transfers};
use super::world::World;
use super::{collective, message};
use crate::comm::arguments::Arguments;
use crate::comm::buffer::apart;
use crate::comm::call::{Call, describe_message};
use crate::comm::lane::{LaneKind, Sequences};
use crate::comm::strided::validate;
use crate::comm::{CollectiveOp, CommError, GroupStats, Pending, ProcessGroup, ReduceOp, StridedPlan};
use candle_core::Tensor;
use parking_lot::Mutex;
use std::sync::{Arc, OnceLock};

/// One rank's handle of a group.
#[derive(Debug)]
pub(super) struct MpiGroup {
    world: Arc<World>,
    members: Arc<Members>,
    sequences: Mutex<Sequences>,
}

impl MpiGroup {
    pub(super) fn new(world: Arc<World>, members: Members) -> Self {
        let sequences = Mutex::new(Sequences::new(members.world_size()));
        Self { world, members: Arc::new(members), sequences }
    }

    fn arguments(&self, op: CollectiveOp) -> Arguments<'_> {
        Arguments { group: &self.members.name, world_size: self.members.world_size(), op }
    }

    /// As [`Arguments::tensors`], for tensors that MPI can read.
    fn tensors(&self, op: CollectiveOp, tensors: &[&Tensor]) -> Result<candle_core::DType, CommError> {
        let dtype = self.arguments(op).tensors(tensors)?;
        self.on_cpu(op, tensors.iter().copied()).map(|()| dtype)
    }

    fn on_cpu<'a>(
        &self,
        op: CollectiveOp,
        mut tensors: impl Iterator<Item = &'a Tensor>,
    ) -> Result<(), CommError> {
        match tensors.find(|tensor| !tensor.device().is_cpu()) {
            None => Ok(()),
            Some(tensor) => {
                let location = tensor.device().location();
                Err(self.arguments(op).invalid(format!("MPI carries CPU tensors, got one on {location:?}")))
            }
        }
    }

    /// Begins a collective whose arguments were checked, after the comparison of calls where that was
    /// asked for.
    fn start(
        &self,
        call: Call,
        begin: impl FnOnce(&mut Transfers, &Members) -> Result<Option<Step>, CommError> + Send + 'static,
    ) -> Result<Pending, CommError> {
        let (op, description) = (call.op(), call.clone());
        let first = if self.world.check {
            Step::compare_then(call, |transfers, members, _| begin(transfers, members))
        } else {
            Step::new(begin)
        };
        self.issue(op, LaneKind::Collectives, first, || description.to_string())
    }

    fn issue(
        &self,
        op: CollectiveOp,
        kind: LaneKind,
        first: Step,
        describe: impl FnOnce() -> String,
    ) -> Result<Pending, CommError> {
        self.world.check()?;
        let members = &self.members;
        let id_and_lane = {
            let mut sequences = self.sequences.lock();
            let sequence = sequences.next(kind);
            if members.world_size() > 1 {
                members.stats.lock().ops.entry(op).or_default().calls += 1;
            }
            let operation = Operation::new(members, kind, OpPlace { op, sequence }, first);
            let lane = operation.lane;
            (lane, self.world.issue(operation, describe)?)
        };
        let (lane, id) = id_and_lane;
        let (completing, failing) = (self.world.clone(), self.world.clone());
        Ok(Pending::new(
            move || completing.complete(lane, id),
            move |error| {
                failing.fail(CommError::PeerFailed { rank: failing.rank, reason: error.to_string() });
            },
        ))
    }

    /// Waits for the members of the new group and makes its communicator.
    fn agree_on_split(&self, call: Call) -> Result<Vec<Call>, CommError> {
        let agreed: Arc<OnceLock<Vec<Call>>> = Arc::default();
        let result = agreed.clone();
        let description = call.clone();
        let first = Step::compare_then(call, move |_, _, calls| {
            // Set once: an operation has one such step.
            let _ = result.set(calls.to_vec());
            Ok(None)
        });
        let describe = || description.to_string();
        self.issue(CollectiveOp::Split, LaneKind::Collectives, first, describe)?.wait()?;
        Ok(agreed.get().cloned().unwrap_or_default())
    }
}

/// The members of each new group, as (colour, ranks of the old group in the new order).
fn divide(calls: &[Call]) -> Vec<(usize, Vec<usize>)> {
    let mut colored: Vec<(usize, usize, usize)> = calls
        .iter()
        .enumerate()
        .filter_map(|(rank, call)| match call {
            Call::Split { color: Some(color), key, .. } => Some((*color, *key, rank)),
            _ => None,
        })
        .collect();
    colored.sort_unstable();
    let mut groups: Vec<(usize, Vec<usize>)> = Vec::new();
    for (color, _, rank) in colored {
        match groups.last_mut() {
            Some((last, ranks)) if *last == color => ranks.push(rank),
            _ => groups.push((color, vec![rank])),
        }
    }
    groups
}

impl ProcessGroup for MpiGroup {
    fn name(&self) -> &str {
        &self.members.name
    }

    fn rank(&self) -> usize {
        self.members.rank
    }

    fn global_ranks(&self) -> &[usize] {
        &self.members.global_ranks
    }

    fn check(&self) -> Result<(), CommError> {
        self.world.check()
    }

    fn start_all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<Pending, CommError> {
        let dtype = self.tensors(CollectiveOp::AllReduce, &[tensor])?;
        let (call, tensor) = (Call::AllReduce { op, dtype, count: tensor.elem_count() }, tensor.clone());
        self.start(call, move |transfers, members| collective::all_reduce(transfers, members, tensor, op))
    }

    fn start_reduce_scatter(
        &self,
        input: &Tensor,
        output: &Tensor,
        op: ReduceOp,
    ) -> Result<Pending, CommError> {
        let dtype = self.tensors(CollectiveOp::ReduceScatter, &[input, output])?;
        self.arguments(CollectiveOp::ReduceScatter).chunks(("input", input), ("output", output))?;
        let call = Call::ReduceScatter { op, dtype, chunk: output.elem_count() };
        let (input, output) = (input.clone(), output.clone());
        self.start(call, move |transfers, members| {
            collective::reduce_scatter(transfers, members, input, output, op)
        })
    }

    fn start_all_gather(&self, input: &Tensor, output: &Tensor) -> Result<Pending, CommError> {
        let dtype = self.tensors(CollectiveOp::AllGather, &[input, output])?;
        self.arguments(CollectiveOp::AllGather).chunks(("output", output), ("input", input))?;
        let call = Call::AllGather { dtype, count: input.elem_count() };
        let (input, output) = (apart(input, &[output])?, output.clone());
        self.start(call, move |transfers, members| {
            collective::all_gather(transfers, members, &input, &output)
        })
    }

    fn start_all_to_all(
        &self,
        input: &Tensor,
        output: &Tensor,
        send_counts: &[usize],
        recv_counts: &[usize],
    ) -> Result<Pending, CommError> {
        let dtype = self.tensors(CollectiveOp::AllToAll, &[input, output])?;
        let arguments = self.arguments(CollectiveOp::AllToAll);
        arguments.counts("send", send_counts, input)?;
        arguments.counts("recv", recv_counts, output)?;
        let (send, recv) = (send_counts.to_vec(), recv_counts.to_vec());
        let call = Call::AllToAll { dtype, send: send.clone(), recv: recv.clone() };
        let (input, output) = (apart(input, &[output])?, output.clone());
        self.start(call, move |transfers, members| {
            collective::all_to_all(transfers, members, (&input, &send), (&output, &recv))
        })
    }

    fn start_all_to_all_strided(
        &self,
        inputs: &[Tensor],
        outputs: &[Tensor],
        plan: &Arc<StridedPlan>,
    ) -> Result<Pending, CommError> {
        let dtype = validate(&self.members.name, self.world_size(), inputs, outputs, plan)?;
        self.on_cpu(CollectiveOp::AllToAllStrided, inputs.iter().chain(outputs))?;
        let written: Vec<&Tensor> = outputs.iter().collect();
        let inputs = inputs.iter().map(|input| apart(input, &written)).collect::<Result<_, _>>()?;
        let (outputs, plan) = (outputs.to_vec(), plan.clone());
        let call = Call::AllToAllStrided { dtype, plan: plan.clone() };
        let exchange = Exchange { inputs, outputs, plan, dtype };
        self.start(call, move |transfers, members| all_to_all_strided(transfers, members, exchange))
    }

    fn start_broadcast(&self, tensor: &Tensor, root: usize) -> Result<Pending, CommError> {
        let dtype = self.tensors(CollectiveOp::Broadcast, &[tensor])?;
        self.arguments(CollectiveOp::Broadcast).rank("root", root)?;
        let call = Call::Broadcast { dtype, count: tensor.elem_count(), root };
        let tensor = tensor.clone();
        self.start(call, move |transfers, members| collective::broadcast(transfers, members, &tensor, root))
    }

    fn start_send(&self, tensor: &Tensor, dst: usize) -> Result<Pending, CommError> {
        self.tensors(CollectiveOp::Send, &[tensor])?;
        self.arguments(CollectiveOp::Send).rank("destination", dst)?;
        let describe = || describe_message(CollectiveOp::Send, tensor, dst);
        let first = message::send(tensor.clone(), dst);
        self.issue(CollectiveOp::Send, LaneKind::SendTo(dst), first, describe)
    }

    fn start_recv(&self, tensor: &Tensor, src: usize) -> Result<Pending, CommError> {
        self.tensors(CollectiveOp::Recv, &[tensor])?;
        self.arguments(CollectiveOp::Recv).rank("source", src)?;
        let describe = || describe_message(CollectiveOp::Recv, tensor, src);
        let first = message::receive(tensor.clone(), src);
        self.issue(CollectiveOp::Recv, LaneKind::RecvFrom(src), first, describe)
    }

    fn start_barrier(&self) -> Result<Pending, CommError> {
        let first = Step::compare_then(Call::Barrier, |_, _, _| Ok(None));
        let describe = || Call::Barrier.to_string();
        self.issue(CollectiveOp::Barrier, LaneKind::Collectives, first, describe)
    }

    fn split(
        &self,
        name: &str,
        color: Option<usize>,
        key: usize,
    ) -> Result<Option<Arc<dyn ProcessGroup>>, CommError> {
        let calls = self.agree_on_split(Call::Split { name: name.to_owned(), color, key })?;
        let groups = divide(&calls);
        let own = groups.iter().position(|(group_color, _)| Some(*group_color) == color);
        let rank_of = |ranks: &[usize]| ranks.iter().position(|&rank| rank == self.members.rank);
        let rank = own.and_then(|own| rank_of(&groups[own].1)).unwrap_or(0);
        // MPI blocks in this, but every rank has already come to the split. Colours and keys are
        // numbered anew: MPI's are smaller than ours.
        let made = self.world.call(|| self.members.communicator.split(own, rank));
        let made = made.map_err(|reason| {
            let (group, global) = (self.members.name.clone(), self.world.rank);
            let (op, sequence) = (CollectiveOp::Split, self.sequences.lock().collective - 1);
            let library = "MPI";
            self.world.fail(CommError::Library { library, group, op, sequence, rank: global, reason })
        })?;
        let (Some(communicator), Some(own)) = (made, own) else { return Ok(None) };
        self.world.adopt(communicator);
        let global_ranks = groups[own].1.iter().map(|&rank| self.members.global_ranks[rank]).collect();
        let members = Members::new(name, communicator, rank, global_ranks);
        Ok(Some(Arc::new(MpiGroup::new(self.world.clone(), members))))
    }

    fn stats(&self) -> GroupStats {
        self.members.stats.lock().clone()
    }

    fn abort(&self, reason: &str) {
        let rank = self.world.rank;
        self.world.fail(CommError::PeerFailed { rank, reason: reason.to_owned() });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_ordered_by_key_then_rank_and_ranks_without_a_color_are_in_none() {
        let split = |color, key| Call::Split { name: "x".into(), color, key };
        let calls =
            [split(Some(9), 1), split(None, 0), split(Some(2), 0), split(Some(9), 0), split(Some(9), 1)];
        assert_eq!(divide(&calls), [(2, vec![2]), (9, vec![3, 0, 4])]);
    }
}
