//! The `ulysses` command line: subcommands and exit codes.
//!
//! Exit codes: 0 done; 1 failed check or run, or unusable training data; 2 bad arguments, config, model description or
//! batch file; 75 stopped by a signal after a step, which is saved if the config has a `checkpoint` section.

mod allocator;
mod arguments;
mod bench;
mod checkpoint;
mod config;
mod config_flags;
mod data;
mod device;
mod doctor;
#[cfg(test)]
mod documented;
mod eval;
#[cfg(unix)]
mod launch;
mod manual;
mod mesh;
mod model;
mod placement;
mod plan;
mod process;
mod progress;
mod ranks;
mod report;
mod settings;
mod sources;
mod template;
mod train;
mod verify;

use allocator::OrExit;
use anyhow::Context;
use clap::{Parser, Subcommand};
use clap_complete::Shell;
use device::DeviceArg;
use mimalloc::MiMalloc;
use process::Process;
use progress::above_progress;
use std::fmt::Display;
use std::io::{ErrorKind, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use ulysses::config::{Overrides, StatedMesh};
use ulysses::data::Tokenizer;
use ulysses::kernels::linear::bf16_gemm;
use ulysses::memory::CountingAllocator;
use ulysses::mesh::{Cluster, MeshError, TrainingShape};
use ulysses::monitor::{Tracer, escaped, write_line};

/// Counts the bytes that each rank's thread has allocated. mimalloc reuses freed blocks without unmapping their pages;
/// glibc unmaps blocks above 32 MiB.
#[global_allocator]
static ALLOCATOR: CountingAllocator<OrExit<MiMalloc>> = CountingAllocator(OrExit(MiMalloc));

/// The command line.
#[derive(Parser)]
#[command(name = "ulysses")]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a model from a DeepSpeed-style JSON config.
    Train(train::TrainArgs),
    /// Start the ranks of a job as processes, on this machine or on several, and restart them after a failure.
    #[cfg(unix)]
    Launch(launch::LaunchArgs),
    /// End the processes of a job if `launch` is killed. Started by `launch`.
    #[cfg(unix)]
    #[command(hide = true)]
    LaunchWatchdog(launch::WatchdogArgs),
    /// Tokenize for another process. Started by every command that reads text.
    #[cfg(unix)]
    #[command(hide = true, name = Tokenizer::WORKER)]
    TokenizerWorker(sources::TokenizerArgs),
    /// Compare one batch on a mesh with the same batch on a single rank, or write its results to a file.
    Verify(verify::VerifyArgs),
    /// Compute loss, perplexity and bits per byte of a model on a dataset.
    Eval(eval::EvalArgs),
    /// Predict memory, FLOPs and communication per rank, and the longest sequence that fits.
    Plan(plan::PlanArgs),
    /// Write an HTML report of one or several runs: curves, communication, memory, config.
    Report(report::ReportArgs),
    /// Explain config keys, or resolve a config file.
    #[command(subcommand)]
    Config(config::ConfigCommand),
    /// Verify, inspect, compare or export checkpoints.
    Checkpoint(checkpoint::CheckpointArgs),
    /// Prepare token files, or inspect data.
    #[command(subcommand)]
    Data(data::DataCommand),
    /// Measure throughput against a baseline, or find the longest sequence that fits.
    Bench(bench::BenchArgs),
    /// Draw a device mesh with its process groups, or propose one.
    Mesh(mesh::MeshArgs),
    /// Check this machine: CPU, memory, MPI, GPUs, disk and every collective.
    Doctor(doctor::DoctorArgs),
    /// Print a shell completion script.
    Completions {
        /// Shell to complete for.
        shell: Shell,
    },
    /// Write a man page for each command.
    Man {
        /// Output directory; created if missing.
        dir: PathBuf,
    },
}

/// A failed command, with its exit code.
pub(crate) enum Failure {
    /// Bad arguments, config, model description or batch file: exit code 2.
    Usage(anyhow::Error),
    /// A failed run or check: exit code 1.
    Run(anyhow::Error),
    /// A run that a signal stopped after a step: exit code 75, `EX_TEMPFAIL` of sysexits.h.
    Stopped {
        /// The last completed step.
        step: u64,
        /// Whether that step is saved in a checkpoint.
        is_saved: bool,
    },
    /// A job that a signal stopped, with the exit code of its processes.
    Ended {
        /// The exit code.
        exit_code: u8,
    },
}

/// Assigns an exit code to an error.
pub(crate) trait OrFail<T> {
    /// Turns an error into [`Failure::Usage`].
    fn or_usage(self) -> Result<T, Failure>;
    /// Turns an error into [`Failure::Run`].
    fn or_run(self) -> Result<T, Failure>;
}

impl<T, E: Into<anyhow::Error>> OrFail<T> for Result<T, E> {
    fn or_usage(self) -> Result<T, Failure> {
        self.map_err(|error| Failure::Usage(error.into()))
    }

    fn or_run(self) -> Result<T, Failure> {
        self.map_err(|error| Failure::Run(error.into()))
    }
}

fn main() -> ExitCode {
    settings::limit_candle_threads();
    settings::survive_file_size_limit();
    let cli = arguments::parse();
    let tracer = match &cli.command {
        Command::Train(args) => args.tracer(),
        _ => None,
    };
    settings::start_logging(tracer.as_ref());
    // Leaves the job at the end of `main`: as soon as a process has ended with an error, the launcher ends the others, and
    // the one that reports must have done so.
    let mut process = None;
    let result = bf16_gemm().map(drop).or_usage().and_then(|()| dispatch(cli.command, tracer, &mut process));
    let (error, code) = match result {
        Ok(()) => return ExitCode::SUCCESS,
        Err(Failure::Stopped { step, is_saved }) => {
            let saved = match is_saved {
                true => "continue with --resume",
                false => "nothing was saved, because the config has no `checkpoint` section",
            };
            log_line(format_args!("stopped by a signal after step {step}; {saved}"));
            return ExitCode::from(75);
        }
        Err(Failure::Ended { exit_code }) => return ExitCode::from(exit_code),
        Err(Failure::Run(error)) => (error, 1),
        Err(Failure::Usage(error)) => (error, 2),
    };
    log_line(format_args!("error: {}", causes(&error)));
    ExitCode::from(code)
}

fn dispatch(command: Command, tracer: Option<Tracer>, process: &mut Option<Process>) -> Result<(), Failure> {
    match command {
        Command::Train(args) => train::run(args, tracer, process),
        #[cfg(unix)]
        Command::Launch(args) => launch::run(args),
        #[cfg(unix)]
        Command::LaunchWatchdog(args) => launch::watch(&args),
        #[cfg(unix)]
        Command::TokenizerWorker(args) => sources::serve_tokenizer(&args),
        Command::Verify(args) => verify::run(args, process),
        Command::Eval(args) => eval::run(args),
        Command::Plan(args) => plan::run(args),
        Command::Report(args) => report::run(&args),
        Command::Config(command) => config::run(command),
        Command::Checkpoint(args) => checkpoint::run(args),
        Command::Data(command) => data::run(command),
        Command::Bench(args) => bench::run(args, process),
        Command::Mesh(args) => mesh::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Completions { shell } => manual::completions(shell),
        Command::Man { dir } => manual::pages(&dir),
    }
}

/// Whether this process prints nothing, because another process of the job reports to the user.
static IS_MUTED: AtomicBool = AtomicBool::new(false);

/// Turns the output of [`print`] and [`log_line`] off or on: one process of a job reports to the user.
fn mute(is_muted: bool) {
    IS_MUTED.store(is_muted, Ordering::Relaxed);
}

/// Writes a result to standard output with control characters escaped, since names may contain any. A pipe that its
/// reader closes early, such as `head`, is no error.
fn print(text: impl Display) -> Result<(), Failure> {
    if IS_MUTED.load(Ordering::Relaxed) {
        return Ok(());
    }
    let text = text.to_string();
    let mut stdout = std::io::stdout().lock();
    match write!(stdout, "{}", escaped(&text)).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write to standard output").or_run(),
    }
}

/// Writes a line about the run to standard error with control characters escaped. Write errors are ignored.
fn log_line(line: impl Display) {
    if !IS_MUTED.load(Ordering::Relaxed) {
        let line = line.to_string();
        let _ = above_progress(|| write_line(&mut std::io::stderr(), &line));
    }
}

/// [`log_line`] as the function pointer that the library takes for its log.
fn log(line: &str) {
    log_line(line);
}

/// Joins an error and its causes into one line, without causes that the line contains already.
fn causes(error: &anyhow::Error) -> String {
    let mut message = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !message.contains(&cause) {
            message = format!("{message}: {cause}");
        }
    }
    message
}

/// Parses the `(dp, sp)` of a command that takes neither hybrid sharding nor a ring.
fn dp_sp(notation: &str) -> Result<(usize, usize), Failure> {
    match unreplicated(notation)? {
        TrainingShape { dp, sp, ring_size: None, .. } => Ok((dp, sp)),
        TrainingShape { dp, sp, .. } => Err(Failure::Usage(anyhow::anyhow!(
            "--mesh {notation}: this command does not support a ring (`ring`); use {dp}x{sp}"
        ))),
    }
}

/// Parses the sizes of a command that takes no hybrid sharding.
fn unreplicated(notation: &str) -> Result<TrainingShape, Failure> {
    match training_shape(notation)? {
        shape @ TrainingShape { shard_size: None, .. } => Ok(shape),
        TrainingShape { dp, sp, .. } => Err(Failure::Usage(anyhow::anyhow!(
            "--mesh {notation}: this command does not support hybrid sharding (`dp_replicate`); use {dp}x{sp}"
        ))),
    }
}

/// Parses the sizes of a `--mesh` flag.
fn training_shape(notation: &str) -> Result<TrainingShape, Failure> {
    Ok(stated_mesh(notation, None)?.shape)
}

/// Returns the overrides of a `--mesh` flag, if given.
fn mesh_overrides(mesh: Option<&StatedMesh>) -> Overrides {
    mesh.map_or_else(Overrides::default, |mesh| Overrides::default().with_mesh(mesh))
}

/// Parses a `--mesh` flag, for a job on `cluster`, if any.
fn stated_mesh(notation: &str, cluster: Option<Cluster>) -> Result<StatedMesh, Failure> {
    let flag = || format!("--mesh {notation}");
    match StatedMesh::parse(notation, cluster) {
        Err(MeshError::InferWithoutWorldSize { axis }) => {
            let message = format!(
                "{}: the size of {axis} cannot be inferred from -1, because the mesh determines the number of ranks; \
                 give a size, 1 for an unused axis",
                flag()
            );
            Err(Failure::Usage(anyhow::anyhow!(message)))
        }
        parsed => parsed.with_context(flag).or_usage(),
    }
}
