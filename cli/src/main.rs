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
mod failure;
mod launch;
mod manual;
mod mesh;
mod mesh_flag;
mod model;
mod output;
mod plan;
mod progress;
mod ranks;
mod report;
mod settings;
mod sources;
mod template;
mod train;
mod verify;

use allocator::OrExit;
use clap::{Parser, Subcommand};
use clap_complete::Shell;
use device::DeviceArg;
use failure::{Failure, OrFail, causes};
use mimalloc::MiMalloc;
use output::{LOG, log_line};
use std::path::PathBuf;
use std::process::ExitCode;
use ulysses::data::Tokenizer;
use ulysses::kernels::linear::bf16_gemm;
use ulysses::memory::CountingAllocator;
use ulysses::monitor::Tracer;
use ulysses::trainer::job::JobRanks;

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
    Launch(launch::LaunchArgs),
    /// End the processes of a job if `launch` is killed. Started by `launch`.
    #[command(hide = true)]
    LaunchWatchdog(launch::WatchdogArgs),
    /// Tokenize for another process. Started by every command that reads text.
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
    /// Draw a device mesh with its process groups.
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
    let mut ranks = JobRanks::new(LOG);
    let result = bf16_gemm().map(drop).or_usage().and_then(|()| dispatch(cli.command, tracer, &mut ranks));
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

fn dispatch(command: Command, tracer: Option<Tracer>, ranks: &mut JobRanks) -> Result<(), Failure> {
    match command {
        Command::Train(args) => train::run(args, tracer, ranks),
        Command::Launch(args) => launch::run(args),
        Command::LaunchWatchdog(args) => launch::watch(&args),
        Command::TokenizerWorker(args) => sources::serve_tokenizer(&args),
        Command::Verify(args) => verify::run(args, ranks),
        Command::Eval(args) => eval::run(args, ranks),
        Command::Plan(args) => plan::run(args),
        Command::Report(args) => report::run(&args),
        Command::Config(command) => config::run(command),
        Command::Checkpoint(args) => checkpoint::run(args),
        Command::Data(command) => data::run(command),
        Command::Bench(args) => bench::run(args, ranks),
        Command::Mesh(args) => mesh::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Completions { shell } => manual::completions(shell),
        Command::Man { dir } => manual::pages(&dir),
    }
}
