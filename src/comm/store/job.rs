//! The store of a job whose ranks a launcher starts on its own machine, and hosts itself.

use super::address;
use super::endpoint::{HOSTED, StoreEndpoint};
use super::acceptor::Acceptor;
use super::secret::{JobSecret, SECRET};
use super::{ControlChannel, NO_RANK, Received, Store};
use crate::comm::diagnostics::ControlMessage;
use std::io;
use std::net::TcpListener;

const LOOPBACK: &str = "127.0.0.1";

/// Hosts the store of a job, for as long as somebody [`poll`](Self::poll)s it, and knows why its ranks have failed.
pub struct JobStore {
    point: StoreEndpoint,
    listener: TcpListener,
    secret: String,
    state: State,
    failure: Option<String>,
}

#[derive(Debug)]
enum State {
    /// Not all ranks have come, and perhaps none will: the program may be another one.
    Accepting(Acceptor),
    Open(ControlChannel),
}

impl JobStore {
    /// Listens for the ranks of a new job, on this machine's loopback at any port. Only they get to know its secret.
    ///
    /// # Errors
    /// No port, or no randomness.
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

    /// The variables by which its ranks find it.
    pub fn environment(&self) -> [(&'static str, String); 4] {
        [
            ("MASTER_ADDR", LOOPBACK.to_owned()),
            ("ULYSSES_MASTER_PORT", self.point.port.to_string()),
            (SECRET, self.secret.clone()),
            (HOSTED, "1".to_owned()),
        ]
    }

    /// Takes what has come, and passes it on. Waits for nothing. When all ranks have left, they may meet again: what the
    /// launcher has started may run more than one command that needs them.
    pub fn poll(&mut self) {
        if let State::Accepting(acceptor) = &mut self.state {
            acceptor.accept(&self.listener);
            acceptor.serve();
            if !acceptor.ranks.is_empty() {
                // It was that of a meeting before.
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

    /// The ranks that have not come to meet those that have.
    pub fn missing(&self) -> Vec<usize> {
        match &self.state {
            State::Accepting(acceptor) if !acceptor.ranks.is_empty() => {
                acceptor.missing.iter().copied().collect()
            }
            _ => Vec::new(),
        }
    }

    /// The failure that the ranks have reported first, if they have: all of them end with it.
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }
}

/// Logs do not get the secret.
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
