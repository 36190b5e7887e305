//! What a rank has called last, and what of it is still under way.

use crate::comm::CollectiveOp;
use crate::comm::cause::Wait;
use crate::comm::history::{History, Label, Record, Told};
use std::fmt;
use std::sync::Arc;

/// A rank's last calls.
#[derive(Debug, Default)]
pub(super) struct Calls {
    history: History<Called>,
    issued: u64,
    /// The collectives are remembered by who compares them, before they do.
    is_checked: bool,
    /// The collective that is being compared; nothing of it is on the GPU yet.
    compared: Option<u64>,
}

/// A call, as it is remembered.
#[derive(Debug)]
pub(super) struct Called {
    pub(super) op: CollectiveOp,
    pub(super) text: String,
}

impl fmt::Display for Called {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// An operation that the GPU is not done with: its group's name, and its place there.
pub(super) type OnGpu = (String, CollectiveOp, u64);

fn is_collective(op: CollectiveOp) -> bool {
    !matches!(op, CollectiveOp::Send | CollectiveOp::Recv)
}

impl Calls {
    /// From now on collectives are compared.
    pub(super) fn set_checked(&mut self) {
        self.is_checked = true;
    }

    /// A call was given to the GPU.
    pub(super) fn issued(&mut self, group: &Arc<Label>, sequence: u64, call: Called) {
        if !self.is_checked || !is_collective(call.op) {
            self.remember(group, sequence, call);
        }
    }

    /// A collective is about to be compared. Its place is that among the calls that are.
    pub(super) fn comparing(&mut self, group: &Arc<Label>, sequence: u64, call: Called) {
        self.compared = Some(self.remember(group, sequence, call));
    }

    /// All ranks have come to it, and it goes to the GPU. The comparison ran there, behind all others, on the one
    /// stream: they are complete.
    pub(super) fn agreed(&mut self) {
        self.compared = None;
        self.history.complete_before_newest();
    }

    fn remember(&mut self, group: &Arc<Label>, sequence: u64, call: Called) -> u64 {
        let id = self.issued;
        self.issued += 1;
        let (group, is_collective) = (group.clone(), is_collective(call.op));
        self.history.add(Record { id, group, sequence, is_collective, call });
        id
    }

    /// The oldest first.
    pub(super) fn tell(&self, on_gpu: &[OnGpu]) -> Vec<Told> {
        self.history.tell_by(|record, is_complete| self.is_under_way(record, is_complete, on_gpu))
    }

    /// What keeps the rank, as its collectives run one after the other: the oldest that is under way. For whom it waits
    /// the rank does not know.
    pub(super) fn wait(&self, on_gpu: &[OnGpu]) -> Option<Wait> {
        let is_under_way =
            |record: &Record<Called>, is_complete| self.is_under_way(record, is_complete, on_gpu);
        let Record { group, sequence, call, .. } = self.history.oldest_under_way(is_under_way)?;
        Some(Wait { group: group.clone(), op: call.op, sequence: *sequence, missing: Vec::new() })
    }

    fn is_under_way(&self, record: &Record<Called>, is_complete: bool, on_gpu: &[OnGpu]) -> bool {
        let Record { id, group, sequence, is_collective: of_all, call } = record;
        if !(self.is_checked && *of_all) {
            let is = |(name, op, place): &OnGpu| (name, op, place) == (&group.name, &call.op, sequence);
            return on_gpu.iter().any(is);
        }
        // The GPU counts other places, since a split of groups is several operations to it. But only the last call of
        // those that all ranks have come to can be on it.
        let may_be_on_gpu = || on_gpu.iter().any(|(name, op, _)| *name == group.name && is_collective(*op));
        !is_complete && (self.compared == Some(*id) || may_be_on_gpu())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label(name: &str) -> Arc<Label> {
        Arc::new(Label { name: name.into(), members: vec![0, 1] })
    }

    fn called(op: CollectiveOp) -> Called {
        Called { op, text: op.to_string() }
    }

    fn on_gpu(name: &str, op: CollectiveOp, place: u64) -> OnGpu {
        (name.into(), op, place)
    }

    fn under_way(calls: &Calls, on_gpu: &[OnGpu]) -> Option<(u64, CollectiveOp)> {
        calls.wait(on_gpu).map(|wait| (wait.sequence, wait.op))
    }

    #[test]
    fn without_comparison_the_gpu_says_what_is_under_way() {
        let (mut calls, sp) = (Calls::default(), label("sp"));
        for (sequence, op) in (0..).zip([CollectiveOp::AllToAll, CollectiveOp::AllGather]) {
            calls.issued(&sp, sequence, called(op));
        }
        calls.issued(&sp, 0, called(CollectiveOp::Send));
        assert_eq!(under_way(&calls, &[]), None);
        let both = [on_gpu("sp", CollectiveOp::AllToAll, 0), on_gpu("sp", CollectiveOp::AllGather, 1)];
        assert_eq!(under_way(&calls, &both), Some((0, CollectiveOp::AllToAll)));
        assert_eq!(under_way(&calls, &both[1..]), Some((1, CollectiveOp::AllGather)));
        assert_eq!(under_way(&calls, &[on_gpu("dp", CollectiveOp::AllToAll, 0)]), None, "another group's");
    }

    #[test]
    fn a_collective_that_the_gpu_is_done_with_is_not_what_keeps_a_rank() {
        let (mut calls, sp) = (Calls::default(), label("sp"));
        calls.set_checked();
        calls.comparing(&sp, 7, called(CollectiveOp::AllToAll));
        let comparison = on_gpu("sp (calls)", CollectiveOp::AllGather, 7);
        assert_eq!(under_way(&calls, std::slice::from_ref(&comparison)), Some((7, CollectiveOp::AllToAll)));
        calls.agreed();
        // Places on the GPU differ: it has counted the gatherings of splits.
        let exchange = on_gpu("sp", CollectiveOp::AllToAll, 9);
        calls.issued(&sp, 9, called(CollectiveOp::AllToAll));
        assert_eq!(under_way(&calls, std::slice::from_ref(&exchange)), Some((7, CollectiveOp::AllToAll)));
        // It is done, and a rank does not come to the next one, which is still being compared.
        calls.comparing(&sp, 8, called(CollectiveOp::Barrier));
        assert_eq!(under_way(&calls, std::slice::from_ref(&comparison)), Some((8, CollectiveOp::Barrier)));
        assert_eq!(under_way(&calls, &[exchange, comparison]), Some((7, CollectiveOp::AllToAll)));
    }

    #[test]
    fn a_message_that_waits_is_not_taken_for_the_collective_before_it() {
        let (mut calls, sp) = (Calls::default(), label("sp"));
        calls.set_checked();
        calls.comparing(&sp, 0, called(CollectiveOp::AllReduce));
        calls.agreed();
        calls.issued(&sp, 0, called(CollectiveOp::Recv));
        let message = [on_gpu("sp", CollectiveOp::Recv, 0)];
        assert_eq!(under_way(&calls, &message), None);
        let told: Vec<String> = calls.tell(&message).iter().map(ToString::to_string).collect();
        let place = |call: &str| format!("#0 of \"sp\": {call}");
        assert_eq!(told, [place("all_reduce, complete"), place("recv, under way")]);
    }
}
