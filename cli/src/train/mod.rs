//! `ulysses train`: arguments, processes and output of a [`Trainer`](ulysses::trainer::Trainer).

mod args;
mod available;
mod flop_rate;
mod gemm_peak;
mod host;
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
mod resume;
mod run;
mod signals;
mod trace;
mod writable;

use super::Process;
use crate::failure::Failure;
use crate::output::log_line;
pub(super) use args::TrainArgs;
use host::Host;
use run::Run;
use ulysses::monitor::Tracer;

pub(super) fn run(
    args: TrainArgs,
    tracer: Option<Tracer>,
    process: &mut Option<Process>,
) -> Result<(), Failure> {
    let mut host = Host::new(process);
    let (config_path, is_verbose) = (args.config().to_owned(), args.verbose);
    let trace = args.trace.clone().zip(tracer);
    let prepared = prepare::prepare(args, &mut host);
    let mut prepared = host.agree(prepared)?;
    prepared.decide(&mut host)?;
    // Nothing is written unless all processes can start.
    let trace_path = trace.as_ref().map(|(path, _)| &**path);
    let acquired =
        host.is_first().then(|| output::acquire(&config_path, &prepared.config, trace_path)).transpose();
    let (output, _lock) = host.agree(acquired)?.unzip();
    let output = host.value_of_first(output.unwrap_or_default())?;
    let record = record::begin(&prepared, &config_path);
    let run = Run { prepared, output, tracer: trace.as_ref().map(|(_, tracer)| tracer.clone()), record };
    log_line(&run);
    let Run { prepared, .. } = &run;
    if let Some(planned) = &prepared.planned {
        planned.log(prepared.ranks_together(&host));
    }
    let results = host.launch(&prepared.config, &prepared.placement, &prepared.launch, |rank, device| {
        rank::train(&run, rank, device)
    });
    let traced = trace.filter(|_| host.is_first()).map_or(Ok(()), |(path, tracer)| {
        trace::write(&path, &prepared.mesh, &tracer, results.as_deref().unwrap_or_default())
    });
    // A failed run takes precedence over an unwritable trace.
    let results = results?;
    traced?;
    outcome::report(&run, results, host.is_first(), is_verbose)
}
