//! The store of a job: keys and values that all of its processes share, over TCP (what c10d calls TCPStore).
//!
//! One process hosts it: rank 0, or the launcher that has started all ranks on its machine. It opens when all ranks have
//! come and proved that they know the job's secret. Every process holds all keys; a change goes to the host, which
//! passes it on, so all see the changes of one rank in their order. Nothing here waits for a process that does not read.
//!
//! Each rank's presence is a key as well. A rank that is done deletes its own; of one whose connection ends before, the
//! host does.
//!
//! Reading order: `endpoint.rs`, `secret.rs`, `address.rs` (where the processes meet), `handshake.rs`, `reception.rs`,
//! `join.rs` (how they do), `connection.rs`, `change.rs` (what travels then), `control_channel.rs` (failures and hang reports as keys), `job.rs` (a launcher as the host).
#![cfg_attr(
    not(feature = "nccl"),
    allow(dead_code, reason = "ranks of MPI and threads need no store; it is tested without NCCL")
)]

mod address;
mod change;
mod connection;
pub(super) mod control_channel;
mod handshake;
mod job;
mod join;
mod endpoint;
mod acceptor;
mod secret;
#[cfg(test)]
pub(super) mod tests;

pub(super) use change::{Change, Departure};
pub(super) use connection::Connection;
pub(super) use control_channel::{ControlChannel, Received};
pub use job::JobStore;
pub(super) use endpoint::StoreEndpoint;
#[cfg(test)]
pub(super) use secret::JobSecret;

use connection::ConnectionState;
use join::join;
use acceptor::accept_all;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long processes that do not read may hold up one that makes a change: all of them together, since what it does
/// next may be what they wait for.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Between two looks.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// The largest value that a process takes, with a short key before it.
pub(super) const MAX_VALUE_BYTES: usize = connection::MAX_BYTES - 256;
/// The key that the host sets when all ranks have come.
const OPEN: &str = "open";
/// In place of its rank, the host that is none.
pub(super) const NO_RANK: usize = u32::MAX as usize;

/// One process's end of the store.
#[derive(Debug)]
pub(super) struct Store {
    rank: usize,
    host: usize,
    values: BTreeMap<String, Arc<[u8]>>,
    /// Of the host to all ranks but itself, of those to the host.
    connections: BTreeMap<usize, Connection>,
    /// What `watch` has not returned yet.
    changes: VecDeque<Change>,
    timeout: Duration,
}

/// The key that is there as long as a rank is.
fn presence(rank: usize) -> String {
    format!("rank/{rank}")
}

/// A process of the store, as messages name it.
fn process_name(rank: usize) -> String {
    match rank {
        NO_RANK => "the launcher".to_owned(),
        rank => format!("rank {rank}"),
    }
}

impl Store {
    /// Meets the other ranks of the job: as the host where this rank is. Returns when all have come.
    ///
    /// # Errors
    /// Why not, in words.
    pub(super) fn meet(point: &StoreEndpoint, rank: usize, timeout: Duration) -> Result<Self, String> {
        let (host, world_size) = (point.host_rank(), point.world_size);
        if host == rank {
            return Ok(Self::open(host, world_size, accept_all(point, timeout)?));
        }
        let connection = join(point, rank, timeout)?;
        let mut store = Self::new(rank, host, world_size, BTreeMap::from([(host, connection)]));
        match store.wait(OPEN, timeout) {
            Ok(_) => Ok(store),
            Err(reason) => Err(format!("not all ranks have come to {point}: {reason}")),
        }
    }

    /// The host's end once all ranks have come, which it tells them.
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

    /// The rank of the host, [`NO_RANK`] if it is none.
    pub(super) fn host(&self) -> usize {
        self.host
    }

    /// Sets a key, for all. What a process does not read in time goes out later, when this one looks. A value has at most
    /// [`MAX_VALUE_BYTES`].
    pub(super) fn set(&mut self, key: &str, value: impl Into<Arc<[u8]>>) {
        self.make(key.to_owned(), Some(value.into()), self.deadline());
    }

    /// Deletes a key, for all.
    #[allow(dead_code, reason = "keys of the backends end with their ranks; tests delete others")]
    pub(super) fn delete(&mut self, key: &str) {
        self.make(key.to_owned(), None, self.deadline());
    }

    /// The value of a key, as far as it has come.
    pub(super) fn get(&self, key: &str) -> Option<&Arc<[u8]>> {
        self.values.get(key)
    }

    /// Waits for a key to be set. Changes on the way are for `watch` to return.
    ///
    /// # Errors
    /// It was not set in time, or this process has lost the host; in words.
    pub(super) fn wait(&mut self, key: &str, timeout: Duration) -> Result<Arc<[u8]>, String> {
        let started = Instant::now();
        loop {
            self.poll();
            if let Some(value) = self.get(key) {
                return Ok(value.clone());
            }
            if self.connections.is_empty() {
                return Err(format!("the store has ended before `{key}` was set"));
            }
            if started.elapsed() >= timeout {
                return Err(format!("nobody has set `{key}` within {} s", timeout.as_secs_f32()));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// The changes of others that have come since the last call.
    pub(super) fn watch(&mut self) -> impl Iterator<Item = Change> {
        self.poll();
        std::mem::take(&mut self.changes).into_iter()
    }

    /// Whether anyone is left who can be heard.
    pub(super) fn is_connected(&self) -> bool {
        !self.connections.is_empty()
    }

    /// Deletes this rank's presence, and stays until that has arrived, for as long as processes that do not read may hold
    /// it up. A connection that is closed with something unread takes back what is still on its way, so each side reads
    /// until the other one has closed: the host until all others have, and it passes on what they change meanwhile; the
    /// others until the host has read that nothing follows.
    pub(super) fn close(&mut self) {
        let deadline = self.deadline();
        self.make(presence(self.rank), None, deadline);
        while self.is_connected() && Instant::now() < deadline {
            if self.rank != self.host {
                self.connections.values_mut().for_each(Connection::finish);
            }
            self.poll();
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Waits until all has gone out, for as long as processes that do not read may hold it up.
    pub(super) fn flush(&mut self) {
        self.flush_until(self.deadline());
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }

    fn make(&mut self, key: String, value: Option<Arc<[u8]>>, deadline: Instant) {
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
                return tracing::debug!("{own} goes on before {late} have read all");
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Sends a change to all that this process is connected to, but the one that it comes from.
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

    /// Takes what has come.
    fn poll(&mut self) {
        let peers: Vec<usize> = self.connections.keys().copied().collect();
        for peer in peers {
            let Some(connection) = self.connections.get_mut(&peer) else { continue };
            connection.write();
            let (frames, mut state) = connection.read();
            for frame in frames {
                let Some(change) = Change::decode(&frame).filter(|change| self.is_permitted(peer, change))
                else {
                    state = ConnectionState::Broken(std::io::ErrorKind::InvalidData.into());
                    break;
                };
                self.take(change, peer);
            }
            match state {
                ConnectionState::Open => continue,
                ConnectionState::Closed if self.values.contains_key(&presence(peer)) => {
                    let gone = Change { rank: self.rank, key: presence(peer), value: None };
                    self.take(gone, peer);
                }
                ConnectionState::Closed => {}
                ConnectionState::Broken(error) => {
                    let (own, peer) = (process_name(self.rank), process_name(peer));
                    tracing::warn!("{own} hears no more of the failures that {peer} tells: {error}");
                }
            }
            self.connections.remove(&peer);
        }
    }

    /// A rank speaks for itself, the host for all.
    fn is_permitted(&self, peer: usize, change: &Change) -> bool {
        self.rank != self.host || change.rank == peer
    }

    fn take(&mut self, change: Change, from: usize) {
        if self.rank == self.host {
            self.forward(&change, from);
        }
        self.apply(&change);
        self.changes.push_back(change);
    }
}
