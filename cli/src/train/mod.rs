//! `ulysses train`: arguments, processes and output of a [`Trainer`](ulysses::trainer::Trainer).

mod args;
mod comms;
mod explain;
mod flop_rate;
mod gemm_peak;
mod mesh_order;
mod outcome;
mod output;
mod overrides;
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
use run::Run;
use ulysses::monitor::Tracer;
use ulysses::trainer::job::JobRanks;

pub(super) fn run(args: TrainArgs, tracer: Option<Tracer>, ranks: &mut JobRanks) -> Result<(), Failure> {
    let (config_path, is_verbose) = (args.config().to_owned(), args.verbose);
    let trace = args.trace.clone().zip(tracer.clone());
    let prepared = Run::prepare(args, tracer, ranks);
    let mut run = ranks.agree(prepared, Failure::is_usage)?;
    run.job.decide_attention_output(ranks)?;
    // Nothing is written unless all processes can start.
    let _lock =
        run.job.acquire_output(ranks, || trace.as_ref().map_or(Ok(()), |(path, _)| trace::check(path)))?;
    run.output = run.job.output.clone().unwrap_or_default();
    run.record = record::begin(&run.job, &config_path);
    log_line(&run);
    if let Some(planned) = &run.job.planned {
        // A process trains once.
        let _ = crate::settings::PLANNED_PEAK.set(planned.clause());
    }
    run.job.log_planned_memory(ranks);
    let results = run.job.run(ranks, |rank, device| rank::train(&run, rank, device));
    let traced = trace.filter(|_| ranks.is_first()).map_or(Ok(()), |(path, tracer)| {
        trace::write(&path, &run.job.mesh, &tracer, results.as_deref().unwrap_or_default())
    });
    // A failed run takes precedence over an unwritable trace.
    let results = results?;
    traced?;
    outcome::report(&run, results, ranks.is_first(), is_verbose)
}
