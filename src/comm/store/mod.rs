//! The store of a job: a key-value store over TCP that all its processes share (c10d's TCPStore).
//!
//! One process hosts it: rank 0, or the launcher that started all ranks on its machine. It opens when all ranks have
//! joined and proved that they know the job's secret. Every process has a copy of all keys. A change is sent to the
//! host, which forwards it, so all processes see the changes of one rank in order. No process waits for one that does
//! not read.
//!
//! Each rank has a presence key. A rank that finishes deletes its own; if a connection ends earlier, the host deletes
//! that rank's key.
//!
//! Reading order: `endpoint.rs`, `secret.rs`, `address.rs` (the address of the store), `handshake.rs`, `acceptor.rs`,
//! `join.rs` (joining), `connection.rs`, `change.rs` (the protocol), `control_channel.rs` (failures and hang reports as
//! keys), `job.rs` (a launcher as the host), `nodes.rs` (the store of the launchers of several machines).
#![cfg_attr(
    not(feature = "nccl"),
    allow(dead_code, reason = "MPI and threads need no store; it is tested without NCCL")
)]

mod acceptor;
mod address;
mod change;
mod connection;
pub(super) mod control_channel;
mod endpoint;
mod handshake;
mod job;
mod join;
mod nodes;
mod secret;
#[cfg(test)]
pub(super) mod tests;

pub(super) use change::{Change, Departure};
pub(super) use connection::Connection;
pub(super) use control_channel::{ControlChannel, Received};
#[cfg(test)]
pub(super) use endpoint::Member;
pub(super) use endpoint::StoreEndpoint;
pub use job::{JobStore, store_environment};
pub use nodes::{LostNode, NodeEndpoint, NodeLoss, NodeStore};
#[cfg(test)]
pub(super) use secret::JobSecret;

use acceptor::gather;
use connection::{Arrived, ConnectionState};
use join::join;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Total time for which processes that do not read may delay a process that makes a change, in total: its
/// next action may be what they wait for.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between polls.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// The largest value, which leaves room for a short key.
pub(super) const MAX_VALUE_BYTES: usize = connection::MAX_BYTES - 256;
/// The key that the host sets when all ranks have joined.
const OPEN: &str = "open";
/// Prefix of keys that the host does not forward.
const FOR_HOST: &str = "host/";
/// The rank number of a host that is not a rank.
pub(super) const NO_RANK: usize = u32::MAX as usize;

/// The store of one process.
#[derive(Debug)]
pub(super) struct Store {
    rank: usize,
    host: usize,
    values: BTreeMap<String, Arc<[u8]>>,
    /// The host has a connection to each other rank, a rank only to the host.
    connections: BTreeMap<usize, Connection>,
    /// Changes that `watch` has not returned yet.
    changes: VecDeque<Change>,
    timeout: Duration,
}

/// The key that exists while a rank is present.
fn presence(rank: usize) -> String {
    format!("rank/{rank}")
}

/// Name of a process in messages.
fn process_name(rank: usize) -> String {
    match rank {
        NO_RANK => "the launcher".to_owned(),
        rank => format!("rank {rank}"),
    }
}

impl Store {
    /// Joins the store of the job, or hosts it on the host's rank. Returns once all ranks have joined.
    ///
    /// # Errors
    /// A message with the reason.
    pub(super) fn meet(point: &StoreEndpoint, rank: usize, timeout: Duration) -> Result<Self, String> {
        if point.host_rank() == rank {
            let ranks = gather(point, point.world_size, timeout)?.ranks;
            return Ok(Self::open(rank, point.world_size, ranks));
        }
        Self::meet_host(point, rank, timeout)
    }

    /// Joins the store at its host.
    fn meet_host(point: &StoreEndpoint, rank: usize, timeout: Duration) -> Result<Self, String> {
        let (host, world_size) = (point.host_rank(), point.world_size);
        let connection = join(point, rank, timeout)?;
        let mut store = Self::new(rank, host, world_size, BTreeMap::from([(host, connection)]));
        // The host decides at the end of its own timeout, which may have begun as late as this connection.
        match store.wait(OPEN, timeout + TIMEOUT) {
            Ok(_) => Ok(store),
            Err(reason) => Err(format!("not all {}s joined the store at {point}: {reason}", point.members)),
        }
    }

    /// Creates the host's store once all ranks have joined, and notifies them.
    pub(super) fn open(host: usize, world_size: usize, connections: BTreeMap<usize, Connection>) -> Self {
        let mut store = Self::new(host, host, world_size, connections);
        store.set(OPEN, *b"");
        store
    }

    pub(super) fn new(
        rank: usize,
        host: usize,
        world_size: usize,
        connections: BTreeMap<usize, Connection>,
    ) -> Self {
        let all = (0..world_size).chain([host]);
        let values = all.map(|rank| (presence(rank), Arc::default())).collect();
        Self { rank, host, values, connections, changes: VecDeque::new(), timeout: TIMEOUT }
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    /// Rank of the host, or [`NO_RANK`] if it is the launcher.
    pub(super) fn host(&self) -> usize {
        self.host
    }

    /// Sets a key for all processes. Data that a process does not read in time is sent by later polls. A value has at most
    /// [`MAX_VALUE_BYTES`].
    pub(super) fn set(&mut self, key: &str, value: impl Into<Arc<[u8]>>) {
        self.change_key(key.to_owned(), Some(value.into()), self.deadline());
    }

    /// Deletes a key for all processes.
    #[allow(dead_code, reason = "backends need no deletion; used in tests")]
    pub(super) fn delete(&mut self, key: &str) {
        self.change_key(key.to_owned(), None, self.deadline());
    }

    /// Returns the value of a key, if it has arrived.
    pub(super) fn get(&self, key: &str) -> Option<&Arc<[u8]>> {
        self.values.get(key)
    }

    /// Waits for a key to be set. `watch` still returns the changes that arrive meanwhile.
    ///
    /// # Errors
    /// A message, if the key was not set in time or the host was lost.
    pub(super) fn wait(&mut self, key: &str, timeout: Duration) -> Result<Arc<[u8]>, String> {
        let started = Instant::now();
        loop {
            self.poll();
            if let Some(value) = self.get(key) {
                return Ok(value.clone());
            }
            if self.connections.is_empty() {
                return Err(format!("the store was closed before `{key}` was set"));
            }
            if started.elapsed() >= timeout {
                return Err(format!("no rank set `{key}` within {} s", timeout.as_secs_f32()));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Returns the changes of other processes since the last call.
    pub(super) fn watch(&mut self) -> impl Iterator<Item = Change> {
        self.poll();
        std::mem::take(&mut self.changes).into_iter()
    }

    /// Returns whether any connection is open.
    pub(super) fn is_connected(&self) -> bool {
        !self.connections.is_empty()
    }

    /// Deletes this rank's presence key and waits until that has arrived, limited by the timeout for processes that do not
    /// read. The host still forwards the changes of the others until all have closed.
    pub(super) fn close(&mut self) {
        let deadline = self.deadline();
        self.change_key(presence(self.rank), None, deadline);
        self.read_until_closed(self.rank != self.host, deadline);
    }

    /// Ends the connections without deleting the presence key, as the end of the process does. Sent changes still arrive.
    pub(super) fn disconnect(&mut self) {
        self.read_until_closed(true, self.deadline());
    }

    /// Reads until the other side of each connection has closed it: closing a socket with unread data resets the
    /// connection, which discards data still in flight.
    fn read_until_closed(&mut self, closes_first: bool, deadline: Instant) {
        while self.is_connected() && Instant::now() < deadline {
            if closes_first {
                self.connections.values_mut().for_each(Connection::finish);
            }
            self.poll();
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Waits until all changes are sent, limited by the timeout for processes that do not read.
    pub(super) fn flush(&mut self) {
        self.flush_until(self.deadline());
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }

    fn change_key(&mut self, key: String, value: Option<Arc<[u8]>>, deadline: Instant) {
        let change = Change { rank: self.rank, key, value };
        self.forward(&change, self.rank);
        self.apply(&change);
        self.flush_until(deadline);
    }

    fn flush_until(&mut self, deadline: Instant) {
        loop {
            self.connections.values_mut().for_each(Connection::write);
            let late = self.connections.iter().filter(|(_, connection)| connection.is_late());
            let late: Vec<String> = late.map(|(peer, _)| process_name(*peer)).collect();
            if late.is_empty() {
                return;
            }
            if Instant::now() >= deadline {
                let (own, late) = (process_name(self.rank), late.join(", "));
                return tracing::debug!("{own} continues before {late} have read everything");
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Sends a change to all connected processes except its sender.
    fn forward(&mut self, change: &Change, from: usize) {
        let frame: Arc<[u8]> = change.encode().into();
        for (_, connection) in self.connections.iter_mut().filter(|(peer, _)| **peer != from) {
            connection.send(&frame);
        }
    }

    fn apply(&mut self, change: &Change) {
        match &change.value {
            Some(value) => self.values.insert(change.key.clone(), value.clone()),
            None => self.values.remove(&change.key),
        };
    }

    /// Receives and applies changes without blocking.
    fn poll(&mut self) {
        let peers: Vec<usize> = self.connections.keys().copied().collect();
        for peer in peers {
            let Some(connection) = self.connections.get_mut(&peer) else { continue };
            connection.write();
            let Arrived { frames, mut state } = connection.read();
            for frame in frames {
                let Some(change) = Change::decode(&frame).filter(|change| self.is_permitted(peer, change))
                else {
                    state = ConnectionState::Broken(std::io::ErrorKind::InvalidData.into());
                    break;
                };
                self.receive_change(change, peer);
            }
            match state {
                ConnectionState::Open => continue,
                ConnectionState::Closed => self.note_loss(peer),
                ConnectionState::Broken(error) => {
                    let (own, peer) = (process_name(self.rank), process_name(peer));
                    tracing::warn!(
                        "{own} lost its store connection to {peer}, and no longer receives failures from it: {error}"
                    );
                }
            }
            self.connections.remove(&peer);
        }
    }

    /// Returns whether `peer` may send the change: a rank only its own, the host those of all ranks.
    fn is_permitted(&self, peer: usize, change: &Change) -> bool {
        self.rank != self.host || change.rank == peer
    }

    /// Ends the connection to a process, as if it had ended.
    fn disconnect_peer(&mut self, peer: usize) {
        if self.connections.remove(&peer).is_some() {
            self.note_loss(peer);
        }
    }

    /// Deletes the presence key of a process whose connection has ended, unless it has deleted it itself.
    fn note_loss(&mut self, peer: usize) {
        if self.values.contains_key(&presence(peer)) {
            let lost = Change { rank: self.rank, key: presence(peer), value: None };
            self.receive_change(lost, peer);
        }
    }

    fn receive_change(&mut self, change: Change, from: usize) {
        if self.rank == self.host && !change.key.starts_with(FOR_HOST) {
            self.forward(&change, from);
        }
        self.apply(&change);
        self.changes.push_back(change);
    }
}
