//! Control messages as MPI messages. Ranks connected by MPI need no store.

use super::library::{Communicator, Request};
use super::transfers::CONTROL_TAG;
use crate::comm::diagnostics::ControlMessage;

/// A control message, and its sender.
#[derive(Debug)]
pub(super) struct Received {
    pub(super) from: usize,
    pub(super) message: ControlMessage,
}

/// The control messages in progress, on the communicator of all ranks.
#[derive(Debug)]
pub(super) struct ControlMessages {
    communicator: Communicator,
    rank: usize,
    ranks: usize,
    sending: Vec<(Request, Vec<u8>)>,
    receiving: Vec<(usize, Request, Vec<u8>)>,
}

impl ControlMessages {
    pub(super) fn new(communicator: Communicator, rank: usize, ranks: usize) -> Self {
        Self { communicator, rank, ranks, sending: Vec::new(), receiving: Vec::new() }
    }

    /// Starts to send a message to all other ranks.
    pub(super) fn send(&mut self, message: &ControlMessage) -> Result<(), String> {
        let text = serde_json::to_vec(message).map_err(|error| error.to_string())?;
        for peer in (0..self.ranks).filter(|&peer| peer != self.rank) {
            let text = text.clone();
            // SAFETY: the list keeps the text alive and unchanged until the request is complete.
            let request = unsafe { self.communicator.send(text.as_ptr(), text.len(), peer, CONTROL_TAG)? };
            self.sending.push((request, text));
        }
        Ok(())
    }

    /// Looks for a message and leaves it: MPI then moves messages of all communicators.
    pub(super) fn call_mpi(&self) {
        // A failure shows in the next call of the rank.
        let _ = self.communicator.probe(None, CONTROL_TAG);
    }

    /// Returns whether all messages have been sent.
    pub(super) fn are_sent(&self) -> bool {
        self.sending.is_empty()
    }

    /// Returns the messages received, in the order of each sender.
    pub(super) fn poll(&mut self) -> Result<Vec<Received>, String> {
        let mut index = 0;
        while index < self.sending.len() {
            match self.sending[index].0.test()? {
                Some(_) => drop(self.sending.swap_remove(index)),
                None => index += 1,
            }
        }
        while let Some(arrived) = self.communicator.probe(None, CONTROL_TAG)? {
            let mut text = vec![0_u8; arrived.bytes];
            // SAFETY: the list keeps the text alive and in place until the request is complete.
            let request = unsafe {
                self.communicator.receive(text.as_mut_ptr(), text.len(), arrived.source, CONTROL_TAG)?
            };
            self.receiving.push((arrived.source, request, text));
        }
        let mut messages = Vec::new();
        // In order of arrival, so that a rank's messages stay in order.
        while let Some((source, request, text)) = self.receiving.first_mut() {
            if request.test()?.is_none() {
                break;
            }
            let message = serde_json::from_slice(text).map_err(|error| error.to_string())?;
            messages.push(Received { from: *source, message });
            self.receiving.remove(0);
        }
        Ok(messages)
    }
}

impl Drop for ControlMessages {
    /// Leaks buffers that MPI may still read or write.
    fn drop(&mut self) {
        std::mem::forget(std::mem::take(&mut self.sending));
        std::mem::forget(std::mem::take(&mut self.receiving));
    }
}
