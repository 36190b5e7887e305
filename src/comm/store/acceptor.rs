//! How the ranks of a job come to the host of its store.

use super::address;
use super::connection::Connection;
use super::handshake::{
    CLAIM_BYTES, Claim, HELLO_BYTES, MAGIC, Nonce, OTHER_SECRET, Session, Verdict, nonce,
};
use super::endpoint::StoreEndpoint;
use super::process_name;
use super::secret::JobSecret;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Error, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Between two looks at all connections.
const POLL: Duration = Duration::from_millis(5);
/// How long a connection may take from its beginning to the answer.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Connections beyond those of ranks that may be open at once. One more closes the oldest.
pub(super) const MAX_UNAUTHENTICATED: usize = 256;
/// Connections that are taken in one look.
pub(super) const MAX_ACCEPTS_PER_POLL: usize = 64;
/// Refusals that the host lists when ranks do not come.
const MAX_LISTED: usize = 8;

/// The host's connections to all other ranks, once they have come.
///
/// # Errors
/// It cannot listen, or not all ranks have come in time; in words.
pub(super) fn accept_all(
    point: &StoreEndpoint,
    timeout: Duration,
) -> Result<BTreeMap<usize, Connection>, String> {
    let started = Instant::now();
    let listener = address::listen(point).and_then(|listener| {
        listener.set_nonblocking(true)?;
        Ok(listener)
    });
    let listener = listener.map_err(|error| {
        format!(
            "cannot listen on port {} of {}: {error}; ULYSSES_MASTER_PORT names another port, ULYSSES_MASTER_BIND another \
             address of this machine",
            point.port, point.host
        )
    })?;
    warn_of_exposed_port(&listener, point);
    let mut acceptor = Acceptor::new(point.clone());
    while !acceptor.missing.is_empty() {
        if started.elapsed() >= timeout {
            return Err(acceptor.timeout_message(timeout));
        }
        acceptor.accept(&listener);
        acceptor.serve();
        std::thread::sleep(POLL);
    }
    Ok(acceptor.ranks)
}

fn warn_of_exposed_port(listener: &TcpListener, point: &StoreEndpoint) {
    let is_local = listener.local_addr().is_ok_and(|address| address.ip().is_loopback());
    if !is_local && !point.secret.is_secret() && point.world_size > 1 {
        tracing::warn!(
            "the ranks meet at {point} without a job secret, so any process that reaches that port can take a rank: set \
             ULYSSES_JOB_SECRET to the same random text for all ranks"
        );
    }
}

/// The host while ranks come.
#[derive(Debug)]
pub(super) struct Acceptor {
    point: StoreEndpoint,
    /// Who has not proved yet to be of this job, the oldest first.
    pub(super) pending: Vec<Pending>,
    pub(super) ranks: BTreeMap<usize, Connection>,
    pub(super) missing: BTreeSet<usize>,
    refused: BTreeSet<String>,
}

impl Acceptor {
    pub(super) fn new(point: StoreEndpoint) -> Self {
        let missing = (0..point.world_size).filter(|rank| *rank != point.host_rank()).collect();
        Self { point, pending: Vec::new(), ranks: BTreeMap::new(), missing, refused: BTreeSet::new() }
    }

    /// Takes the connections that there are, so many at a time that a flood of them does not hold up the ranks. One that
    /// cannot be taken, for the lack of file descriptors as well, comes again.
    pub(super) fn accept(&mut self, listener: &TcpListener) {
        for _ in 0..MAX_ACCEPTS_PER_POLL {
            let Ok((stream, from)) = listener.accept() else { return };
            if self.pending.len() >= MAX_UNAUTHENTICATED + self.point.world_size {
                self.pending.remove(0);
            }
            self.pending.extend(Pending::new(stream, from));
        }
    }

    /// Goes on with all connections, none of which the others wait for.
    pub(super) fn serve(&mut self) {
        for mut peer in std::mem::take(&mut self.pending) {
            match peer.read(&self.point.secret) {
                // A peer that goes away before it is answered comes again; who is no rank gets nothing.
                Err(_) => {}
                Ok(None) if Instant::now() >= peer.deadline => {}
                Ok(None) => self.pending.push(peer),
                Ok(Some(claim)) => self.answer(peer, claim),
            }
        }
    }

    fn answer(&mut self, mut peer: Pending, claim: Option<Claim>) {
        let from = peer.from.ip();
        let Some(claim) = claim else {
            // It may be gone already.
            let _ = peer.stream.write(&OTHER_SECRET);
            return self.add_refusal(format!("a process at {from} has another job secret"));
        };
        let (verdict, world_size) = (self.verdict(claim), self.point.world_size as u64);
        let session = peer.session(&self.point.secret);
        let (reply, key) = (session.reply(verdict, world_size), session.frame_key(true));
        // Far less than a new connection takes without waiting.
        let is_sent = peer.stream.write(&reply).is_ok_and(|written| written == reply.len());
        if verdict != Verdict::Accepted {
            let reason = verdict.reason(claim, world_size, self.point.host_rank());
            return self.add_refusal(format!("{reason} (from {from})"));
        }
        if let (true, Ok(connection)) = (is_sent, Connection::new(peer.stream, key)) {
            self.missing.remove(&(claim.rank as usize));
            self.ranks.insert(claim.rank as usize, connection);
        }
    }

    fn verdict(&self, Claim { rank, world_size }: Claim) -> Verdict {
        let own = self.point.world_size as u64;
        match usize::try_from(rank) {
            _ if rank >= own => Verdict::OutOfRange,
            _ if world_size != own => Verdict::OtherWorldSize,
            // A rank whose connection has broken off before it was answered comes again.
            Ok(rank)
                if rank != self.point.host_rank()
                    && !self.ranks.get(&rank).is_some_and(Connection::is_open) =>
            {
                Verdict::Accepted
            }
            _ => Verdict::Taken,
        }
    }

    fn add_refusal(&mut self, refused: String) {
        if self.refused.len() < MAX_LISTED && self.refused.insert(refused.clone()) {
            let host = process_name(self.point.host_rank());
            tracing::warn!("{host} has refused a process: {refused}");
        }
    }

    fn timeout_message(&self, timeout: Duration) -> String {
        let Self { point, missing, refused, .. } = self;
        let seconds = timeout.as_secs_f32();
        let mut why = format!("ranks {missing:?} did not come to {point} within {seconds} s");
        if !refused.is_empty() {
            let refused: Vec<&str> = refused.iter().map(String::as_str).collect();
            why = format!("{why}; refused were: {}", refused.join("; "));
        }
        why
    }
}

/// A connection in its handshake, on the host's side.
#[derive(Debug)]
pub(super) struct Pending {
    stream: TcpStream,
    pub(super) from: SocketAddr,
    pub(super) deadline: Instant,
    own: Nonce,
    /// The nonce of its hello, once that has come.
    peer: Option<Nonce>,
    /// Bytes received of the next message.
    received: Vec<u8>,
}

impl Pending {
    pub(super) fn new(stream: TcpStream, from: SocketAddr) -> std::io::Result<Self> {
        stream.set_nonblocking(true)?;
        let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
        Ok(Self { stream, from, deadline, own: nonce()?, peer: None, received: Vec::new() })
    }

    fn session<'s>(&self, secret: &'s JobSecret) -> Session<'s> {
        Session { secret, root: self.own, peer: self.peer.unwrap_or_default() }
    }

    /// Reads without waiting: nothing yet, a claim, or `None` for a claim made with another secret.
    fn read(&mut self, secret: &JobSecret) -> std::io::Result<Option<Option<Claim>>> {
        loop {
            let wanted = if self.peer.is_none() { HELLO_BYTES } else { CLAIM_BYTES };
            let mut bytes = [0; CLAIM_BYTES];
            match self.stream.read(&mut bytes[..wanted - self.received.len()]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(read) => self.received.extend_from_slice(&bytes[..read]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error),
            }
            let begun = self.received.len().min(MAGIC.len());
            if self.peer.is_none() && self.received[..begun] != MAGIC[..begun] {
                return Err(Error::new(ErrorKind::InvalidData, "not a rank"));
            }
            if self.received.len() < wanted {
                continue;
            }
            let message = std::mem::take(&mut self.received);
            if self.peer.is_some() {
                return Ok(Some(self.session(secret).read_claim(&message)));
            }
            self.peer = message[MAGIC.len()..].try_into().ok();
            self.stream.write_all(&self.own)?;
        }
    }
}
