//! [`ProcessGroup`] over the processes of a job.

use super::operation::{Operation, Step};
use super::rank::MpiRank;
use super::strided_all_to_all::{StridedAllToAll, all_to_all_strided};
use super::transfers::{Members, Transfers};
use super::{collective, message, progress};
use crate::comm::arg_check::ArgCheck;
use crate::comm::buffer::copy_if_shared;
use crate::comm::ordered_channel::{ChannelKind, Sequences};
use crate::comm::{
    Call, CallSignature, CollectiveOp, CommError, GroupStats, OpStats, Pending, ProcessGroup, ReduceOp,
};
use candle_core::Tensor;
use parking_lot::Mutex;
use std::sync::{Arc, OnceLock};

/// One rank's handle of a group.
#[derive(Debug)]
pub(super) struct MpiGroup {
    own: Arc<MpiRank>,
    members: Arc<Members>,
    sequences: Mutex<Sequences>,
}

impl MpiGroup {
    pub(super) fn new(own: Arc<MpiRank>, members: Members) -> Self {
        let sequences = Mutex::new(Sequences::new(members.world_size()));
        Self { own, members: Arc::new(members), sequences }
    }

    /// Runs the checks that need no peer, and checks that MPI can access the tensors.
    fn check_args(&self, call: &Call<'_>) -> Result<(), CommError> {
        call.check(self)?;
        let Some(tensor) = call.tensors().find(|tensor| !tensor.device().is_cpu()) else { return Ok(()) };
        let reason =
            format!("MPI supports CPU tensors only, got a tensor on {:?}", tensor.device().location());
        Err(ArgCheck::new(self, call.op()).invalid(reason))
    }

    /// Starts a collective with checked arguments, after the desync check if that is
    /// enabled.
    fn begin(
        &self,
        call: CallSignature,
        begin: impl FnOnce(&mut Transfers, &Members) -> Result<Option<Step>, CommError> + Send + 'static,
    ) -> Result<Pending, CommError> {
        let first = if self.own.check {
            Step::compare_then(call.clone(), |transfers, members, _| begin(transfers, members))
        } else {
            Step::new(begin)
        };
        self.issue(call, ChannelKind::Collectives, first)
    }

    fn issue(&self, call: CallSignature, kind: ChannelKind, first: Step) -> Result<Pending, CommError> {
        self.own.check()?;
        let members = &self.members;
        let (channel, id) = {
            let mut sequences = self.sequences.lock();
            let sequence = sequences.next(kind);
            if members.world_size() > 1 {
                members.stats.lock().add(call.op(), OpStats { calls: 1, ..OpStats::default() });
            }
            let operation = Operation::new(members, kind, sequence, call.op(), first);
            let channel = operation.channel;
            (channel, self.own.issue(operation, call)?)
        };
        let [polling, completing, failing] = [(); 3].map(|()| self.own.clone());
        Ok(Pending::new(
            move || polling.is_complete(channel, id),
            move || completing.complete(channel, id),
            move |error| {
                failing.fail(CommError::PeerFailed { rank: failing.rank, reason: error.to_string() });
            },
        ))
    }

    fn reduce_to(
        &self,
        call: CallSignature,
        tensor: Tensor,
        op: ReduceOp,
        root: Option<usize>,
    ) -> Result<Pending, CommError> {
        self.begin(call, move |transfers, members| {
            collective::reduce_to(transfers, members, tensor, op, root)
        })
    }

    /// Waits for all members and returns their calls.
    fn agree_on_split(&self, call: CallSignature) -> Result<Vec<CallSignature>, CommError> {
        let agreed: Arc<OnceLock<Vec<CallSignature>>> = Arc::default();
        let result = agreed.clone();
        let first = Step::compare_then(call.clone(), move |_, _, calls| {
            // Set once: an operation has one such step.
            let _ = result.set(calls.to_vec());
            Ok(None)
        });
        self.issue(call, ChannelKind::Collectives, first)?.wait()?;
        Ok(agreed.get().cloned().unwrap_or_default())
    }
}

/// The members of each new group, as (color, ranks of the old group in the new order).
fn divide(calls: &[CallSignature]) -> Vec<(usize, Vec<usize>)> {
    let mut colored: Vec<(usize, usize, usize)> = calls
        .iter()
        .enumerate()
        .filter_map(|(rank, call)| match call {
            CallSignature::Split { color: Some(color), key, .. } => Some((*color, *key, rank)),
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
        self.own.check()
    }

    fn progress_in_background(&self) {
        let started = self.own.set_progress(|| progress::start(Arc::downgrade(&self.own)));
        if let Err(error) = started {
            tracing::warn!("messages move only while rank {} waits: {error}", self.own.rank);
        }
    }

    fn start(&self, call: Call<'_>) -> Result<Pending, CommError> {
        self.check_args(&call)?;
        let [input, output] = call.input_and_output()?;
        let Call { signature, inputs, outputs } = call;
        match signature {
            CallSignature::AllReduce { op, .. } => self.reduce_to(signature, output, op, None),
            CallSignature::Reduce { op, root, .. } => self.reduce_to(signature, output, op, Some(root)),
            CallSignature::ReduceScatter { op, .. } => self.begin(signature, move |transfers, members| {
                collective::reduce_scatter(transfers, members, input, output, op)
            }),
            CallSignature::AllGather { .. } => {
                let input = copy_if_shared(&input, outputs)?;
                self.begin(signature, move |transfers, members| {
                    collective::all_gather(transfers, members, &input, &output)
                })
            }
            CallSignature::AllToAll { .. } | CallSignature::Gather { .. } | CallSignature::Scatter { .. } => {
                let input = copy_if_shared(&input, outputs)?;
                let (send, recv) = signature.counts(self.members.rank, self.members.world_size());
                self.begin(signature, move |transfers, members| {
                    collective::all_to_all(transfers, members, (&input, &send), (&output, &recv))
                })
            }
            CallSignature::AllToAllStrided { dtype, ref plan } => {
                let inputs = inputs.iter().map(|input| copy_if_shared(input, outputs));
                let (inputs, plan) = (inputs.collect::<Result<_, _>>()?, plan.clone());
                let strided = StridedAllToAll { inputs, outputs: outputs.to_vec(), plan, dtype };
                self.begin(signature, move |transfers, members| {
                    all_to_all_strided(transfers, members, strided)
                })
            }
            CallSignature::Broadcast { root, .. } => self.begin(signature, move |transfers, members| {
                collective::broadcast(transfers, members, &output, root)
            }),
            CallSignature::Send { dst, .. } => {
                self.issue(signature, ChannelKind::SendTo(dst), message::send(input, dst))
            }
            CallSignature::Recv { src, .. } => {
                self.issue(signature, ChannelKind::RecvFrom(src), message::receive(output, src))
            }
            CallSignature::Barrier | CallSignature::Split { .. } => {
                let first = Step::compare_then(signature.clone(), |_, _, _| Ok(None));
                self.issue(signature, ChannelKind::Collectives, first)
            }
        }
    }

    fn split(
        &self,
        name: &str,
        color: Option<usize>,
        key: usize,
    ) -> Result<Option<Arc<dyn ProcessGroup>>, CommError> {
        let calls = self.agree_on_split(CallSignature::Split { name: name.into(), color, key })?;
        let groups = divide(&calls);
        let own = groups.iter().position(|(group_color, _)| Some(*group_color) == color);
        let rank_of = |ranks: &[usize]| ranks.iter().position(|&rank| rank == self.members.rank);
        let rank = own.and_then(|own| rank_of(&groups[own].1)).unwrap_or(0);
        // MPI blocks in this call, but every rank has already joined the split. Colors and keys are
        // renumbered, since MPI's range is smaller.
        let created = self.own.call(|| self.members.communicator.split(own, rank));
        let created = created.map_err(|reason| {
            let (group, global) = (self.members.name.clone(), self.own.rank);
            let (op, sequence) = (CollectiveOp::Split, self.sequences.lock().collective - 1);
            let library = "MPI";
            self.own.fail(CommError::Library { library, group, op, sequence, rank: global, reason })
        })?;
        let (Some(communicator), Some(own)) = (created, own) else { return Ok(None) };
        self.own.adopt(communicator);
        let global_ranks = groups[own].1.iter().map(|&rank| self.members.global_ranks[rank]).collect();
        let members = Members::new(name, communicator, rank, global_ranks);
        Ok(Some(Arc::new(MpiGroup::new(self.own.clone(), members))))
    }

    fn stats(&self) -> GroupStats {
        self.members.stats.lock().clone()
    }

    fn sent_to(&self) -> Vec<u64> {
        self.members.sent_to.lock().clone()
    }

    fn abort(&self, reason: &str) {
        let rank = self.own.rank;
        self.own.fail(CommError::PeerFailed { rank, reason: reason.to_owned() });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_ordered_by_key_then_rank_and_ranks_without_a_color_have_no_group() {
        let split = |color, key| CallSignature::Split { name: "x".into(), color, key };
        let calls =
            [split(Some(9), 1), split(None, 0), split(Some(2), 0), split(Some(9), 0), split(Some(9), 1)];
        assert_eq!(divide(&calls), [(2, vec![2]), (9, vec![3, 0, 4])]);
    }
}
