//! What the engine of a stage knows of the pipeline.

use super::EngineError;
use super::flops::layers_of_stages;
use crate::config::{Config, PipelineSchedule};
use crate::model::Model;
use crate::pipeline::{Action, Neighbors, Schedule, ScheduleError, ScheduleKind, stage_model};
use crate::zero::PipelineGroups;
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

fn schedule_kind(config: &Config) -> ScheduleKind {
    match config.ulysses.pipeline.schedule {
        PipelineSchedule::Gpipe => ScheduleKind::GPipe,
        PipelineSchedule::OneForwardOneBackward => ScheduleKind::OneForwardOneBackward,
    }
}

/// A pipeline, as one of its stages sees it.
pub(super) struct Pipeline {
    pub(super) neighbors: Arc<Neighbors>,
    schedule: ScheduleKind,
    /// The layers of this stage, in the whole model.
    pub(super) layers: Range<usize>,
    /// The names of all parameters, in the order of the whole model.
    pub(super) parameters: Vec<String>,
    /// Those that input and objective share.
    pub(super) tied: Vec<String>,
    /// Whether the next pass receives from the stage that the current one sends to: [`Neighbors::flush`].
    pub(super) pairs_messages: bool,
}

impl Pipeline {
    /// Divides a model: returns this rank's stage of it.
    pub(super) fn divide(
        model: Model,
        config: &Config,
        PipelineGroups { pp, .. }: &PipelineGroups,
        workspace: &Arc<Workspace>,
    ) -> Result<(Model, Self), EngineError> {
        let layers = layers_of_stages(&model, config).map_err(Box::new)?.swap_remove(pp.rank());
        let of_input = model.input.name().to_owned();
        let hidden_size = model.input.hidden_size().ok_or(EngineError::NoHiddenSize { input: of_input })?;
        let parameters = model.units().into_iter().flat_map(|unit| unit.parameters);
        let parameters = parameters.map(|parameter| parameter.name).collect();
        let tied = model.tied_parameters().map(|parameter| parameter.name.clone()).collect();
        let neighbors = Arc::new(Neighbors::new(pp.clone(), workspace.clone()));
        let stage = stage_model(model, layers.clone(), hidden_size, &neighbors);
        Ok((
            stage,
            Self {
                neighbors,
                schedule: schedule_kind(config),
                layers,
                parameters,
                tied,
                pairs_messages: false,
            },
        ))
    }

    /// The passes of this stage in a step of so many micro batches, in order.
    pub(super) fn actions(&self, micro_batches: usize) -> Result<Vec<Action>, ScheduleError> {
        let (stage, num_stages) = (self.neighbors.stage(), self.neighbors.num_stages());
        Ok(self.schedule.schedule(num_stages, micro_batches)?.ranks.swap_remove(stage))
    }
}
