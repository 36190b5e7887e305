//! Jobs on this machine whose ranks `launch` starts itself.

use super::job::{NoOtherNodes, Outcome};
use super::job_spec::JobSpec;
use super::ranks::{NodeRanks, free_port};
use super::signals::Signals;
use super::training::Variation;
use crate::failure::{Failure, OrFail};
use anyhow::Context;
use ulysses::comm::store::JobStore;

/// Runs a job of this many processes, with restarts.
pub(super) fn run(job: &JobSpec, num_processes: usize) -> Result<(), Failure> {
    let signals = Signals::watch().context("cannot handle signals").or_run()?;
    let (mut restarts, mut variation) = (0, Variation::default());
    loop {
        let store = JobStore::listen(num_processes).context("cannot open the store of the job").or_run()?;
        let ranks = NodeRanks {
            first: 0,
            count: num_processes,
            world_size: num_processes,
            node: 0,
            num_nodes: 1,
            // PyTorch programs rendezvous at a separate port.
            master_port: free_port().or_run()?,
            restarts,
            max_restarts: job.max_restarts,
        };
        let arguments = job.arguments(&variation);
        let commands = ranks.commands(&job.program, &arguments, &store.environment());
        match job.start(commands, Some(store), &variation).run(&signals, &mut NoOtherNodes).or_run()? {
            Outcome::Done | Outcome::Interrupted => return Ok(()),
            Outcome::Stopped { exit_code } => return Err(Failure::Ended { exit_code }),
            Outcome::Failed(failure) => {
                job.restart_after(&failure, &mut restarts, &mut variation)?;
            }
        }
    }
}
