//! What ranks that are processes send all others outside of any operation, whatever carries it.

use super::{EntryReport, Wait};
use crate::comm::CommError;
use serde::{Deserialize, Serialize};

/// A message of one rank to all others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::comm) enum ControlMessage {
    /// The world has failed, and why.
    Failed(CommError),
    /// What the rank has called last, and what it waits for now. A rank whose time is up says so: it will fail, and asks
    /// the others for theirs.
    CallReport { calls: Vec<EntryReport>, wait: Option<Wait> },
    /// The rank issues nothing any more. Its last word.
    Ended,
}

impl ControlMessage {
    /// That `rank` has failed. An error that does not travel is told as the rank's failure, in its words.
    pub(in crate::comm) fn failed(rank: usize, error: &CommError) -> Self {
        Self::Failed(match error {
            CommError::Mesh(_)
            | CommError::NotMember { .. }
            | CommError::Library { .. }
            | CommError::Start { .. } => CommError::PeerFailed { rank, reason: error.to_string() },
            travels => travels.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::CollectiveOp;

    #[test]
    fn every_failure_can_be_told() {
        let library = CommError::Library {
            library: "NCCL",
            group: "sp".into(),
            op: CollectiveOp::AllToAll,
            sequence: 7,
            rank: 3,
            reason: "unhandled system error".into(),
        };
        let start = CommError::Start { library: "NCCL", rank: None, reason: "no driver".into() };
        let timeout = CommError::Timeout {
            group: "sp".into(),
            op: CollectiveOp::Barrier,
            sequence: 1,
            waited_ms: 10,
            missing: vec![2],
        };
        for (error, says) in [(library, "unhandled system error"), (start, "no driver"), (timeout, "[2]")] {
            let reported = serde_json::to_vec(&ControlMessage::failed(3, &error)).unwrap();
            let ControlMessage::Failed(received) = serde_json::from_slice(&reported).unwrap() else {
                panic!("{error}")
            };
            assert!(received.to_string().contains(says), "{received}");
        }
    }
}
