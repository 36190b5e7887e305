//! [`Session`]: a process that is one rank of a job, whatever connects it to the other processes.

use super::{LaunchError, LaunchOptions, ProcessGroup, ProcessGroupExt, RankContext};
use candle_core::Device;
use parking_lot::Mutex;
use serde::{Serialize, de::DeserializeOwned};
use std::error::Error;

pub(super) type BoxedError = Box<dyn Error + Send + Sync>;

/// The function of a rank, with the device of its tensors.
pub type RankMain<'a> = &'a (dyn Fn(&RankContext, Device) -> Result<(), BoxedError> + Sync);

/// A process that has joined a job of several processes, each of which is a rank.
pub trait Session {
    /// Rank of this process.
    fn rank(&self) -> usize;

    /// Number of processes.
    fn world_size(&self) -> usize;

    /// Number of processes on this host.
    fn local_size(&self) -> usize;

    /// Returns whether MPI connects the processes; otherwise NCCL does.
    fn uses_mpi(&self) -> bool;

    /// Calls `run` once, as this process's rank. Collective. [`run`](trait.Session.html#method.run) also returns a value.
    ///
    /// # Errors
    /// The failure of this rank, which may follow from that of another.
    fn run_rank(&mut self, options: &LaunchOptions, run: RankMain<'_>) -> Result<(), LaunchError>;

    /// Gathers bytes from every process, in rank order. Collective.
    ///
    /// # Errors
    /// When the processes cannot communicate.
    fn all_gather_bytes(&mut self, own: &[u8]) -> Result<Vec<Vec<u8>>, BoxedError>;
}

impl dyn Session {
    /// Runs `run` as this process's rank, with the device of its tensors. Collective.
    ///
    /// # Errors
    /// The failure of this rank, which may follow from that of another.
    pub fn run<T: Send, E: Into<BoxedError>>(
        &mut self,
        options: &LaunchOptions,
        run: impl Fn(&RankContext, Device) -> Result<T, E> + Sync,
    ) -> Result<T, LaunchError> {
        let value = Mutex::new(None);
        self.run_rank(options, &|rank, device| {
            let returned = run(rank, device).map_err(Into::into)?;
            *value.lock() = Some(returned);
            Ok(())
        })?;
        let rank = self.rank();
        let not_run =
            || LaunchError::Failed { rank, source: "the session did not run the rank's function".into() };
        value.into_inner().ok_or_else(not_run)
    }

    /// Gathers a value from every process, in rank order. Collective.
    ///
    /// # Errors
    /// When the processes cannot communicate, or do not understand each other's values.
    pub fn all_gather_object<T: Serialize + DeserializeOwned>(
        &mut self,
        own: &T,
    ) -> Result<Vec<T>, BoxedError> {
        parse(&self.all_gather_bytes(&serde_json::to_vec(own)?)?)
    }
}

/// Gathers a value from every rank of a group, in rank order, as PyTorch's `all_gather_object`. Collective.
///
/// # Errors
/// When the ranks cannot communicate, or do not understand each other's values.
pub fn all_gather_object<T: Serialize + DeserializeOwned>(
    group: &dyn ProcessGroup,
    own: &T,
) -> Result<Vec<T>, BoxedError> {
    parse(&group.all_gather_varied(&serde_json::to_vec(own)?)?)
}

fn parse<T: DeserializeOwned>(all: &[Vec<u8>]) -> Result<Vec<T>, BoxedError> {
    let parsed = all.iter().map(|value| serde_json::from_slice(value));
    parsed
        .map(|value| value.map_err(|error| format!("cannot parse the value of a rank: {error}").into()))
        .collect()
}
