//! What one rank does, from its engine to its outcome.

use super::Run;
use super::checkpoints::Checkpoints;
use super::evaluations::{EvaluationTracker, agreed};
use super::feed::Feed;
use super::memory::{MemoryWatch, StepMemory};
use super::peak;
use super::reporter::{Reported, Reporter};
use super::stragglers::Stragglers;
use crate::evaluation::evaluate;
use candle_core::Device;
use serde::{Deserialize, Serialize};
use std::time::Instant;
use ulysses::checkpoint::{Evaluated, Evaluations};
use ulysses::comm::{MeshGroups, ProcessGroup, RankContext};
use ulysses::data::Placement;
use ulysses::engine::plan::{PlannedCalls, RankStep};
use ulysses::engine::{Engine, StepTimes, initialize};
use ulysses::memory::peak_bytes;
use ulysses::model::Model;
use ulysses::monitor::{EvalMetrics, Metrics, PlannedVolume, RankComms, RankSummary, Traced};

/// What a rank ends with.
#[derive(Serialize, Deserialize)]
pub(super) struct RankOutcome {
    /// On rank 0, if there was anything to do.
    pub(super) reported: Option<Reported>,
    pub(super) summary: RankSummary,
    /// Steps that were done.
    pub(super) steps: u64,
    /// The number of the last step that there was to do.
    pub(super) last_step: u64,
    pub(super) stopped: bool,
    /// The newest checkpoint that the run has saved.
    pub(super) checkpoint: Option<String>,
    /// Why the run has ended before its last step, where no signal asked for it.
    pub(super) stopped_early: Option<String>,
    pub(super) evaluations: Evaluations,
    /// What this rank did in the steps that are traced.
    pub(super) trace: Traced,
    pub(super) comms: RankComms,
    /// The most that the rank held at a time; 0 where nobody counts.
    pub(super) peak_bytes: u64,
    /// What it held over one step.
    pub(super) step_memory: Option<StepMemory>,
    pub(super) peak_flops: Option<f64>,
}

impl Run {
    pub(super) fn train(&self, rank: &RankContext, device: Device) -> anyhow::Result<RankOutcome> {
        let _rank = tracing::info_span!("rank", rank = rank.rank).entered();
        let groups = MeshGroups::new(&self.mesh, rank.group.clone())?.on(device);
        let engine = initialize(Model::llama(&self.llama)?, &*self.weights, &self.config, &groups);
        let mut engine = engine.map_err(|error| self.with_plan(error.into(), None))?;
        let mut feed = Feed::new(self, Placement::of(&self.mesh, rank.rank)?)?;
        let mut checkpoints = Checkpoints::new(self, &groups, &engine)?;
        let mut evaluations = EvaluationTracker::new(&self.config, self.phases[0].held_out_hash);
        checkpoints.resume(&mut engine, &mut feed, &mut evaluations)?;
        let first_step = engine.attempted_steps();
        let last_step = feed.last_step(first_step);
        self.check_agreement(&mut engine, last_step)?;
        let peak_flops = peak::measure(checkpoints.group(), groups.device(), self.config.precision.dtype())?;
        let reporter = || Reporter::new(self, checkpoints.run_id(), first_step..last_step, peak_flops);
        // A run that has nothing to do leaves its files as they are.
        let is_done = first_step >= last_step || evaluations.stops_early();
        let mut reporter = (rank.rank == 0 && !is_done).then(reporter).transpose()?;
        if reporter.is_some() {
            self.note_first_step(feed.phase().data.seq_len(), peak_flops);
        }
        let stragglers = Stragglers::new(&groups)?;
        let mut watch = MemoryWatch::new(self, rank.rank, groups.device().is_cpu());
        if !is_done {
            checkpoints.announce();
        }
        if !is_done && first_step == 0 {
            let evaluation = self.validate(&mut engine, &mut feed, checkpoints.group(), last_step);
            let evaluation = evaluation.map_err(|error| self.with_plan(error, engine.part()))?;
            judge(evaluation, &mut evaluations, &mut reporter)?;
        }
        let mut stopped = false;
        while engine.attempted_steps() < last_step && !stopped && !evaluations.stops_early() {
            let step = step(&mut engine, &mut feed, &mut watch, &stragglers, first_step);
            let (metrics, times) = step.map_err(|error| self.with_plan(error, engine.part()))?;
            if let Some(reporter) = &mut reporter {
                reporter.record(metrics, &times, feed.phase())?;
            }
            let evaluation = self.validate(&mut engine, &mut feed, checkpoints.group(), last_step);
            let evaluation = evaluation.map_err(|error| self.with_plan(error, engine.part()))?;
            judge(evaluation, &mut evaluations, &mut reporter)?;
            stopped = checkpoints.after_step(&mut engine, &feed, &mut evaluations, last_step)?;
            if let Some(reporter) = &mut reporter {
                reporter.after_step(checkpoints.is_saving())?;
            }
        }
        engine.check_replicas()?;
        let summary = engine.summary(&self.llama, feed.passes())?;
        if let Some(reporter) = &mut reporter {
            reporter.complete()?;
        }
        let reported = reporter.map(|reporter| reporter.reported);
        let trace = self.tracer.as_ref().map(|tracer| tracer.take(rank.rank as u64)).unwrap_or_default();
        let comms = self.comms(&engine, &summary, &feed, rank.rank);
        Ok(RankOutcome {
            reported,
            summary,
            steps: engine.attempted_steps(),
            last_step,
            stopped,
            checkpoint: checkpoints.newest(),
            stopped_early: evaluations.stops_early().then(|| evaluations.reason()),
            evaluations: evaluations.state,
            trace,
            comms,
            peak_bytes: u64::try_from(peak_bytes()).unwrap_or(0),
            step_memory: watch.kept(),
            peak_flops,
        })
    }

    /// This rank's collectives, measured and planned over the same steps and evaluations.
    fn comms(&self, engine: &Engine, summary: &RankSummary, feed: &Feed<'_>, rank: usize) -> RankComms {
        let sent = summary.groups.iter().flat_map(|(axis, stats)| {
            stats.ops.iter().map(|(op, counted)| (axis.clone(), *op, counted.bytes_sent))
        });
        let planned = feed.passes().iter().flat_map(|passes| {
            let steps = passes.trained / self.config.gradient_accumulation_steps as u64;
            let config = self.config.clone().with_seq_len(passes.seq_len);
            let plans = [
                (steps, RankStep::of(&config, &self.llama, &self.mesh, rank)),
                (passes.evaluated, RankStep::of_evaluation(&config, &self.llama, &self.mesh, rank)),
            ];
            // What cannot be planned is told without a plan.
            let plans = plans.into_iter().filter_map(|(times, plan)| Some((times, plan.ok()?)));
            plans.flat_map(|(times, plan)| {
                plan.collectives.into_iter().map(
                    move |PlannedCalls { axis, op, purpose, sent_bytes, .. }| PlannedVolume {
                        axis,
                        op,
                        purpose,
                        sent_bytes: times.saturating_mul(sent_bytes),
                    },
                )
            })
        });
        RankComms {
            calls: engine.comm_calls(),
            each: engine.each_comm_call(),
            planned: planned.collect(),
            sent: sent.collect(),
        }
    }

    /// The loss on held-out data, where an evaluation is due after a step or before the first. Collective.
    fn validate(
        &self,
        engine: &mut Engine,
        feed: &mut Feed<'_>,
        group: &dyn ProcessGroup,
        last_step: u64,
    ) -> anyhow::Result<Option<EvalMetrics>> {
        let (Some(validation), Some(data)) = (&self.config.ulysses.validation, &feed.phase().held_out) else {
            return Ok(None);
        };
        let step = engine.attempted_steps();
        let is_due = match step {
            0 => validation.eval_on_start,
            _ => {
                step == last_step || validation.interval.is_some_and(|interval| step.is_multiple_of(interval))
            }
        };
        if !is_due {
            return Ok(None);
        }
        let start = Instant::now();
        let max_rows =
            validation.batches.map(|batches| batches.saturating_mul(self.config.train_batch_size as u64));
        let evaluation = evaluate(engine, data, feed.placement, max_rows)?;
        feed.add_evaluated(evaluation.micro_batches);
        let eval_loss = agreed(group, evaluation.loss())?;
        Ok(Some(EvalMetrics {
            step,
            eval_loss,
            eval_perplexity: eval_loss.exp(),
            eval_tokens: evaluation.sum.valid_tokens,
            eval_seconds: start.elapsed().as_secs_f64(),
        }))
    }
}

/// Decides by an evaluation, if there was one, and tells of it.
fn judge(
    evaluation: Option<EvalMetrics>,
    evaluations: &mut EvaluationTracker,
    reporter: &mut Option<Reporter<'_>>,
) -> anyhow::Result<()> {
    let Some(metrics) = evaluation else { return Ok(()) };
    evaluations.record(Evaluated { step: metrics.step, loss: metrics.eval_loss });
    reporter.as_mut().map_or(Ok(()), |reporter| reporter.record_evaluation(&metrics))
}

/// One step of one rank, in a run that began after `first_step` steps.
fn step(
    engine: &mut Engine,
    feed: &mut Feed<'_>,
    watch: &mut MemoryWatch<'_>,
    stragglers: &Stragglers,
    first_step: u64,
) -> anyhow::Result<(Metrics, StepTimes)> {
    let done = engine.attempted_steps();
    let _step = tracing::debug_span!("step", step = done + 1, done = done - first_step).entered();
    let start = Instant::now();
    if feed.begin_step(engine.attempted_steps())? {
        // Nothing of the old length is asked for again.
        engine.workspace().clear();
    }
    watch.begin(engine, feed.phase().data.seq_len());
    let report = engine.train_batch(|| feed.next_micro_batch())?;
    watch.end(engine, report.step);
    let (step_seconds, data_seconds) = (start.elapsed().as_secs_f64(), feed.take_waited());
    let times = engine.take_times();
    let time = times.shares(step_seconds, data_seconds);
    let slowest = stragglers.slowest(time.compute_seconds)?;
    let metrics = Metrics {
        data_seconds,
        padding_share: feed.phase().data.padding_share(),
        time,
        slowest_rank: slowest.rank,
        slowest_rank_ratio: slowest.ratio,
        ..report.metrics(step_seconds)
    };
    Ok((metrics, times))
}
