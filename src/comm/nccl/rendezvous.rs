//! Handing the id of a communicator from rank 0 to all others, over TCP. The connections stay, for notices.

mod address;
mod handshake;
#[cfg(test)]
mod tests;

use super::secret::JobSecret;
use crate::comm::CommError;
use handshake::{
    CLAIM_BYTES, Claim, HELLO_BYTES, MAGIC, Nonce, OTHER_SECRET, REPLY_BYTES, Session, Verdict, hello, nonce,
};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Error, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// Bytes of a unique id.
pub(super) const ID_BYTES: usize = 128;
/// A unique id.
pub(super) type Id = [u8; ID_BYTES];

/// Between two attempts to reach rank 0.
const RETRY: Duration = Duration::from_millis(20);
/// Between two looks at all connections.
const POLL: Duration = Duration::from_millis(5);
/// How long a connection may take from its beginning to the id.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Connections beyond those of ranks that may be open at once. One more closes the oldest.
const MAX_STRANGERS: usize = 256;
/// Refusals that rank 0 lists when ranks do not come.
const MAX_LISTED: usize = 8;

/// Where the ranks of a job meet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MeetingPoint {
    /// Rank 0's machine, as the others know it.
    pub(super) host: String,
    pub(super) port: u16,
    /// The address that rank 0 listens on, where one is given.
    pub(super) bind: Option<IpAddr>,
    pub(super) world_size: usize,
    /// Whether all ranks are known to be on one machine.
    pub(super) is_one_node: bool,
    pub(super) secret: JobSecret,
}

impl std::fmt::Display for MeetingPoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// Rank 0: gives `id` to all other ranks. Returns its connections to them.
///
/// # Errors
/// [`CommError::Start`] when it cannot listen, or not all ranks have come in time.
pub(super) fn hand_out(
    id: &Id,
    point: &MeetingPoint,
    timeout: Duration,
) -> Result<BTreeMap<usize, TcpStream>, CommError> {
    let started = Instant::now();
    let listener = address::listen(point).and_then(|listener| {
        listener.set_nonblocking(true)?;
        Ok(listener)
    });
    let listener = listener.map_err(|error| {
        let reason = format!(
            "cannot listen on port {} of {}: {error}; ULYSSES_MASTER_PORT names another port, ULYSSES_MASTER_BIND another \
             address of this machine",
            point.port, point.host
        );
        failed(0, reason)
    })?;
    warn_of_strangers(&listener, point);
    let mut reception = Reception::new(id, point);
    while !reception.missing.is_empty() {
        if started.elapsed() >= timeout {
            return Err(failed(0, reception.why_incomplete(timeout)));
        }
        reception.accept(&listener);
        reception.serve();
        std::thread::sleep(POLL);
    }
    Ok(reception.ranks)
}

fn warn_of_strangers(listener: &TcpListener, point: &MeetingPoint) {
    let is_local = listener.local_addr().is_ok_and(|address| address.ip().is_loopback());
    if !is_local && !point.secret.is_secret() && point.world_size > 1 {
        tracing::warn!(
            "the ranks meet at {point} without a job secret, so any process that reaches that port can take a rank: set \
             ULYSSES_JOB_SECRET to the same random text for all ranks"
        );
    }
}

/// Rank 0 while ranks come.
struct Reception<'a> {
    id: &'a Id,
    point: &'a MeetingPoint,
    /// Who has not proved yet to be of this job, the oldest first.
    pending: Vec<Pending>,
    ranks: BTreeMap<usize, TcpStream>,
    missing: BTreeSet<usize>,
    refused: BTreeSet<String>,
}

impl<'a> Reception<'a> {
    fn new(id: &'a Id, point: &'a MeetingPoint) -> Self {
        let missing = (1..point.world_size).collect();
        Self { id, point, pending: Vec::new(), ranks: BTreeMap::new(), missing, refused: BTreeSet::new() }
    }

    /// Takes all connections that there are. One that cannot be taken, for the lack of file descriptors as well, comes
    /// again.
    fn accept(&mut self, listener: &TcpListener) {
        while let Ok((stream, from)) = listener.accept() {
            if self.pending.len() >= MAX_STRANGERS + self.point.world_size {
                self.pending.remove(0);
            }
            self.pending.extend(Pending::new(stream, from));
        }
    }

    /// Goes on with all connections, none of which the others wait for.
    fn serve(&mut self) {
        for mut peer in std::mem::take(&mut self.pending) {
            match peer.read(&self.point.secret) {
                // A peer that goes away before it has the id comes again; who is no rank gets none.
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
            return self.note(format!("a process at {from} has another job secret"));
        };
        let (verdict, world_size) = (self.judge(claim), self.point.world_size as u64);
        let reply = peer.session(&self.point.secret).reply(verdict, world_size, self.id);
        // Far less than a new connection takes without waiting.
        let is_sent = peer.stream.write(&reply).is_ok_and(|written| written == reply.len());
        if verdict != Verdict::Accepted {
            self.note(format!("{} (from {from})", verdict.reason(claim, world_size)));
        } else if is_sent {
            self.missing.remove(&(claim.rank as usize));
            self.ranks.insert(claim.rank as usize, peer.stream);
        }
    }

    fn judge(&self, Claim { rank, world_size }: Claim) -> Verdict {
        let own = self.point.world_size as u64;
        // A rank whose connection has broken off before it had the id comes again.
        let is_here = |stream: &TcpStream| match stream.peek(&mut [0]) {
            Ok(read) => read > 0,
            Err(error) => error.kind() == ErrorKind::WouldBlock,
        };
        match usize::try_from(rank) {
            _ if rank >= own => Verdict::OutOfRange,
            _ if world_size != own => Verdict::OtherWorldSize,
            Ok(rank) if rank > 0 && !self.ranks.get(&rank).is_some_and(is_here) => Verdict::Accepted,
            _ => Verdict::Taken,
        }
    }

    fn note(&mut self, refused: String) {
        if self.refused.len() < MAX_LISTED && self.refused.insert(refused.clone()) {
            tracing::warn!("rank 0 has refused a process: {refused}");
        }
    }

    fn why_incomplete(&self, timeout: Duration) -> String {
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

/// A connection in its handshake, on rank 0's side.
struct Pending {
    stream: TcpStream,
    from: SocketAddr,
    deadline: Instant,
    own: Nonce,
    /// The nonce of its hello, once that has come.
    peer: Option<Nonce>,
    /// Bytes received of the next message.
    heard: Vec<u8>,
}

impl Pending {
    fn new(stream: TcpStream, from: SocketAddr) -> std::io::Result<Self> {
        stream.set_nonblocking(true)?;
        let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
        Ok(Self { stream, from, deadline, own: nonce()?, peer: None, heard: Vec::new() })
    }

    fn session<'s>(&self, secret: &'s JobSecret) -> Session<'s> {
        Session { secret, root: self.own, peer: self.peer.unwrap_or_default() }
    }

    /// Reads without waiting: nothing yet, a claim, or `None` for a claim made with another secret.
    fn read(&mut self, secret: &JobSecret) -> std::io::Result<Option<Option<Claim>>> {
        loop {
            let wanted = if self.peer.is_none() { HELLO_BYTES } else { CLAIM_BYTES };
            let mut bytes = [0; CLAIM_BYTES];
            match self.stream.read(&mut bytes[..wanted - self.heard.len()]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(read) => self.heard.extend_from_slice(&bytes[..read]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error),
            }
            let begun = self.heard.len().min(MAGIC.len());
            if self.peer.is_none() && self.heard[..begun] != MAGIC[..begun] {
                return Err(Error::new(ErrorKind::InvalidData, "not a rank"));
            }
            if self.heard.len() < wanted {
                continue;
            }
            let message = std::mem::take(&mut self.heard);
            if self.peer.is_some() {
                return Ok(Some(self.session(secret).read_claim(&message)));
            }
            self.peer = message[MAGIC.len()..].try_into().ok();
            self.stream.write_all(&self.own)?;
        }
    }
}

/// The others: asks rank 0 until it answers. Returns the connection too.
///
/// # Errors
/// [`CommError::Start`] when it has not answered in time, or has refused this rank.
pub(super) fn fetch(
    point: &MeetingPoint,
    rank: usize,
    timeout: Duration,
) -> Result<(Id, TcpStream), CommError> {
    let started = Instant::now();
    loop {
        match ask(point, rank) {
            Ok(met) => return Ok(met),
            Err(Attempt::Refused(reason)) => {
                return Err(failed(rank, format!("rank 0 at {point} refuses this process: {reason}")));
            }
            Err(Attempt::Failed(error)) if started.elapsed() >= timeout => {
                let seconds = timeout.as_secs_f32();
                return Err(failed(
                    rank,
                    format!(
                        "no id from rank 0 at {point} within {seconds} s: {error}; where rank 0 knows this name by another \
                         address, ULYSSES_MASTER_BIND gives it the one to listen on"
                    ),
                ));
            }
            Err(Attempt::Failed(_)) => std::thread::sleep(RETRY),
        }
    }
}

/// Why rank 0 gave no id.
enum Attempt {
    /// It may later.
    Failed(Error),
    /// It will not.
    Refused(String),
}

impl From<Error> for Attempt {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// Asks at the addresses of the host, one after another.
fn ask(point: &MeetingPoint, rank: usize) -> Result<(Id, TcpStream), Attempt> {
    let mut outcome = Err(Error::new(ErrorKind::NotFound, "no such host").into());
    for address in (point.host.as_str(), point.port).to_socket_addrs()? {
        outcome = ask_at(&address, point, rank);
        if !matches!(outcome, Err(Attempt::Failed(_))) {
            break;
        }
    }
    outcome
}

fn ask_at(address: &SocketAddr, point: &MeetingPoint, rank: usize) -> Result<(Id, TcpStream), Attempt> {
    let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
    let mut stream = TcpStream::connect_timeout(address, HANDSHAKE_TIMEOUT)?;
    stream.set_write_timeout(Some(HANDSHAKE_TIMEOUT))?;
    let (own, mut root) = (nonce()?, Nonce::default());
    stream.write_all(&hello(&own))?;
    read_by(deadline, &mut stream, &mut root)?;
    let session = Session { secret: &point.secret, root, peer: own };
    let claim = Claim { rank: rank as u64, world_size: point.world_size as u64 };
    stream.write_all(&session.claim(claim))?;
    let mut reply = [0; REPLY_BYTES];
    read_by(deadline, &mut stream, &mut reply)?;
    match session.read_reply(&reply) {
        Some((Verdict::Accepted, _, id)) => Ok((id, stream)),
        Some((refused, world_size, _)) => Err(Attempt::Refused(refused.reason(claim, world_size))),
        None => Err(Attempt::Refused(
            "it has another job secret; ULYSSES_JOB_SECRET must be the same for all ranks, or another job has this port"
                .to_owned(),
        )),
    }
}

/// Fills `bytes` before `deadline`, however slowly they come.
fn read_by(deadline: Instant, stream: &mut TcpStream, mut bytes: &mut [u8]) -> std::io::Result<()> {
    while !bytes.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        match stream.read(bytes) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(read) => bytes = &mut bytes[read..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
    }
    stream.set_read_timeout(None)
}

fn failed(rank: usize, reason: String) -> CommError {
    CommError::Start { library: "NCCL", rank: Some(rank), reason }
}
