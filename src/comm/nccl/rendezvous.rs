//! Handing the id of a communicator from rank 0 to all others, over TCP. The connections stay, for notices.

use crate::comm::CommError;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Error, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// Bytes of a unique id.
pub(super) const ID_BYTES: usize = 128;
/// A unique id.
pub(super) type Id = [u8; ID_BYTES];

/// What a rank says before its number, so that a stranger who finds the port gets nothing.
const GREETING: [u8; 8] = *b"ulysses\0";

/// Between two attempts to reach rank 0, or to see somebody come.
const PAUSE: Duration = Duration::from_millis(20);
/// How long one side waits for the other once they are connected.
const PATIENCE: Duration = Duration::from_secs(5);

/// Rank 0, on the machine `host`: gives `id` to ranks 1 to `peers`, which come to `port`. Returns its connections to
/// them.
///
/// # Errors
/// [`CommError::Start`] when the port cannot be listened on, or not all have come in time.
pub(super) fn hand_out(
    id: &Id,
    host: &str,
    port: u16,
    peers: usize,
    timeout: Duration,
) -> Result<BTreeMap<usize, TcpStream>, CommError> {
    let started = Instant::now();
    let mut connections = BTreeMap::new();
    let mut missing: BTreeSet<u64> = (1..=peers as u64).collect();
    let mut listen = || -> std::io::Result<()> {
        let listener = TcpListener::bind(any_address(host, port))?;
        listener.set_nonblocking(true)?;
        while !missing.is_empty() && started.elapsed() < timeout {
            match listener.accept() {
                // A peer that goes away before it has the id comes again; who is no rank gets none.
                Ok((mut peer, _)) => {
                    if let Ok(rank) = serve(&mut peer, id) {
                        missing.remove(&rank);
                        connections.insert(rank as usize, peer);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::sleep(PAUSE),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    };
    listen().map_err(|error| {
        failed(0, format!("cannot listen on port {port}: {error}; ULYSSES_MASTER_PORT names another"))
    })?;
    if missing.is_empty() {
        return Ok(connections);
    }
    let seconds = timeout.as_secs_f32();
    Err(failed(0, format!("ranks {missing:?} did not come to {host}:{port} within {seconds} s")))
}

/// All addresses of this machine: which of them the others take `host` for is theirs to know.
fn any_address(host: &str, port: u16) -> SocketAddr {
    let known = (host, port).to_socket_addrs().ok().and_then(|mut known| known.next());
    let ip: IpAddr = match known {
        Some(SocketAddr::V6(_)) => Ipv6Addr::UNSPECIFIED.into(),
        _ => Ipv4Addr::UNSPECIFIED.into(),
    };
    SocketAddr::new(ip, port)
}

/// Gives the id to who says which rank it is.
fn serve(peer: &mut TcpStream, id: &Id) -> std::io::Result<u64> {
    peer.set_nonblocking(false)?;
    peer.set_read_timeout(Some(PATIENCE))?;
    peer.set_write_timeout(Some(PATIENCE))?;
    let (mut greeting, mut rank) = ([0; GREETING.len()], [0; 8]);
    peer.read_exact(&mut greeting)?;
    if greeting != GREETING {
        return Err(Error::new(ErrorKind::InvalidData, "not a rank"));
    }
    peer.read_exact(&mut rank)?;
    peer.write_all(id)?;
    Ok(u64::from_le_bytes(rank))
}

/// The others: asks rank 0 at `host` until it answers. Returns the connection too.
///
/// # Errors
/// [`CommError::Start`] when it has not answered in time.
pub(super) fn fetch(
    host: &str,
    port: u16,
    rank: usize,
    timeout: Duration,
) -> Result<(Id, TcpStream), CommError> {
    let started = Instant::now();
    loop {
        match ask(host, port, rank) {
            Ok(met) => return Ok(met),
            Err(error) if started.elapsed() >= timeout => {
                let seconds = timeout.as_secs_f32();
                return Err(failed(
                    rank,
                    format!("no id from rank 0 at {host}:{port} within {seconds} s: {error}"),
                ));
            }
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

/// Asks at the addresses of `host`, one after another.
fn ask(host: &str, port: u16, rank: usize) -> std::io::Result<(Id, TcpStream)> {
    let mut outcome = Err(Error::new(ErrorKind::NotFound, "no such host"));
    for address in (host, port).to_socket_addrs()? {
        outcome = ask_at(&address, rank);
        if outcome.is_ok() {
            break;
        }
    }
    outcome
}

fn ask_at(address: &SocketAddr, rank: usize) -> std::io::Result<(Id, TcpStream)> {
    let mut stream = TcpStream::connect_timeout(address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(&GREETING)?;
    stream.write_all(&(rank as u64).to_le_bytes())?;
    let mut id = [0; ID_BYTES];
    stream.read_exact(&mut id)?;
    Ok((id, stream))
}

fn failed(rank: usize, reason: String) -> CommError {
    CommError::Start { library: "NCCL", rank: Some(rank), reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: &str = "127.0.0.1";
    const PATIENT: Duration = Duration::from_secs(20);
    const BRIEF: Duration = Duration::from_millis(60);

    /// A port that was free a moment ago.
    fn free_port() -> u16 {
        TcpListener::bind((HOST, 0)).unwrap().local_addr().unwrap().port()
    }

    #[test]
    fn all_ranks_get_the_id_of_rank_0_whoever_comes_first() {
        let port = free_port();
        let id: Id = std::array::from_fn(|i| i as u8 ^ 0x5a);
        std::thread::scope(|scope| {
            let early = scope.spawn(|| fetch(HOST, port, 1, PATIENT));
            let root = scope.spawn(|| hand_out(&id, HOST, port, 3, PATIENT));
            let late = [2, 3].map(|rank| scope.spawn(move || fetch("localhost", port, rank, PATIENT)));
            assert_eq!(early.join().unwrap().unwrap().0, id);
            late.into_iter().for_each(|rank| assert_eq!(rank.join().unwrap().unwrap().0, id));
            let connections = root.join().unwrap().unwrap();
            assert_eq!(connections.into_keys().collect::<Vec<_>>(), [1, 2, 3], "which stay");
        });
    }

    #[test]
    fn a_stranger_gets_nothing_and_takes_no_ranks_place() {
        let port = free_port();
        std::thread::scope(|scope| {
            let root = scope.spawn(|| hand_out(&[7; ID_BYTES], HOST, port, 1, PATIENT));
            let mut stranger = loop {
                match TcpStream::connect((HOST, port)) {
                    Ok(stream) => break stream,
                    Err(_) => std::thread::sleep(PAUSE),
                }
            };
            stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
            let mut answer = Vec::new();
            // Closed with bytes unread, a connection ends with an error.
            let _ = stranger.read_to_end(&mut answer);
            assert!(answer.is_empty(), "{answer:?}");
            assert_eq!(fetch(HOST, port, 1, PATIENT).unwrap().0, [7; ID_BYTES]);
            root.join().unwrap().unwrap();
        });
    }

    #[test]
    fn who_waits_in_vain_is_told_for_whom() {
        let port = free_port();
        let error = fetch(HOST, port, 3, BRIEF).unwrap_err();
        assert!(matches!(error, CommError::Start { rank: Some(3), .. }), "{error}");
        let error = hand_out(&[0; ID_BYTES], HOST, port, 2, BRIEF).unwrap_err();
        assert!(error.to_string().contains("ranks {1, 2} did not come"), "{error}");
    }

    #[test]
    fn a_port_in_use_is_named() {
        let taken = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        let port = taken.local_addr().unwrap().port();
        let error = hand_out(&[0; ID_BYTES], HOST, port, 1, BRIEF).unwrap_err().to_string();
        assert!(error.contains(&format!("cannot listen on port {port}")), "{error}");
    }
}
