//! The store of the launchers of a job on several machines, one per node. Node 0 hosts it.
//!
//! Every launcher sends a heartbeat each second. One that is silent for too long is lost, as is one whose connection
//! ends: a machine that loses its power or its network closes no connection.

use super::acceptor::{Acceptor, gather, missing_secret};
use super::endpoint::{Member, StoreEndpoint, bind_address};
use super::secret::JobSecret;
use super::{Departure, FOR_HOST, Store};
use crate::comm::Launcher;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, TcpListener, ToSocketAddrs};
use std::time::{Duration, Instant};

/// Interval between heartbeats.
const BEAT_INTERVAL: Duration = Duration::from_secs(1);
/// The rank of node 0.
const HOST: usize = 0;

/// The address at which the launchers of a job meet, and this launcher among them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeEndpoint {
    /// Host of node 0, as the other nodes know it.
    pub host: String,
    /// Port on it.
    pub port: u16,
    /// The number of this node.
    pub node: usize,
    /// Number of nodes.
    pub num_nodes: usize,
}

/// The way in which a node was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeLoss {
    /// Its launcher left the job, or ended.
    Ended,
    /// No heartbeat came in time: it is stopped, overloaded, or cut off.
    Silent,
}

/// The store of the launchers of a job, as one of them sees it.
#[derive(Debug)]
pub struct NodeStore {
    node: usize,
    store: Store,
    /// On node 0: listener and acceptor that refuse processes that come after the start.
    late_acceptor: Option<(TcpListener, Acceptor)>,
    secret: JobSecret,
    bind: Option<IpAddr>,
    /// On node 0: the nodes that did not come.
    missing: BTreeSet<usize>,
    /// When the nodes that this one watches were last heard: node 0 watches all others, which watch node 0.
    last_heard: BTreeMap<usize, Instant>,
    last_beat: Instant,
    /// Silence after which a node is lost.
    max_silence: Duration,
}

impl NodeStore {
    /// Joins the launchers of all other nodes, or on node 0 waits for them: until all have joined, or at the end of the
    /// timeout at least `min_nodes`. `lookup` returns environment variables: the job's secret, and the address to listen on.
    ///
    /// # Errors
    /// A message with the reason: too few nodes joined in time, node 0 refused this one, or there is no secret although
    /// other machines reach the port.
    pub fn meet(
        at: &NodeEndpoint,
        min_nodes: usize,
        lookup: impl Fn(&str) -> Option<String>,
        timeout: Duration,
        max_silence: Duration,
    ) -> Result<Self, String> {
        let secret = JobSecret::read(Launcher::None, &lookup)?;
        let point = StoreEndpoint {
            host: at.host.clone(),
            port: at.port,
            bind: bind_address(&lookup)?,
            world_size: at.num_nodes,
            is_one_node: at.num_nodes == 1,
            is_hosted: false,
            members: Member::Node,
            secret: secret.clone(),
        };
        let (store, late_acceptor) = if at.node == HOST {
            let (listener, mut acceptor) = gather(&point, min_nodes, timeout)?;
            acceptor.is_closed = true;
            let ranks = std::mem::take(&mut acceptor.ranks);
            (Store::open(HOST, at.num_nodes, ranks), Some((listener, acceptor)))
        } else {
            if !secret.is_secret() && is_remote(at) {
                return Err(missing_secret(&point));
            }
            (Store::meet_host(&point, at.node, timeout)?, None)
        };
        let watched = if at.node == HOST { 1..at.num_nodes } else { HOST..HOST + 1 };
        let missing: BTreeSet<usize> =
            late_acceptor.iter().flat_map(|(_, acceptor)| acceptor.missing.clone()).collect();
        let now = Instant::now();
        Ok(Self {
            node: at.node,
            store,
            late_acceptor,
            secret,
            bind: point.bind,
            last_heard: watched.filter(|node| !missing.contains(node)).map(|node| (node, now)).collect(),
            missing,
            last_beat: now,
            max_silence,
        })
    }

    /// Sets a key for all nodes.
    pub fn set(&mut self, key: &str, value: &str) {
        self.store.set(key, value.as_bytes());
    }

    /// Returns the value of a key, if it has arrived.
    pub fn get(&self, key: &str) -> Option<String> {
        self.store.get(key).map(|value| String::from_utf8_lossy(value).into_owned())
    }

    /// Exchanges changes and heartbeats without blocking. Returns the nodes that were lost since the last call, or that
    /// left: node 0 reports any other, these only node 0.
    pub fn poll(&mut self) -> Vec<(usize, NodeLoss)> {
        if let Some((listener, acceptor)) = &mut self.late_acceptor {
            acceptor.accept(listener);
            acceptor.serve();
        }
        if self.last_beat.elapsed() >= BEAT_INTERVAL {
            self.last_beat = Instant::now();
            let prefix = if self.node == HOST { "" } else { FOR_HOST };
            self.store.set(&format!("{prefix}beat"), *b"");
        }
        let changes: Vec<_> = self.store.watch().collect();
        let mut lost = Vec::new();
        for change in changes {
            // All changes reach the other nodes by way of node 0.
            let from = if self.node == HOST { change.rank } else { HOST };
            self.last_heard.entry(from).and_modify(|heard| *heard = Instant::now());
            if let Some(Departure::Ended(node) | Departure::Lost(node)) = change.departure() {
                lost.extend(self.last_heard.remove(&node).map(|_| (node, NodeLoss::Ended)));
            }
        }
        let is_silent = |(_, heard): &(&usize, &Instant)| heard.elapsed() >= self.max_silence;
        let silent: Vec<usize> = self.last_heard.iter().filter(is_silent).map(|(node, _)| *node).collect();
        for node in silent {
            self.last_heard.remove(&node);
            self.store.disconnect_peer(node);
            lost.push((node, NodeLoss::Silent));
        }
        if self.node != HOST && !self.store.is_connected() {
            lost.extend(self.last_heard.remove(&HOST).map(|_| (HOST, NodeLoss::Ended)));
        }
        lost
    }

    /// On node 0: returns the nodes that had not joined at the end of the timeout.
    pub fn missing(&self) -> &BTreeSet<usize> {
        &self.missing
    }

    /// Returns the secret of the ranks for a start of the job. All nodes compute the same one, so it is not sent.
    pub fn rank_secret(&self, start: &str) -> String {
        let mut hasher = blake3::Hasher::new_keyed(self.secret.key());
        hasher.update(b"ranks").update(start.as_bytes());
        hasher.finalize().to_hex().to_string()
    }

    /// The address that this node listens on, if one is set.
    pub fn bind(&self) -> Option<IpAddr> {
        self.bind
    }

    /// Leaves the job. Node 0 waits until the others have left, for a few seconds at most.
    pub fn close(&mut self) {
        self.store.close();
    }
}

/// Returns whether the address of node 0 is known not to be the loopback.
fn is_remote(at: &NodeEndpoint) -> bool {
    let known = (at.host.as_str(), at.port).to_socket_addrs();
    known.is_ok_and(|mut known| known.any(|address| !address.ip().is_loopback()))
}

#[cfg(test)]
mod tests;
