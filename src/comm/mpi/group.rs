//! [`ProcessGroup`] over the processes of a job.

use super::operation::{Operation, Step};
use super::rank::MpiRank;
use super::strided_all_to_all::{StridedAllToAll, all_to_all_strided};
use super::transfers::{Members, Transfers};
use super::{collective, message, progress};
use crate::comm::arg_check::ArgCheck;
use crate::comm::args::RootedExchange;
use crate::comm::buffer::copy_if_shared;
use crate::comm::call_signature::CallSignature;
use crate::comm::ordered_channel::{ChannelKind, Sequences};
use crate::comm::{CollectiveArgs, CollectiveOp, CommError, GroupStats, Pending, ProcessGroup, ReduceOp};
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
    fn check_args(&self, call: &CollectiveArgs<'_>) -> Result<CallSignature, CommError> {
        let (group, world_size) = (self.members.name.as_str(), self.members.world_size());
        let signature = call.check(group, self.members.rank, world_size)?;
        let mut tensors = call.inputs().iter().chain(call.outputs());
        match tensors.find(|tensor| !tensor.device().is_cpu()) {
            None => Ok(signature),
            Some(tensor) => {
                let location = tensor.device().location();
                let check = ArgCheck { group, world_size, op: call.op() };
                Err(check.invalid(format!("MPI supports CPU tensors only, got a tensor on {location:?}")))
            }
        }
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
                members.stats.lock().ops.entry(call.op()).or_default().calls += 1;
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
        tensor: &Tensor,
        op: ReduceOp,
        root: Option<usize>,
    ) -> Result<Pending, CommError> {
        let tensor = tensor.clone();
        self.begin(call, move |transfers, members| {
            collective::reduce_to(transfers, members, tensor, op, root)
        })
    }

    fn start_strided(
        &self,
        call: CallSignature,
        inputs: &[Tensor],
        outputs: &[Tensor],
    ) -> Result<Pending, CommError> {
        let CallSignature::AllToAllStrided { dtype, plan } = &call else { return Ok(Pending::ready()) };
        let written: Vec<&Tensor> = outputs.iter().collect();
        let inputs = inputs.iter().map(|input| copy_if_shared(input, &written)).collect::<Result<_, _>>()?;
        let strided =
            StridedAllToAll { inputs, outputs: outputs.to_vec(), plan: plan.clone(), dtype: *dtype };
        self.begin(call, move |transfers, members| all_to_all_strided(transfers, members, strided))
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

    fn start(&self, call: CollectiveArgs<'_>) -> Result<Pending, CommError> {
        let signature = self.check_args(&call)?;
        match call {
            CollectiveArgs::AllReduce { tensor, op } => self.reduce_to(signature, tensor, op, None),
            CollectiveArgs::Reduce { tensor, op, root } => self.reduce_to(signature, tensor, op, Some(root)),
            CollectiveArgs::Gather { .. } | CollectiveArgs::Scatter { .. } => {
                let exchange = call.as_all_to_all(self.members.rank, self.members.world_size())?;
                let Some(exchange) = exchange else { return Ok(Pending::ready()) };
                let RootedExchange { input, output, send_counts, recv_counts } = exchange;
                let input = copy_if_shared(&input, &[&output])?;
                self.begin(signature, move |transfers, members| {
                    collective::all_to_all(
                        transfers,
                        members,
                        (&input, &send_counts),
                        (&output, &recv_counts),
                    )
                })
            }
            CollectiveArgs::ReduceScatter { input, output, op } => {
                let (input, output) = (input.clone(), output.clone());
                self.begin(signature, move |transfers, members| {
                    collective::reduce_scatter(transfers, members, input, output, op)
                })
            }
            CollectiveArgs::AllGather { input, output } => {
                let (input, output) = (copy_if_shared(input, &[output])?, output.clone());
                self.begin(signature, move |transfers, members| {
                    collective::all_gather(transfers, members, &input, &output)
                })
            }
            CollectiveArgs::AllToAll { input, output, send_counts, recv_counts } => {
                let (send, recv) = (send_counts.to_vec(), recv_counts.to_vec());
                let (input, output) = (copy_if_shared(input, &[output])?, output.clone());
                self.begin(signature, move |transfers, members| {
                    collective::all_to_all(transfers, members, (&input, &send), (&output, &recv))
                })
            }
            CollectiveArgs::AllToAllStrided { inputs, outputs, .. } => {
                self.start_strided(signature, inputs, outputs)
            }
            CollectiveArgs::Broadcast { tensor, root } => {
                let tensor = tensor.clone();
                self.begin(signature, move |transfers, members| {
                    collective::broadcast(transfers, members, &tensor, root)
                })
            }
            CollectiveArgs::Send { tensor, dst } => {
                self.issue(signature, ChannelKind::SendTo(dst), message::send(tensor.clone(), dst))
            }
            CollectiveArgs::Recv { tensor, src } => {
                self.issue(signature, ChannelKind::RecvFrom(src), message::receive(tensor.clone(), src))
            }
            CollectiveArgs::Barrier => {
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
