//! Messages that processes send to all other ranks outside of any operation, over any transport.

use super::CallReport;
use crate::comm::CommError;
use serde::{Deserialize, Serialize};

/// A message of one rank to all others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::comm) enum ControlMessage {
    /// The world has failed, with the error.
    Failed(CommError),
    /// The last calls of the rank and what it waits for now. A rank that times out sends it before it fails, and the other
    /// ranks answer with theirs.
    CallReport(CallReport),
    /// The rank issues no more operations. Its last message.
    Ended,
}

impl ControlMessage {
    /// Creates the message that `rank` has failed. An error that cannot be serialized is sent as text.
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
    fn every_failure_can_be_sent() {
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
