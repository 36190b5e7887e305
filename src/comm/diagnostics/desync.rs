//! The desync check: compares the calls of all ranks of a group.

use super::OpLabel;
use crate::comm::{CallSignature, CollectiveOp, CommError, Elements, StridedBlock};

/// A call of one rank that differs from the calls of the others.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::comm) struct Divergence {
    pub(in crate::comm) rank: usize,
    pub(in crate::comm) called: String,
    pub(in crate::comm) others: Vec<usize>,
    pub(in crate::comm) others_called: String,
}

impl Divergence {
    /// Returns the error that all ranks report, for a divergence of ranks of the group in an operation.
    pub(in crate::comm) fn error_in(self, label: &OpLabel) -> CommError {
        let members = &label.group.members;
        let others = self.others.into_iter().map(|rank| members[rank]).collect();
        Self { rank: members[self.rank], others, ..self }.into_error(label)
    }

    /// As [`error_in`](Self::error_in), for a divergence of global ranks.
    pub(super) fn into_error(self, label: &OpLabel) -> CommError {
        let Divergence { rank, called, others, others_called } = self;
        let (group, sequence) = (label.group.name.clone(), label.sequence);
        CommError::Desync { group, sequence, rank, called, others, others_called }
    }
}

/// Returns whether two calls match, as far as that is possible without knowing their ranks. (Counts of all-to-alls
/// are compared pair by pair instead.)
fn agree(one: &CallSignature, other: &CallSignature) -> bool {
    use CallSignature::*;
    match (one, other) {
        (AllToAll { dtype, .. }, AllToAll { dtype: d, .. })
        | (AllToAllStrided { dtype, .. }, AllToAllStrided { dtype: d, .. }) => dtype == d,
        (Split { name, color, .. }, Split { name: n, color: c, .. }) => {
            color != c || color.is_none() || name == n
        }
        _ => one == other,
    }
}

/// Compares the calls of all ranks of a group, in rank order. Every rank comes to the same result.
pub(in crate::comm) fn compare(calls: &[&CallSignature]) -> Result<(), Divergence> {
    if calls.iter().all(|call| agree(calls[0], call)) {
        return compare_counts(calls);
    }
    let agreeing =
        |rank: usize| (0..calls.len()).filter(|&other| agree(calls[rank], calls[other])).collect::<Vec<_>>();
    // The largest set of ranks with matching calls; ties go to the lowest rank.
    let others =
        (0..calls.len()).map(agreeing).reduce(|best, next| if next.len() > best.len() { next } else { best });
    let others = others.unwrap_or_default();
    let Some(rank) = (0..calls.len()).find(|rank| !others.contains(rank)) else {
        return compare_counts(calls);
    };
    let others_called = others.first().map_or_else(String::new, |&other| calls[other].to_string());
    Err(Divergence { rank, called: calls[rank].to_string(), others, others_called })
}

/// Compares the elements that rank `src` of a group sends with those that rank `dst` expects.
pub(in crate::comm) fn compare_message(
    src: usize,
    sent: Elements,
    dst: usize,
    expected: Elements,
) -> Result<(), Divergence> {
    if sent == expected {
        return Ok(());
    }
    let (called, others_called) =
        (format!("{}({sent})", CollectiveOp::Send), format!("{}({expected})", CollectiveOp::Recv));
    Err(Divergence { rank: src, called, others: vec![dst], others_called })
}

/// Compares the whole count matrix of an all-to-all: each rank must send what its peer
/// expects. Names the rank with most mismatches.
fn compare_counts(calls: &[&CallSignature]) -> Result<(), Divergence> {
    let ranks = calls.len();
    let pairs = (0..ranks).flat_map(|src| (0..ranks).map(move |dst| (src, dst)));
    let faulty: Vec<(usize, usize)> = pairs.filter(|&(src, dst)| !pair_matches(calls, src, dst)).collect();
    let faults = |rank: usize| faulty.iter().filter(|&&(src, dst)| src == rank || dst == rank).count();
    let Some(&(mut src, mut dst)) = faulty.first() else { return Ok(()) };
    let most = (0..ranks).map(faults).max().unwrap_or(0);
    let culprit =
        if faults(src) == most { src } else { (0..ranks).find(|&r| faults(r) == most).unwrap_or(src) };
    if let Some(&pair) = faulty.iter().find(|&&(src, dst)| src == culprit || dst == culprit) {
        (src, dst) = pair;
    }
    let op = calls[culprit].op();
    let sends = format!("{op} sending {} to rank {dst} of the group", sent(calls[src], dst));
    let expects = format!("{op} expecting {} from rank {src} of the group", expected(calls[dst], src));
    let (other, called, others_called) =
        if src == culprit { (dst, sends, expects) } else { (src, expects, sends) };
    Err(Divergence { rank: culprit, called, others: vec![other], others_called })
}

fn pair_matches(calls: &[&CallSignature], src: usize, dst: usize) -> bool {
    match (calls[src], calls[dst]) {
        (CallSignature::AllToAll { send, .. }, CallSignature::AllToAll { recv, .. }) => {
            send[dst] == recv[src]
        }
        (
            CallSignature::AllToAllStrided { plan: from, .. },
            CallSignature::AllToAllStrided { plan: to, .. },
        ) => {
            let shape = |block: &StridedBlock| [block.batch, block.rows, block.run];
            let sent = from.send[dst].iter().map(shape);
            sent.eq(to.recv[src].iter().map(|recv| shape(&recv.block)))
        }
        _ => true,
    }
}

fn sent(call: &CallSignature, dst: usize) -> String {
    match call {
        CallSignature::AllToAll { send, .. } => elements(send[dst]),
        CallSignature::AllToAllStrided { plan, .. } => blocks(plan.send[dst].iter()),
        _ => String::new(),
    }
}

fn expected(call: &CallSignature, src: usize) -> String {
    match call {
        CallSignature::AllToAll { recv, .. } => elements(recv[src]),
        CallSignature::AllToAllStrided { plan, .. } => blocks(plan.recv[src].iter().map(|recv| &recv.block)),
        _ => String::new(),
    }
}

fn elements(count: usize) -> String {
    format!("{count} element{}", if count == 1 { "" } else { "s" })
}

fn blocks<'a>(blocks: impl Iterator<Item = &'a StridedBlock>) -> String {
    let shapes = blocks.map(|block| (block.batch, block.rows, block.run));
    format!("blocks (batch, rows, run) {:?}", shapes.collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::ReduceOp;
    use candle_core::DType;

    #[test]
    fn a_call_survives_serialization() {
        for call in [reduce(4), exchange(&[0, 3], &[0, 2]), CallSignature::Barrier] {
            let text = serde_json::to_string(&call).unwrap();
            let decoded: CallSignature = serde_json::from_str(&text).unwrap();
            assert_eq!(decoded.to_string(), call.to_string(), "{text}");
        }
    }

    fn reduce(count: usize) -> CallSignature {
        CallSignature::AllReduce { op: ReduceOp::Sum, elements: Elements { dtype: DType::F32, count } }
    }

    fn exchange(send: &[usize], recv: &[usize]) -> CallSignature {
        CallSignature::AllToAll { dtype: DType::F32, send: send.into(), recv: recv.into() }
    }

    #[test]
    fn the_minority_is_named_with_both_calls() {
        let divergence = compare(&[&reduce(4), &CallSignature::Barrier, &reduce(4)]).unwrap_err();
        let expected = Divergence {
            rank: 1,
            called: "barrier".into(),
            others: vec![0, 2],
            others_called: "all_reduce(Sum, 4 × f32)".into(),
        };
        assert_eq!(divergence, expected);
    }

    #[test]
    fn the_first_rank_can_be_the_minority() {
        assert_eq!(compare(&[&reduce(5), &reduce(4), &reduce(4)]).unwrap_err().rank, 0);
    }

    #[test]
    fn a_wrong_row_of_the_count_matrix_names_its_rank() {
        // Rank 2 sends one element too many to both of the others.
        let calls = [
            exchange(&[1, 1, 1], &[1, 1, 1]),
            exchange(&[1, 1, 1], &[1, 1, 1]),
            exchange(&[2, 2, 1], &[1, 1, 1]),
        ];
        let divergence = compare(&calls.iter().collect::<Vec<_>>()).unwrap_err();
        assert_eq!(divergence.rank, 2);
        assert_eq!(divergence.called, "all_to_all sending 2 elements to rank 0 of the group");
        assert_eq!(divergence.others_called, "all_to_all expecting 1 element from rank 2 of the group");
    }

    #[test]
    fn uneven_but_consistent_counts_agree() {
        let calls = [exchange(&[0, 3], &[0, 2]), exchange(&[2, 1], &[3, 1])];
        assert_eq!(compare(&calls.iter().collect::<Vec<_>>()), Ok(()));
    }

    #[test]
    fn split_names_must_agree_only_within_a_color() {
        let split = |name: &str, color| CallSignature::Split { name: name.into(), color, key: 0 };
        assert_eq!(compare(&[&split("a", Some(0)), &split("b", Some(1)), &split("c", None)]), Ok(()));
        let divergence =
            compare(&[&split("a", Some(0)), &split("b", Some(0)), &split("a", Some(0))]).unwrap_err();
        assert_eq!(divergence.rank, 1);
    }
}
