//! The recorded calls of a rank, and which of them are in progress.

use crate::comm::CallSignature;
use crate::comm::diagnostics::{CallReport, Entry, FlightRecorder, OpLabel, Wait};

/// The last calls of a rank.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    entries: FlightRecorder,
    /// Whether the desync check records the collectives, before it compares them.
    is_checked: bool,
    /// The collective that is being compared, and so not yet on the GPU.
    compared: Option<u64>,
}

impl Recorder {
    /// Records that collectives are compared.
    pub(super) fn set_checked(&mut self) {
        self.is_checked = true;
    }

    /// Records a call that was enqueued to the GPU.
    pub(super) fn issued(&mut self, label: OpLabel, call: CallSignature) {
        if !self.is_checked || label.op.is_message() {
            self.entries.record(label, call);
        }
    }

    /// Records a collective that is about to be compared. Its sequence number counts compared calls.
    pub(super) fn comparing(&mut self, label: OpLabel, call: CallSignature) {
        self.compared = Some(self.entries.record(label, call));
    }

    /// All ranks have joined the collective, which is enqueued next. The comparison ran after all earlier operations on the
    /// same stream, so they are complete.
    pub(super) fn agreed(&mut self) {
        self.compared = None;
        self.entries.complete_before_newest();
    }

    /// Returns the recorded calls, given the operations that the GPU has not completed, and the call that blocks the rank:
    /// the oldest in progress, since collectives run in order. The rank does not know for whom it waits.
    pub(super) fn report(&self, on_gpu: &[OpLabel]) -> CallReport {
        let is_in_progress = |entry: &Entry| self.is_in_progress(entry, on_gpu);
        let blocking = self.entries.oldest_under_way(is_in_progress);
        let wait = blocking.map(|entry| Wait { label: entry.label.clone(), missing: Vec::new() });
        CallReport { calls: self.entries.report_by(is_in_progress), wait }
    }

    fn is_in_progress(&self, entry: &Entry, on_gpu: &[OpLabel]) -> bool {
        let own = &entry.label;
        let is_message = own.op.is_message();
        let mut of_kind = on_gpu
            .iter()
            .filter(|other| other.group.name == own.group.name && other.op.is_message() == is_message);
        if is_message {
            // Messages are enqueued together, as one operation with several calls.
            return of_kind.any(|other| other.sequence == own.sequence);
        }
        if !self.is_checked {
            return of_kind.any(|other| (other.op, other.sequence) == (own.op, own.sequence));
        }
        // GPU sequence numbers differ, since a split runs several operations on the GPU. But only the last call
        // that all ranks have joined can be on it.
        !entry.is_complete && (self.compared == Some(entry.id) || of_kind.next().is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::CollectiveOp;
    use crate::comm::diagnostics::tests::{call as called, label};

    fn on_gpu(name: &str, op: CollectiveOp, sequence: u64) -> OpLabel {
        OpLabel { group: label(name, &[0, 1]), op, sequence }
    }

    /// A call in the group sp.
    fn of_sp(sequence: u64, op: &str) -> (OpLabel, CallSignature) {
        let call = called(op);
        (on_gpu("sp", call.op(), sequence), call)
    }

    fn issue(calls: &mut Recorder, sequence: u64, op: &str) {
        let (label, call) = of_sp(sequence, op);
        calls.issued(label, call);
    }

    fn compare(calls: &mut Recorder, sequence: u64, op: &str) {
        let (label, call) = of_sp(sequence, op);
        calls.comparing(label, call);
    }

    fn in_progress(calls: &Recorder, on_gpu: &[OpLabel]) -> Option<(u64, CollectiveOp)> {
        calls.report(on_gpu).wait.map(|wait| (wait.label.sequence, wait.label.op))
    }

    #[test]
    fn without_comparison_the_gpu_determines_what_is_in_progress() {
        let mut calls = Recorder::default();
        for (sequence, op) in (0..).zip(["all_to_all", "all_gather"]) {
            issue(&mut calls, sequence, op);
        }
        issue(&mut calls, 0, "send");
        assert_eq!(in_progress(&calls, &[]), None);
        let both = [on_gpu("sp", CollectiveOp::AllToAll, 0), on_gpu("sp", CollectiveOp::AllGather, 1)];
        assert_eq!(in_progress(&calls, &both), Some((0, CollectiveOp::AllToAll)));
        assert_eq!(in_progress(&calls, &both[1..]), Some((1, CollectiveOp::AllGather)));
        assert_eq!(in_progress(&calls, &[on_gpu("dp", CollectiveOp::AllToAll, 0)]), None, "of another group");
    }

    #[test]
    fn a_collective_that_the_gpu_has_completed_does_not_block_a_rank() {
        let mut calls = Recorder::default();
        calls.set_checked();
        compare(&mut calls, 7, "all_to_all");
        let comparison = on_gpu("sp (calls)", CollectiveOp::AllGather, 7);
        assert_eq!(in_progress(&calls, std::slice::from_ref(&comparison)), Some((7, CollectiveOp::AllToAll)));
        calls.agreed();
        // Sequence numbers on the GPU differ, because they include the all-gathers of splits.
        let exchange = on_gpu("sp", CollectiveOp::AllToAll, 9);
        issue(&mut calls, 9, "all_to_all");
        assert_eq!(in_progress(&calls, std::slice::from_ref(&exchange)), Some((7, CollectiveOp::AllToAll)));
        // It is complete, and some rank has not joined the next one, which is still being compared.
        compare(&mut calls, 8, "barrier");
        assert_eq!(in_progress(&calls, std::slice::from_ref(&comparison)), Some((8, CollectiveOp::Barrier)));
        assert_eq!(in_progress(&calls, &[exchange, comparison]), Some((7, CollectiveOp::AllToAll)));
    }

    #[test]
    fn a_waiting_message_is_not_confused_with_an_earlier_collective() {
        let mut calls = Recorder::default();
        calls.set_checked();
        compare(&mut calls, 0, "all_reduce");
        calls.agreed();
        issue(&mut calls, 0, "recv");
        let message = [on_gpu("sp", CollectiveOp::Recv, 0)];
        assert_eq!(in_progress(&calls, &message), None);
        let reported: Vec<String> = calls.report(&message).calls.iter().map(ToString::to_string).collect();
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
