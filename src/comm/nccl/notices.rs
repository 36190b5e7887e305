//! The notices of the ranks, over the connections by which they met: rank 0 has one to each other rank, and passes on
//! what it hears.

use crate::comm::notice::Notice;
use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// More is no notice of ours.
const MAX_BYTES: usize = 1 << 20;
/// How long a rank that does not read may hold up one that tells.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two attempts to write.
const PAUSE: Duration = Duration::from_millis(1);

/// What comes from a rank.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Heard {
    /// A notice of its own.
    Notice(Notice),
    /// Its process has ended without a last word.
    Gone,
}

/// One rank's connections: of rank 0 to all others, of those to rank 0.
#[derive(Debug)]
pub(super) struct Notices {
    rank: usize,
    lines: BTreeMap<usize, Line>,
}

/// A connection, each notice on it behind its length.
#[derive(Debug)]
struct Line {
    stream: TcpStream,
    /// What has come of the next notice.
    heard: Vec<u8>,
    has_ended: bool,
}

/// How a connection stands.
enum Ear {
    Open,
    /// The other side has closed it, as the system does when a process ends.
    Closed,
    /// It does not work any more, which says nothing of the process.
    Broken(std::io::Error),
}

impl Notices {
    pub(super) fn new(
        rank: usize,
        connections: impl IntoIterator<Item = (usize, TcpStream)>,
    ) -> std::io::Result<Self> {
        let line = |(peer, stream): (usize, TcpStream)| {
            stream.set_nonblocking(true)?;
            Ok((peer, Line { stream, heard: Vec::new(), has_ended: false }))
        };
        Ok(Self { rank, lines: connections.into_iter().map(line).collect::<std::io::Result<_>>()? })
    }

    /// Tells all other ranks, as far as they can be reached.
    pub(super) fn tell(&mut self, notice: &Notice) {
        match serde_json::to_vec(&(self.rank, notice)) {
            Ok(text) => self.pass_on(&text, self.rank),
            Err(error) => tracing::error!("rank {} cannot tell the others: {error}", self.rank),
        }
    }

    /// Sends a text on all lines but that to the rank it comes from.
    fn pass_on(&mut self, text: &[u8], from: usize) {
        for (peer, line) in self.lines.iter_mut().filter(|(peer, _)| **peer != from) {
            if let Err(error) = line.write(text) {
                tracing::debug!("rank {peer} cannot be told: {error}");
            }
        }
    }

    /// What has come, with the ranks that it comes from; each rank's in their order. Rank 0 has passed it on.
    pub(super) fn poll(&mut self) -> Vec<(usize, Heard)> {
        let mut come = Vec::new();
        let peers: Vec<usize> = self.lines.keys().copied().collect();
        for peer in peers {
            let Some(line) = self.lines.get_mut(&peer) else { continue };
            let (texts, ear) = line.listen();
            for text in texts {
                let Ok((from, notice)) = serde_json::from_slice::<(usize, Notice)>(&text) else { continue };
                if let Some(line) =
                    self.lines.get_mut(&peer).filter(|_| notice == Notice::Ended && from == peer)
                {
                    line.has_ended = true;
                }
                if self.rank == 0 {
                    self.pass_on(&text, peer);
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

impl Line {
    fn write(&mut self, text: &[u8]) -> std::io::Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let length = u32::try_from(text.len()).map_err(|_| ErrorKind::InvalidInput)?;
        let framed = [&length.to_le_bytes()[..], text].concat();
        let mut left = &framed[..];
        while !left.is_empty() {
            match self.stream.write(left) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => left = &left[written..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < deadline => {
                    std::thread::sleep(PAUSE);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The texts that are complete.
    fn listen(&mut self) -> (Vec<Vec<u8>>, Ear) {
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

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::comm::CommError;
    use std::net::TcpListener;

    /// The ends of a world that has met.
    pub(in crate::comm::nccl) fn connected(ranks: usize) -> Vec<Notices> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let pairs: Vec<_> = (1..ranks)
            .map(|rank| (rank, TcpStream::connect(address).unwrap(), listener.accept().unwrap().0))
            .collect();
        let (mut of_root, mut ends) = (Vec::new(), Vec::new());
        for (rank, own, of_rank_0) in pairs {
            of_root.push((rank, of_rank_0));
            ends.push(Notices::new(rank, [(0, own)]).unwrap());
        }
        ends.insert(0, Notices::new(0, of_root).unwrap());
        ends
    }

    /// What comes until `count` notices have.
    fn hear(ends: &mut [Notices], rank: usize, count: usize) -> Vec<(usize, Heard)> {
        let (mut come, deadline) = (Vec::new(), Instant::now() + Duration::from_secs(20));
        while come.len() < count && Instant::now() < deadline {
            // Rank 0 passes on while it listens.
            if rank != 0 {
                assert_eq!(ends[0].poll().len(), 0, "this test's rank 0 has heard all");
            }
            come.extend(ends[rank].poll());
        }
        come
    }

    fn failed(rank: usize, reason: &str) -> Notice {
        Notice::Failed(CommError::PeerFailed { rank, reason: reason.into() })
    }

    #[test]
    fn what_a_rank_tells_reaches_all_others_and_not_itself() {
        let mut ends = connected(3);
        // More than a connection takes at once, in pieces.
        let long = failed(1, &"x".repeat(300_000));
        std::thread::scope(|scope| {
            let (root, others) = ends.split_at_mut(1);
            let (first, second) = others.split_at_mut(1);
            scope.spawn(|| {
                first[0].tell(&long);
                first[0].tell(&Notice::Ended);
                assert_eq!(first[0].poll(), [], "it does not hear itself");
            });
            let mut come = (Vec::new(), Vec::new());
            let deadline = Instant::now() + Duration::from_secs(20);
            while come.1.len() < 2 && Instant::now() < deadline {
                come.0.extend(root[0].poll());
                come.1.extend(second[0].poll());
            }
            let expected = [(1, Heard::Notice(long.clone())), (1, Heard::Notice(Notice::Ended))];
            assert_eq!((&come.0[..], &come.1[..]), (&expected[..], &expected[..]));
        });
        ends[0].tell(&failed(0, "told to"));
        for rank in [1, 2] {
            assert_eq!(hear(&mut ends, rank, 1), [(0, Heard::Notice(failed(0, "told to")))]);
        }
    }

    #[test]
    fn a_process_that_ends_is_missed_unless_it_has_said_so() {
        let mut ends = connected(3);
        ends[1].tell(&Notice::Ended);
        let (second, first) = (ends.pop(), ends.pop());
        drop((first, second));
        let mut heard = hear(&mut ends, 0, 2);
        heard.sort_by_key(|(rank, _)| *rank);
        assert_eq!(heard, [(1, Heard::Notice(Notice::Ended)), (2, Heard::Gone)]);
        assert_eq!(ends[0].poll(), [], "told once");
    }

    #[test]
    fn what_is_no_notice_ends_the_line_and_is_no_failure() {
        let mut ends = connected(2);
        ends[1].lines.get_mut(&0).unwrap().stream.write_all(&[0xff; 64]).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        while !ends[0].lines.is_empty() && Instant::now() < deadline {
            assert_eq!(ends[0].poll(), []);
        }
        assert!(ends[0].lines.is_empty(), "given up");
    }
}
