//! The notices of the ranks, over the connections by which they met: rank 0 has one to each other rank, and passes on
//! what it hears.

use super::line::{Ear, Line, MAX_BYTES, framed};
use crate::comm::CommError;
use crate::comm::notice::Notice;
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
    Notice(Notice),
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
    pub(super) fn tell(&mut self, notice: &Notice) {
        match fitting(self.rank, notice) {
            Ok(text) => self.pass_on(&framed(&text), self.rank),
            Err(reason) => tracing::error!("rank {} cannot tell the others: {reason}", self.rank),
        }
        self.settle();
    }

    /// Waits until all has gone out that was told or passed on, for as long as one may wait for ranks that do not read.
    pub(super) fn settle(&mut self) {
        let deadline = Instant::now() + self.patience;
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
                let Ok((from, notice)) = serde_json::from_slice::<(usize, Notice)>(&text) else { continue };
                if let Some(line) =
                    self.lines.get_mut(&peer).filter(|_| notice == Notice::Ended && from == peer)
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
fn fitting(rank: usize, notice: &Notice) -> Result<Vec<u8>, String> {
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
fn shortened(rank: usize, notice: &Notice) -> Option<Notice> {
    match notice {
        Notice::Called { calls, wait } if calls.len() > 1 => {
            Some(Notice::Called { calls: calls[calls.len() / 2..].to_vec(), wait: wait.clone() })
        }
        Notice::Failed(error) => {
            let reason = error.to_string();
            let (end, _) = reason.char_indices().nth(MAX_REASON_CHARS)?;
            let reason = format!("{} … ({} bytes)", &reason[..end], reason.len());
            Some(Notice::Failed(CommError::PeerFailed { rank, reason }))
        }
        _ => None,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::comm::history::{History, Label, Record};
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
        ends[1].lines.get_mut(&0).unwrap().send(&Arc::from([0xff; 64]));
        let deadline = Instant::now() + Duration::from_secs(20);
        while !ends[0].lines.is_empty() && Instant::now() < deadline {
            assert_eq!(ends[0].poll(), []);
        }
        assert!(ends[0].lines.is_empty(), "given up");
    }

    /// Lets one end give up waiting at once.
    fn impatient(mut notices: Notices) -> Notices {
        notices.patience = Duration::ZERO;
        notices
    }

    #[test]
    fn a_notice_that_a_slow_rank_took_in_part_is_finished_before_the_next_one() {
        let mut ends = connected(2);
        let mut root = impatient(ends.remove(0));
        // Far more than the system keeps for one who does not read.
        let long = failed(0, &"x".repeat(MAX_BYTES - 200));
        let told: Vec<Notice> = (0..24).map(|_| long.clone()).chain([Notice::Ended]).collect();
        told.iter().for_each(|notice| root.tell(notice));
        assert!(root.lines[&1].is_late(), "the other side has not read");
        let (mut come, deadline) = (Vec::new(), Instant::now() + Duration::from_secs(60));
        while come.len() < told.len() && Instant::now() < deadline {
            assert_eq!(root.poll(), [], "which is when the rest goes out");
            come.extend(ends[0].poll());
        }
        let expected: Vec<_> = told.into_iter().map(|notice| (0, Heard::Notice(notice))).collect();
        assert!(come == expected, "{} of {} notices came", come.len(), expected.len());
    }

    #[test]
    fn a_rank_that_does_not_read_keeps_nothing_from_the_others() {
        let mut ends = connected(3);
        let (mut root, silent) = (ends.remove(0), ends.remove(0));
        root.patience = Duration::from_secs(24 * 3600);
        let frame = framed(&fitting(0, &failed(0, &"x".repeat(MAX_BYTES - 200))).unwrap());
        while !root.lines[&1].is_late() {
            root.lines.get_mut(&1).unwrap().send(&frame);
        }
        std::thread::scope(|scope| {
            scope.spawn(|| root.tell(&Notice::Ended));
            let (mut come, deadline) = (Vec::new(), Instant::now() + Duration::from_secs(20));
            while come.is_empty() && Instant::now() < deadline {
                come = ends[0].poll();
            }
            // Or the teller would wait for it all day.
            drop(silent);
            assert_eq!(come, [(0, Heard::Notice(Notice::Ended))]);
        });
    }

    #[test]
    fn a_notice_that_is_too_long_is_told_in_short() {
        let mut ends = connected(2);
        ends[1].tell(&failed(1, &"ü".repeat(MAX_BYTES)));
        let group = Arc::new(Label { name: "world".into(), members: vec![0, 1] });
        let mut history = History::default();
        for id in 0..64 {
            let call = format!("all_to_all({id}, {})", "1, ".repeat(10_000));
            history.add(Record { id, group: group.clone(), sequence: id, is_collective: true, call });
        }
        let calls = history.tell();
        ends[1].tell(&Notice::Called { calls: calls.clone(), wait: None });
        let heard = hear(&mut ends, 0, 2);
        let [
            (1, Heard::Notice(Notice::Failed(error))),
            (1, Heard::Notice(Notice::Called { calls: newest, wait: None })),
        ] = &heard[..]
        else {
            panic!("{} notices came", heard.len());
        };
        let reason = error.to_string();
        assert!(reason.contains("üüü …") && reason.contains("bytes)"), "{reason}");
        assert_eq!(newest[..], calls[32..], "of the calls the newest");
    }
}
