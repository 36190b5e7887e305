//! [`ProcessGroup`] over the processes of a job.

use super::operation::{MpiOperation, Step};
use super::rank::MpiRank;
use super::strided_all_to_all::{StridedAllToAll, all_to_all_strided};
use super::transfers::{Members, Transfers};
use super::{collective, message, progress};
use crate::comm::arg_check::ArgCheck;
use crate::comm::buffer::copy_if_shared;
use crate::comm::diagnostics::OpLabel;
use crate::comm::ordered_channel::{ChannelKind, OrderedChannel, Sequences};
use crate::comm::{
    Call, CallSignature, CollectiveOp, CommError, GroupStats, Membership, Pending, ProcessGroup, ReduceOp,
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
        let (members, op) = (&self.members, call.op());
        let channel = OrderedChannel { group: Arc::as_ptr(members).addr(), kind };
        let id = {
            let mut sequences = self.sequences.lock();
            let label =
                OpLabel { group: members.membership.group.clone(), op, sequence: sequences.next(kind) };
            members.traffic.lock().call(op);
            self.own.issue(channel, call, Box::new(MpiOperation::new(members, label, first)))?
        };
        let [polling, completing, failing] = [(); 3].map(|()| self.own.clone());
        Ok(Pending::new(
            move || polling.is_complete(id),
            move || completing.complete(id),
            move |error| failing.abort(error.to_string()),
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

impl ProcessGroup for MpiGroup {
    fn membership(&self) -> &Membership {
        &self.members.membership
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
                let counts = signature.counts(self.members.rank(), self.members.world_size());
                self.begin(signature, move |transfers, members| {
                    collective::all_to_all(transfers, members, &input, &output, &counts)
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
        let places = calls.iter().map(CallSignature::split_place);
        let child = color.map(|color| self.membership().after_split(name, color, places)).transpose()?;
        // MPI blocks in this call, but every rank has already joined the split. Colors and keys are
        // renumbered, since MPI's range is smaller: a color is that of one of its ranks.
        let color = child.as_ref().and_then(|child| child.group.members.iter().min().copied());
        let key = child.as_ref().map_or(0, |child| child.rank);
        let created = self.own.call(|| self.members.communicator.split(color, key));
        let created = created.map_err(|reason| {
            let (group, sequence) = (self.membership().group.clone(), self.sequences.lock().collective - 1);
            let label = OpLabel { group, op: CollectiveOp::Split, sequence };
            self.own.fail(label.failed_in("MPI", self.own.rank, reason))
        })?;
        let (Some(communicator), Some(child)) = (created, child) else { return Ok(None) };
        self.own.adopt(communicator);
        Ok(Some(Arc::new(MpiGroup::new(self.own.clone(), Members::new(communicator, child)))))
    }

    fn stats(&self) -> GroupStats {
        self.members.traffic.lock().stats()
    }

    fn sent_to(&self) -> Vec<u64> {
        self.members.traffic.lock().sent_to()
    }

    fn abort(&self, reason: &str) {
        self.own.abort(reason.to_owned());
    }
}
