//! One rank: from its engine to its result.

use super::flop_rate::FlopRate;
use super::planned_memory::{explain_out_of_memory, log_first_step};
use super::prepare::Prepared;
use super::profile::Profiler;
use super::rank_outcome::{RankOutcome, Reported};
use super::run::Run;
use super::{gemm_peak, node_bytes, output, record};
use crate::launch::{MEMORY_DIR_VARIABLE, Restart};
use crate::output::log;
use crate::progress::LiveProgress;
use candle_core::Device;
use std::collections::BTreeMap;
use std::path::PathBuf;
use ulysses::comm::{MeshGroups, RankContext};
use ulysses::device::gpu_memory;
use ulysses::engine::{Engine, Passes, initialize};
use ulysses::estimate::{PlannedCalls, RankStep};
use ulysses::memory::peak_bytes;
use ulysses::model::Model;
use ulysses::monitor::{PlannedVolume, RankComms, RankSummary, RunTotals};
use ulysses::trainer::{MemoryWatch, MetricsFiles, Trainer, TrainerError, TrainerOptions};

pub(super) fn train(run: &Run, rank: &RankContext, device: Device) -> anyhow::Result<RankOutcome> {
    let _rank = tracing::info_span!("rank", rank = rank.rank).entered();
    let Prepared { config, mesh, model, planned, .. } = &run.prepared;
    let groups = MeshGroups::new(mesh, rank.group.clone())?.on(device);
    let engine = initialize(Model::llama(&model.config)?, &*model.weights, config, &groups)
        .map_err(|error| explain_out_of_memory(error.into(), config, None, planned.as_ref()))?;
    let mut memory = MemoryWatch::new(run.tracer.clone(), rank.rank, groups.device().clone());
    let (mut totals, mut record) = (RunTotals::default(), None);
    let mut trainer = Trainer::new(engine, &groups, run.prepared.data.clone(), options(run))?;
    let placement = &run.prepared.placement;
    let gpu = placement.gpu_name();
    let gpu = gpu.as_deref().map(|name| (name, placement.ranks_per_gpu(mesh.world_size())));
    let dtype = config.precision.dtype();
    let peak_flops = gemm_peak::measure(trainer.group(), groups.device(), gpu, dtype)?;
    trainer.observe(&mut memory);
    // A complete run leaves its files unchanged.
    if rank.rank == 0 && !trainer.is_done() {
        let steps = trainer.steps();
        record = Some(output::begin(run, trainer.run_id(), steps.start)?);
        let mut files = MetricsFiles::open(config, &run.output, steps.start, log)?;
        if let Some(restart) = Restart::of_this_rank() {
            files.record_restart(&record::restart_metrics(restart, &trainer, config))?;
        }
        // The peak of a GPU's data sheet says too little about its steps.
        if groups.device().is_cpu() {
            log_first_step(config, &model.config, mesh, trainer.data().phase().data.seq_len(), peak_flops);
        }
        trainer.observe(FlopRate::new(&run.prepared, peak_flops));
        trainer.observe(&mut totals);
        trainer.observe(LiveProgress::new(steps.clone(), config));
        trainer.observe(Profiler::new(&run.prepared, &steps));
        trainer.observe(files);
    }
    let report = match trainer.train() {
        Err(error @ TrainerError::Engine(_)) => {
            return Err(explain_out_of_memory(
                error.into(),
                config,
                Some(trainer.engine()),
                planned.as_ref(),
            ));
        }
        report => report?,
    };
    let summary = trainer.engine().summary(&model.config, trainer.data().passes())?;
    let comms = comms(&run.prepared, trainer.engine(), &summary, trainer.data().passes());
    drop(trainer);
    Ok(RankOutcome {
        reported: record.map(|record| Reported { totals, record }),
        train: report,
        trace: run.tracer.as_ref().map(|tracer| tracer.take(rank.rank as u64)).unwrap_or_default(),
        comms,
        peak_bytes: match gpu_memory(groups.device()) {
            Some(memory) => memory.peak,
            None => u64::try_from(peak_bytes()).unwrap_or(0),
        },
        step_memory: memory.longest(),
        peak_flops: Some(peak_flops),
        summary,
    })
}

fn options(run: &Run) -> TrainerOptions {
    let Prepared { model, resume, reset_data, stop, .. } = &run.prepared;
    TrainerOptions {
        output: Some(run.output.clone()),
        resume: resume.clone(),
        memory_dir: std::env::var_os(MEMORY_DIR_VARIABLE).map(PathBuf::from),
        reset_data: *reset_data,
        model: model.config.to_hf_json(),
        source: model.hf_source.clone(),
        stop: stop.clone(),
        log,
    }
}

/// Returns this rank's collectives, measured and planned over the same steps and evaluations.
fn comms(prepared: &Prepared, engine: &Engine, summary: &RankSummary, passes: &[Passes]) -> RankComms {
    let Prepared { config, mesh, model, .. } = prepared;
    let (llama, rank) = (&model.config, summary.rank);
    let sent = summary.groups.iter().flat_map(|(axis, stats)| {
        stats.ops.iter().map(|(op, counted)| (axis.clone(), *op, counted.bytes_sent))
    });
    let mut planned_to = BTreeMap::new();
    // Rows of flexible sequence parallelism have no plan.
    let planned: Vec<_> = passes
        .iter()
        .filter(|passes| passes.block_size.is_none())
        .flat_map(|passes| {
            let steps = passes.trained / config.gradient_accumulation_steps as u64;
            let config = config.clone().with_seq_len(passes.seq_len);
            let plans = [
                (steps, RankStep::of(&config, llama, mesh, rank)),
                (passes.evaluated, RankStep::of_evaluation(&config, llama, mesh, rank)),
            ];
            // Without a plan only the measured volume is reported.
            let plans: Vec<_> =
                plans.into_iter().filter_map(|(times, plan)| Some((times, plan.ok()?))).collect();
            for (times, plan) in &plans {
                plan.sent_to
                    .iter()
                    .for_each(|(peer, bytes)| *planned_to.entry(*peer).or_default() += times * bytes);
            }
            plans.into_iter().flat_map(|(times, plan)| {
                plan.collectives.into_iter().map(
                    move |PlannedCalls { axis, op, purpose, sent_bytes, .. }| PlannedVolume {
                        axis,
                        op,
                        purpose,
                        sent_bytes: times.saturating_mul(sent_bytes),
                    },
                )
            })
        })
        .collect();
    let sent_to = node_bytes::sent_to(engine.groups());
    let by_node =
        prepared.hosts.as_ref().map(|hosts| node_bytes::by_node(hosts, rank, &planned_to, &sent_to));
    RankComms {
        calls: engine.comm_calls(),
        each: engine.each_comm_call(),
        planned,
        sent: sent.collect(),
        by_node: by_node.unwrap_or_default(),
    }
}
