//! The recorded calls of a rank, and which of them are in progress.

use crate::comm::diagnostics::{Entry, EntryReport, FlightRecorder, GroupLabel, Wait};
use crate::comm::{CallSignature, CollectiveOp};
use std::sync::Arc;

/// The last calls of a rank.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    entries: FlightRecorder,
    issued: u64,
    /// Whether the desync check records the collectives, before it compares them.
    is_checked: bool,
    /// The collective that is being compared, and so not yet on the GPU.
    compared: Option<u64>,
}

/// An operation that the GPU has not completed: group name, operation and sequence number.
pub(super) type GpuOp = (String, CollectiveOp, u64);

impl Recorder {
    /// Records that collectives are compared.
    pub(super) fn set_checked(&mut self) {
        self.is_checked = true;
    }

    /// Records a call that was enqueued to the GPU.
    pub(super) fn issued(&mut self, group: &Arc<GroupLabel>, sequence: u64, call: CallSignature) {
        if !self.is_checked || call.op().is_message() {
            self.record(group, sequence, call);
        }
    }

    /// Records a collective that is about to be compared. Its sequence number counts compared calls.
    pub(super) fn comparing(&mut self, group: &Arc<GroupLabel>, sequence: u64, call: CallSignature) {
        self.compared = Some(self.record(group, sequence, call));
    }

    /// All ranks have joined the collective, which is enqueued next. The comparison ran after all earlier operations on the
    /// same stream, so they are complete.
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

    /// Returns the recorded calls, oldest first.
    pub(super) fn report(&self, on_gpu: &[GpuOp]) -> Vec<EntryReport> {
        self.entries.report_by(|entry| self.is_in_progress(entry, on_gpu))
    }

    /// Returns the operation that blocks the rank: the oldest in progress, since collectives run in order. The rank does
    /// not know for whom it waits.
    pub(super) fn wait(&self, on_gpu: &[GpuOp]) -> Option<Wait> {
        let Entry { group, sequence, call, .. } =
            self.entries.oldest_under_way(|entry| self.is_in_progress(entry, on_gpu))?;
        Some(Wait { group: group.clone(), op: call.op(), sequence: *sequence, missing: Vec::new() })
    }

    fn is_in_progress(
        &self,
        Entry { id, group, sequence, call, is_complete }: &Entry,
        on_gpu: &[GpuOp],
    ) -> bool {
        let is_message = call.op().is_message();
        let of_kind = |(name, op, _): &&GpuOp| *name == group.name && op.is_message() == is_message;
        let mut of_kind = on_gpu.iter().filter(of_kind);
        if is_message {
            // Messages are enqueued together, as one operation with several calls.
            return of_kind.any(|(_, _, number)| number == sequence);
        }
        if !self.is_checked {
            return of_kind.any(|(_, op, number)| (*op, number) == (call.op(), sequence));
        }
        // GPU sequence numbers differ, since a split runs several operations on the GPU. But only the last call
        // that all ranks have joined can be on it.
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

    fn in_progress(calls: &Recorder, on_gpu: &[GpuOp]) -> Option<(u64, CollectiveOp)> {
        calls.wait(on_gpu).map(|wait| (wait.sequence, wait.op))
    }

    #[test]
    fn without_comparison_the_gpu_determines_what_is_in_progress() {
        let (mut calls, sp) = (Recorder::default(), label("sp"));
        for (sequence, op) in (0..).zip(["all_to_all", "all_gather"]) {
            calls.issued(&sp, sequence, called(op));
        }
        calls.issued(&sp, 0, called("send"));
        assert_eq!(in_progress(&calls, &[]), None);
        let both = [on_gpu("sp", CollectiveOp::AllToAll, 0), on_gpu("sp", CollectiveOp::AllGather, 1)];
        assert_eq!(in_progress(&calls, &both), Some((0, CollectiveOp::AllToAll)));
        assert_eq!(in_progress(&calls, &both[1..]), Some((1, CollectiveOp::AllGather)));
        assert_eq!(in_progress(&calls, &[on_gpu("dp", CollectiveOp::AllToAll, 0)]), None, "of another group");
    }

    #[test]
    fn a_collective_that_the_gpu_has_completed_does_not_block_a_rank() {
        let (mut calls, sp) = (Recorder::default(), label("sp"));
        calls.set_checked();
        calls.comparing(&sp, 7, called("all_to_all"));
        let comparison = on_gpu("sp (calls)", CollectiveOp::AllGather, 7);
        assert_eq!(in_progress(&calls, std::slice::from_ref(&comparison)), Some((7, CollectiveOp::AllToAll)));
        calls.agreed();
        // Sequence numbers on the GPU differ, because they include the all-gathers of splits.
        let exchange = on_gpu("sp", CollectiveOp::AllToAll, 9);
        calls.issued(&sp, 9, called("all_to_all"));
        assert_eq!(in_progress(&calls, std::slice::from_ref(&exchange)), Some((7, CollectiveOp::AllToAll)));
        // It is complete, and some rank has not joined the next one, which is still being compared.
        calls.comparing(&sp, 8, called("barrier"));
        assert_eq!(in_progress(&calls, std::slice::from_ref(&comparison)), Some((8, CollectiveOp::Barrier)));
        assert_eq!(in_progress(&calls, &[exchange, comparison]), Some((7, CollectiveOp::AllToAll)));
    }

    #[test]
    fn a_waiting_message_is_not_confused_with_an_earlier_collective() {
        let (mut calls, sp) = (Recorder::default(), label("sp"));
        calls.set_checked();
        calls.comparing(&sp, 0, called("all_reduce"));
        calls.agreed();
        calls.issued(&sp, 0, called("recv"));
        let message = [on_gpu("sp", CollectiveOp::Recv, 0)];
        assert_eq!(in_progress(&calls, &message), None);
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
