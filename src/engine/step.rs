//! The optimizer step.

use super::{Engine, EngineError, Loss};
use crate::comm::{ProcessGroup, ProcessGroupExt, ReduceOp};
use crate::config::LossNormalization;
use candle_core::Tensor;

/// What has been accumulated since the last step, on this rank.
#[derive(Debug, Default)]
pub(super) struct Accumulation {
    pub(super) micro_steps: usize,
    /// Tokens that a constant `1/C` stands for.
    seq_len: usize,
    /// Weighted sum of the token losses.
    loss_sum: f64,
    valid_tokens: u64,
}

impl Accumulation {
    pub(super) fn add(&mut self, loss: &Loss, seq_len: usize, weight: f64) {
        self.seq_len = seq_len;
        self.loss_sum += loss.sum() * weight;
        self.valid_tokens += loss.valid_tokens();
    }
}

/// What a step did. Equal on all ranks, except for `comm_bytes`.
#[derive(Debug, Clone, PartialEq)]
pub struct StepReport {
    /// Number of the step, from 1; skipped steps count.
    pub step: u64,
    /// Loss of the global batch before the update; 0 when nothing was valid.
    pub loss: f64,
    /// Learning rate that was used.
    pub lr: f64,
    /// Norm of the global gradient before clipping.
    pub grad_norm: f64,
    /// Valid tokens of the global batch.
    pub tokens: u64,
    /// No token of the batch had a label, so nothing was updated and the schedule stood still.
    pub skipped: bool,
    /// Bytes that this rank sent since the last report.
    pub comm_bytes: u64,
}

/// Loss and gradient of a whole global batch, before the update.
#[derive(Debug, Clone, Copy)]
struct GlobalGradient {
    loss: f64,
    valid_tokens: u64,
    /// What the stored gradients must be multiplied by.
    factor: f64,
    norm: f64,
}

impl Engine {
    /// At the accumulation boundary: normalises, clips and updates. Before it: nothing, as
    /// in DeepSpeed, and `None`. Collective.
    ///
    /// # Errors
    /// A loss or gradient that is not finite, or failed communication.
    pub fn step(&mut self) -> Result<Option<StepReport>, EngineError> {
        if self.accumulation.micro_steps < self.config.gradient_accumulation_steps {
            return Ok(None);
        }
        let global = self.global_gradient()?;
        self.accumulation = Accumulation::default();
        self.attempted_steps += 1;
        let lr = self.schedule.lr_at(self.step);
        let skipped = global.valid_tokens == 0;
        if !skipped {
            self.update(global, lr)?;
        }
        let sent = self.bytes_sent();
        let comm_bytes = sent - std::mem::replace(&mut self.reported_bytes, sent);
        Ok(Some(StepReport {
            step: self.attempted_steps,
            loss: global.loss,
            lr,
            grad_norm: global.norm,
            tokens: global.valid_tokens,
            skipped,
            comm_bytes,
        }))
    }

    fn update(&mut self, global: GlobalGradient, lr: f64) -> Result<(), EngineError> {
        let GlobalGradient { loss, norm, factor, .. } = global;
        if !norm.is_finite() || !loss.is_finite() {
            return Err(EngineError::NonFinite { step: self.attempted_steps, loss, norm });
        }
        let clip = self.config.gradient_clipping;
        // torch.nn.utils.clip_grad_norm_'s epsilon.
        let coefficient = if clip > 0.0 { (clip / (norm + 1e-6)).min(1.0) } else { 1.0 };
        let betas = self.schedule.momentum_at(self.step);
        self.zero.update(self.step + 1, lr, betas, factor * coefficient)?;
        self.step += 1;
        Ok(())
    }

    /// Loss of the accumulated batch over the whole mesh. Collective; valid between the last
    /// `backward` and `step`.
    ///
    /// # Errors
    /// An incomplete accumulation, or failed communication.
    pub fn global_loss(&self) -> Result<f64, EngineError> {
        Ok(self.global_gradient()?.loss)
    }

    /// Loss and gradient norm over the whole mesh, of a complete accumulation.
    fn global_gradient(&self) -> Result<GlobalGradient, EngineError> {
        let (accumulation, done) = (self.config.gradient_accumulation_steps, self.accumulation.micro_steps);
        if done < accumulation {
            return Err(EngineError::NotAtBoundary { accumulation, done });
        }
        let local = [self.accumulation.loss_sum, self.accumulation.valid_tokens as f64];
        let dp = self.groups.dp.all_reduce_values(&local, ReduceOp::Sum)?;
        let global = self.groups.sp.all_reduce_values(&dp, ReduceOp::Sum)?;
        let (loss_sum, valid) = (global[0], global[1]);
        let (loss, factor) = match self.config.loss_normalization {
            _ if valid == 0.0 => (0.0, 0.0),
            LossNormalization::Global => {
                let constant = (self.config.train_batch_size * self.accumulation.seq_len) as f64;
                (loss_sum / valid, constant / valid)
            }
            LossNormalization::MicroBatch => (loss_sum, 1.0),
        };
        let norm = factor * self.zero.gradient_sum_of_squares()?.sqrt();
        Ok(GlobalGradient { loss, valid_tokens: valid as u64, factor, norm })
    }

    /// Every gradient of the accumulated batch, whole, normalised and unclipped, by
    /// parameter name. Collective; valid between the last `backward` and `step`.
    ///
    /// # Errors
    /// An incomplete accumulation, or failed communication.
    pub fn gather_gradients(&self) -> Result<Vec<(String, Tensor)>, EngineError> {
        let factor = self.global_gradient()?.factor;
        let gradients = self.zero.gather_gradients()?;
        let scaled = gradients.into_iter().map(|(name, gradient)| Ok((name, (gradient * factor)?)));
        scaled.collect()
    }

    /// Compares the parameters that the ranks of the sp group hold and update redundantly.
    ///
    /// # Errors
    /// Replicas that differ; the first rank that does is named.
    pub fn check_replicas(&self) -> Result<(), EngineError> {
        let own = self.zero.parameter_hash()? as i64;
        let hashes = self.groups.sp.all_gather_values(&[own])?;
        match hashes.iter().position(|hash| *hash != hashes[0]) {
            None => Ok(()),
            Some(sp_rank) => {
                let rank = self.groups.sp.global_ranks()[sp_rank];
                Err(EngineError::ReplicasDiffer { rank, sp_rank })
            }
        }
    }

    fn bytes_sent(&self) -> u64 {
        let of = |group: &dyn ProcessGroup| group.stats().total().bytes_sent;
        of(&*self.groups.dp) + of(&*self.groups.sp)
    }
}
