//! The store of a job, hosted by the launcher that starts its ranks, or on several machines by that of node 0.

use super::acceptor::Acceptor;
use super::address;
use super::endpoint::{HOSTED, Member, StoreEndpoint};
use super::secret::{JobSecret, SECRET};
use super::{ControlChannel, NO_RANK, Received, Store};
use crate::comm::CommError;
use crate::comm::diagnostics::ControlMessage;
use std::io;
use std::net::{IpAddr, TcpListener};

const LOOPBACK: &str = "127.0.0.1";

/// A store that serves a job while [`poll`](Self::poll) is called, and stores the failure of its ranks.
pub struct JobStore {
    point: StoreEndpoint,
    listener: TcpListener,
    secret: String,
    state: State,
    failure: Option<String>,
    first_failed: Option<usize>,
}

#[derive(Debug)]
enum State {
    /// Not all ranks have joined. Perhaps none will, if the program does not use the store.
    Accepting(Acceptor),
    Open(ControlChannel),
}

impl JobStore {
    /// Listens for the ranks of a new job, on a free loopback port, with a new secret.
    ///
    /// # Errors
    /// No port or no randomness is available.
    pub fn listen(world_size: usize) -> io::Result<Self> {
        let secret = random_secret()?;
        Self::listen_at(
            StoreEndpoint {
                host: LOOPBACK.to_owned(),
                port: 0,
                bind: None,
                world_size,
                is_one_node: true,
                is_hosted: true,
                members: Member::Rank,
                secret: JobSecret::new(&secret, true),
            },
            secret,
        )
    }

    /// As [`listen`](Self::listen), for ranks on several machines, which know this one as `host`. `bind` is the address
    /// to listen on, if one is set.
    ///
    /// # Errors
    /// No port is available, or the address is not one of this machine.
    pub fn listen_for_nodes(
        host: &str,
        bind: Option<IpAddr>,
        world_size: usize,
        secret: String,
    ) -> io::Result<Self> {
        let point = StoreEndpoint {
            host: host.to_owned(),
            port: 0,
            bind,
            world_size,
            is_one_node: false,
            is_hosted: true,
            members: Member::Rank,
            secret: JobSecret::new(&secret, true),
        };
        Self::listen_at(point, secret)
    }

    fn listen_at(mut point: StoreEndpoint, secret: String) -> io::Result<Self> {
        let listener = address::listen(&point)?;
        listener.set_nonblocking(true)?;
        point.port = listener.local_addr()?.port();
        let state = State::Accepting(Acceptor::new(point.clone()));
        Ok(Self { point, listener, secret, state, failure: None, first_failed: None })
    }

    /// The port that it listens on.
    pub fn port(&self) -> u16 {
        self.point.port
    }

    /// The environment variables through which the ranks find the store.
    pub fn environment(&self) -> [(&'static str, String); 4] {
        store_environment(&self.point.host, self.point.port, &self.secret)
    }

    /// Receives and forwards changes without blocking. After all ranks have left, they may join again: the
    /// launched program may run several commands that use the store.
    pub fn poll(&mut self) {
        if let State::Accepting(acceptor) = &mut self.state {
            acceptor.accept(&self.listener);
            acceptor.serve();
            if !acceptor.ranks.is_empty() {
                // The failure belongs to an earlier run of the store.
                (self.failure, self.first_failed) = (None, None);
            }
            if !acceptor.missing.is_empty() {
                return;
            }
            let (world_size, ranks) = (acceptor.ranks.len(), std::mem::take(&mut acceptor.ranks));
            self.state = State::Open(ControlChannel::new(Store::open(NO_RANK, world_size, ranks)));
        }
        let State::Open(channel) = &mut self.state else { return };
        for (rank, received) in channel.poll() {
            match received {
                Received::Message(ControlMessage::Failed(error)) => {
                    let failed = match error {
                        CommError::PeerFailed { rank, .. } => rank,
                        _ => rank,
                    };
                    self.first_failed.get_or_insert(failed);
                    self.failure.get_or_insert(error.to_string());
                }
                Received::Lost => {
                    self.first_failed.get_or_insert(rank);
                }
                Received::Message(_) => {}
            }
        }
        if !channel.is_connected() {
            self.state = State::Accepting(Acceptor::new(self.point.clone()));
        }
    }

    /// The ranks that have not joined, if other ranks have.
    pub fn missing(&self) -> Vec<usize> {
        match &self.state {
            State::Accepting(acceptor) if !acceptor.ranks.is_empty() => {
                acceptor.missing.iter().copied().collect()
            }
            _ => Vec::new(),
        }
    }

    /// The rank that failed first, as far as the ranks reported failures or ended without notice.
    pub fn first_failed(&self) -> Option<usize> {
        self.first_failed
    }

    /// The first failure that the ranks reported, if any.
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }
}

/// The environment variables through which ranks find the store that a launcher hosts.
pub fn store_environment(host: &str, port: u16, secret: &str) -> [(&'static str, String); 4] {
    [
        ("MASTER_ADDR", host.to_owned()),
        ("ULYSSES_MASTER_PORT", port.to_string()),
        (SECRET, secret.to_owned()),
        (HOSTED, "1".to_owned()),
    ]
}

/// Keeps the secret out of logs.
impl std::fmt::Debug for JobStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { point, state, failure, .. } = self;
        f.debug_struct("JobStore")
            .field("port", &point.port)
            .field("state", state)
            .field("failure", failure)
            .finish()
    }
}

fn random_secret() -> io::Result<String> {
    use rand::TryRngCore;
    let mut bytes = [0; 32];
    rand::rngs::OsRng.try_fill_bytes(&mut bytes).map_err(io::Error::other)?;
    Ok(blake3::Hash::from_bytes(bytes).to_hex().to_string())
}
