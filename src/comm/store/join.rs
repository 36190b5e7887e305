//! The rank's side of joining a store.

use super::acceptor::HANDSHAKE_TIMEOUT;
use super::connection::Connection;
use super::endpoint::StoreEndpoint;
use super::handshake::{
    Claim, MAGIC, Nonce, PROTOCOL, REPLY_BYTES, Reply, Session, Verdict, hello, nonce, other_version,
};
use std::io::{Error, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// Interval between attempts to connect to the host.
pub(super) const RETRY: Duration = Duration::from_millis(20);

/// Connects to the host and retries until it answers.
///
/// # Errors
/// A message, if the host does not answer in time or refuses this rank.
pub(super) fn join(point: &StoreEndpoint, rank: usize, timeout: Duration) -> Result<Connection, String> {
    let (started, host) = (Instant::now(), point.host_name());
    loop {
        match try_join(point, rank) {
            Ok(connection) => return Ok(connection),
            Err(Attempt::Refused(reason)) => {
                return Err(format!("{host} at {point} refused this process: {reason}"));
            }
            Err(Attempt::Failed(error)) if started.elapsed() >= timeout => {
                let seconds = timeout.as_secs_f32();
                let hint = match point.is_hosted {
                    true => String::new(),
                    false => format!(
                        "; if this name has another address on {host}'s machine, set ULYSSES_MASTER_BIND to the address to \
                         listen on"
                    ),
                };
                return Err(format!("no answer from {host} at {point} within {seconds} s: {error}{hint}"));
            }
            Err(Attempt::Failed(_)) => std::thread::sleep(RETRY),
        }
    }
}

/// A failed attempt to join.
enum Attempt {
    /// A temporary failure; retry.
    Failed(Error),
    /// A refusal by the host, with its reason.
    Refused(String),
}

impl From<Error> for Attempt {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// Tries the addresses of the host one after another.
fn try_join(point: &StoreEndpoint, rank: usize) -> Result<Connection, Attempt> {
    let mut outcome = Err(Error::new(ErrorKind::NotFound, "no such host").into());
    for address in (point.host.as_str(), point.port).to_socket_addrs()? {
        outcome = try_join_at(&address, point, rank);
        if !matches!(outcome, Err(Attempt::Failed(_))) {
            break;
        }
    }
    outcome
}

fn try_join_at(address: &SocketAddr, point: &StoreEndpoint, rank: usize) -> Result<Connection, Attempt> {
    let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
    let mut stream = TcpStream::connect_timeout(address, HANDSHAKE_TIMEOUT)?;
    stream.set_write_timeout(Some(HANDSHAKE_TIMEOUT))?;
    let (own, mut root) = (nonce()?, Nonce::default());
    stream.write_all(&hello(&own))?;
    let (version, rest) = root.split_at_mut(MAGIC.len());
    read_by(deadline, &mut stream, version)?;
    if version.starts_with(PROTOCOL) {
        return Err(Attempt::Refused(other_version(version)));
    }
    read_by(deadline, &mut stream, rest)?;
    let session = Session { secret: &point.secret, root, peer: own };
    let claim = Claim { rank: rank as u64, world_size: point.world_size as u64 };
    stream.write_all(&session.claim(claim))?;
    let mut reply = [0; REPLY_BYTES];
    read_by(deadline, &mut stream, &mut reply)?;
    match session.read_reply(&reply) {
        Some(Reply { verdict: Verdict::Accepted, .. }) => {
            Ok(Connection::new(stream, session.frame_key(false))?)
        }
        Some(refused) => Err(Attempt::Refused(refused.reason(claim, point))),
        None => Err(Attempt::Refused(format!(
            "different job secret; set the same ULYSSES_JOB_SECRET for all {}s, or use a port that no other job uses",
            point.members
        ))),
    }
}

/// Fills `bytes` before `deadline`, however slowly they arrive.
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
