//! `ulysses train`: arguments, processes and output of a [`Trainer`](ulysses::trainer::Trainer).

mod args;
mod available;
mod flop_rate;
mod gemm_peak;
mod mesh_order;
mod node_bytes;
mod outcome;
mod output;
mod overrides;
mod planned_memory;
mod prepare;
mod profile;
mod rank;
mod rank_outcome;
mod record;
mod run;
mod signals;
mod trace;
mod writable;

use crate::failure::Failure;
use crate::output::log_line;
pub(super) use args::TrainArgs;
use prepare::Prepared;
use run::Run;
use ulysses::monitor::Tracer;
use ulysses::trainer::job::JobRanks;

pub(super) fn run(args: TrainArgs, tracer: Option<Tracer>, ranks: &mut JobRanks) -> Result<(), Failure> {
    let (config_path, is_verbose) = (args.config().to_owned(), args.verbose);
    let trace = args.trace.clone().zip(tracer);
    let prepared = Prepared::new(args, ranks);
    let mut prepared = ranks.agree(prepared, Failure::is_usage)?;
    prepared.decide(ranks)?;
    // Nothing is written unless all processes can start.
    let trace_path = trace.as_ref().map(|(path, _)| &**path);
    let config = &prepared.job.config;
    let acquired = ranks.is_first().then(|| output::acquire(&config_path, config, trace_path)).transpose();
    let (output, _lock) = ranks.agree(acquired, Failure::is_usage)?.unzip();
    let output = ranks.value_of_first(output.unwrap_or_default())?;
    prepared.job.output = Some(output.clone());
    let record = record::begin(&prepared.job, &config_path);
    let together = prepared.ranks_together(ranks);
    let Prepared { job, planned } = prepared;
    let tracer = trace.as_ref().map(|(_, tracer)| tracer.clone());
    let run = Run { job, planned, output, tracer, record };
    log_line(&run);
    if let Some(planned) = &run.planned {
        planned.log(together);
    }
    let results = run.job.run(ranks, |rank, device| rank::train(&run, rank, device));
    let traced = trace.filter(|_| ranks.is_first()).map_or(Ok(()), |(path, tracer)| {
        trace::write(&path, &run.job.mesh, &tracer, results.as_deref().unwrap_or_default())
    });
    // A failed run takes precedence over an unwritable trace.
    let results = results?;
    traced?;
    outcome::report(&run, results, ranks.is_first(), is_verbose)
}
