//! A process that drives one GPU, as a rank of a job.

use super::launch::{checked, join_from_env};
use super::rank::NcclRank;
use crate::comm::launch::run_rank;
use crate::comm::session::BoxedError;
use crate::comm::{
    CommError, LaunchError, LaunchOptions, ProcessGroup, ProcessGroupExt, ProcessInfo, RankContext, RankMain,
};
use std::error::Error;
use std::sync::Arc;

/// A process of a job in which every process drives one GPU; the counterpart of `comm::mpi::Session`.
#[derive(Debug)]
pub struct Session {
    own: Arc<NcclRank>,
    group: Arc<dyn ProcessGroup>,
    local_size: usize,
}

impl Session {
    /// Connects to the other processes, as [`from_env`](super::from_env) does. The calling thread becomes the rank's.
    ///
    /// # Errors
    /// As for [`from_env`](super::from_env).
    pub fn start(info: &ProcessInfo, options: &LaunchOptions) -> Result<Self, CommError> {
        let (own, group) = join_from_env(info, options.timeout)?;
        Ok(Self { own, group, local_size: info.local_world_size.unwrap_or(1) })
    }

    /// Runs `run` as this process's rank, with a rayon pool that includes the calling thread from then on. Call it once.
    ///
    /// # Errors
    /// The failure of this rank, which may follow from that of another.
    pub fn run<T, E, F>(&mut self, options: &LaunchOptions, run: F) -> Result<T, LaunchError>
    where
        E: Into<Box<dyn Error + Send + Sync>>,
        F: Fn(RankContext) -> Result<T, E>,
    {
        let (rank, world_size, threads) =
            (self.group.rank(), self.group.world_size(), options.threads_per_rank);
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

impl crate::comm::Session for Session {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn world_size(&self) -> usize {
        self.group.world_size()
    }

    fn local_size(&self) -> usize {
        self.local_size
    }

    fn uses_mpi(&self) -> bool {
        false
    }

    fn run_rank(&mut self, options: &LaunchOptions, run: RankMain<'_>) -> Result<(), LaunchError> {
        self.run(options, |rank| run(&rank, rank.group.value_device()))
    }

    fn all_gather_bytes(&mut self, own: &[u8]) -> Result<Vec<Vec<u8>>, BoxedError> {
        Ok(self.group.all_gather_varied(own)?)
    }
}

impl Drop for Session {
    /// Announces the shutdown, so that the end of the process is not a failure, even if its groups are still held.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.own.end();
        }
    }
}
