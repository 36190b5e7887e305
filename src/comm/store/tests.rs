//! Tests of joining and of the shared keys, between threads of this machine.

use super::acceptor::*;
use super::handshake::*;
use super::join::{RETRY, join};
use super::*;
use crate::comm::{CommError, ProcessInfo};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

/// The connected stores of a job, in rank order.
pub(in crate::comm) fn connected_stores(ranks: usize) -> Vec<Store> {
    stores_hosted_by(0, ranks)
}

/// The connected stores with any host, which comes first.
pub(in crate::comm) fn stores_hosted_by(host: usize, ranks: usize) -> Vec<Store> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let secret = JobSecret::new("a secret of these tests", true);
    let session = Session { secret: &secret, root: [1; 32], peer: [2; 32] };
    let end = |stream, is_host| Connection::new(stream, session.frame_key(is_host)).unwrap();
    let (mut of_host, mut ends) = (BTreeMap::new(), Vec::new());
    for rank in (0..ranks).filter(|rank| *rank != host) {
        let own = TcpStream::connect(address).unwrap();
        of_host.insert(rank, end(listener.accept().unwrap().0, true));
        ends.push(Store::new(rank, host, ranks, BTreeMap::from([(host, end(own, false))])));
    }
    ends.insert(0, Store::new(host, host, ranks, of_host));
    ends
}

impl Store {
    pub(in crate::comm) fn connection_mut(&mut self, peer: usize) -> &mut Connection {
        self.connections.get_mut(&peer).unwrap()
    }

    pub(in crate::comm) fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }
}

/// Number of frames that a connection takes while the other side does not read.
pub(in crate::comm) fn capacity(frame: &Arc<[u8]>) -> usize {
    let mut ends = connected_stores(2);
    let connection = ends[1].connection_mut(0);
    let taken = (0..).take_while(|_| {
        connection.send(frame);
        !connection.is_late()
    });
    taken.count()
}

const HOST: &str = "127.0.0.1";
const LONG_TIMEOUT: Duration = Duration::from_secs(20);
const SHORT_TIMEOUT: Duration = Duration::from_millis(60);

/// A port that was free at the time of the call.
fn free_port() -> u16 {
    TcpListener::bind((HOST, 0)).unwrap().local_addr().unwrap().port()
}

pub(super) fn point(port: u16, world_size: usize) -> StoreEndpoint {
    let secret = JobSecret::new("a secret of these tests", true);
    StoreEndpoint {
        host: HOST.into(),
        port,
        bind: None,
        world_size,
        is_one_node: true,
        is_hosted: false,
        members: Member::Rank,
        secret,
    }
}

/// A connection to rank 0, which may not listen yet.
fn connect(port: u16) -> TcpStream {
    loop {
        match TcpStream::connect((HOST, port)) {
            Ok(stream) => return stream,
            Err(_) => std::thread::sleep(RETRY),
        }
    }
}

/// Hosts the store until all other ranks have joined.
fn accept_all(point: &StoreEndpoint, timeout: Duration) -> Result<BTreeMap<usize, Connection>, String> {
    gather(point, point.world_size, timeout).map(|acceptor| acceptor.ranks)
}

/// The reason why rank 0 refuses a process.
fn refusal(point: &StoreEndpoint, rank: usize) -> String {
    join(point, rank, LONG_TIMEOUT).unwrap_err()
}

#[test]
fn all_ranks_get_the_value_of_rank_0_in_any_joining_order() {
    let point = point(free_port(), 4);
    let named = StoreEndpoint { host: "localhost".into(), ..point.clone() };
    let value: [u8; 128] = std::array::from_fn(|i| i as u8 ^ 0x5a);
    let get = |point: &StoreEndpoint, rank| {
        let mut store = Store::meet(point, rank, LONG_TIMEOUT).unwrap();
        let value = store.wait("id", LONG_TIMEOUT).unwrap();
        store.close();
        value
    };
    std::thread::scope(|scope| {
        let early = scope.spawn(|| get(&point, 1));
        let root = scope.spawn(|| {
            let mut store = Store::meet(&point, 0, LONG_TIMEOUT).unwrap();
            store.set("id", value);
            store.close();
        });
        let late = [2, 3].map(|rank| {
            let (named, get) = (&named, &get);
            scope.spawn(move || get(named, rank))
        });
        assert_eq!(early.join().unwrap()[..], value);
        late.into_iter().for_each(|rank| assert_eq!(rank.join().unwrap()[..], value));
        root.join().unwrap();
    });
}

#[test]
fn all_ranks_see_the_changes_of_a_rank_in_order() {
    let mut ends = connected_stores(3);
    ends[1].set("a", *b"1");
    ends[1].set("b", *b"2");
    ends[1].delete("a");
    let change =
        |key: &str, value: Option<&[u8]>| Change { rank: 1, key: key.into(), value: value.map(Into::into) };
    let expected = [change("a", Some(b"1")), change("b", Some(b"2")), change("a", None)];
    let deadline = Instant::now() + LONG_TIMEOUT;
    let (mut by_root, mut by_last) = (Vec::new(), Vec::new());
    while by_last.len() < 3 && Instant::now() < deadline {
        by_root.extend(ends[0].watch());
        by_last.extend(ends[2].watch());
    }
    assert_eq!((&by_root[..], &by_last[..]), (&expected[..], &expected[..]));
    for end in &mut ends {
        assert_eq!((end.get("a"), end.get("b").map(|value| &value[..])), (None, Some(&b"2"[..])));
        assert_eq!(end.wait("b", SHORT_TIMEOUT).unwrap()[..], *b"2");
    }
    assert_eq!(ends[1].watch().count(), 0, "own changes are not returned");
    assert!(ends[2].wait("c", SHORT_TIMEOUT).unwrap_err().contains("no rank set `c`"));
    drop(ends.remove(0));
    assert!(ends[1].wait("c", LONG_TIMEOUT).unwrap_err().contains("closed before `c` was set"));
}

#[test]
fn frames_for_another_rank_or_with_a_wrong_proof_are_rejected() {
    let forged = Change { rank: 2, key: "rank/2".into(), value: None };
    let mut ends = connected_stores(3);
    ends[1].connection_mut(0).send(&forged.encode().into());
    let mut recorded = connected_stores(2);
    // A frame of another connection, with the wrong number and key.
    let (deadline, key) =
        (Instant::now() + LONG_TIMEOUT, |key: &str| Change { rank: 1, key: key.into(), value: None });
    recorded[1].connection_mut(0).skip_number();
    recorded[1].connection_mut(0).send(&key("x").encode().into());
    while (ends[0].connections.contains_key(&1) || recorded[0].is_connected()) && Instant::now() < deadline {
        assert_eq!((ends[0].watch().count(), recorded[0].watch().count()), (0, 0));
    }
    assert_eq!((ends[0].connections.len(), recorded[0].connections.len()), (1, 0));
    assert!(ends[0].get("rank/2").is_some());
}

/// A launcher's store and its endpoint.
fn launched(world_size: usize) -> (JobStore, StoreEndpoint) {
    let secret = "a secret of these tests";
    let host = JobStore::listen(HOST, None, world_size, secret).unwrap();
    let environment = store_environment(HOST, host.port(), secret);
    let lookup = |name: &str| environment.get(name).cloned();
    let info = ProcessInfo { world_size, local_world_size: Some(world_size), ..ProcessInfo::alone() };
    let point = StoreEndpoint::read(&info, lookup).unwrap().unwrap();
    assert_eq!(point.host_rank(), NO_RANK);
    (host, point)
}

#[test]
fn a_launcher_that_hosts_the_store_forwards_changes_and_receives_failures() {
    use crate::comm::diagnostics::ControlMessage;
    let (mut host, point) = launched(2);
    let error = CommError::PeerFailed { rank: 1, reason: "out of memory".into() };
    std::thread::scope(|scope| {
        let first = scope.spawn(|| {
            let mut store = Store::meet(&point, 0, LONG_TIMEOUT).unwrap();
            store.set("id", *b"7");
            store.close();
            assert!(!store.is_connected(), "the host has received the shutdown");
        });
        scope.spawn(|| {
            let mut store = Store::meet(&point, 1, LONG_TIMEOUT).unwrap();
            assert_eq!(store.wait("id", LONG_TIMEOUT).unwrap()[..], *b"7");
            let mut channel = ControlChannel::new(store);
            channel.send(&ControlMessage::Failed(error.clone()));
            // The host may just be sending that rank 0 has left. A closed socket would answer with a reset, which can
            // overtake the failure.
            channel.disconnect();
        });
        let deadline = Instant::now() + LONG_TIMEOUT;
        while (host.failure().is_none() || !first.is_finished()) && Instant::now() < deadline {
            host.poll();
        }
    });
    assert_eq!(host.failure(), Some("rank 1 failed: out of memory"));
}

#[test]
fn the_ranks_of_a_launcher_may_join_again_when_all_have_left() {
    let (mut host, point) = launched(2);
    for meeting in [&b"1"[..], b"2"] {
        std::thread::scope(|scope| {
            let ranks = [0, 1].map(|rank| {
                let point = &point;
                scope.spawn(move || {
                    let mut store = Store::meet(point, rank, SHORT_TIMEOUT * 100)?;
                    if rank == 0 {
                        store.set("meeting", meeting);
                    }
                    let met = store.wait("meeting", LONG_TIMEOUT);
                    store.close();
                    met
                })
            });
            while !ranks.iter().all(|rank| rank.is_finished()) {
                host.poll();
            }
            for rank in ranks {
                assert_eq!(rank.join().unwrap().as_deref(), Ok(meeting));
            }
        });
    }
}

#[test]
fn a_rank_that_does_not_join_is_named_by_the_launcher_and_fails_the_others() {
    let (mut host, point) = launched(3);
    host.poll();
    assert!(host.missing().is_empty(), "a missing process may be another program");
    let larger = StoreEndpoint { world_size: 4, ..point.clone() };
    std::thread::scope(|scope| {
        let early = scope.spawn(|| {
            assert!(refusal(&larger, 2).contains("rank 2 has world size 4, but the launcher has 3"));
            Store::meet(&point, 1, SHORT_TIMEOUT * 10).unwrap_err()
        });
        let deadline = Instant::now() + LONG_TIMEOUT;
        while !early.is_finished() && Instant::now() < deadline {
            host.poll();
        }
        let error = early.join().unwrap();
        assert!(error.contains("not all ranks joined"), "{error}");
    });
    assert_eq!(host.missing(), [0, 2]);
}

#[test]
fn an_unauthenticated_client_gets_no_data_and_no_rank() {
    let point = point(free_port(), 2);
    std::thread::scope(|scope| {
        let root = scope.spawn(|| accept_all(&point, LONG_TIMEOUT));
        let mut client = connect(point.port);
        client.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let mut answer = Vec::new();
        // Closing with unread bytes ends the connection with an error.
        let _ = client.read_to_end(&mut answer);
        assert!(answer.is_empty(), "{answer:?}");
        join(&point, 1, LONG_TIMEOUT).unwrap();
        root.join().unwrap().unwrap();
    });
}

#[test]
fn a_process_without_the_secret_gets_no_answer_and_no_rank() {
    let point = point(free_port(), 2);
    let guess = StoreEndpoint { secret: JobSecret::new("another secret", true), ..point.clone() };
    std::thread::scope(|scope| {
        let root = scope.spawn(|| accept_all(&point, LONG_TIMEOUT));
        assert!(refusal(&guess, 1).contains("set the same ULYSSES_JOB_SECRET for all ranks"));
        // A client that knows the protocol but not the secret.
        let mut client = connect(point.port);
        client.write_all(&hello(&[1; 32])).unwrap();
        let mut root_nonce = Nonce::default();
        client.read_exact(&mut root_nonce).unwrap();
        let claim = Claim { rank: 1, world_size: 2 };
        let session = Session { secret: &guess.secret, root: root_nonce, peer: [1; 32] };
        client.write_all(&session.claim(claim)).unwrap();
        let mut answer = Vec::new();
        client.read_to_end(&mut answer).unwrap();
        assert_eq!(answer, OTHER_SECRET);
        join(&point, 1, LONG_TIMEOUT).unwrap();
        root.join().unwrap().unwrap();
    });
}

#[test]
fn a_rank_rejects_an_answer_without_the_secret() {
    let listener = TcpListener::bind((HOST, 0)).unwrap();
    let point = point(listener.local_addr().unwrap().port(), 2);
    let client = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; HELLO_BYTES]).unwrap();
        stream.write_all(&[2; 32]).unwrap();
        stream.read_exact(&mut [0; CLAIM_BYTES]).unwrap();
        stream.write_all(&[0; REPLY_BYTES]).unwrap();
    });
    assert!(refusal(&point, 1).contains("a port that no other job uses"));
    client.join().unwrap();
}

#[test]
fn ranks_that_are_out_of_range_or_taken_are_refused_by_name() {
    let point = point(free_port(), 3);
    std::thread::scope(|scope| {
        let root = scope.spawn(|| accept_all(&point, LONG_TIMEOUT));
        for rank in [3, usize::MAX] {
            let expected = format!("rank {rank} is out of range: the job has ranks 0 to 2");
            assert!(refusal(&point, rank).contains(&expected));
        }
        assert!(refusal(&point, 0).contains("rank 0 is taken"));
        let larger = StoreEndpoint { world_size: 4, ..point.clone() };
        assert!(refusal(&larger, 2).contains("rank 2 has world size 4, but rank 0 has 3"));
        let first = join(&point, 1, LONG_TIMEOUT).unwrap();
        assert!(refusal(&point, 1).contains("rank 1 is taken: two processes have the same rank"));
        drop(first);
        let _again = join(&point, 1, LONG_TIMEOUT).unwrap();
        let _last = join(&point, 2, LONG_TIMEOUT).unwrap();
        assert_eq!(root.join().unwrap().unwrap().into_keys().collect::<Vec<_>>(), [1, 2]);
    });
}

#[test]
fn a_timeout_of_rank_0_lists_the_processes_it_refused() {
    let point = point(free_port(), 2);
    std::thread::scope(|scope| {
        let root = scope.spawn(|| accept_all(&point, Duration::from_millis(500)));
        assert!(refusal(&point, 9).contains("out of range"));
        let error = root.join().unwrap().unwrap_err();
        assert!(
            error.contains("ranks {1} did not join") && error.contains("rank 9 is out of range"),
            "{error}"
        );
    });
}

#[test]
fn silent_connections_do_not_delay_the_ranks() {
    let point = point(free_port(), 2);
    std::thread::scope(|scope| {
        let root = scope.spawn(|| accept_all(&point, LONG_TIMEOUT));
        let mut silent: Vec<TcpStream> = (0..10).map(|_| connect(point.port)).collect();
        // Half of them send a part of the magic and stop.
        silent.iter_mut().step_by(2).for_each(|stream| stream.write_all(&MAGIC[..3]).unwrap());
        join(&point, 1, LONG_TIMEOUT).unwrap();
        root.join().unwrap().unwrap();
        silent
            .iter_mut()
            .for_each(|stream| assert!(!matches!(stream.read(&mut [0]), Ok(1..)), "no data is sent to them"));
    });
}

#[test]
fn a_connection_is_closed_at_its_deadline() {
    let listener = TcpListener::bind((HOST, 0)).unwrap();
    let point = point(listener.local_addr().unwrap().port(), 2);
    let mut silent = connect(point.port);
    let (stream, from) = listener.accept().unwrap();
    let mut acceptor = Acceptor::new(listener, point).unwrap();
    acceptor.pending.extend(Pending::new(stream, from));
    acceptor.serve();
    assert_eq!(acceptor.pending.len(), 1);
    acceptor.pending[0].deadline = Instant::now();
    acceptor.serve();
    assert_eq!(acceptor.pending.len(), 0);
    assert_eq!(silent.read(&mut [0]).unwrap(), 0);
}

#[test]
fn too_many_unauthenticated_clients_close_the_oldest() {
    let listener = TcpListener::bind((HOST, 0)).unwrap();
    let point = point(listener.local_addr().unwrap().port(), 2);
    let mut acceptor = Acceptor::new(listener, point.clone()).unwrap();
    let mut unauthenticated = Vec::new();
    for _ in 0..MAX_UNAUTHENTICATED + 2 {
        unauthenticated.push(connect(point.port));
        acceptor.accept();
    }
    let addresses = |peers: &[Pending]| peers.iter().map(|peer| peer.from).collect::<Vec<_>>();
    let oldest = unauthenticated[0].local_addr().unwrap();
    assert!(addresses(&acceptor.pending).contains(&oldest));
    unauthenticated.push(connect(point.port));
    acceptor.accept();
    assert!(!addresses(&acceptor.pending).contains(&oldest));
    assert_eq!(acceptor.pending.len(), MAX_UNAUTHENTICATED + 2);
}

#[test]
fn a_poll_accepts_a_bounded_number_of_connections() {
    let listener = TcpListener::bind((HOST, 0)).unwrap();
    let point = point(listener.local_addr().unwrap().port(), 2);
    let _strangers: Vec<TcpStream> = (0..=MAX_ACCEPTS_PER_POLL).map(|_| connect(point.port)).collect();
    let mut acceptor = Acceptor::new(listener, point).unwrap();
    acceptor.accept();
    assert_eq!(acceptor.pending.len(), MAX_ACCEPTS_PER_POLL);
    acceptor.accept();
    assert_eq!(acceptor.pending.len(), MAX_ACCEPTS_PER_POLL + 1);
}

#[test]
fn a_poll_reads_a_bounded_number_of_bytes_from_a_process() {
    const FRAMES: usize = 800;
    let frame: Arc<[u8]> = [7; 10_000].into();
    let mut ends = connected_stores(2);
    let (mut sender, mut host) = (ends.remove(1), ends.remove(0));
    (0..FRAMES).for_each(|_| sender.connection_mut(0).send(&frame));
    let (mut arrived, deadline) = (0, Instant::now() + LONG_TIMEOUT);
    while arrived < FRAMES && Instant::now() < deadline {
        let Arrived { frames, .. } = host.connection_mut(1).read();
        assert!(frames.len() * frame.len() <= 2 * connection::MAX_BYTES, "{} frames", frames.len());
        arrived += frames.len();
        sender.connection_mut(0).write();
    }
    assert_eq!(arrived, FRAMES);
}

#[test]
fn a_timeout_names_the_missing_ranks() {
    let point = point(free_port(), 3);
    let error = join(&point, 2, SHORT_TIMEOUT).unwrap_err();
    assert!(error.contains("no answer from rank 0"), "{error}");
    let error = accept_all(&point, SHORT_TIMEOUT).unwrap_err();
    assert!(error.contains("ranks {1, 2} did not join"), "{error}");
    let error = join(&StoreEndpoint { is_hosted: true, ..point }, 2, SHORT_TIMEOUT).unwrap_err();
    assert!(error.contains("no answer from the launcher"), "{error}");
}

#[test]
fn a_port_in_use_is_named() {
    let taken = TcpListener::bind((HOST, 0)).unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = accept_all(&point(port, 2), SHORT_TIMEOUT).unwrap_err();
    assert!(error.contains(&format!("cannot listen on port {port}")), "{error}");
}
