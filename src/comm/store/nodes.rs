//! The store of the launchers of a job, one per node. Node 0 hosts it; on one machine it is alone there.
//!
//! Every launcher sends a heartbeat each second. One that is silent for too long is lost, as is one whose connection
//! ends: a machine that loses its power or its network closes no connection.

use super::acceptor::{Acceptor, gather, missing_secret};
use super::endpoint::{Member, StoreEndpoint, bind_address};
use super::handshake::nonce;
use super::secret::JobSecret;
use super::{Departure, FOR_HOST, Store};
use crate::comm::Launcher;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, ToSocketAddrs};
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

/// A node that was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LostNode {
    /// Its number.
    pub node: usize,
    /// The way in which it was lost.
    pub loss: NodeLoss,
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
    store: Store,
    /// On node 0 of several: refuses processes that come after the start.
    late_acceptor: Option<Acceptor>,
    secret: JobSecret,
    bind: Option<IpAddr>,
    /// When the nodes that this one watches were last heard: node 0 watches all others, which watch node 0.
    last_heard: BTreeMap<usize, Instant>,
    last_beat: Instant,
    /// Silence after which a node is lost.
    max_silence: Duration,
}

impl NodeStore {
    /// Creates the store of a launcher whose job has no other node. It listens nowhere.
    ///
    /// # Errors
    /// No randomness is available for the secret.
    pub fn alone() -> io::Result<Self> {
        let secret = JobSecret::new(&blake3::Hash::from_bytes(nonce()?).to_string(), true);
        Ok(Self::new(Store::open(HOST, 1, BTreeMap::new()), None, secret, None, Duration::MAX))
    }

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
            let mut acceptor = gather(&point, min_nodes, timeout)?;
            acceptor.is_closed = true;
            let nodes = std::mem::take(&mut acceptor.ranks);
            (Store::open(HOST, at.num_nodes, nodes), Some(acceptor))
        } else {
            if !secret.is_secret() && is_remote(at) {
                return Err(missing_secret(&point));
            }
            (Store::meet_host(&point, at.node, timeout)?, None)
        };
        Ok(Self::new(store, late_acceptor, secret, point.bind, max_silence))
    }

    fn new(
        store: Store,
        late_acceptor: Option<Acceptor>,
        secret: JobSecret,
        bind: Option<IpAddr>,
        max_silence: Duration,
    ) -> Self {
        let watched = match store.rank() {
            HOST => store.connections.keys().copied().collect(),
            _ => vec![HOST],
        };
        let now = Instant::now();
        let last_heard = watched.into_iter().map(|node| (node, now)).collect();
        Self { store, late_acceptor, secret, bind, last_heard, last_beat: now, max_silence }
    }

    fn is_host(&self) -> bool {
        self.store.rank() == HOST
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
    pub fn poll(&mut self) -> Vec<LostNode> {
        if let Some(acceptor) = &mut self.late_acceptor {
            acceptor.poll();
        }
        if self.last_beat.elapsed() >= BEAT_INTERVAL {
            self.last_beat = Instant::now();
            let prefix = if self.is_host() { "" } else { FOR_HOST };
            self.store.set(&format!("{prefix}beat"), *b"");
        }
        let changes: Vec<_> = self.store.watch().collect();
        let mut lost = Vec::new();
        for change in changes {
            // All changes reach the other nodes by way of node 0.
            let from = if self.is_host() { change.rank } else { HOST };
            self.last_heard.entry(from).and_modify(|heard| *heard = Instant::now());
            if let Some(Departure::Ended(node) | Departure::Lost(node)) = change.departure() {
                lost.extend(self.lose(node, NodeLoss::Ended));
            }
        }
        let is_silent = |heard: &Instant| heard.elapsed() >= self.max_silence;
        let nodes = self.last_heard.iter();
        let silent: Vec<usize> = nodes.filter(|(_, heard)| is_silent(heard)).map(|(node, _)| *node).collect();
        for node in silent {
            self.store.disconnect_peer(node);
            lost.extend(self.lose(node, NodeLoss::Silent));
        }
        if !self.is_host() && !self.store.is_connected() {
            lost.extend(self.lose(HOST, NodeLoss::Ended));
        }
        lost
    }

    /// Stops watching a node, if it is not lost already.
    fn lose(&mut self, node: usize, loss: NodeLoss) -> Option<LostNode> {
        self.last_heard.remove(&node).map(|_| LostNode { node, loss })
    }

    /// On node 0: returns the nodes that had not joined at the end of the timeout.
    pub fn missing(&self) -> BTreeSet<usize> {
        self.late_acceptor.as_ref().map_or_else(BTreeSet::new, |acceptor| acceptor.missing.clone())
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
