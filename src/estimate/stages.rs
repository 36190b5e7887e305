//! The stages of a pipeline, each with the plan of its ranks.

use super::{RankPlan, Workload};
use crate::engine::EngineError;
use std::ops::Range;

/// The plan of a pipeline stage.
#[derive(Debug, Clone, PartialEq)]
pub struct StagePlan {
    /// Its layers.
    pub layers: Range<usize>,
    /// The plan of its rank that needs most memory.
    pub plan: RankPlan,
}

impl Workload {
    /// Returns the plan of each pipeline stage, first stage first: that of [`plan`](Self::plan) is the largest.
    ///
    /// # Errors
    /// As [`plan`](Self::plan), or for a model whose layers do not fill the stages.
    pub fn stage_plans(&self) -> Result<Vec<StagePlan>, EngineError> {
        let mesh = self.mesh()?;
        let pp = self.config.mesh.pp_size;
        let layers = self.config.ulysses.pipeline.layers_of_stages(pp, self.model.num_layers());
        let layers = layers.map_err(Box::new)?;
        let classes = self.rank_classes()?;
        let stage_plan = |(stage, layers): (usize, Range<usize>)| {
            let ranks = classes.iter().filter(|class| class.stage == stage);
            let plans = ranks.map(|class| self.plan_of(mesh.ranks()[class.rank]));
            Ok(StagePlan { layers, plan: RankPlan::largest(plans.collect::<Result<_, EngineError>>()?) })
        };
        layers.into_iter().enumerate().map(stage_plan).collect()
    }

    /// Returns the share of a step in which a pipeline stage has nothing to compute, if all stages take as long for a micro batch:
    /// (p − 1) / (m + p − 1) with p stages and m micro batches, for `gpipe` and `1f1b` alike. 0 for one stage.
    pub fn pipeline_bubble(&self) -> f64 {
        let (stages, micro_batches) = (self.config.mesh.pp_size, self.config.gradient_accumulation_steps);
        (stages - 1) as f64 / (micro_batches + stages - 1) as f64
    }
}
