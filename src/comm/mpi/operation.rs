//! An operation in progress: its messages, and the step that follows them.

use super::transfers::{Members, Transfers};
use crate::comm::diagnostics::{OpLabel, compare};
use crate::comm::progress_engine::{Operation, Progress, Published};
use crate::comm::{CallSignature, CommError};
use std::fmt;
use std::sync::Arc;

type Work = dyn FnOnce(&mut Transfers, &Members) -> Result<Option<Step>, CommError> + Send;

/// A step of an operation, which runs once its transfers are complete. It may start further transfers and
/// return the step that follows them; `None` ends the operation.
pub(super) struct Step(Box<Work>);

impl Step {
    pub(super) fn new(
        work: impl FnOnce(&mut Transfers, &Members) -> Result<Option<Step>, CommError> + Send + 'static,
    ) -> Self {
        Self(Box::new(work))
    }

    /// Creates a last step, which starts no further transfers.
    pub(super) fn last(work: impl FnOnce(&Members) -> Result<(), CommError> + Send + 'static) -> Self {
        Self::new(move |_, members| work(members).map(|()| None))
    }

    /// Creates a step that sends all ranks their peers' calls and continues if they match. No rank completes
    /// it before all ranks have started it, so it is also a barrier.
    pub(super) fn compare_then(
        call: CallSignature,
        then: impl FnOnce(&mut Transfers, &Members, &[CallSignature]) -> Result<Option<Step>, CommError>
        + Send
        + 'static,
    ) -> Self {
        Self::new(move |transfers, members| {
            let text = serde_json::to_vec(&call).map_err(|error| CommError::Tensor(error.to_string()))?;
            for peer in peers(members) {
                transfers.send_text(members, text.clone(), peer)?;
                transfers.expect_text(peer);
            }
            Ok(Some(Self::new(move |transfers, members| {
                let calls = (0..members.world_size()).map(|rank| {
                    if rank == members.rank() {
                        return Ok(call.clone());
                    }
                    let reported = serde_json::from_slice(&transfers.text_from(rank));
                    reported
                        .map_err(|error| CommError::Tensor(format!("invalid call from rank {rank}: {error}")))
                });
                let calls = calls.collect::<Result<Vec<CallSignature>, _>>()?;
                compare(&calls.iter().collect::<Vec<_>>())
                    .map_err(|divergence| divergence.error_in(transfers.label()))?;
                transfers.next_phase();
                then(transfers, members, &calls)
            })))
        })
    }
}

impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Step")
    }
}

/// The other ranks of a group, starting with the next one, so that ranks do not all start with the same peer.
pub(super) fn peers(members: &Members) -> impl Iterator<Item = usize> {
    let (rank, ranks) = (members.rank(), members.world_size());
    (1..ranks).map(move |distance| (rank + distance) % ranks)
}

/// An operation of this rank.
#[derive(Debug)]
pub(super) struct MpiOperation {
    members: Arc<Members>,
    transfers: Transfers,
    next: Option<Step>,
}

impl MpiOperation {
    pub(super) fn new(members: &Arc<Members>, label: OpLabel, first: Step) -> Self {
        Self { members: members.clone(), transfers: Transfers::new(label), next: Some(first) }
    }
}

impl Operation for MpiOperation {
    fn label(&self) -> &OpLabel {
        self.transfers.label()
    }

    fn advance(&mut self, _published: &Published<'_>) -> Result<Progress, CommError> {
        while self.transfers.settle(&self.members)? {
            let Some(step) = self.next.take() else {
                self.transfers.count(&self.members);
                return Ok(Progress::Complete);
            };
            self.next = (step.0)(&mut self.transfers, &self.members)?;
        }
        // The messages of an operation have tags of their own.
        Ok(Progress::WaitingForPeers)
    }

    fn missing(&self) -> Vec<usize> {
        self.transfers.missing()
    }
}
