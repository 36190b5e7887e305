//! What a rank has called last, and what of it is still in progress.

use crate::comm::CollectiveOp;
use crate::comm::call_signature::CallSignature;
use crate::comm::diagnostics::{Entry, EntryReport, FlightRecorder, GroupLabel, Wait};
use std::sync::Arc;

/// A rank's last calls.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    entries: FlightRecorder,
    issued: u64,
    /// The collectives are recorded by who compares them, before they do.
    is_checked: bool,
    /// The collective that is being compared; nothing of it is on the GPU yet.
    compared: Option<u64>,
}

/// An operation that the GPU is not done with: its group's name, and its place there.
pub(super) type GpuOp = (String, CollectiveOp, u64);

impl Recorder {
    /// From now on collectives are compared.
    pub(super) fn set_checked(&mut self) {
        self.is_checked = true;
    }

    /// A call was given to the GPU.
    pub(super) fn issued(&mut self, group: &Arc<GroupLabel>, sequence: u64, call: CallSignature) {
        if !self.is_checked || call.op().is_message() {
            self.record(group, sequence, call);
        }
    }

    /// A collective is about to be compared. Its place is that among the calls that are.
    pub(super) fn comparing(&mut self, group: &Arc<GroupLabel>, sequence: u64, call: CallSignature) {
        self.compared = Some(self.record(group, sequence, call));
    }

    /// All ranks have come to it, and it goes to the GPU. The comparison ran there, behind all others, on the one
    /// stream: they are complete.
    pub(super) fn agreed(&mut self) {
        self.compared = None;
        self.entries.complete_before_newest();
    }

    fn record(&mut self, group: &Arc<GroupLabel>, sequence: u64, call: CallSignature) -> u64 {
        let id = self.issued;
        self.issued += 1;
        self.entries.record(Entry { id, group: group.clone(), sequence, call, is_complete: false });
        id
    }

    /// The oldest first.
    pub(super) fn report(&self, on_gpu: &[GpuOp]) -> Vec<EntryReport> {
        self.entries.report_by(|entry| self.is_under_way(entry, on_gpu))
    }

    /// What keeps the rank, as its collectives run one after the other: the oldest that is in progress. For whom it waits
    /// the rank does not know.
    pub(super) fn wait(&self, on_gpu: &[GpuOp]) -> Option<Wait> {
        let Entry { group, sequence, call, .. } =
            self.entries.oldest_under_way(|entry| self.is_under_way(entry, on_gpu))?;
        Some(Wait { group: group.clone(), op: call.op(), sequence: *sequence, missing: Vec::new() })
    }

    fn is_under_way(
        &self,
        Entry { id, group, sequence, call, is_complete }: &Entry,
        on_gpu: &[GpuOp],
    ) -> bool {
        let is_message = call.op().is_message();
        let of_kind = |(name, op, _): &&GpuOp| *name == group.name && op.is_message() == is_message;
        let mut of_kind = on_gpu.iter().filter(of_kind);
        if is_message {
            // Messages go to the GPU together, as one operation of several calls.
            return of_kind.any(|(_, _, number)| number == sequence);
        }
        if !self.is_checked {
            return of_kind.any(|(_, op, number)| (*op, number) == (call.op(), sequence));
        }
        // The GPU counts other places, since a split of groups is several operations to it. But only the last call of
        // those that all ranks have come to can be on it.
        !is_complete && (self.compared == Some(*id) || of_kind.next().is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label(name: &str) -> Arc<GroupLabel> {
        Arc::new(GroupLabel { name: name.into(), members: vec![0, 1] })
    }

    use crate::comm::diagnostics::tests::call as called;

    fn on_gpu(name: &str, op: CollectiveOp, sequence: u64) -> GpuOp {
        (name.into(), op, sequence)
    }

    fn under_way(calls: &Recorder, on_gpu: &[GpuOp]) -> Option<(u64, CollectiveOp)> {
        calls.wait(on_gpu).map(|wait| (wait.sequence, wait.op))
    }

    #[test]
    fn without_comparison_the_gpu_says_what_is_under_way() {
        let (mut calls, sp) = (Recorder::default(), label("sp"));
        for (sequence, op) in (0..).zip(["all_to_all", "all_gather"]) {
            calls.issued(&sp, sequence, called(op));
        }
        calls.issued(&sp, 0, called("send"));
        assert_eq!(under_way(&calls, &[]), None);
        let both = [on_gpu("sp", CollectiveOp::AllToAll, 0), on_gpu("sp", CollectiveOp::AllGather, 1)];
        assert_eq!(under_way(&calls, &both), Some((0, CollectiveOp::AllToAll)));
        assert_eq!(under_way(&calls, &both[1..]), Some((1, CollectiveOp::AllGather)));
        assert_eq!(under_way(&calls, &[on_gpu("dp", CollectiveOp::AllToAll, 0)]), None, "another group's");
    }

    #[test]
    fn a_collective_that_the_gpu_is_done_with_is_not_what_keeps_a_rank() {
        let (mut calls, sp) = (Recorder::default(), label("sp"));
        calls.set_checked();
        calls.comparing(&sp, 7, called("all_to_all"));
        let comparison = on_gpu("sp (calls)", CollectiveOp::AllGather, 7);
        assert_eq!(under_way(&calls, std::slice::from_ref(&comparison)), Some((7, CollectiveOp::AllToAll)));
        calls.agreed();
        // Places on the GPU differ: it has counted the gatherings of splits.
        let exchange = on_gpu("sp", CollectiveOp::AllToAll, 9);
        calls.issued(&sp, 9, called("all_to_all"));
        assert_eq!(under_way(&calls, std::slice::from_ref(&exchange)), Some((7, CollectiveOp::AllToAll)));
        // It is done, and a rank does not come to the next one, which is still being compared.
        calls.comparing(&sp, 8, called("barrier"));
        assert_eq!(under_way(&calls, std::slice::from_ref(&comparison)), Some((8, CollectiveOp::Barrier)));
        assert_eq!(under_way(&calls, &[exchange, comparison]), Some((7, CollectiveOp::AllToAll)));
    }

    #[test]
    fn a_message_that_waits_is_not_taken_for_the_collective_before_it() {
        let (mut calls, sp) = (Recorder::default(), label("sp"));
        calls.set_checked();
        calls.comparing(&sp, 0, called("all_reduce"));
        calls.agreed();
        calls.issued(&sp, 0, called("recv"));
        let message = [on_gpu("sp", CollectiveOp::Recv, 0)];
        assert_eq!(under_way(&calls, &message), None);
        let reported: Vec<String> = calls.report(&message).iter().map(ToString::to_string).collect();
        let entry = |call: &str| format!("#0 of \"sp\": {call}");
        assert_eq!(
            reported,
            [
                entry("all_reduce(Sum, 1 × f32), complete"),
                entry("recv(1 × f32) with rank 0 of the group, in progress")
            ]
        );
    }
}
