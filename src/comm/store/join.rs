//! How a rank comes to the host of its job's store.

use super::connection::Connection;
use super::handshake::{Claim, Nonce, REPLY_BYTES, Session, Verdict, hello, nonce};
use super::endpoint::StoreEndpoint;
use super::process_name;
use super::acceptor::HANDSHAKE_TIMEOUT;
use std::io::{Error, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// Between two attempts to reach the host.
pub(super) const RETRY: Duration = Duration::from_millis(20);

/// Asks the host until it answers.
///
/// # Errors
/// It has not answered in time, or has refused this rank; in words.
pub(super) fn join(point: &StoreEndpoint, rank: usize, timeout: Duration) -> Result<Connection, String> {
    let (started, host) = (Instant::now(), process_name(point.host_rank()));
    loop {
        match try_join(point, rank) {
            Ok(connection) => return Ok(connection),
            Err(Attempt::Refused(reason)) => {
                return Err(format!("{host} at {point} refuses this process: {reason}"));
            }
            Err(Attempt::Failed(error)) if started.elapsed() >= timeout => {
                let seconds = timeout.as_secs_f32();
                let hint = match point.is_hosted {
                    true => "",
                    false => {
                        "; where rank 0 knows this name by another address, ULYSSES_MASTER_BIND gives it the one to \
                         listen on"
                    }
                };
                return Err(format!("no answer from {host} at {point} within {seconds} s: {error}{hint}"));
            }
            Err(Attempt::Failed(_)) => std::thread::sleep(RETRY),
        }
    }
}

/// Why the host has not accepted.
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
    read_by(deadline, &mut stream, &mut root)?;
    let session = Session { secret: &point.secret, root, peer: own };
    let claim = Claim { rank: rank as u64, world_size: point.world_size as u64 };
    stream.write_all(&session.claim(claim))?;
    let mut reply = [0; REPLY_BYTES];
    read_by(deadline, &mut stream, &mut reply)?;
    match session.read_reply(&reply) {
        Some((Verdict::Accepted, _)) => Ok(Connection::new(stream, session.frame_key(false))?),
        Some((refused, world_size)) => {
            Err(Attempt::Refused(refused.reason(claim, world_size, point.host_rank())))
        },
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
