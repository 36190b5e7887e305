//! A connection that carries texts, each behind its length, and never waits.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;

/// A text that is longer, with its length, is no notice of ours.
pub(super) const MAX_BYTES: usize = 1 << 20;

/// A connection, each notice on it behind its length.
#[derive(Debug)]
pub(super) struct Line {
    stream: TcpStream,
    /// What has come of the next notice.
    heard: Vec<u8>,
    /// What is still to go out, in order. A notice that was begun is never given up for the next one: the other side
    /// would take the middle of one for the length of another.
    unsent: VecDeque<Arc<[u8]>>,
    /// How much of the first has gone.
    sent_bytes: usize,
    /// Nothing can be written any more; what was told before may still come.
    is_deaf: bool,
    /// The other side has said its last word.
    pub(super) has_ended: bool,
}

/// How a connection stands.
pub(super) enum Ear {
    Open,
    /// The other side has closed it, as the system does when a process ends.
    Closed,
    /// It does not work any more, which says nothing of the process.
    Broken(std::io::Error),
}

impl Line {
    pub(super) fn new(stream: TcpStream) -> std::io::Result<Self> {
        stream.set_nonblocking(true)?;
        let (heard, unsent) = (Vec::new(), VecDeque::new());
        Ok(Self { stream, heard, unsent, sent_bytes: 0, is_deaf: false, has_ended: false })
    }

    /// Writes a frame behind all that is still to go out.
    pub(super) fn send(&mut self, frame: &Arc<[u8]>) {
        if !self.is_deaf {
            self.unsent.push_back(frame.clone());
            self.write();
        }
    }

    /// Whether the other side has not taken all yet.
    pub(super) fn is_late(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Says that nothing follows, once all has gone out. What comes is still heard.
    pub(super) fn finish(&mut self) {
        self.write();
        if !self.is_late() && !std::mem::replace(&mut self.is_deaf, true) {
            // A connection that is broken needs no end.
            let _ = self.stream.shutdown(Shutdown::Write);
        }
    }

    /// Writes of what is unsent as much as the other side takes now.
    pub(super) fn write(&mut self) {
        while let Some(frame) = self.unsent.front() {
            match self.stream.write(&frame[self.sent_bytes..]) {
                Ok(written) if written > 0 => self.sent_bytes += written,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                failed => {
                    tracing::debug!("a rank cannot be told any more: {failed:?}");
                    self.is_deaf = true;
                    return self.unsent.clear();
                }
            }
            if self.sent_bytes == frame.len() {
                self.unsent.pop_front();
                self.sent_bytes = 0;
            }
        }
    }

    /// The texts that are complete.
    pub(super) fn listen(&mut self) -> (Vec<Vec<u8>>, Ear) {
        let mut ear = Ear::Open;
        let mut chunk = [0; 4096];
        loop {
            match self.stream.read(&mut chunk) {
                Ok(0) => ear = Ear::Closed,
                Ok(read) => {
                    self.heard.extend_from_slice(&chunk[..read]);
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                // What the system says of a process that was killed with something unread.
                Err(error) if error.kind() == ErrorKind::ConnectionReset => ear = Ear::Closed,
                Err(error) => ear = Ear::Broken(error),
            }
            break;
        }
        let mut texts = Vec::new();
        while let Some((length, _)) = self.heard.split_first_chunk::<4>() {
            let end = 4 + u32::from_le_bytes(*length) as usize;
            if end > MAX_BYTES {
                return (texts, Ear::Broken(ErrorKind::InvalidData.into()));
            }
            if self.heard.len() < end {
                break;
            }
            let text = self.heard.drain(..end).skip(4).collect();
            texts.push(text);
        }
        (texts, ear)
    }
}

/// A text of at most [`MAX_BYTES`] − 4 behind its length.
pub(super) fn framed(text: &[u8]) -> Arc<[u8]> {
    [&(text.len() as u32).to_le_bytes()[..], text].concat().into()
}
