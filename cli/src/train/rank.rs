//! The observers of a rank, and the files that it begins.

use super::flop_rate::FlopRate;
use super::record::{self, Record};
use super::{first_step, gemm_peak, output};
use crate::launch::Restart;
use crate::output::log;
use crate::progress::LiveProgress;
use ulysses::trainer::job::PreparedJob;
use ulysses::trainer::{MetricsFiles, ObserverError, Trainer};

/// Measures the peak FLOP rate, and adds the observers of the first rank. Collective.
pub(super) fn observe<'a>(
    job: &'a PreparedJob,
    trainer: &mut Trainer<'a>,
    record: &Record,
) -> Result<(), ObserverError> {
    let PreparedJob { config, mesh, placement, .. } = job;
    let device = trainer.engine().workspace().options().device.clone();
    let (dtype, ranks_per_gpu) = (config.precision.dtype(), placement.ranks_per_gpu(mesh.world_size()));
    let of_gpu = placement.gpu_name().and_then(|name| gemm_peak::data_sheet(&name, dtype));
    let of_rank = of_gpu.map(|flops| flops / ranks_per_gpu as f64);
    let peak_flops = gemm_peak::measure(trainer.group(), &device, dtype, of_rank)?;
    record.set_peak_flops(peak_flops);
    // A complete run leaves its files unchanged.
    if trainer.group().rank() != 0 || trainer.is_done() {
        return Ok(());
    }
    output::begin(job, trainer, record)?;
    let steps = trainer.steps();
    let mut files = MetricsFiles::open(config, record.output(), steps.start, log)?;
    if let Some(restart) = Restart::of_this_rank() {
        files.record_restart(&record::restart_metrics(restart, trainer, config))?;
    }
    // The peak of a GPU's data sheet says too little about its steps.
    if device.is_cpu() {
        first_step::log(job, trainer.data().phase().data.seq_len(), peak_flops);
    }
    trainer.observe(FlopRate::new(job, peak_flops));
    trainer.observe(LiveProgress::new(steps, config));
    trainer.observe(files);
    Ok(())
}
