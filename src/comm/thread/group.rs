//! [`ProcessGroup`] in the memory of one process.

use super::collective::{Buffers, Child, Collective, SplitResult};
use super::communicator::Communicator;
use super::mailbox::{RecvOperation, SendOperation};
use super::progress_lane;
use super::rank_state::RankState;
use crate::comm::buffer::copy_if_shared;
use crate::comm::diagnostics::OpLabel;
use crate::comm::ordered_channel::{ChannelKind, OrderedChannel, Sequences};
use crate::comm::progress_engine::Operation;
use crate::comm::{Call, CallSignature, CommError, GroupStats, Membership, Pending, ProcessGroup};
use candle_core::Tensor;
use parking_lot::Mutex;
use std::sync::{Arc, OnceLock};
use ulysses_kernels::device::Fence;

/// One rank's handle of a group whose ranks are threads of this process.
#[derive(Debug)]
pub(super) struct ThreadGroup {
    state: Arc<RankState>,
    comm: Arc<Communicator>,
    membership: Membership,
    sequences: Mutex<Sequences>,
}

impl ThreadGroup {
    pub(super) fn new(state: Arc<RankState>, comm: Arc<Communicator>, rank: usize) -> Self {
        let sequences = Mutex::new(Sequences::new(comm.world_size()));
        let membership = Membership { group: comm.label.clone(), rank };
        Self { state, comm, membership, sequences }
    }

    /// Publishes a collective with checked arguments.
    fn publish(
        &self,
        call: CallSignature,
        inputs: Vec<Tensor>,
        outputs: &[Tensor],
        split: SplitResult,
    ) -> Result<Pending, CommError> {
        let buffers = Buffers::new(inputs, outputs.to_vec())?;
        self.issue(ChannelKind::Collectives, call.clone(), |label| {
            Box::new(Collective::publish(&self.comm, self.membership.rank, label, call, buffers, split))
        })
    }

    fn issue(
        &self,
        kind: ChannelKind,
        call: CallSignature,
        publish: impl FnOnce(OpLabel) -> Box<dyn Operation>,
    ) -> Result<Pending, CommError> {
        self.state.world.check()?;
        let channel = OrderedChannel { group: Arc::as_ptr(&self.comm).addr(), kind };
        let (group, op) = (self.comm.label.clone(), call.op());
        let label = || OpLabel { group, op, sequence: self.sequences.lock().next(kind) };
        let id = self.state.issue(channel, call, || publish(label()));
        if self.comm.world_size() == 1 && kind == ChannelKind::Collectives {
            // There is no peer to wait for.
            self.state.complete(id)?;
            return Ok(Pending::ready());
        }
        let [polling, completing, failing] = [(); 3].map(|()| self.state.clone());
        Ok(Pending::new(
            move || polling.is_complete(id),
            move || completing.complete(id),
            move |error| failing.abort(error.to_string()),
        ))
    }
}

impl ProcessGroup for ThreadGroup {
    fn membership(&self) -> &Membership {
        &self.membership
    }

    fn check(&self) -> Result<(), CommError> {
        self.state.world.check()
    }

    fn progress_in_background(&self) {
        if self.state.world.has_free_core
            && self.state.claim_lane()
            && let Err(error) = progress_lane::start(&self.state)
        {
            tracing::warn!("exchanges move only while rank {} waits: {error}", self.state.global_rank);
        }
    }

    fn start(&self, call: Call<'_>) -> Result<Pending, CommError> {
        call.check(self)?;
        let (Call { signature, inputs, outputs }, rank) = (call, self.membership.rank);
        let (inputs, outputs) = match signature {
            CallSignature::Send { dst, .. } => {
                let fence = Fence::after(inputs[0].device())?;
                return self.issue(ChannelKind::SendTo(dst), signature, |label| {
                    Box::new(SendOperation::publish(&self.comm, rank, dst, label, &inputs[0], fence))
                });
            }
            CallSignature::Recv { src, .. } => {
                return self.issue(ChannelKind::RecvFrom(src), signature, |label| {
                    Box::new(RecvOperation::new(&self.comm, rank, src, label, &outputs[0]))
                });
            }
            CallSignature::AllReduce { .. } | CallSignature::Reduce { .. } => (inputs.to_vec(), outputs),
            CallSignature::Broadcast { root, .. } if root == rank => (inputs.to_vec(), &[][..]),
            CallSignature::Broadcast { .. } => (Vec::new(), outputs),
            _ => {
                // Peers read the inputs while the outputs are being written.
                let inputs = inputs.iter().map(|input| copy_if_shared(input, outputs));
                (inputs.collect::<Result<_, _>>()?, outputs)
            }
        };
        self.publish(signature, inputs, outputs, SplitResult::default())
    }

    fn split(
        &self,
        name: &str,
        color: Option<usize>,
        key: usize,
    ) -> Result<Option<Arc<dyn ProcessGroup>>, CommError> {
        let result: SplitResult = Arc::new(OnceLock::new());
        let call = CallSignature::Split { name: name.into(), color, key };
        self.publish(call, Vec::new(), &[], result.clone())?.wait()?;
        let Some(Child { comm, rank }) = result.get() else { return Ok(None) };
        Ok(Some(Arc::new(ThreadGroup::new(self.state.clone(), comm.clone(), *rank))))
    }

    fn stats(&self) -> GroupStats {
        self.comm.stats(self.membership.rank)
    }

    fn sent_to(&self) -> Vec<u64> {
        self.comm.sent_to(self.membership.rank)
    }

    fn abort(&self, reason: &str) {
        self.state.abort(reason.to_owned());
    }
}
