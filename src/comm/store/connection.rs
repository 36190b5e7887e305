//! A nonblocking connection that carries frames, each with its length and a proof of its sender.

use super::handshake::FrameKey;
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;

/// The largest frame, including its header. A longer one is invalid.
pub(in crate::comm) const MAX_BYTES: usize = 1 << 20;
/// Length and proof.
pub(super) const HEADER_BYTES: usize = 4 + 32;

/// One side of a connection.
#[derive(Debug)]
pub(in crate::comm) struct Connection {
    stream: TcpStream,
    key: FrameKey,
    /// Received bytes of the next frame.
    received: Vec<u8>,
    num_received: u64,
    /// Frames not sent yet, in order, as header and body. A frame that was begun is always finished: otherwise the
    /// other side would read the middle of one frame as the length of another.
    unsent: VecDeque<([u8; HEADER_BYTES], Arc<[u8]>)>,
    num_sent: u64,
    /// Bytes of the first frame that were sent.
    sent_bytes: usize,
    /// Writing is closed; data sent before may still arrive.
    is_write_closed: bool,
}

/// Frames received on a connection, and whether it is still open.
pub(super) struct Arrived {
    /// The complete frames.
    pub(super) frames: Vec<Vec<u8>>,
    pub(super) state: ConnectionState,
}

/// State of a connection.
pub(super) enum ConnectionState {
    Open,
    /// Closed by the other side, or by the system when its process ended.
    Closed,
    /// Broken, which says nothing about the process.
    Broken(std::io::Error),
}

impl Connection {
    pub(super) fn new(stream: TcpStream, key: FrameKey) -> std::io::Result<Self> {
        stream.set_nonblocking(true)?;
        let (received, unsent) = (Vec::new(), VecDeque::new());
        let (num_received, num_sent, sent_bytes, is_write_closed) = (0, 0, 0, false);
        Ok(Self { stream, key, received, num_received, unsent, num_sent, sent_bytes, is_write_closed })
    }

    /// Returns whether the other side has not closed it, as far as that is known without reading.
    pub(super) fn is_open(&self) -> bool {
        match self.stream.peek(&mut [0]) {
            Ok(read) => read > 0,
            Err(error) => error.kind() == ErrorKind::WouldBlock,
        }
    }

    #[cfg(test)]
    pub(super) fn skip_number(&mut self) {
        self.num_sent += 1;
    }

    /// Queues a frame after all unsent frames, and writes.
    pub(super) fn send(&mut self, body: &Arc<[u8]>) {
        if self.is_write_closed {
            return;
        }
        let mut header = [0; HEADER_BYTES];
        header[..4].copy_from_slice(&(body.len() as u32).to_le_bytes());
        header[4..].copy_from_slice(self.key.prove_own(self.num_sent, body).as_bytes());
        self.num_sent += 1;
        self.unsent.push_back((header, body.clone()));
        self.write();
    }

    /// Returns whether frames are still unsent.
    pub(super) fn is_late(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Closes the write side once all frames are sent. Data can still be received.
    pub(super) fn finish(&mut self) {
        self.write();
        if !self.is_late() && !std::mem::replace(&mut self.is_write_closed, true) {
            // A broken connection needs no shutdown.
            let _ = self.stream.shutdown(Shutdown::Write);
        }
    }

    /// Writes as many unsent bytes as the other side accepts now.
    pub(super) fn write(&mut self) {
        while let Some((header, body)) = self.unsent.front() {
            let rest = match self.sent_bytes.checked_sub(HEADER_BYTES) {
                Some(of_body) => &body[of_body..],
                None => &header[self.sent_bytes..],
            };
            match self.stream.write(rest) {
                Ok(written) if written > 0 || rest.is_empty() => self.sent_bytes += written,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                failed => {
                    tracing::debug!("cannot send to a process any more: {failed:?}");
                    self.is_write_closed = true;
                    return self.unsent.clear();
                }
            }
            if self.sent_bytes == HEADER_BYTES + body.len() {
                self.unsent.pop_front();
                self.sent_bytes = 0;
            }
        }
    }

    /// Returns the complete frames. Reads at most the size of the longest frame, so that one sender cannot block others.
    pub(super) fn read(&mut self) -> Arrived {
        let mut state = ConnectionState::Open;
        let mut chunk = [0; 4096];
        loop {
            match self.stream.read(&mut chunk) {
                Ok(0) => state = ConnectionState::Closed,
                Ok(read) => {
                    self.received.extend_from_slice(&chunk[..read]);
                    if self.received.len() <= MAX_BYTES {
                        continue;
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                // The system's error for a killed process that left data unread.
                Err(error) if error.kind() == ErrorKind::ConnectionReset => state = ConnectionState::Closed,
                Err(error) => state = ConnectionState::Broken(error),
            }
            break;
        }
        let mut frames = Vec::new();
        let invalid = || ConnectionState::Broken(ErrorKind::InvalidData.into());
        while let Some((length, _)) = self.received.split_first_chunk::<4>() {
            let end = HEADER_BYTES + u32::from_le_bytes(*length) as usize;
            if end > MAX_BYTES {
                return Arrived { frames, state: invalid() };
            }
            if self.received.len() < end {
                break;
            }
            let frame: Vec<u8> = self.received.drain(..end).collect();
            let (header, body) = frame.split_at(HEADER_BYTES);
            if !self.key.is_proof(self.num_received, body, &header[4..]) {
                return Arrived { frames, state: invalid() };
            }
            self.num_received += 1;
            frames.push(body.to_vec());
        }
        Arrived { frames, state }
    }
}
