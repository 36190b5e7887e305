//! Tests of control channels between threads of this machine.

use super::*;
use crate::comm::CallSignature;
use crate::comm::GroupLabel;
use crate::comm::diagnostics::{FlightRecorder, OpLabel};
use crate::comm::store::tests::{capacity, connected_stores};
use crate::comm::store::{Change, presence};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The connected channels of a world.
pub(in crate::comm) fn connected(ranks: usize) -> Vec<ControlChannel> {
    connected_stores(ranks).into_iter().map(ControlChannel::new).collect()
}

fn received(from: usize, message: ControlMessage) -> Received {
    Received { from, message: Some(message) }
}

/// Polls until `count` messages have arrived.
fn receive(ends: &mut [ControlChannel], rank: usize, count: usize) -> Vec<Received> {
    let (mut arrived, deadline) = (Vec::new(), Instant::now() + Duration::from_secs(20));
    while arrived.len() < count && Instant::now() < deadline {
        // Rank 0 relays while it polls.
        if rank != 0 {
            assert_eq!(ends[0].poll().len(), 0, "rank 0 has received all messages");
        }
        arrived.extend(ends[rank].poll());
    }
    arrived
}

/// Announces the end of a rank without waiting for the announcement to arrive.
fn end(channel: &mut ControlChannel) {
    channel.store.delete(&presence(channel.rank));
}

fn failed(rank: usize, reason: &str) -> ControlMessage {
    ControlMessage::Failed(CommError::PeerFailed { rank, reason: reason.into() })
}

#[test]
fn a_message_reaches_all_other_ranks_and_not_its_sender() {
    let mut ends = connected(3);
    // More than a connection takes at once, so it is sent in pieces.
    let long = failed(1, &"x".repeat(300_000));
    std::thread::scope(|scope| {
        let (root, others) = ends.split_at_mut(1);
        let (first, second) = others.split_at_mut(1);
        scope.spawn(|| {
            first[0].send(&long);
            end(&mut first[0]);
            assert_eq!(first[0].poll(), [], "own messages are not received");
        });
        let mut arrived = (Vec::new(), Vec::new());
        let deadline = Instant::now() + Duration::from_secs(20);
        while arrived.1.len() < 2 && Instant::now() < deadline {
            arrived.0.extend(root[0].poll());
            arrived.1.extend(second[0].poll());
        }
        let expected = [received(1, long.clone()), received(1, ControlMessage::Ended)];
        assert_eq!((&arrived.0[..], &arrived.1[..]), (&expected[..], &expected[..]));
    });
    ends[0].send(&failed(0, "told to"));
    for rank in [1, 2] {
        assert_eq!(receive(&mut ends, rank, 1), [received(0, failed(0, "told to"))]);
    }
}

#[test]
fn a_process_that_ends_is_gone_unless_it_announced_its_end() {
    let mut ends = connected(3);
    end(&mut ends[1]);
    let (second, first) = (ends.pop(), ends.pop());
    drop((first, second));
    let mut arrived = receive(&mut ends, 0, 2);
    arrived.sort_by_key(|received| received.from);
    assert_eq!(arrived, [received(1, ControlMessage::Ended), Received { from: 2, message: None }]);
    assert_eq!(ends[0].poll(), [], "reported once");
}

#[test]
fn a_malformed_frame_ends_the_connection_and_is_no_failure() {
    let mut ends = connected(2);
    ends[1].store.connection_mut(0).send(&Arc::from([0xff; 64]));
    let deadline = Instant::now() + Duration::from_secs(20);
    while ends[0].store.is_connected() && Instant::now() < deadline {
        assert_eq!(ends[0].poll(), []);
    }
    assert!(!ends[0].store.is_connected(), "connection closed");
}

/// A frame of `bytes` bytes that fails rank `rank`, with a reason of repeated `x`.
fn frame(rank: usize, bytes: usize) -> Arc<[u8]> {
    let value = encode_to_fit(rank, &failed(rank, &"x".repeat(bytes))).unwrap();
    Change { rank, key: format!("control/{rank}"), value: Some(value.into()) }.encode().into()
}

#[test]
fn the_last_message_arrives_despite_unsent_and_unread_data() {
    let frame = frame(1, 10_000);
    // More than the kernel buffers on rank 0's side, so some data stays on this side.
    let frames = capacity(&frame) * 3 / 4;
    let mut ends = connected(2);
    let (mut last, mut root) = (ends.remove(1), ends.remove(0));
    root.send(&failed(0, "not read"));
    let mut sent = 0;
    while sent < frames && !last.store.connection_mut(0).is_late() {
        last.store.connection_mut(0).send(&frame);
        sent += 1;
    }
    let mut arrived = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(move || last.close());
        // Time to disconnect before rank 0 polls.
        std::thread::sleep(Duration::from_millis(100));
        let deadline = Instant::now() + Duration::from_secs(20);
        while root.store.is_connected() && Instant::now() < deadline {
            arrived.extend(root.poll());
        }
    });
    assert_eq!(arrived.len(), sent + 1);
    assert_eq!(arrived.last(), Some(&received(1, ControlMessage::Ended)));
}

#[test]
fn rank_0_forwards_messages_until_all_ranks_have_ended() {
    let mut ends = connected(3);
    std::thread::scope(|scope| {
        let (mut second, mut first, mut root) = (ends.remove(2), ends.remove(1), ends.remove(0));
        scope.spawn(move || root.close());
        let deadline = Instant::now() + Duration::from_secs(20);
        let mut receive = |expected: &[Received]| {
            let mut arrived = Vec::new();
            while arrived.len() < expected.len() && Instant::now() < deadline {
                arrived.extend(second.poll());
            }
            assert_eq!(arrived, expected);
        };
        receive(&[received(0, ControlMessage::Ended)]);
        first.send(&failed(1, "late"));
        receive(&[received(1, failed(1, "late"))]);
        first.close();
        assert!(!first.store.is_connected(), "rank 0 has received all");
    });
}

/// Sets the timeout of a channel to zero.
pub(in crate::comm) fn impatient(mut channel: ControlChannel) -> ControlChannel {
    channel.store.set_timeout(Duration::ZERO);
    channel
}

#[test]
fn a_partly_sent_message_is_finished_before_the_next_one() {
    let mut ends = connected(2);
    let mut root = impatient(ends.remove(0));
    // Far more than the kernel buffers for a process that does not read.
    let long = failed(0, &"x".repeat(MAX_VALUE_BYTES - 200));
    (0..24).for_each(|_| root.send(&long));
    end(&mut root);
    let reported: Vec<ControlMessage> =
        (0..24).map(|_| long.clone()).chain([ControlMessage::Ended]).collect();
    assert!(root.store.connection_mut(1).is_late(), "the other side has not read the data");
    let (mut arrived, deadline) = (Vec::new(), Instant::now() + Duration::from_secs(60));
    while arrived.len() < reported.len() && Instant::now() < deadline {
        assert_eq!(root.poll(), [], "this sends the rest");
        arrived.extend(ends[0].poll());
    }
    let expected: Vec<_> = reported.into_iter().map(|message| received(0, message)).collect();
    assert!(arrived == expected, "{} of {} messages arrived", arrived.len(), expected.len());
}

#[test]
fn a_rank_that_does_not_read_does_not_block_the_others() {
    let mut ends = connected(3);
    let (mut root, silent) = (ends.remove(0), ends.remove(0));
    root.store.set_timeout(Duration::from_secs(24 * 3600));
    let frame = frame(0, MAX_VALUE_BYTES - 200);
    while !root.store.connection_mut(1).is_late() {
        root.store.connection_mut(1).send(&frame);
    }
    std::thread::scope(|scope| {
        scope.spawn(|| end(&mut root));
        let (mut arrived, deadline) = (Vec::new(), Instant::now() + Duration::from_secs(20));
        while arrived.is_empty() && Instant::now() < deadline {
            arrived = ends[0].poll();
        }
        // Otherwise the sender would wait for it.
        drop(silent);
        assert_eq!(arrived, [received(0, ControlMessage::Ended)]);
    });
}

#[test]
fn a_message_that_is_too_long_is_shortened() {
    let mut ends = connected(2);
    ends[1].send(&failed(1, &"ü".repeat(MAX_VALUE_BYTES)));
    let group = Arc::new(GroupLabel { name: "world".into(), members: vec![0, 1] });
    let mut recorder = FlightRecorder::default();
    for sequence in 0..64 {
        let counts: Arc<[usize]> = [1; 5_000].into();
        let call =
            CallSignature::AllToAll { dtype: candle_core::DType::F32, send: counts.clone(), recv: counts };
        recorder.record(OpLabel { group: group.clone(), op: call.op(), sequence }, call);
    }
    let calls = recorder.report();
    ends[1].send(&ControlMessage::CallReport(CallReport { calls: calls.clone(), wait: None }));
    let arrived = receive(&mut ends, 0, 2);
    let [
        Received { from: 1, message: Some(ControlMessage::Failed(error)) },
        Received {
            from: 1,
            message: Some(ControlMessage::CallReport(CallReport { calls: newest, wait: None })),
        },
    ] = &arrived[..]
    else {
        panic!("{} messages arrived", arrived.len());
    };
    let reason = error.to_string();
    assert!(reason.contains("üüü …") && reason.contains("bytes)"), "{reason}");
    assert_eq!(newest[..], calls[32..], "the newest calls");
}
