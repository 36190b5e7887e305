//! Tests of the launchers' store, between threads of this machine.

use super::*;
use crate::comm::store::handshake::{MAGIC, hello};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

const TIMEOUT: Duration = Duration::from_secs(20);

fn endpoint(node: usize, num_nodes: usize, port: u16) -> NodeEndpoint {
    NodeEndpoint { host: "127.0.0.1".into(), port, node, num_nodes }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn secret(name: &str) -> Option<String> {
    (name == "ULYSSES_JOB_SECRET").then(|| "0123456789abcdef".to_owned())
}

fn meet(at: &NodeEndpoint, max_silence: Duration) -> Result<NodeStore, String> {
    NodeStore::meet(at, at.num_nodes, secret, TIMEOUT, max_silence)
}

/// The connected stores of two nodes.
fn two_nodes(max_silence: [Duration; 2]) -> (NodeStore, NodeStore) {
    let port = free_port();
    let host = std::thread::spawn(move || meet(&endpoint(0, 2, port), max_silence[0]).unwrap());
    let other = meet(&endpoint(1, 2, port), max_silence[1]).unwrap();
    (host.join().unwrap(), other)
}

/// Polls until a node is lost.
fn first_lost(store: &mut NodeStore) -> Vec<LostNode> {
    let deadline = Instant::now() + TIMEOUT;
    while Instant::now() < deadline {
        let lost = store.poll();
        if !lost.is_empty() {
            return lost;
        }
    }
    Vec::new()
}

#[test]
fn nodes_share_keys_and_compute_the_same_secret_for_their_ranks() {
    let (mut host, mut other) = two_nodes([TIMEOUT; 2]);
    other.set("node/1", "n1");
    host.set("plan", "4 ranks");
    let deadline = Instant::now() + TIMEOUT;
    while (host.get("node/1").is_none() || other.get("plan").is_none()) && Instant::now() < deadline {
        assert!(host.poll().is_empty() && other.poll().is_empty());
    }
    assert_eq!((host.get("node/1").as_deref(), other.get("plan").as_deref()), (Some("n1"), Some("4 ranks")));
    assert_eq!(host.rank_secret("0"), other.rank_secret("0"));
    assert_ne!(host.rank_secret("0"), host.rank_secret("1"));
}

fn lost(node: usize, loss: NodeLoss) -> [LostNode; 1] {
    [LostNode { node, loss }]
}

#[test]
fn a_silent_node_and_a_node_that_ends_are_lost_once() {
    let short = Duration::from_millis(300);
    let (mut host, other) = two_nodes([short, TIMEOUT]);
    assert_eq!(first_lost(&mut host), lost(1, NodeLoss::Silent), "the other node does not poll");
    assert!(host.poll().is_empty());
    drop(other);
    let (host, mut other) = two_nodes([TIMEOUT, short]);
    assert_eq!(first_lost(&mut other), lost(0, NodeLoss::Silent));
    drop(host);
    let (host, mut other) = two_nodes([TIMEOUT; 2]);
    drop(host);
    assert_eq!(first_lost(&mut other), lost(0, NodeLoss::Ended));
    let (mut host, mut other) = two_nodes([TIMEOUT; 2]);
    std::thread::scope(|scope| {
        scope.spawn(move || other.close());
        assert_eq!(first_lost(&mut host), lost(1, NodeLoss::Ended), "a node that leaves");
    });
}

#[test]
fn a_node_alone_has_its_own_secret_and_loses_nobody() {
    let (mut one, other) = (NodeStore::alone().unwrap(), NodeStore::alone().unwrap());
    one.set("plan", "2 ranks");
    assert!(one.poll().is_empty() && one.missing().is_empty());
    assert_eq!(one.get("plan").as_deref(), Some("2 ranks"));
    assert_ne!(one.rank_secret("0"), other.rank_secret("0"));
    one.close();
}

#[test]
fn a_node_that_comes_too_late_is_refused_by_name() {
    let port = free_port();
    let host = std::thread::spawn(move || meet(&endpoint(0, 2, port), TIMEOUT).unwrap());
    let other = meet(&endpoint(1, 2, port), TIMEOUT).unwrap();
    let mut host = host.join().unwrap();
    let late = std::thread::spawn(move || meet(&endpoint(1, 2, port), TIMEOUT).unwrap_err());
    while !late.is_finished() {
        assert!(host.poll().is_empty());
    }
    let refused = late.join().unwrap();
    assert!(refused.contains("node 0 at 127.0.0.1"), "{refused}");
    assert!(
        refused.contains("the job has already started: node 1 has joined it before, or comes too late"),
        "{refused}"
    );
    drop(other);
}

#[test]
fn another_number_of_nodes_and_a_missing_node_are_named() {
    let port = free_port();
    let host = std::thread::spawn(move || {
        NodeStore::meet(&endpoint(0, 3, port), 3, secret, Duration::from_secs(1), TIMEOUT).unwrap_err()
    });
    let refused = meet(&endpoint(1, 2, port), TIMEOUT).unwrap_err();
    assert!(refused.contains("node 1 has --nnodes 2, but node 0 has 3"), "{refused}");
    let error = host.join().unwrap();
    assert!(error.contains("nodes {1, 2} did not join the store"), "{error}");
}

#[test]
fn enough_nodes_open_the_store_at_the_end_of_the_timeout() {
    let port = free_port();
    let second = Duration::from_secs(1);
    let host = std::thread::spawn(move || {
        NodeStore::meet(&endpoint(0, 3, port), 2, secret, second, TIMEOUT).unwrap()
    });
    // The timeout of this node ends first or at about the same time.
    let mut other = NodeStore::meet(&endpoint(2, 3, port), 2, secret, second, TIMEOUT).unwrap();
    let mut host = host.join().unwrap();
    assert_eq!(host.missing(), BTreeSet::from([1]));
    let late = std::thread::spawn(move || meet(&endpoint(1, 3, port), TIMEOUT).unwrap_err());
    while !late.is_finished() {
        assert!(host.poll().is_empty() && other.poll().is_empty(), "a node that did not come is not lost");
    }
    let refused = late.join().unwrap();
    assert!(refused.contains("the job has already started: node 1 has joined it before, or comes too late"));
}

#[test]
fn another_version_of_the_protocol_is_named_on_both_sides() {
    let port = free_port();
    let host = std::thread::spawn(move || {
        NodeStore::meet(&endpoint(0, 2, port), 2, secret, Duration::from_secs(2), TIMEOUT).unwrap_err()
    });
    let mut client = loop {
        if let Ok(client) = TcpStream::connect(("127.0.0.1", port)) {
            break client;
        }
    };
    let newer = [b"ulysses9", &hello(&[1; 32])[MAGIC.len()..]].concat();
    client.write_all(&newer).unwrap();
    let mut answer = [0; MAGIC.len()];
    client.read_exact(&mut answer).unwrap();
    assert_eq!(answer, MAGIC);
    let error = host.join().unwrap();
    assert!(error.contains("it has version 9 of the store's protocol"), "{error}");
    // The same, seen from a node that meets a host of another version.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let host = std::thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        stream.read_exact(&mut [0; MAGIC.len()]).unwrap();
        stream.write_all(b"ulysses9").unwrap();
        stream.read_to_end(&mut Vec::new()).unwrap();
    });
    let refused = meet(&endpoint(1, 2, port), TIMEOUT).unwrap_err();
    assert!(refused.contains("it has version 9") && refused.contains("this process version 3"), "{refused}");
    host.join().unwrap();
}

#[test]
fn launchers_of_several_machines_need_a_secret() {
    let exposed = |name: &str| (name == "ULYSSES_MASTER_BIND").then(|| "0.0.0.0".to_owned());
    let meet = |at: &NodeEndpoint, lookup: &dyn Fn(&str) -> Option<String>| {
        NodeStore::meet(at, at.num_nodes, lookup, Duration::from_millis(50), TIMEOUT).map(|_| ())
    };
    let host = endpoint(0, 2, free_port());
    let refused = meet(&host, &exposed).unwrap_err();
    assert!(
        refused.contains("has no job secret") && refused.contains("ULYSSES_JOB_SECRET_FILE"),
        "{refused}"
    );
    // An address of RFC 5737's documentation network.
    let other = NodeEndpoint { host: "192.0.2.7".into(), ..endpoint(1, 2, 29400) };
    assert!(meet(&other, &|_| None).unwrap_err().contains("has no job secret"));
    let local = meet(&host, &|_| None).unwrap_err();
    assert!(local.contains("nodes {1} did not join"), "the loopback needs none: {local}");
    assert_eq!(meet(&endpoint(0, 1, free_port()), &exposed), Ok(()), "one machine needs none");
}
