//! The pipeline of an engine: the stages of its rank, and their schedule.

use super::EngineError;
use crate::comm::PipelineGroups;
use crate::config::{Config, PipelineSchedule};
use crate::model::Model;
use crate::nn::InputLayer;
use crate::objective::Objective;
use crate::pipeline::{
    Action, DueMessages, Neighbors, RankModel, Schedule, ScheduleError, ScheduleKind, due_messages,
    rank_model,
};
use std::ops::Range;
use std::sync::Arc;
use ulysses_kernels::Workspace;

/// Returns what the ranks of the config's pipeline do in a step of so many micro batches.
///
/// # Errors
/// Micro batches that the schedule cannot divide.
pub(crate) fn pipeline_schedule(config: &Config, micro_batches: usize) -> Result<Schedule, ScheduleError> {
    schedule_kind(config).schedule(config.mesh.pp_size, micro_batches)
}

/// Returns the share of a step in which a rank of the config's pipeline has nothing to compute, if all stages take as long for a micro
/// batch, and a forward pass as long as each half of a backward pass, without recomputation. 0 without a pipeline.
///
/// It is (p − 1) / (v·m + p − 1) with p ranks, v stages on each and m micro batches, for `gpipe` and `1f1b` alike. With
/// `zero_bubble` a rank is idle for b = max(p − 1, 2p − 1 − m) forward passes: b / (3m + b).
pub(crate) fn pipeline_bubble(config: &Config) -> f64 {
    let (pipeline, ranks) = (&config.ulysses.pipeline, config.mesh.pp_size);
    let passes = pipeline.stages_per_rank(ranks) * config.gradient_accumulation_steps;
    let (idle, busy) = match pipeline.schedule {
        PipelineSchedule::Gpipe | PipelineSchedule::OneForwardOneBackward => (ranks - 1, passes),
        PipelineSchedule::ZeroBubble => ((ranks - 1).max((2 * ranks - 1).saturating_sub(passes)), 3 * passes),
    };
    idle as f64 / (busy + idle) as f64
}

fn schedule_kind(config: &Config) -> ScheduleKind {
    let pipeline = &config.ulysses.pipeline;
    match (pipeline.schedule, pipeline.stages_per_rank(config.mesh.pp_size)) {
        (PipelineSchedule::Gpipe, _) => ScheduleKind::GPipe,
        (PipelineSchedule::ZeroBubble, _) => ScheduleKind::ZeroBubble,
        (PipelineSchedule::OneForwardOneBackward, 1) => ScheduleKind::OneForwardOneBackward,
        (PipelineSchedule::OneForwardOneBackward, num_chunks) => ScheduleKind::Interleaved { num_chunks },
    }
}

/// A pipeline, as one of its ranks sees it.
pub(super) struct Pipeline {
    pub(super) neighbors: Arc<Neighbors>,
    schedule: ScheduleKind,
    /// The layers of this rank's stages, in the whole model.
    pub(super) stages: Vec<Range<usize>>,
    /// [`RankModel::later_input`].
    pub(super) later_input: Option<Box<dyn InputLayer>>,
    /// [`RankModel::earlier_objective`].
    pub(super) earlier_objective: Option<Box<dyn Objective>>,
    /// The names of all parameters, in the order of the whole model.
    pub(super) parameters: Vec<String>,
    /// Those that input and objective share.
    pub(super) tied: Vec<String>,
    /// Messages to send after the current pass of a schedule. `None`: all of them.
    pub(super) due: Option<DueMessages>,
}

impl Pipeline {
    /// Divides a model into stages of these layers: returns this rank's part of it.
    pub(super) fn divide(
        model: Model,
        config: &Config,
        stages: Vec<Range<usize>>,
        PipelineGroups { pp, .. }: &PipelineGroups,
        workspace: &Arc<Workspace>,
    ) -> Result<(Model, Self), EngineError> {
        let stages: Vec<_> = stages.into_iter().skip(pp.rank()).step_by(pp.world_size()).collect();
        let of_input = model.input.name().to_owned();
        let hidden_size = model.input.hidden_size().ok_or(EngineError::NoHiddenSize { input: of_input })?;
        let parameters = model.units().into_iter().flat_map(|unit| unit.parameters);
        let parameters = parameters.map(|parameter| parameter.name).collect();
        let tied = model.tied_parameters().map(|parameter| parameter.name.clone()).collect();
        let neighbors = Arc::new(Neighbors::new(pp.clone(), workspace.clone()));
        let RankModel { model, later_input, earlier_objective } =
            rank_model(model, &stages, hidden_size, &neighbors);
        let schedule = schedule_kind(config);
        let due = None;
        Ok((
            model,
            Self { neighbors, schedule, stages, later_input, earlier_objective, parameters, tied, due },
        ))
    }

    /// The passes of this rank in a step of so many micro batches, in order.
    pub(super) fn actions(&self, micro_batches: usize) -> Result<Vec<Action>, ScheduleError> {
        let (rank, ranks) = (self.neighbors.rank(), self.neighbors.num_ranks());
        Ok(self.schedule.schedule(ranks, micro_batches)?.ranks.swap_remove(rank))
    }

    /// Messages to send after each pass of a step. Empty if messages do not share one stream: then each is sent at once.
    pub(super) fn due_messages(&self, micro_batches: usize) -> Result<Vec<DueMessages>, ScheduleError> {
        if !self.neighbors.have_one_stream() {
            return Ok(Vec::new());
        }
        let schedule = self.schedule.schedule(self.neighbors.num_ranks(), micro_batches)?;
        due_messages(&schedule, self.neighbors.rank())
    }

    /// This rank's layers of one of its stages, counted from its first one.
    pub(super) fn local_layers(&self, chunk: usize) -> Range<usize> {
        let first = self.stages[..chunk].iter().map(ExactSizeIterator::len).sum();
        first..first + self.stages[chunk].len()
    }

    /// The number in the whole model of this rank's layer `index`.
    pub(super) fn layer_number(&self, index: usize) -> usize {
        self.stages.iter().cloned().flatten().nth(index).unwrap_or(index)
    }
}
