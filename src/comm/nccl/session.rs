//! A process that drives one GPU, and how it runs as a rank.

use super::launch::{checked, join_from_env};
use super::rank::NcclRank;
use crate::comm::launch::run_rank;
use crate::comm::{CommError, LaunchError, LaunchOptions, ProcessGroup, ProcessInfo, RankContext};
use std::error::Error;
use std::sync::Arc;

/// A process of a job in which every process drives one GPU: what `comm::mpi::Session` is to MPI.
#[derive(Debug)]
pub struct Session {
    own: Arc<NcclRank>,
    group: Arc<dyn ProcessGroup>,
    local_size: usize,
}

impl Session {
    /// Meets the other processes, as [`from_env`](super::from_env) does. The thread that calls is the rank's.
    ///
    /// # Errors
    /// As there.
    pub fn start(info: &ProcessInfo, options: &LaunchOptions) -> Result<Self, CommError> {
        let (own, group) = join_from_env(info, options.timeout)?;
        Ok(Self { own, group, local_size: info.local_world_size.unwrap_or(1) })
    }

    /// This process among all.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// Number of processes.
    pub fn world_size(&self) -> usize {
        self.group.world_size()
    }

    /// Number of processes on this host.
    pub fn local_size(&self) -> usize {
        self.local_size
    }

    /// The group of all processes.
    pub fn group(&self) -> &Arc<dyn ProcessGroup> {
        &self.group
    }

    /// Runs `run` as this process's rank, with a rayon pool that the calling thread is part of from then on: once.
    ///
    /// # Errors
    /// What went wrong on this rank, if only because it did on another.
    pub fn run<T, E, F>(&mut self, options: &LaunchOptions, run: F) -> Result<T, LaunchError>
    where
        E: Into<Box<dyn Error + Send + Sync>>,
        F: Fn(RankContext) -> Result<T, E>,
    {
        let (rank, world_size, threads) = (self.rank(), self.world_size(), options.threads_per_rank);
        if threads == 0 {
            return Err(LaunchError::InvalidOptions { world_size, threads_per_rank: threads });
        }
        self.own.set_timeout(options.timeout);
        let group = self.group.clone();
        let group = if options.check { checked(&self.own, group) } else { Ok(group) };
        let group = group.map_err(|error| LaunchError::Failed { rank, source: error.into() })?;
        let outcome = run_rank(RankContext { rank, world_size, threads, group }, &run);
        if let Err(error) = &outcome {
            self.group.abort(&error.reason());
        }
        outcome
    }
}

impl Drop for Session {
    /// So that the end of the process is none of a rank that others count on, whoever still holds its groups.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.own.end();
        }
    }
}
