//! The optimizer step.

use super::step_part::StepPart;
use super::{Engine, EngineError, StepReport};
use crate::comm::{Disagreement, ProcessGroupExt, ReduceOp};
use crate::config::LossNormalization;
use crate::data::FlexibleStep;
use crate::model::Model;
use crate::nn::ParameterSpec;
use crate::placement::Placement;
use crate::placement::ledger::sums;
use crate::zero::{Buffer, Comparison, Division, FlatLayout, ZeroAxis, ZeroError};
use candle_core::Tensor;
use std::collections::HashSet;
use ulysses_kernels::OpError;
use ulysses_kernels::lm_head_loss::{LossSum, Losses};

/// Consecutive overflows after which training stops, whatever the loss scale.
const MAX_CONSECUTIVE_SKIPS: u64 = 64;

/// Updates between two checks of the replicas.
const STEPS_PER_REPLICA_CHECK: u64 = 100;

/// Totals on this rank since the last step.
#[derive(Debug, Default)]
pub(super) struct Accumulation {
    /// Backward passes of each chunk of layers.
    backward_passes: Vec<usize>,
    /// The token losses of each micro step, and the weight of their sum.
    losses: Vec<(Losses, f64)>,
    /// Combined hash of the sequences of all micro steps.
    batch_hash: u64,
    /// Tokens of all micro steps, over the sp group.
    tokens: u64,
    /// The step, if it is divided by flexible sequence parallelism.
    flexible: Option<FlexibleStep>,
}

impl Accumulation {
    /// Micro batches that went backward.
    pub(super) fn micro_steps(&self) -> usize {
        self.backward_passes(0)
    }

    /// Backward passes of a chunk of layers.
    pub(super) fn backward_passes(&self, chunk: usize) -> usize {
        self.backward_passes.get(chunk).copied().unwrap_or(0)
    }

    /// Whether no backward pass was run.
    pub(super) fn is_new(&self) -> bool {
        self.backward_passes.iter().all(|passes| *passes == 0)
    }

    pub(super) fn count_backward_pass(&mut self, chunk: usize) {
        self.backward_passes.resize(self.backward_passes.len().max(chunk + 1), 0);
        self.backward_passes[chunk] += 1;
    }

    /// Begins a step.
    pub(super) fn begin(&mut self, flexible: Option<FlexibleStep>) {
        self.flexible = flexible;
    }

    /// Checks that a micro batch has as many micro steps in its step as the first one.
    pub(super) fn check(&self, flexible: Option<FlexibleStep>) -> Result<(), EngineError> {
        let [got, expected] = [flexible, self.flexible].map(|step| step.map_or(0, |step| step.micro_steps));
        let what = "the number of micro steps of its step (ulysses.flexible_sp; 0 without)";
        if got == expected { Ok(()) } else { Err(EngineError::MicroBatch { what, got, expected }) }
    }

    pub(super) fn add(&mut self, losses: Losses, batch_hash: u64, tokens: u64, weight: f64) {
        self.losses.push((losses, weight));
        self.tokens += tokens;
        self.batch_hash = combine(self.batch_hash, batch_hash);
    }

    /// The weighted sum of the token losses, and the number of tokens with a label. Synchronizes with a
    /// GPU, once for all micro steps.
    fn sum(&self) -> Result<[f64; 2], OpError> {
        let mut total = [0.0; 2];
        for (losses, weight) in &self.losses {
            let LossSum { sum, valid_tokens } = losses.sum()?;
            total[0] += sum * weight;
            total[1] += valid_tokens as f64;
        }
        Ok(total)
    }
}

/// Loss of a whole global batch.
#[derive(Debug, Clone, Copy)]
struct GlobalLoss {
    loss: f64,
    valid_tokens: u64,
    /// Factor that unscales the stored gradients.
    factor: f64,
}

impl Engine {
    /// At the accumulation boundary: normalizes, clips and updates. Before it: does nothing, as in
    /// DeepSpeed, and returns `None`. Collective.
    ///
    /// # Errors
    /// A loss or gradient that is not finite, an sp group with shards of different sequences, or failed
    /// communication.
    pub fn step(&mut self) -> Result<Option<StepReport>, EngineError> {
        self.check_usable()?;
        if self.accumulation.micro_steps() < self.micro_steps_per_step() {
            return Ok(None);
        }
        self.begin_part(StepPart::Update);
        self.check_sequences(self.accumulation.batch_hash)?;
        let global = self.accumulated_loss()?;
        let norm = global.factor * self.zero.gradient_sum_of_squares()?.sqrt();
        self.settle_all_messages()?;
        let Accumulation { tokens, flexible, .. } = std::mem::take(&mut self.accumulation);
        // Micro batches have the same size on all dp ranks, unless their documents are assigned one by one.
        let tokens = flexible.map_or(tokens * self.config.mesh.dp_size as u64, |step| step.tokens);
        self.attempted_steps += 1;
        let lr = self.schedule.lr_at(self.step);
        let loss_scale = self.scaler.scale();
        let is_empty = global.valid_tokens == 0;
        // Loss and norm are sums over the mesh, so all ranks skip or none does.
        let is_finite = norm.is_finite() && global.loss.is_finite();
        let overflow = !is_empty && !is_finite;
        if overflow {
            self.skip(global.loss, norm)?;
        } else if !is_empty {
            self.update(global.factor, norm, lr)?;
        }
        tracing::debug!(loss = global.loss, grad_norm = norm, lr, "stepped");
        let sent = self.bytes_sent();
        let comm_bytes = sent - std::mem::replace(&mut self.reported_bytes, sent);
        Ok(Some(StepReport {
            step: self.attempted_steps,
            loss: global.loss,
            lr,
            grad_norm: norm,
            tokens,
            label_tokens: global.valid_tokens,
            skipped: is_empty || overflow,
            overflow,
            loss_scale,
            comm_bytes,
        }))
    }

    /// Micro steps of the current step: `gradient_accumulation_steps`, unless flexible sequence parallelism decides.
    pub(super) fn micro_steps_per_step(&self) -> usize {
        self.accumulation.flexible.map_or(self.config.gradient_accumulation_steps, |step| step.micro_steps)
    }

    /// Skips a step whose gradient is not finite. In f32 no other scale can help, and a run that only
    /// skips makes no progress: both are errors.
    fn skip(&mut self, loss: f64, norm: f64) -> Result<(), EngineError> {
        let step = self.attempted_steps;
        if !self.config.precision.skips_overflow() {
            return Err(EngineError::NonFinite { step, loss, norm });
        }
        self.consecutive_skips += 1;
        let scale = self.scaler.scale();
        let can_scale = self.scaler.update(true);
        tracing::debug!(step, loss_scale = scale, "the gradient overflowed: step skipped");
        if can_scale && self.consecutive_skips < MAX_CONSECUTIVE_SKIPS {
            return Ok(());
        }
        let (skips, part) = (self.consecutive_skips, self.first_overflowing_part()?);
        Err(EngineError::Overflow { step, skips, scale, loss, part, is_scale_at_minimum: !can_scale })
    }

    /// The first part of the model, in backward order, whose gradient is not finite on some rank.
    /// Collective over the ZeRO world.
    fn first_overflowing_part(&self) -> Result<String, EngineError> {
        let parts = self.parts_in_backward_order();
        let overflowing: HashSet<_> = self.zero.non_finite_gradients()?.into_iter().collect();
        let own = parts.iter().position(|(_, names)| names.iter().any(|name| overflowing.contains(name)));
        let own = own.map_or(i64::MAX, |part| part as i64);
        let mut first = self.groups.shard().all_reduce_values(&[own], ReduceOp::Min)?;
        if let Some(groups) = &self.groups.tensor {
            first = groups.tp.all_reduce_values(&first, ReduceOp::Min)?;
        }
        let part = usize::try_from(first[0]).ok().and_then(|part| parts.get(part));
        let of_stages = self.gather_stages(part.map(|(part, _)| part.clone()))?;
        Ok(of_stages.into_iter().rev().flatten().next().unwrap_or_else(|| "the loss".to_owned()))
    }

    /// Objective, layers from last to first, input; each with the names of its parameters.
    fn parts_in_backward_order(&self) -> Vec<(String, Vec<&str>)> {
        fn names(parameters: &[ParameterSpec]) -> Vec<&str> {
            parameters.iter().map(|parameter| parameter.name.as_str()).collect()
        }
        let Model { input, layers, objective } = &self.model;
        let of_input = names(input.parameters());
        // The gradient of a tied parameter is complete with the input's.
        let tied = self.pipeline.as_ref().map_or(&[][..], |pipeline| &pipeline.tied);
        let is_of_input = |name: &&str| of_input.contains(name) || tied.iter().any(|tied| tied == name);
        let of_objective =
            names(objective.parameters()).into_iter().filter(|name| !is_of_input(name)).collect();
        let layers = layers.iter().rev().map(|layer| (layer.name().to_owned(), names(layer.parameters())));
        std::iter::once((format!("the {}", objective.name()), of_objective))
            .chain(layers)
            .chain([(format!("the {}", input.name()), of_input)])
            .collect()
    }

    fn update(&mut self, factor: f64, norm: f64, lr: f64) -> Result<(), EngineError> {
        self.consecutive_skips = 0;
        let clip = self.config.gradient_clipping;
        // The epsilon of torch.nn.utils.clip_grad_norm_.
        let coefficient = if clip > 0.0 { (clip / (norm + 1e-6)).min(1.0) } else { 1.0 };
        let betas = self.schedule.momentum_at(self.step);
        self.is_broken = true;
        self.zero.update(self.step + 1, lr, betas, factor * coefficient)?;
        self.is_broken = false;
        // False only after an overflow, and there was none.
        let _ = self.scaler.update(false);
        self.step += 1;
        if self.step.is_multiple_of(STEPS_PER_REPLICA_CHECK) { self.check_replicas() } else { Ok(()) }
    }

    /// Loss of the accumulated batch over the whole mesh. Collective; valid between the last `backward`
    /// and `step`.
    ///
    /// # Errors
    /// An incomplete accumulation, or failed communication.
    pub fn global_loss(&self) -> Result<f64, EngineError> {
        Ok(self.accumulated_loss()?.loss)
    }

    /// Loss of a complete accumulation, over the whole mesh.
    fn accumulated_loss(&self) -> Result<GlobalLoss, EngineError> {
        let (accumulation, done) = (self.micro_steps_per_step(), self.accumulation.micro_steps());
        if done < accumulation {
            return Err(EngineError::NotAtBoundary { accumulation, done });
        }
        let [loss_sum, valid] = self.sum_over_mesh(self.accumulation.sum()?)?;
        let (loss, factor) = match self.config.loss_normalization {
            _ if valid == 0.0 => (0.0, 0.0),
            LossNormalization::Global => (loss_sum / valid, self.loss_constant() / valid),
            LossNormalization::MicroBatch => (loss_sum, 1.0),
        };
        // The scale that the backward passes used: only `step` changes it, after this.
        let factor = factor / self.scaler.scale();
        Ok(GlobalLoss { loss, valid_tokens: valid as u64, factor })
    }

    /// Sums two numbers over dp, then over the ranks with other tokens, then over the stages.
    /// All but the last have 0.
    pub(super) fn sum_over_mesh(&self, local: [f64; 2]) -> Result<[f64; 2], EngineError> {
        sums::begin_tokens("the sum of the losses");
        let dp = self.groups.dp.all_reduce_values(&local, ReduceOp::Sum)?;
        let mut global = self.groups.tokens().all_reduce_values(&dp, ReduceOp::Sum)?;
        if let Some(stages) = self.stages() {
            global = stages.all_reduce_values(&global, ReduceOp::Sum)?;
        }
        sums::end().map_err(ZeroError::from)?;
        Ok([global[0], global[1]])
    }

    /// Gathers every gradient of the accumulated batch by parameter name: whole, normalized and
    /// unclipped. Collective; valid between the last `backward` and `step`.
    ///
    /// # Errors
    /// An incomplete accumulation, or failed communication.
    pub fn gather_gradients(&self) -> Result<Vec<(String, Tensor)>, EngineError> {
        let factor = self.accumulated_loss()?.factor;
        let gradients = self.gather_stage_tensors(self.zero.gather_gradients()?)?;
        let scaled = gradients.into_iter().map(|(name, gradient)| Ok((name, (gradient * factor)?)));
        scaled.collect()
    }

    /// Clears everything accumulated since the last step, as DeepSpeed's `zero_grad` does.
    pub fn zero_grad(&mut self) {
        self.accumulation = Accumulation::default();
    }

    /// Compares replicas: parameters and optimizer state among the ranks with the same partition (by default the sp group);
    /// and among the ranks that share the partitions (dp), parameters below ZeRO stage 3 and optimizer state at stage 0. Collective. `step` calls it
    /// every 100 updates, and every checkpoint before it is saved.
    ///
    /// # Errors
    /// [`EngineError::ReplicasDiffer`], or failed communication.
    pub fn check_replicas(&self) -> Result<(), EngineError> {
        let layouts: Vec<_> = self.zero.layouts().map(FlatLayout::division).collect();
        // All stages compare the same: the layers of another one may be frozen.
        let is_present = |division: &Division| match division.is_tied {
            true => layouts.contains(division),
            false => !division.over_tp || self.groups.tensor.is_some(),
        };
        let mut compared = Vec::new();
        for division in Division::ALL.into_iter().filter(is_present) {
            compared.extend(self.check_replicas_of(division)?);
        }
        Ok(self.zero.check_compared(&compared)?)
    }

    /// [`check_replicas`](Self::check_replicas) of the parameters with one division.
    fn check_replicas_of(&self, division: Division) -> Result<Vec<Comparison<'_>>, EngineError> {
        let buffers = [("parameters", Buffer::Parameters), ("optimizer state", Buffer::OptimizerState)];
        let layout = |buffer| self.groups.layout(buffer, self.zero.stage(), division);
        let mut compared = Vec::new();
        // Replicas of the partitions first.
        for (index, axis) in layout(Buffer::Parameters).axes().iter().enumerate().rev() {
            let is_replicated =
                |buffer: Buffer| layout(buffer).axes()[index].placement == Placement::Replicate;
            let replicated: Vec<_> =
                buffers.into_iter().filter(|(_, buffer)| is_replicated(*buffer)).collect();
            compared.extend(self.check_replicas_along(axis, &replicated, division)?);
        }
        Ok(compared)
    }

    /// Compares buffers, each with its name, along an axis that replicates them.
    fn check_replicas_along<'a>(
        &self,
        &ZeroAxis { name: axis, group, .. }: &ZeroAxis<'a>,
        buffers: &[(&'static str, Buffer)],
        division: Division,
    ) -> Result<Vec<Comparison<'a>>, EngineError> {
        if group.world_size() == 1 || buffers.is_empty() {
            return Ok(Vec::new());
        }
        let hashes = buffers.iter().map(|(_, buffer)| self.zero.hash(*buffer, division));
        let hashes = hashes.collect::<Result<Vec<u64>, ZeroError>>()?;
        match group.find_disagreement(&hashes)? {
            None => Ok(buffers
                .iter()
                .map(|(_, buffer)| Comparison { buffer: *buffer, division, group })
                .collect()),
            Some(Disagreement { rank, index }) => {
                let (what, first) = (buffers[index].0, group.global_ranks()[0]);
                Err(EngineError::ReplicasDiffer { what, axis, rank, first })
            }
        }
    }

    /// The constant that losses are divided by before the number of valid tokens is known. Any value
    /// would do; this one keeps gradients near their final size.
    pub(super) fn loss_constant(&self) -> f64 {
        self.config.train_batch_size as f64 * self.config.ulysses.seq_len.unwrap_or(1) as f64
    }

    /// Fails after an error within a backward pass or an update, which leaves gradients or parameters
    /// incomplete and different between ranks.
    pub(super) fn check_usable(&self) -> Result<(), EngineError> {
        if self.is_broken { Err(EngineError::Broken) } else { Ok(()) }
    }

    pub(super) fn bytes_sent(&self) -> u64 {
        self.groups.by_axis().into_iter().map(|(_, group)| group.stats().total().bytes_sent).sum()
    }

    /// Compares hashes of whole sequences among the ranks with other tokens of them, then over the stages. If the loaders of a group
    /// had diverged, the loss would be that of sequences that do not exist. Collective; each rank sends 8 bytes.
    pub(super) fn check_sequences(&self, hash: u64) -> Result<(), EngineError> {
        let groups = std::iter::once(self.groups.tokens()).chain(self.stages());
        for group in groups.filter(|group| group.world_size() > 1) {
            if let Some(Disagreement { rank, .. }) = group.find_disagreement(&[hash])? {
                return Err(EngineError::SequencesDiffer { rank, first: group.global_ranks()[0] });
            }
        }
        Ok(())
    }

    /// Compares values that must be equal on all ranks, each with a name. Ranks that disagree on the last
    /// step, for example, would wait for each other forever. Collective; all ranks pass the same names.
    ///
    /// # Errors
    /// Ranks with different values, or failed communication.
    pub fn check_agreement(&mut self, numbers: &[(&'static str, u64)]) -> Result<(), EngineError> {
        let sent = self.bytes_sent();
        let values: Vec<u64> = numbers.iter().map(|(_, value)| *value).collect();
        for group in [self.groups.tokens(), &self.groups.dp].into_iter().chain(self.stages()) {
            if let Some(Disagreement { rank, index }) = group.find_disagreement(&values)? {
                let (what, first) = (numbers[index].0, group.global_ranks()[0]);
                return Err(EngineError::Disagreement { what, rank, first });
            }
        }
        // The bytes sent by this check do not count toward a step's metrics.
        self.reported_bytes += self.bytes_sent() - sent;
        Ok(())
    }
}

/// Combines the hashes of a step's micro batches, in order.
pub(super) fn combine(hashes: u64, batch_hash: u64) -> u64 {
    hashes.rotate_left(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ batch_hash
}
