//! The model's FLOP rate as a metric.

use ulysses::engine::Engine;
use ulysses::estimate::{ModelFlops, model_flops};
use ulysses::trainer::job::PreparedJob;
use ulysses::trainer::{Observer, ObserverError, StepEnd};

/// Adds the model's FLOP rate to the metrics, and its share of the peak (MFU).
pub(super) struct FlopRate<'a> {
    run: &'a PreparedJob,
    /// Peak FLOP rate of all ranks together.
    peak_flops: f64,
    step_flops: StepFlops,
}

impl<'a> FlopRate<'a> {
    pub(super) fn new(run: &'a PreparedJob, peak_flops: f64) -> Self {
        Self { run, peak_flops, step_flops: StepFlops::default() }
    }
}

impl Observer for FlopRate<'_> {
    fn on_step_end(&mut self, _engine: &mut Engine, step: &mut StepEnd) -> Result<(), ObserverError> {
        let PreparedJob { config, model, mesh, .. } = self.run;
        let flops = self.step_flops.of_length(step.seq_len, || {
            let config = config.clone().with_seq_len(step.seq_len);
            model_flops(&config, &model.config, mesh).ok()
        });
        let rate =
            flops.map(|flops| flops.with_labels(step.metrics.label_share()) / step.metrics.step_seconds);
        step.metrics.model_flops_per_second = rate;
        step.metrics.gemm_share = share_of_peak(rate, self.peak_flops);
        Ok(())
    }
}

/// The MFU; none above 1, where the measured peak is too low to be one: the machine was busy, or its clock has risen.
fn share_of_peak(rate: Option<f64>, peak_flops: f64) -> Option<f64> {
    rate.map(|rate| rate / peak_flops).filter(|share| *share <= 1.0)
}

/// Cache of the FLOPs of a step on all ranks, for the last sequence length.
#[derive(Default)]
struct StepFlops {
    known: Option<(usize, Option<ModelFlops>)>,
}

impl StepFlops {
    /// Returns the cached result, including a failed one, or calls `plan`.
    fn of_length(&mut self, seq_len: usize, plan: impl FnOnce() -> Option<ModelFlops>) -> Option<ModelFlops> {
        match self.known {
            Some((known, flops)) if known == seq_len => flops,
            _ => {
                let flops = plan();
                self.known = Some((seq_len, flops));
                flops
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_above_1_is_no_mfu() {
        let shares = [None, Some(5.0), Some(10.0), Some(10.1)].map(|rate| share_of_peak(rate, 10.0));
        assert_eq!(shares, [None, Some(0.5), Some(1.0), None]);
    }

    #[test]
    fn each_length_is_planned_once_even_if_it_fails() {
        let (mut flops, mut planned) = (StepFlops::default(), Vec::new());
        let of_layers = |layers| Some(ModelFlops { layers, lm_head: 1.0 });
        let plans = [(64, None), (64, None), (128, of_layers(2.0)), (128, of_layers(3.0)), (64, None)];
        for (seq_len, answer) in plans {
            let result = flops.of_length(seq_len, || {
                planned.push(seq_len);
                answer
            });
            assert_eq!(result, of_layers(2.0).filter(|_| seq_len == 128));
        }
        assert_eq!(planned, [64, 128, 64]);
    }
}
