//! The MPI backend: this process is one rank, and the other processes run the same cases.

use super::{Backend, Group, Results, Wire, Work};
use std::cell::RefCell;
use std::time::Duration;
use ulysses::comm::mpi::Session;
use ulysses::comm::{CommError, LaunchError, LaunchOptions, ProcessGroupExt, Session as _};

/// The processes of one job. A smaller world consists of the first processes.
pub(crate) struct Mpi(RefCell<Session>);

/// A rank's outcome: a value as bytes, or an error or panic as text.
type Outcome = (u8, Vec<u8>);
const VALUE: u8 = 0;
const FAILED: u8 = 1;
const PANICKED: u8 = 2;

fn outcome_of(result: Result<Vec<u8>, LaunchError>) -> Outcome {
    match result {
        Ok(value) => (VALUE, value),
        Err(LaunchError::Panicked { message, .. }) => (PANICKED, message.to_bytes()),
        Err(error) => {
            let error = error.comm_error().cloned().unwrap_or(CommError::Tensor(error.to_string()));
            // Some errors cannot be serialized.
            let text = CommError::Tensor(error.to_string());
            let json = serde_json::to_vec(&error).or_else(|_| serde_json::to_vec(&text)).unwrap();
            (FAILED, json)
        }
    }
}

fn result_of(rank: usize, (kind, bytes): Outcome) -> Result<Vec<u8>, LaunchError> {
    match kind {
        VALUE => Ok(bytes),
        FAILED => {
            let error: CommError = serde_json::from_slice(&bytes).unwrap();
            Err(LaunchError::Failed { rank, source: error.into() })
        }
        _ => Err(LaunchError::Panicked { rank, message: Wire::read(&mut bytes.as_slice()) }),
    }
}

impl Mpi {
    pub(crate) fn start() -> Self {
        Self(RefCell::new(Session::start().unwrap()))
    }

    pub(crate) fn processes(&self) -> usize {
        self.0.borrow().world_size()
    }

    /// Runs the ranks, and returns all results on every process.
    fn results(
        &self,
        world_size: usize,
        timeout: Duration,
        work: Work<'_>,
    ) -> Vec<Result<Vec<u8>, LaunchError>> {
        let mut session = self.0.borrow_mut();
        let options = LaunchOptions { timeout, check: true, ..Default::default() };
        let own = session.run_on(world_size, &options, |context| work(context.group)).transpose();
        let own = own.map_or_else(Vec::new, |result| outcome_of(result).to_bytes());
        let gather = |group: Group| group.all_gather_varied(&own);
        let all = session.run(&LaunchOptions::default(), |context| gather(context.group)).unwrap();
        let outcomes = all[..world_size].iter().map(|outcome| Wire::read(&mut outcome.as_slice()));
        outcomes.enumerate().map(|(rank, outcome)| result_of(rank, outcome)).collect()
    }
}

impl Backend for Mpi {
    fn run_bytes(&self, world_size: usize, timeout: Duration, work: Work<'_>) -> Results {
        original(self.results(world_size, timeout, work))
    }

    fn fail_for(
        &self,
        world_size: usize,
        timeout: Duration,
        work: &(dyn Fn(&Group) -> Result<(), CommError> + Sync),
    ) -> (LaunchError, Vec<Option<CommError>>) {
        let results = self.results(world_size, timeout, &|group| work(&group).map(|()| Vec::new()));
        let own = |result: &Result<Vec<u8>, LaunchError>| result.as_ref().err()?.comm_error().cloned();
        let errors = results.iter().map(own).collect();
        (original(results).unwrap_err(), errors)
    }
}

/// Returns all values, or the root failure: that of the rank which the other errors name.
fn original(results: Vec<Result<Vec<u8>, LaunchError>>) -> Results {
    let named = results.iter().find_map(|result| match result.as_ref().err()?.comm_error()? {
        CommError::PeerFailed { rank, .. } => Some(*rank),
        _ => None,
    });
    let mut values = Vec::new();
    let mut first = None;
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            Ok(value) => values.push(value),
            Err(error) if first.is_none() || Some(rank) == named => first = Some(error),
            Err(_) => {}
        }
    }
    first.map_or(Ok(values), Err)
}
