//! The `ulysses` command line: subcommands and exit codes.
//!
//! Exit codes: 0 done; 1 failed check or run, or data that cannot be trained
//! on; 2 bad arguments, config, model description or batch file; 75 ended by a signal after
//! a step, which was saved where the config has a `checkpoint` section.

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
mod html;
mod inspect;
#[cfg(unix)]
mod launch;
mod manual;
mod mesh;
mod model;
mod plan;
mod process;
mod progress;
mod ranks;
mod report;
mod settings;
mod tokens;
mod train;
mod verify;

use allocator::OrExit;
use anyhow::Context;
use clap::{Parser, Subcommand};
use clap_complete::Shell;
use device::DeviceArg;
use mimalloc::MiMalloc;
use progress::above_progress;
use std::fmt::Display;
use std::io::{ErrorKind, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use ulysses::kernels::linear::bf16_products;
use ulysses::memory::CountingAllocator;
use ulysses::mesh::{DeviceMesh, MeshError, TrainingShape};
use ulysses::monitor::{Tracer, escaped};

/// Counts what every rank's thread holds. mimalloc returns freed blocks to the next
/// allocation without giving their pages back, which glibc does above 32 MiB.
#[global_allocator]
static ALLOCATOR: CountingAllocator<OrExit<MiMalloc>> = CountingAllocator(OrExit(MiMalloc));

/// Trains transformers on sequences too long for one device.
#[derive(Parser)]
#[command(name = "ulysses")]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a model by a DeepSpeed-style JSON config.
    Train(train::TrainArgs),
    /// Start processes on this machine, watch them, and start them anew when one fails.
    #[cfg(unix)]
    Launch(launch::LaunchArgs),
    /// End the processes of a job when `launch` does not: `launch` starts it.
    #[cfg(unix)]
    #[command(hide = true)]
    LaunchWatchdog(launch::WatchdogArgs),
    /// Run one batch on a mesh and compare it with a single rank, or write what it gives.
    Verify(verify::VerifyArgs),
    /// Compute the loss, perplexity and bits per byte of a model on data.
    Eval(eval::EvalArgs),
    /// Predict memory, arithmetic and communication of a run, and how long a sequence fits.
    Plan(plan::PlanArgs),
    /// Make one HTML page of one or several runs: curves, communication, memory, config.
    Report(report::ReportArgs),
    /// Explain the keys of a config file, or complete one.
    #[command(subcommand)]
    Config(config::ConfigCommand),
    /// Verify, show, compare or export a checkpoint.
    Checkpoint(checkpoint::CheckpointArgs),
    /// Make files of tokens, or look into them.
    #[command(subcommand)]
    Data(tokens::DataCommand),
    /// Measure rates, each beside its baseline in the same run, or the longest row that fits.
    Bench(bench::BenchArgs),
    /// Draw who is in which group of a mesh.
    Mesh(mesh::MeshArgs),
    /// Say what this machine offers, and test it: processor, memory, MPI, GPUs, disk, every collective.
    Doctor(doctor::DoctorArgs),
    /// Print what lets a shell complete commands and flags.
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Write a man page for every command.
    Man {
        /// Directory to write to; made where it does not exist.
        dir: PathBuf,
    },
}

/// Why a command did not do its work.
pub(crate) enum Failure {
    /// Arguments, config, model description or batch file are at fault: exit code 2.
    Usage(anyhow::Error),
    /// The run or the check failed: exit code 1.
    Run(anyhow::Error),
    /// A signal ended the run after a step: exit code 75, `EX_TEMPFAIL` of sysexits.h.
    Stopped {
        /// The last step that was done.
        step: u64,
        /// Whether it was saved, and can be resumed.
        is_saved: bool,
    },
    /// The processes of a job have ended with this exit code because a signal asked them to.
    Ended {
        /// The exit code.
        exit_code: u8,
    },
}

/// Marks errors with the exit code that they end in.
pub(crate) trait OrFail<T> {
    /// An error is the caller's fault.
    fn or_usage(self) -> Result<T, Failure>;
    /// An error happened on the way.
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
    let result = bf16_products().map(drop).or_usage().and_then(|()| dispatch(cli.command, tracer));
    let (error, code) = match result {
        Ok(()) => return ExitCode::SUCCESS,
        Err(Failure::Stopped { step, is_saved }) => {
            let saved = match is_saved {
                true => "--resume goes on",
                false => "nothing was saved: the config has no `checkpoint` section",
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

fn dispatch(command: Command, tracer: Option<Tracer>) -> Result<(), Failure> {
    match command {
        Command::Train(args) => train::run(args, tracer),
        #[cfg(unix)]
        Command::Launch(args) => launch::run(args),
        #[cfg(unix)]
        Command::LaunchWatchdog(args) => launch::watch(&args),
        Command::Verify(args) => verify::run(args),
        Command::Eval(args) => eval::run(args),
        Command::Plan(args) => plan::run(args),
        Command::Report(args) => report::run(&args),
        Command::Config(command) => config::run(command),
        Command::Checkpoint(args) => checkpoint::run(args),
        Command::Data(command) => tokens::run(command),
        Command::Bench(args) => bench::run(args),
        Command::Mesh(args) => mesh::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Completions { shell } => manual::completions(shell),
        Command::Man { dir } => manual::pages(&dir),
    }
}

/// Whether this process leaves it to another one to talk to the user.
static IS_MUTED: AtomicBool = AtomicBool::new(false);

/// Lets [`print`] and [`note`] say nothing, or speak again: of the processes of a job one talks.
fn mute(is_muted: bool) {
    IS_MUTED.store(is_muted, Ordering::Relaxed);
}

/// Writes a result to standard output, with control characters escaped: names in it may hold any. A reader that closes it early, such as `head`, has
/// seen what it wanted.
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

/// Writes a line about the run to standard error, if somebody reads it, with control characters escaped.
fn log_line(line: impl Display) {
    if !IS_MUTED.load(Ordering::Relaxed) {
        let line = line.to_string();
        let _ = above_progress(|| writeln!(std::io::stderr(), "{}", escaped(&line)));
    }
}

/// As [`note`], for the library's log.
fn log(line: &str) {
    log_line(line);
}

/// The error and its causes in one line, without what a cause only repeats.
fn causes(error: &anyhow::Error) -> String {
    let mut message = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !message.contains(&cause) {
            message = format!("{message}: {cause}");
        }
    }
    message
}

/// `(dp, sp)` of a mesh given on the command line, for what does not partition.
fn dp_sp(notation: &str) -> Result<(usize, usize), Failure> {
    match training_shape(notation)? {
        TrainingShape { dp, sp, shard_size: None } => Ok((dp, sp)),
        TrainingShape { dp, sp, .. } => Err(Failure::Usage(anyhow::anyhow!(
            "--mesh {notation}: replicas of ZeRO's partitions are for training: give {dp}x{sp} here"
        ))),
    }
}

/// The sizes of a mesh given on the command line.
fn training_shape(notation: &str) -> Result<TrainingShape, Failure> {
    let flag = || format!("--mesh {notation}");
    let mesh = match DeviceMesh::parse(notation, None) {
        Err(MeshError::InferWithoutWorldSize { axis }) => {
            let message = format!(
                "{}: the mesh itself says how many ranks there are, so -1 cannot be inferred; write the size of {axis}, \
                 1 for an axis that is not used",
                flag()
            );
            return Err(Failure::Usage(anyhow::anyhow!(message)));
        }
        parsed => parsed.with_context(flag).or_usage()?,
    };
    mesh.training_shape().with_context(flag).or_usage()
}
