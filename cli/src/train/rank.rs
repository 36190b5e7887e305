//! One rank: from its engine to its result.

use super::explain::{explain_out_of_memory, log_first_step};
use super::flop_rate::FlopRate;
use super::rank_outcome::{RankOutcome, Reported};
use super::run::Run;
use super::{comms, gemm_peak, output, record};
use crate::launch::Restart;
use crate::output::log;
use crate::progress::LiveProgress;
use candle_core::Device;
use ulysses::comm::RankContext;
use ulysses::device::gpu_memory;
use ulysses::engine::Engine;
use ulysses::memory::peak_bytes;
use ulysses::monitor::RunTotals;
use ulysses::trainer::job::{PlannedMemory, PreparedJob};
use ulysses::trainer::{MemoryWatch, MetricsFiles, TrainerError};

pub(super) fn train(run: &Run, rank: &RankContext, device: Device) -> anyhow::Result<RankOutcome> {
    let _rank = tracing::info_span!("rank", rank = rank.rank).entered();
    let PreparedJob { config, mesh, model, placement, .. } = &run.job;
    let explain = |error: TrainerError, engine: Option<&Engine>| match error {
        TrainerError::Engine(_) => explain_out_of_memory(
            error.into(),
            config,
            engine,
            run.job.planned.as_ref().map(PlannedMemory::clause),
        ),
        error => error.into(),
    };
    let mut memory = MemoryWatch::new(run.tracer.clone(), rank.rank, device.clone());
    let (mut totals, mut record) = (RunTotals::default(), None);
    let mut trainer = run.job.trainer(rank, device.clone()).map_err(|error| explain(error, None))?;
    let gpu = placement.gpu_name();
    let gpu = gpu.as_deref().map(|name| (name, placement.ranks_per_gpu(mesh.world_size())));
    let dtype = config.precision.dtype();
    let peak_flops = gemm_peak::measure(trainer.group(), &device, gpu, dtype)?;
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
        if device.is_cpu() {
            log_first_step(config, &model.config, mesh, trainer.data().phase().data.seq_len(), peak_flops);
        }
        trainer.observe(FlopRate::new(&run.job, peak_flops));
        trainer.observe(&mut totals);
        trainer.observe(LiveProgress::new(steps.clone(), config));
        trainer.observe(files);
    }
    let report = trainer.train();
    let report = report.map_err(|error| explain(error, Some(trainer.engine())))?;
    let summary = trainer.engine().summary(&model.config, trainer.data().passes())?;
    let comms = comms::measure(&run.job, trainer.engine(), &summary, trainer.data().passes());
    drop(trainer);
    Ok(RankOutcome {
        reported: record.map(|record| Reported { totals, record }),
        train: report,
        trace: run.tracer.as_ref().map(|tracer| tracer.take(rank.rank as u64)).unwrap_or_default(),
        comms,
        peak_bytes: match gpu_memory(&device) {
            Some(memory) => memory.peak,
            None => u64::try_from(peak_bytes()).unwrap_or(0),
        },
        step_memory: memory.longest(),
        peak_flops: Some(peak_flops),
        summary,
    })
}
