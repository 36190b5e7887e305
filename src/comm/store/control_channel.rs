//! Control messages over a store: each message is a key, which all other ranks watch.

use super::{Change, Departure, MAX_VALUE_BYTES, Store};
use crate::comm::CommError;
use crate::comm::diagnostics::{CallReport, ControlMessage};

/// Length to which a failure reason that is too long is cut.
const MAX_REASON_CHARS: usize = 2000;

/// Input from another rank.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::comm) struct Received {
    pub(in crate::comm) from: usize,
    /// `None` if its process ended without [`ControlMessage::Ended`].
    pub(in crate::comm) message: Option<ControlMessage>,
}

/// One rank's endpoint for control messages to and from all other ranks.
#[derive(Debug)]
pub(in crate::comm) struct ControlChannel {
    rank: usize,
    store: Store,
}

impl ControlChannel {
    pub(in crate::comm) fn new(store: Store) -> Self {
        Self { rank: store.rank(), store }
    }

    /// Sends a message to all other ranks that can be reached. Data that a rank does not read in time is sent
    /// by later polls.
    pub(in crate::comm) fn send(&mut self, message: &ControlMessage) {
        match encode_to_fit(self.rank, message) {
            Ok(text) => self.store.set(&format!("control/{}", self.rank), text),
            Err(reason) => tracing::error!("rank {} cannot send a control message: {reason}", self.rank),
        }
    }

    /// Returns the messages received, in the order of each sender.
    pub(in crate::comm) fn poll(&mut self) -> Vec<Received> {
        let received = |change: Change| match (change.departure(), change.value) {
            (Some(Departure::Ended(from)), _) => {
                Some(Received { from, message: Some(ControlMessage::Ended) })
            }
            (Some(Departure::Lost(from)), _) => Some(Received { from, message: None }),
            (None, Some(text)) if change.key.starts_with("control/") => {
                let message = Some(serde_json::from_slice(&text).ok()?);
                Some(Received { from: change.rank, message })
            }
            (None, _) => None,
        };
        self.store.watch().filter_map(received).collect()
    }

    /// The rank that relays all messages.
    pub(in crate::comm) fn host(&self) -> usize {
        self.store.host()
    }

    /// Returns whether any other rank can still be received.
    pub(in crate::comm) fn is_connected(&self) -> bool {
        self.store.is_connected()
    }

    /// Waits until all messages are sent, limited by the timeout for ranks that do not read.
    pub(in crate::comm) fn flush(&mut self) {
        self.store.flush();
    }

    /// Announces that this rank issues no more operations, and waits until that has arrived.
    pub(in crate::comm) fn close(&mut self) {
        self.store.close();
    }

    /// Ends the connections without that announcement, once all messages have arrived.
    pub(in crate::comm) fn disconnect(&mut self) {
        self.store.disconnect();
    }
}

/// Encodes a message, shortened if it exceeds the size limit.
fn encode_to_fit(rank: usize, message: &ControlMessage) -> Result<Vec<u8>, String> {
    let text = serde_json::to_vec(message).map_err(|error| error.to_string())?;
    if text.len() <= MAX_VALUE_BYTES {
        return Ok(text);
    }
    match shortened(rank, message) {
        Some(shorter) => encode_to_fit(rank, &shorter),
        None => Err(format!("message of {} bytes exceeds the limit of {MAX_VALUE_BYTES} bytes", text.len())),
    }
}

/// Returns the newer half of a list of calls, or the beginning of a long reason.
fn shortened(rank: usize, message: &ControlMessage) -> Option<ControlMessage> {
    match message {
        ControlMessage::CallReport(CallReport { calls, wait }) if calls.len() > 1 => {
            let (calls, wait) = (calls[calls.len() / 2..].to_vec(), wait.clone());
            Some(ControlMessage::CallReport(CallReport { calls, wait }))
        }
        ControlMessage::Failed(error) => {
            let reason = error.to_string();
            let (end, _) = reason.char_indices().nth(MAX_REASON_CHARS)?;
            let reason = format!("{} … ({} bytes)", &reason[..end], reason.len());
            Some(ControlMessage::Failed(CommError::PeerFailed { rank, reason }))
        }
        _ => None,
    }
}

#[cfg(test)]
pub(in crate::comm) mod tests;
