//! The control messages of ranks that share a store: each is a key, which all others watch.

use super::{Departure, MAX_VALUE_BYTES, Store};
use crate::comm::CommError;
use crate::comm::diagnostics::ControlMessage;

/// How much of a failure's reason is sent when all of it is too long.
const MAX_REASON_CHARS: usize = 2000;

/// What comes from a rank.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::comm) enum Received {
    /// A message of its own.
    Message(ControlMessage),
    /// Its process has ended without a last word.
    Gone,
}

/// One rank's end: what it sends all others, and what comes from them.
#[derive(Debug)]
pub(in crate::comm) struct ControlChannel {
    rank: usize,
    store: Store,
}

impl ControlChannel {
    pub(in crate::comm) fn new(store: Store) -> Self {
        Self { rank: store.rank(), store }
    }

    /// Sends all other ranks a message, as far as they can be reached. What a rank does not read in time goes out later,
    /// when this one looks.
    pub(in crate::comm) fn send(&mut self, message: &ControlMessage) {
        match fitting(self.rank, message) {
            Ok(text) => self.store.set(&format!("control/{}", self.rank), text),
            Err(reason) => tracing::error!("rank {} cannot tell the others: {reason}", self.rank),
        }
    }

    /// What has come, with the ranks that it comes from; each rank's in their order.
    pub(in crate::comm) fn poll(&mut self) -> Vec<(usize, Received)> {
        let mut come = Vec::new();
        for change in self.store.watch() {
            match (change.departure(), change.value) {
                (Some(Departure::Ended(rank)), _) => {
                    come.push((rank, Received::Message(ControlMessage::Ended)));
                }
                (Some(Departure::Gone(rank)), _) => come.push((rank, Received::Gone)),
                (None, Some(text)) if change.key.starts_with("control/") => {
                    let message = serde_json::from_slice(&text).ok();
                    come.extend(message.map(|message| (change.rank, Received::Message(message))));
                }
                (None, _) => {}
            }
        }
        come
    }

    /// The rank that all messages go through.
    pub(in crate::comm) fn host(&self) -> usize {
        self.store.host()
    }

    /// Whether anyone is left who can be heard.
    pub(in crate::comm) fn is_connected(&self) -> bool {
        self.store.is_connected()
    }

    /// Waits until all has gone out, for as long as ranks that do not read may hold it up.
    pub(in crate::comm) fn flush(&mut self) {
        self.store.flush();
    }

    /// Says that this rank issues nothing any more, and lets that arrive.
    pub(in crate::comm) fn close(&mut self) {
        self.store.close();
    }
}

/// A message as it goes out: shortened, if it is more than a rank takes.
fn fitting(rank: usize, message: &ControlMessage) -> Result<Vec<u8>, String> {
    let text = serde_json::to_vec(message).map_err(|error| error.to_string())?;
    if text.len() <= MAX_VALUE_BYTES {
        return Ok(text);
    }
    match shortened(rank, message) {
        Some(shorter) => fitting(rank, &shorter),
        None => Err(format!("{} bytes are more than the {MAX_VALUE_BYTES} of a message", text.len())),
    }
}

/// The newer half of many calls, the beginning of a long reason.
fn shortened(rank: usize, message: &ControlMessage) -> Option<ControlMessage> {
    match message {
        ControlMessage::CallReport { calls, wait } if calls.len() > 1 => {
            Some(ControlMessage::CallReport { calls: calls[calls.len() / 2..].to_vec(), wait: wait.clone() })
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
