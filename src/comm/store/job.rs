//! The store of a job's ranks, hosted by the launcher that starts them, or on several machines by that of node 0.

use super::acceptor::Acceptor;
use super::endpoint::{HOSTED, Member, StoreEndpoint};
use super::secret::{JobSecret, SECRET};
use super::{ControlChannel, NO_RANK, Received, Store};
use crate::comm::CommError;
use crate::comm::diagnostics::ControlMessage;
use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;

/// A store that serves a job while [`poll`](Self::poll) is called, and stores the failure of its ranks.
#[derive(Debug)]
pub struct JobStore {
    acceptor: Acceptor,
    /// Once all ranks have joined. Perhaps none will, if the program does not use the store.
    channel: Option<ControlChannel>,
    failure: Option<String>,
    first_failed: Option<usize>,
}

impl JobStore {
    /// Listens for the ranks of a start, on a free port. They know this machine as `host`; `bind` is the address to listen
    /// on, if one is set.
    ///
    /// # Errors
    /// No port is available, or the address is not one of this machine.
    pub fn listen(host: &str, bind: Option<IpAddr>, world_size: usize, secret: &str) -> io::Result<Self> {
        let acceptor = Acceptor::listen(StoreEndpoint {
            host: host.to_owned(),
            port: 0,
            bind,
            world_size,
            is_one_node: false,
            is_hosted: true,
            members: Member::Rank,
            secret: JobSecret::new(secret, true),
        })?;
        Ok(Self { acceptor, channel: None, failure: None, first_failed: None })
    }

    /// The port that it listens on.
    pub fn port(&self) -> u16 {
        self.acceptor.point.port
    }

    /// Receives and forwards changes without blocking. After all ranks have left, they may join again: the
    /// launched program may run several commands that use the store.
    pub fn poll(&mut self) {
        if self.channel.is_none() {
            self.acceptor.poll();
            if !self.acceptor.ranks.is_empty() {
                // The failure belongs to an earlier run of the store.
                (self.failure, self.first_failed) = (None, None);
            }
            if !self.acceptor.missing.is_empty() {
                return;
            }
            let ranks = self.acceptor.take_ranks();
            self.channel = Some(ControlChannel::new(Store::open(NO_RANK, ranks.len(), ranks)));
        }
        let Some(channel) = &mut self.channel else { return };
        for Received { from, message } in channel.poll() {
            match message {
                Some(ControlMessage::Failed(error)) => {
                    let failed = match error {
                        CommError::PeerFailed { rank, .. } => rank,
                        _ => from,
                    };
                    self.first_failed.get_or_insert(failed);
                    self.failure.get_or_insert(error.to_string());
                }
                None => _ = self.first_failed.get_or_insert(from),
                Some(_) => {}
            }
        }
        if !channel.is_connected() {
            self.channel = None;
        }
    }

    /// The ranks that have not joined, if other ranks have.
    pub fn missing(&self) -> Vec<usize> {
        match self.acceptor.ranks.is_empty() {
            true => Vec::new(),
            false => self.acceptor.missing.iter().copied().collect(),
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
pub fn store_environment(host: &str, port: u16, secret: &str) -> BTreeMap<&'static str, String> {
    BTreeMap::from([
        ("MASTER_ADDR", host.to_owned()),
        ("ULYSSES_MASTER_PORT", port.to_string()),
        (SECRET, secret.to_owned()),
        (HOSTED, "1".to_owned()),
    ])
}
