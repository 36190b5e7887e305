//! The host's side of joining a store: accepts the ranks of a job.

use super::address;
use super::connection::Connection;
use super::endpoint::{Member, StoreEndpoint};
use super::handshake::{
    CLAIM_BYTES, Claim, HELLO_BYTES, MAGIC, Nonce, OTHER_SECRET, PROTOCOL, Reply, Session, Verdict, nonce,
    other_version,
};
use super::secret::JobSecret;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Error, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Interval between polls of all connections.
const POLL: Duration = Duration::from_millis(5);
/// Time limit of a handshake.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Number of open connections beyond the ranks' own. Another connection closes the oldest.
pub(super) const MAX_UNAUTHENTICATED: usize = 256;
/// Number of connections accepted per poll.
pub(super) const MAX_ACCEPTS_PER_POLL: usize = 64;
/// Number of refusals listed when ranks do not join.
const MAX_LISTED: usize = 8;

/// Accepts the other members until all have joined. At the end of the timeout `least` are enough, the host included.
///
/// # Errors
/// A message, if the host cannot listen, too few join in time, or launchers of other machines need no secret.
pub(super) fn gather(point: &StoreEndpoint, least: usize, timeout: Duration) -> Result<Acceptor, String> {
    let started = Instant::now();
    let mut acceptor = Acceptor::listen(point.clone()).map_err(|error| {
        let other_port = match point.members {
            Member::Rank => "set ULYSSES_MASTER_PORT to another port",
            Member::Node => "give --rdzv-endpoint another port",
        };
        format!(
            "cannot listen on port {} of {}: {error}; {other_port}, or ULYSSES_MASTER_BIND to another address of this machine",
            point.port, point.host
        )
    })?;
    acceptor.check_exposed_port()?;
    while !acceptor.missing.is_empty() {
        if started.elapsed() >= timeout {
            if acceptor.missing.len() + least <= point.world_size {
                break;
            }
            return Err(acceptor.timeout_message(timeout));
        }
        acceptor.poll();
        std::thread::sleep(POLL);
    }
    Ok(acceptor)
}

/// Message about a store that other machines reach and that has no secret.
pub(super) fn missing_secret(point: &StoreEndpoint) -> String {
    format!(
        "the store at {point} has no job secret, so any process that reaches this port can join as a {member}: set \
         ULYSSES_JOB_SECRET, or a file by ULYSSES_JOB_SECRET_FILE, to the same random text for all {member}s",
        member = point.members
    )
}

/// The host's state while ranks join.
#[derive(Debug)]
pub(super) struct Acceptor {
    pub(super) point: StoreEndpoint,
    listener: TcpListener,
    /// Connections in their handshake, oldest first.
    pub(super) pending: Vec<Pending>,
    pub(super) ranks: BTreeMap<usize, Connection>,
    pub(super) missing: BTreeSet<usize>,
    refused: BTreeSet<String>,
    /// The job has started; nobody else can join.
    pub(super) is_closed: bool,
}

impl Acceptor {
    /// Listens at the endpoint, on a free port if its port is 0.
    pub(super) fn listen(point: StoreEndpoint) -> std::io::Result<Self> {
        Self::new(address::listen(&point)?, point)
    }

    pub(super) fn new(listener: TcpListener, mut point: StoreEndpoint) -> std::io::Result<Self> {
        listener.set_nonblocking(true)?;
        point.port = listener.local_addr()?.port();
        let missing = others(&point);
        let (pending, ranks, refused) = (Vec::new(), BTreeMap::new(), BTreeSet::new());
        Ok(Self { point, listener, pending, ranks, missing, refused, is_closed: false })
    }

    /// Refuses to accept launchers that prove nothing from other machines. Ranks only get a warning: torchrun and SLURM
    /// give them no secret.
    fn check_exposed_port(&self) -> Result<(), String> {
        let Self { point, listener, .. } = self;
        let is_local = listener.local_addr().is_ok_and(|address| address.ip().is_loopback());
        if is_local || point.secret.is_secret() || point.world_size == 1 {
            return Ok(());
        }
        match point.members {
            Member::Node => return Err(missing_secret(point)),
            Member::Rank => tracing::warn!("{}", missing_secret(point)),
        }
        Ok(())
    }

    /// Returns the connections to the ranks that have joined. All may then join again.
    pub(super) fn take_ranks(&mut self) -> BTreeMap<usize, Connection> {
        self.pending.clear();
        self.refused.clear();
        self.missing = others(&self.point);
        std::mem::take(&mut self.ranks)
    }

    /// Accepts new connections and advances all, without blocking.
    pub(super) fn poll(&mut self) {
        self.accept();
        self.serve();
    }

    /// Accepts new connections, but a limited number, so that a flood does not delay the ranks. After an error, such as
    /// too few file descriptors, the next poll retries.
    pub(super) fn accept(&mut self) {
        for _ in 0..MAX_ACCEPTS_PER_POLL {
            let Ok((stream, from)) = self.listener.accept() else { return };
            if self.pending.len() >= MAX_UNAUTHENTICATED + self.point.world_size {
                self.pending.remove(0);
            }
            self.pending.extend(Pending::new(stream, from));
        }
    }

    /// Advances all connections without blocking on any of them.
    pub(super) fn serve(&mut self) {
        for mut peer in std::mem::take(&mut self.pending) {
            match peer.read(&self.point.secret) {
                // A rank that disconnects before the answer retries; other clients get nothing.
                Err(_) => {}
                Ok(None) if Instant::now() >= peer.deadline => {}
                Ok(None) => self.pending.push(peer),
                Ok(Some(Message::Claim(claim))) => self.answer(peer, claim),
                Ok(Some(Message::OtherVersion(magic))) => {
                    // The peer may have disconnected.
                    let _ = peer.stream.write(&MAGIC);
                    self.add_refusal(format!("process at {}: {}", peer.from.ip(), other_version(&magic)));
                }
            }
        }
    }

    fn answer(&mut self, mut peer: Pending, claim: Option<Claim>) {
        let from = peer.from.ip();
        let Some(claim) = claim else {
            // The peer may have disconnected.
            let _ = peer.stream.write(&OTHER_SECRET);
            return self.add_refusal(format!("process at {from} has a different job secret"));
        };
        let reply = Reply { verdict: self.verdict(claim), world_size: self.point.world_size as u64 };
        let session = peer.session(&self.point.secret);
        let (message, key) = (session.reply(reply), session.frame_key(true));
        // Much less than a new connection takes without blocking.
        let is_sent = peer.stream.write(&message).is_ok_and(|written| written == message.len());
        if reply.verdict != Verdict::Accepted {
            return self.add_refusal(format!("{} (from {from})", reply.reason(claim, &self.point)));
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
            _ if self.is_closed => Verdict::Started,
            // A rank whose connection broke before the answer retries.
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
            let host = self.point.host_name();
            tracing::warn!("{host} refused a process: {refused}");
        }
    }

    fn timeout_message(&self, timeout: Duration) -> String {
        let Self { point, missing, refused, .. } = self;
        let seconds = timeout.as_secs_f32();
        let member = point.members;
        let mut why = format!("{member}s {missing:?} did not join the store at {point} within {seconds} s");
        if !refused.is_empty() {
            let refused: Vec<&str> = refused.iter().map(String::as_str).collect();
            why = format!("{why}; refused: {}", refused.join("; "));
        }
        why
    }
}

/// The members that join: all but the host.
fn others(point: &StoreEndpoint) -> BTreeSet<usize> {
    (0..point.world_size).filter(|rank| *rank != point.host_rank()).collect()
}

/// A message that ends the host's reading of a handshake.
enum Message {
    /// A claim, or `None` for one made with a different secret.
    Claim(Option<Claim>),
    /// The hello of another version of the protocol.
    OtherVersion(Vec<u8>),
}

/// A connection in its handshake, on the host's side.
#[derive(Debug)]
pub(super) struct Pending {
    stream: TcpStream,
    pub(super) from: SocketAddr,
    pub(super) deadline: Instant,
    own: Nonce,
    /// The nonce of its hello, once received.
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

    /// Reads without blocking; `None` before a message is complete.
    fn read(&mut self, secret: &JobSecret) -> std::io::Result<Option<Message>> {
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
                if begun == MAGIC.len() && self.received.starts_with(PROTOCOL) {
                    return Ok(Some(Message::OtherVersion(self.received[..begun].to_vec())));
                }
                return Err(Error::new(ErrorKind::InvalidData, "not a rank"));
            }
            if self.received.len() < wanted {
                continue;
            }
            let message = std::mem::take(&mut self.received);
            if self.peer.is_some() {
                return Ok(Some(Message::Claim(self.session(secret).read_claim(&message))));
            }
            self.peer = message[MAGIC.len()..].try_into().ok();
            self.stream.write_all(&self.own)?;
        }
    }
}
