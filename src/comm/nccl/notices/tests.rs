//! Ends that are connected on this machine.

use super::*;
use crate::comm::call_signature::CallSignature;
use crate::comm::diagnostics::{Entry, FlightRecorder, GroupLabel};
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

fn failed(rank: usize, reason: &str) -> ControlMessage {
    ControlMessage::Failed(CommError::PeerFailed { rank, reason: reason.into() })
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
            first[0].tell(&ControlMessage::Ended);
            assert_eq!(first[0].poll(), [], "it does not hear itself");
        });
        let mut come = (Vec::new(), Vec::new());
        let deadline = Instant::now() + Duration::from_secs(20);
        while come.1.len() < 2 && Instant::now() < deadline {
            come.0.extend(root[0].poll());
            come.1.extend(second[0].poll());
        }
        let expected = [(1, Heard::Notice(long.clone())), (1, Heard::Notice(ControlMessage::Ended))];
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
    ends[1].tell(&ControlMessage::Ended);
    let (second, first) = (ends.pop(), ends.pop());
    drop((first, second));
    let mut heard = hear(&mut ends, 0, 2);
    heard.sort_by_key(|(rank, _)| *rank);
    assert_eq!(heard, [(1, Heard::Notice(ControlMessage::Ended)), (2, Heard::Gone)]);
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

/// How many frames a connection takes when the other side reads none.
fn capacity(frame: &Arc<[u8]>) -> usize {
    let mut ends = connected(2);
    let line = ends[1].lines.get_mut(&0).unwrap();
    let taken = (0..).take_while(|_| {
        line.send(frame);
        !line.is_late()
    });
    taken.count()
}

#[test]
fn the_last_word_arrives_though_much_is_on_its_way_and_something_was_not_read() {
    let frame = framed(&fitting(1, &failed(1, &"x".repeat(10_000))).unwrap());
    // More than rank 0's side keeps for it, and as a rule all of it out of this rank's own hands.
    let frames = capacity(&frame) * 3 / 4;
    let mut ends = connected(2);
    let (mut last, mut root) = (ends.remove(1), ends.remove(0));
    root.tell(&failed(0, "not read"));
    let mut sent = 0;
    while sent < frames && !last.lines[&0].is_late() {
        last.lines.get_mut(&0).unwrap().send(&frame);
        sent += 1;
    }
    let mut come = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(move || last.end());
        // Time to be gone before rank 0 looks.
        std::thread::sleep(Duration::from_millis(100));
        let deadline = Instant::now() + Duration::from_secs(20);
        while root.has_lines() && Instant::now() < deadline {
            come.extend(root.poll());
        }
    });
    assert_eq!(come.len(), sent + 1);
    assert_eq!(come.last(), Some(&(1, Heard::Notice(ControlMessage::Ended))));
}

#[test]
fn rank_0_passes_on_what_is_told_until_all_have_ended() {
    let mut ends = connected(3);
    std::thread::scope(|scope| {
        let (mut second, mut first, mut root) = (ends.remove(2), ends.remove(1), ends.remove(0));
        scope.spawn(move || root.end());
        let deadline = Instant::now() + Duration::from_secs(20);
        let mut hear = |expected: &[(usize, Heard)]| {
            let mut come = Vec::new();
            while come.len() < expected.len() && Instant::now() < deadline {
                come.extend(second.poll());
            }
            assert_eq!(come, expected);
        };
        hear(&[(0, Heard::Notice(ControlMessage::Ended))]);
        first.tell(&failed(1, "late"));
        hear(&[(1, Heard::Notice(failed(1, "late")))]);
        first.end();
        assert!(!first.has_lines(), "rank 0 has heard all");
    });
}

/// Lets one end give up waiting at once.
pub(in crate::comm::nccl) fn impatient(mut notices: Notices) -> Notices {
    notices.patience = Duration::ZERO;
    notices
}

#[test]
fn a_notice_that_a_slow_rank_took_in_part_is_finished_before_the_next_one() {
    let mut ends = connected(2);
    let mut root = impatient(ends.remove(0));
    // Far more than the system keeps for one who does not read.
    let long = failed(0, &"x".repeat(MAX_BYTES - 200));
    let told: Vec<ControlMessage> = (0..24).map(|_| long.clone()).chain([ControlMessage::Ended]).collect();
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
        scope.spawn(|| root.tell(&ControlMessage::Ended));
        let (mut come, deadline) = (Vec::new(), Instant::now() + Duration::from_secs(20));
        while come.is_empty() && Instant::now() < deadline {
            come = ends[0].poll();
        }
        // Or the teller would wait for it all day.
        drop(silent);
        assert_eq!(come, [(0, Heard::Notice(ControlMessage::Ended))]);
    });
}

#[test]
fn a_notice_that_is_too_long_is_told_in_short() {
    let mut ends = connected(2);
    ends[1].tell(&failed(1, &"ü".repeat(MAX_BYTES)));
    let group = Arc::new(GroupLabel { name: "world".into(), members: vec![0, 1] });
    let mut recorder = FlightRecorder::default();
    for id in 0..64 {
        let counts: Arc<[usize]> = [1; 5_000].into();
        let call = CallSignature::AllToAll { dtype: candle_core::DType::F32, send: counts.clone(), recv: counts };
        recorder.record(Entry { id, group: group.clone(), sequence: id, call, is_complete: false });
    }
    let calls = recorder.report();
    ends[1].tell(&ControlMessage::Called { calls: calls.clone(), wait: None });
    let heard = hear(&mut ends, 0, 2);
    let [
        (1, Heard::Notice(ControlMessage::Failed(error))),
        (1, Heard::Notice(ControlMessage::Called { calls: newest, wait: None })),
    ] = &heard[..]
    else {
        panic!("{} notices came", heard.len());
    };
    let reason = error.to_string();
    assert!(reason.contains("üüü …") && reason.contains("bytes)"), "{reason}");
    assert_eq!(newest[..], calls[32..], "of the calls the newest");
}
