//! `ulysses train`: arguments, processes and output of a [`Job`].

mod args;
mod first_step;
mod flop_rate;
mod gemm_peak;
mod mesh_order;
mod outcome;
mod output;
mod rank;
mod record;
mod signals;
mod trace;

use crate::failure::Failure;
use crate::output::log_line;
pub(super) use args::TrainArgs;
use record::Record;
use std::sync::Arc;
use ulysses::config::ParameterGroup;
use ulysses::monitor::{Tracer, counted};
use ulysses::trainer::Job;
use ulysses::trainer::job::{JobRanks, PreparedJob};

pub(super) fn run(args: TrainArgs, tracer: Option<Tracer>, ranks: &mut JobRanks) -> Result<(), Failure> {
    let mut job = Job::on(ranks, args.config(), args.options(tracer.clone()))?;
    let (is_first, trace) = (job.is_first(), args.trace.as_deref().zip(tracer));
    mesh_order::log(job.prepared());
    let stop = job.prepared().options.stop.clone();
    let saves = job.prepared().config.checkpoint.is_some();
    // Nothing is written unless all processes can start.
    let output = job.acquire_output(|| {
        signals::watch(stop, saves)?;
        trace.as_ref().filter(|_| is_first).map_or(Ok(()), |(path, _)| trace::check(path))
    })?;
    let record = Arc::new(Record::begin(job.prepared(), output, args.config()));
    log_line(describe(job.prepared()));
    if let Some(planned) = &job.prepared().planned {
        // A process trains once.
        let _ = crate::settings::PLANNED_PEAK.set(planned.clause());
    }
    job.observe({
        let record = record.clone();
        move |job, trainer| rank::observe(job, trainer, &record)
    });
    let report = job.train();
    let traced = trace.filter(|_| is_first).map_or(Ok(()), |(path, tracer)| {
        trace::write(path, &job.prepared().mesh, &tracer, report.as_ref().ok().map(|report| &report.trace))
    });
    // A failed run takes precedence over an unwritable trace.
    let report = report?;
    traced?;
    outcome::report(job.prepared(), &report, &record, is_first, args.verbose)
}

/// Describes what the job trains, in a line.
fn describe(PreparedJob { config, model, data, launch, .. }: &PreparedJob) -> String {
    let (model, data) = (&model.config, &data.phases()[0].data);
    let partitions = config.zero_world_size();
    let replicas = config.zero_shard_size().map_or_else(String::new, |size| {
        format!(
            " ({} of {})",
            counted(config.mesh.dp_size / size, "replica"),
            counted(partitions, "partition")
        )
    });
    let is_frozen = |name: &str| ParameterGroup::is_frozen(&config.ulysses.parameter_groups, name);
    let frozen = match model.num_parameters_where(is_frozen) {
        0 => String::new(),
        frozen => format!(" ({:.2} M frozen)", frozen as f64 / 1e6),
    };
    format!(
        "mesh {}, ZeRO stage {}{replicas}, {:.2} M parameters{frozen}, {} of {} tokens, {} per rank",
        config.training_shape(),
        config.zero_axes().with_stage(config.zero.stage),
        model.num_parameters() as f64 / 1e6,
        counted(data.num_sequences(), "sequence"),
        data.seq_len(),
        counted(launch.threads_per_rank, "thread"),
    )
}
