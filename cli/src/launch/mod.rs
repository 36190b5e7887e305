//! `ulysses launch`: runs the processes of a job on this machine.

mod job;
mod output;
mod processes;
mod rank_failure;
mod watchdog;

use super::train::TrainArgs;
use super::{Command, Failure, OrFail, arguments, log_line};
use anyhow::{Context, anyhow};
use job::{JobSpec, Outcome, Signals};
use std::path::PathBuf;
use std::time::Duration;
use ulysses::config::Backend;
pub(super) use watchdog::{WatchdogArgs, watch};

#[derive(clap::Args)]
pub(super) struct LaunchArgs {
    /// Number of processes, one per rank.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    nproc: u16,
    /// Maximum number of restarts after a failure. `train` resumes from the newest valid checkpoint.
    #[arg(long, value_name = "K", default_value_t = 0)]
    max_restarts: u32,
    /// Seconds between SIGTERM and SIGKILL when stopping processes.
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    grace: u64,
    /// Program to start instead of `ulysses`.
    #[arg(long)]
    program: Option<PathBuf>,
    /// Arguments of the program, after `--`, such as `train config.json`.
    #[arg(last = true, required = true, value_name = "ARGUMENTS")]
    arguments: Vec<String>,
}

pub(super) fn run(args: LaunchArgs) -> Result<(), Failure> {
    let LaunchArgs { nproc, max_restarts, grace, program, arguments } = args;
    let is_ulysses = program.is_none();
    let training = if is_ulysses { training(&arguments)? } else { None };
    let uses_mpirun = match &training {
        Some(training) => training.uses_mpirun(nproc, max_restarts)?,
        None => is_ulysses && names_mpi(&arguments),
    };
    let program = match program {
        Some(program) => program,
        None => std::env::current_exe().context("cannot find the path of this program").or_run()?,
    };
    let num_processes = usize::from(nproc);
    let grace = Duration::from_secs(grace);
    let mut job = JobSpec { program, arguments, num_processes, uses_mpirun, grace };
    let signals = Signals::watch().context("cannot handle signals").or_run()?;
    let mut restarts = 0;
    loop {
        let failure = match job.run(&signals).or_run()? {
            Outcome::Done => return Ok(()),
            Outcome::Stopped { exit_code } => return Err(Failure::Ended { exit_code }),
            Outcome::Failed(failure) => failure,
        };
        if failure.is_usage() {
            return Err(Failure::Usage(anyhow!("{failure}")));
        }
        if restarts == max_restarts {
            let after = if restarts > 0 { format!(", after {restarts} restart(s)") } else { String::new() };
            return Err(Failure::Run(anyhow!("{failure}{after}")));
        }
        restarts += 1;
        log_line(format_args!("launch: {failure}; restart {restarts} of {max_restarts}"));
        if training.as_ref().is_some_and(|training| !training.resumes) {
            job.arguments.push("--resume".to_owned());
        }
    }
}

/// A `train` command to launch.
struct Training {
    args: TrainArgs,
    resumes: bool,
}

/// Parses the arguments as `ulysses` would; `None` if the command is not `train`.
fn training(words: &[String]) -> Result<Option<Training>, Failure> {
    let words = std::iter::once("ulysses").chain(words.iter().map(String::as_str));
    let cli = arguments::parse_from(words).map_err(|error| {
        let error = error.to_string();
        Failure::Usage(anyhow!("after `--`: {}", error.trim_start_matches("error: ").trim_end()))
    })?;
    match cli.command {
        Command::Train(args) => {
            let resumes = args.resumes();
            Ok(Some(Training { args, resumes }))
        }
        Command::Launch(_) => Err(Failure::Usage(anyhow!("`launch` cannot start `launch`"))),
        _ => Ok(None),
    }
}

impl Training {
    /// Returns whether MPI connects the ranks; otherwise NCCL does.
    fn uses_mpirun(&self, nproc: u16, max_restarts: u32) -> Result<bool, Failure> {
        let (config, backend) = self.args.for_launch(usize::from(nproc))?;
        let refuse = |message: String| Err(Failure::Usage(anyhow!(message)));
        if max_restarts > 0 && (config.checkpoint.is_none() || config.ulysses.output.is_none()) {
            return refuse(
                "--max-restarts needs checkpoints: add a `checkpoint` section to the config, and `ulysses.output` or \
                 --output"
                    .to_owned(),
            );
        }
        match backend {
            Some(Backend::Thread) => refuse(
                "the backend thread runs all ranks in one process: use `ulysses train` without `launch`, or --backend \
                 mpi or nccl"
                    .to_owned(),
            ),
            Some(Backend::Mpi) if cfg!(feature = "mpi") => Ok(true),
            Some(Backend::Nccl) if cfg!(feature = "nccl") => Ok(false),
            Some(missing) => {
                let name = if missing == Backend::Mpi { "mpi" } else { "nccl" };
                refuse(format!("this build lacks the feature `{name}` of the backend {name}"))
            }
            None if cfg!(feature = "nccl") => Ok(false),
            None if cfg!(feature = "mpi") => Ok(true),
            None => refuse(
                "this build lacks the features `mpi` and `nccl` that connect processes: build with one of them, or use \
                 `ulysses train` without `launch`"
                    .to_owned(),
            ),
        }
    }
}

/// Returns whether the arguments of a command other than `train` select MPI.
fn names_mpi(words: &[String]) -> bool {
    let pairs = words.windows(2).any(|pair| pair[0] == "--backend" && pair[1] == "mpi");
    pairs || words.iter().any(|word| word == "--backend=mpi")
}
