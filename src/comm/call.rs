//! What a rank called, and whether the ranks' calls belong together.

use super::{CollectiveOp, CommError, ReduceOp, StridedBlock, StridedPlan};
use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// A collective call, without its data: what the ranks compare before any moves.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Call {
    AllReduce {
        op: ReduceOp,
        #[serde(with = "dtype_name")]
        dtype: DType,
        count: usize,
    },
    ReduceScatter {
        op: ReduceOp,
        #[serde(with = "dtype_name")]
        dtype: DType,
        chunk: usize,
    },
    AllGather {
        #[serde(with = "dtype_name")]
        dtype: DType,
        count: usize,
    },
    AllToAll {
        #[serde(with = "dtype_name")]
        dtype: DType,
        send: Vec<usize>,
        recv: Vec<usize>,
    },
    AllToAllStrided {
        #[serde(with = "dtype_name")]
        dtype: DType,
        #[serde(with = "shared")]
        plan: Arc<StridedPlan>,
    },
    Broadcast {
        #[serde(with = "dtype_name")]
        dtype: DType,
        count: usize,
        root: usize,
    },
    Barrier,
    Split {
        name: String,
        color: Option<usize>,
        key: usize,
    },
}

/// A disagreement. Ranks are those of the group.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Divergence {
    pub(super) rank: usize,
    pub(super) called: String,
    pub(super) others: Vec<usize>,
    pub(super) others_called: String,
}

impl Divergence {
    /// The error that all ranks of the group report.
    pub(super) fn into_error(self, group: &str, sequence: u64, global_ranks: &[usize]) -> CommError {
        let Divergence { rank, called, others, others_called } = self;
        CommError::Desync {
            group: group.to_owned(),
            sequence,
            rank: global_ranks[rank],
            called,
            others: others.into_iter().map(|rank| global_ranks[rank]).collect(),
            others_called,
        }
    }
}

impl Call {
    pub(super) fn op(&self) -> CollectiveOp {
        match self {
            Call::AllReduce { .. } => CollectiveOp::AllReduce,
            Call::ReduceScatter { .. } => CollectiveOp::ReduceScatter,
            Call::AllGather { .. } => CollectiveOp::AllGather,
            Call::AllToAll { .. } => CollectiveOp::AllToAll,
            Call::AllToAllStrided { .. } => CollectiveOp::AllToAllStrided,
            Call::Broadcast { .. } => CollectiveOp::Broadcast,
            Call::Barrier => CollectiveOp::Barrier,
            Call::Split { .. } => CollectiveOp::Split,
        }
    }

    /// Whether two calls may meet, as far as that can be told without knowing whose
    /// they are (the counts of an all-to-all are compared pair by pair instead).
    fn agrees_with(&self, other: &Call) -> bool {
        use Call::*;
        match (self, other) {
            (AllReduce { op, dtype, count }, AllReduce { op: o, dtype: d, count: c }) => {
                (op, dtype, count) == (o, d, c)
            }
            (ReduceScatter { op, dtype, chunk }, ReduceScatter { op: o, dtype: d, chunk: c }) => {
                (op, dtype, chunk) == (o, d, c)
            }
            (AllGather { dtype, count }, AllGather { dtype: d, count: c }) => (dtype, count) == (d, c),
            (AllToAll { dtype, .. }, AllToAll { dtype: d, .. }) => dtype == d,
            (AllToAllStrided { dtype, .. }, AllToAllStrided { dtype: d, .. }) => dtype == d,
            (Broadcast { dtype, count, root }, Broadcast { dtype: d, count: c, root: r }) => {
                (dtype, count, root) == (d, c, r)
            }
            (Barrier, Barrier) => true,
            (Split { name, color, .. }, Split { name: n, color: c, .. }) => {
                color != c || color.is_none() || name == n
            }
            _ => false,
        }
    }
}

/// Compares the calls of all ranks of a group, in rank order. Every rank comes to
/// the same conclusion.
pub(super) fn compare(calls: &[&Call]) -> Result<(), Divergence> {
    if calls.iter().all(|call| calls[0].agrees_with(call)) {
        return compare_counts(calls);
    }
    let agreeing = |rank: usize| {
        (0..calls.len()).filter(|&other| calls[rank].agrees_with(calls[other])).collect::<Vec<_>>()
    };
    // The largest set of ranks that agree; of equal ones, that of the lowest rank.
    let others =
        (0..calls.len()).map(agreeing).reduce(|best, next| if next.len() > best.len() { next } else { best });
    let others = others.unwrap_or_default();
    let Some(rank) = (0..calls.len()).find(|rank| !others.contains(rank)) else {
        return compare_counts(calls);
    };
    let others_called = others.first().map_or_else(String::new, |&other| calls[other].to_string());
    Err(Divergence { rank, called: calls[rank].to_string(), others, others_called })
}

/// For all-to-alls, what each rank sends must be what its peer expects: the whole
/// count matrix is compared, and the rank with most faults is named.
fn compare_counts(calls: &[&Call]) -> Result<(), Divergence> {
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

fn pair_matches(calls: &[&Call], src: usize, dst: usize) -> bool {
    match (calls[src], calls[dst]) {
        (Call::AllToAll { send, .. }, Call::AllToAll { recv, .. }) => send[dst] == recv[src],
        (Call::AllToAllStrided { plan: from, .. }, Call::AllToAllStrided { plan: to, .. }) => {
            let sent = from.send[dst].iter().map(shape);
            sent.eq(to.recv[src].iter().map(|recv| shape(&recv.block)))
        }
        _ => true,
    }
}

fn shape(block: &StridedBlock) -> (usize, usize, usize) {
    (block.batch, block.rows, block.run)
}

fn sent(call: &Call, dst: usize) -> String {
    match call {
        Call::AllToAll { send, .. } => elements(send[dst]),
        Call::AllToAllStrided { plan, .. } => blocks(plan.send[dst].iter()),
        _ => String::new(),
    }
}

fn expected(call: &Call, src: usize) -> String {
    match call {
        Call::AllToAll { recv, .. } => elements(recv[src]),
        Call::AllToAllStrided { plan, .. } => blocks(plan.recv[src].iter().map(|recv| &recv.block)),
        _ => String::new(),
    }
}

fn elements(count: usize) -> String {
    format!("{count} element{}", if count == 1 { "" } else { "s" })
}

fn blocks<'a>(blocks: impl Iterator<Item = &'a StridedBlock>) -> String {
    format!("blocks (batch, rows, run) {:?}", blocks.map(shape).collect::<Vec<_>>())
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.op();
        match self {
            Call::AllReduce { op, dtype, count } => write!(f, "{name}({op:?}, {count} × {})", dtype.as_str()),
            Call::ReduceScatter { op, dtype, chunk } => {
                write!(f, "{name}({op:?}, {chunk} × {} per rank)", dtype.as_str())
            }
            Call::AllGather { dtype, count } => write!(f, "{name}({count} × {} per rank)", dtype.as_str()),
            Call::AllToAll { dtype, send, recv } => {
                write!(f, "{name}({}, sending {send:?}, expecting {recv:?})", dtype.as_str())
            }
            Call::AllToAllStrided { dtype, .. } => write!(f, "{name}({})", dtype.as_str()),
            Call::Broadcast { dtype, count, root } => {
                write!(f, "{name}({count} × {} from rank {root} of the group)", dtype.as_str())
            }
            Call::Barrier => write!(f, "{name}"),
            Call::Split { name: group, color, key } => {
                write!(f, "{name}(\"{group}\", color {color:?}, key {key})")
            }
        }
    }
}

/// What a message is called in words; `peer` is a rank of the group.
#[cfg_attr(
    not(any(feature = "mpi", feature = "nccl")),
    allow(dead_code, reason = "threads have no words for it")
)]
pub(super) fn describe_message(op: CollectiveOp, tensor: &Tensor, peer: usize) -> String {
    format!("{op}({} × {}) with rank {peer} of the group", tensor.elem_count(), tensor.dtype().as_str())
}

/// A plan as itself, whoever else has it, for calls that travel.
mod shared {
    use crate::comm::StridedPlan;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use std::sync::Arc;

    pub(super) fn serialize<S: Serializer>(plan: &Arc<StridedPlan>, to: S) -> Result<S::Ok, S::Error> {
        plan.as_ref().serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Arc<StridedPlan>, D::Error> {
        StridedPlan::deserialize(from).map(Arc::new)
    }
}

/// An element type as its name, for calls that travel.
pub(super) mod dtype_name {
    use candle_core::DType;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(in crate::comm) fn serialize<S: Serializer>(dtype: &DType, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(dtype.as_str())
    }

    pub(in crate::comm) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<DType, D::Error> {
        let name = String::deserialize(from)?;
        name.parse().map_err(|_| Error::custom(format!("no dtype `{name}`")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_has_travelled_says_the_same() {
        for call in [reduce(4), exchange(&[0, 3], &[0, 2]), Call::Barrier] {
            let text = serde_json::to_string(&call).unwrap();
            let travelled: Call = serde_json::from_str(&text).unwrap();
            assert_eq!(travelled.to_string(), call.to_string(), "{text}");
        }
    }

    fn reduce(count: usize) -> Call {
        Call::AllReduce { op: ReduceOp::Sum, dtype: DType::F32, count }
    }

    fn exchange(send: &[usize], recv: &[usize]) -> Call {
        Call::AllToAll { dtype: DType::F32, send: send.to_vec(), recv: recv.to_vec() }
    }

    #[test]
    fn the_minority_is_named_with_both_calls() {
        let divergence = compare(&[&reduce(4), &Call::Barrier, &reduce(4)]).unwrap_err();
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
        let split = |name: &str, color| Call::Split { name: name.into(), color, key: 0 };
        assert_eq!(compare(&[&split("a", Some(0)), &split("b", Some(1)), &split("c", None)]), Ok(()));
        let divergence =
            compare(&[&split("a", Some(0)), &split("b", Some(0)), &split("a", Some(0))]).unwrap_err();
        assert_eq!(divergence.rank, 1);
    }
}
