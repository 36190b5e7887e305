//! The store of a job, hosted by the launcher that starts all its ranks on one machine.

use super::acceptor::Acceptor;
use super::address;
use super::endpoint::{HOSTED, StoreEndpoint};
use super::secret::{JobSecret, SECRET};
use super::{ControlChannel, NO_RANK, Received, Store};
use crate::comm::diagnostics::ControlMessage;
use std::io;
use std::net::TcpListener;

const LOOPBACK: &str = "127.0.0.1";

/// A store that serves a job while [`poll`](Self::poll) is called, and stores the failure of its ranks.
pub struct JobStore {
    point: StoreEndpoint,
    listener: TcpListener,
    secret: String,
    state: State,
    failure: Option<String>,
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
        let mut point = StoreEndpoint {
            host: LOOPBACK.to_owned(),
            port: 0,
            bind: None,
            world_size,
            is_one_node: true,
            is_hosted: true,
            secret: JobSecret::new(&secret, true),
        };
        let listener = address::listen(&point)?;
        listener.set_nonblocking(true)?;
        point.port = listener.local_addr()?.port();
        let state = State::Accepting(Acceptor::new(point.clone()));
        Ok(Self { point, listener, secret, state, failure: None })
    }

    /// The environment variables through which the ranks find the store.
    pub fn environment(&self) -> [(&'static str, String); 4] {
        [
            ("MASTER_ADDR", LOOPBACK.to_owned()),
            ("ULYSSES_MASTER_PORT", self.point.port.to_string()),
            (SECRET, self.secret.clone()),
            (HOSTED, "1".to_owned()),
        ]
    }

    /// Receives and forwards changes without blocking. After all ranks have left, they may join again: the
    /// launched program may run several commands that use the store.
    pub fn poll(&mut self) {
        if let State::Accepting(acceptor) = &mut self.state {
            acceptor.accept(&self.listener);
            acceptor.serve();
            if !acceptor.ranks.is_empty() {
                // The failure belongs to an earlier run of the store.
                self.failure = None;
            }
            if !acceptor.missing.is_empty() {
                return;
            }
            let (world_size, ranks) = (acceptor.ranks.len(), std::mem::take(&mut acceptor.ranks));
            self.state = State::Open(ControlChannel::new(Store::open(NO_RANK, world_size, ranks)));
        }
        let State::Open(channel) = &mut self.state else { return };
        for (_, received) in channel.poll() {
            if let Received::Message(ControlMessage::Failed(error)) = received {
                self.failure.get_or_insert(error.to_string());
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

    /// The first failure that the ranks reported, if any.
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }
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
