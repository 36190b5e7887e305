//! The notices of the ranks, over the connections by which they met: rank 0 has one to each other rank, and passes on
//! what it hears.

use super::line::{Ear, Line, MAX_BYTES, framed};
use crate::comm::CommError;
use crate::comm::diagnostics::ControlMessage;
use std::collections::BTreeMap;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How much of a failure's reason is told when all of it is too long.
const MAX_REASON_CHARS: usize = 2000;
/// How long ranks that do not read may hold up one that tells: all of them together, since what it does next may be
/// what they wait for.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two attempts to write.
const PAUSE: Duration = Duration::from_millis(1);

/// What comes from a rank.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Heard {
    /// A notice of its own.
    Notice(ControlMessage),
    /// Its process has ended without a last word.
    Gone,
}

/// One rank's connections: of rank 0 to all others, of those to rank 0.
#[derive(Debug)]
pub(super) struct Notices {
    rank: usize,
    lines: BTreeMap<usize, Line>,
    patience: Duration,
}

impl Notices {
    pub(super) fn new(
        rank: usize,
        connections: impl IntoIterator<Item = (usize, TcpStream)>,
    ) -> std::io::Result<Self> {
        let line = |(peer, stream): (usize, TcpStream)| Ok((peer, Line::new(stream)?));
        let lines = connections.into_iter().map(line).collect::<std::io::Result<_>>()?;
        Ok(Self { rank, lines, patience: PATIENCE })
    }

    /// Tells all other ranks, as far as they can be reached. What a rank does not read in time goes out later, when
    /// this one listens.
    pub(super) fn tell(&mut self, notice: &ControlMessage) {
        self.tell_until(self.deadline(), notice);
    }

    fn tell_until(&mut self, deadline: Instant, notice: &ControlMessage) {
        match fitting(self.rank, notice) {
            Ok(text) => self.pass_on(&framed(&text), self.rank),
            Err(reason) => tracing::error!("rank {} cannot tell the others: {reason}", self.rank),
        }
        self.settle_until(deadline);
    }

    /// How long one may wait from now on for ranks that do not read.
    fn deadline(&self) -> Instant {
        Instant::now() + self.patience
    }

    /// Waits until all has gone out that was told or passed on, for as long as one may wait for ranks that do not read.
    pub(super) fn settle(&mut self) {
        self.settle_until(self.deadline());
    }

    fn settle_until(&mut self, deadline: Instant) {
        loop {
            self.lines.values_mut().for_each(Line::write);
            let late = self.lines.iter().filter(|(_, line)| line.is_late());
            let late: Vec<usize> = late.map(|(peer, _)| *peer).collect();
            if late.is_empty() {
                return;
            }
            if Instant::now() >= deadline {
                return tracing::debug!("rank {} goes on before rank(s) {late:?} have read all", self.rank);
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Says the last word, and stays until it has arrived, for as long as one may wait for ranks that do not read. A
    /// connection that is closed with something unread takes back what is still on its way, so each rank reads until
    /// the other side has closed: rank 0 until all others have ended, and it passes on what they tell meanwhile; the
    /// others until rank 0 has read that nothing follows.
    pub(super) fn end(&mut self) {
        let deadline = self.deadline();
        self.tell_until(deadline, &ControlMessage::Ended);
        while !self.lines.is_empty() && Instant::now() < deadline {
            if self.rank != 0 {
                self.lines.values_mut().for_each(Line::finish);
            }
            self.poll();
            std::thread::sleep(PAUSE);
        }
    }

    /// Whether there is anyone left to hear.
    #[cfg(test)]
    pub(super) fn has_lines(&self) -> bool {
        !self.lines.is_empty()
    }

    /// Puts a frame on all lines but that to the rank it comes from.
    fn pass_on(&mut self, frame: &Arc<[u8]>, from: usize) {
        for (_, line) in self.lines.iter_mut().filter(|(peer, _)| **peer != from) {
            line.send(frame);
        }
    }

    /// What has come, with the ranks that it comes from; each rank's in their order. Rank 0 has passed it on.
    pub(super) fn poll(&mut self) -> Vec<(usize, Heard)> {
        let mut come = Vec::new();
        let peers: Vec<usize> = self.lines.keys().copied().collect();
        for peer in peers {
            let Some(line) = self.lines.get_mut(&peer) else { continue };
            line.write();
            let (texts, ear) = line.listen();
            for text in texts {
                let Ok((from, notice)) = serde_json::from_slice::<(usize, ControlMessage)>(&text) else { continue };
                if let Some(line) =
                    self.lines.get_mut(&peer).filter(|_| notice == ControlMessage::Ended && from == peer)
                {
                    line.has_ended = true;
                }
                if self.rank == 0 {
                    self.pass_on(&framed(&text), peer);
                }
                come.push((from, Heard::Notice(notice)));
            }
            match ear {
                Ear::Open => continue,
                Ear::Closed => {
                    if self.lines.get(&peer).is_some_and(|line| !line.has_ended) {
                        come.push((peer, Heard::Gone));
                    }
                }
                Ear::Broken(error) => {
                    tracing::warn!("rank {} hears no more of rank {peer}'s failures: {error}", self.rank);
                }
            }
            self.lines.remove(&peer);
        }
        come
    }
}

/// A notice in the words that go out: shortened, if those are more than a rank takes.
fn fitting(rank: usize, notice: &ControlMessage) -> Result<Vec<u8>, String> {
    let text = serde_json::to_vec(&(rank, notice)).map_err(|error| error.to_string())?;
    if 4 + text.len() <= MAX_BYTES {
        return Ok(text);
    }
    match shortened(rank, notice) {
        Some(shorter) => fitting(rank, &shorter),
        None => Err(format!("{} bytes are more than the {MAX_BYTES} of a notice", 4 + text.len())),
    }
}

/// The newer half of many calls, the beginning of a long reason.
fn shortened(rank: usize, notice: &ControlMessage) -> Option<ControlMessage> {
    match notice {
        ControlMessage::Called { calls, wait } if calls.len() > 1 => {
            Some(ControlMessage::Called { calls: calls[calls.len() / 2..].to_vec(), wait: wait.clone() })
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
pub(super) mod tests;
