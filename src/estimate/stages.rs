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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::estimate::event::Purpose;
    use crate::model::preset;
    use serde_json::json;
    use ulysses_kernels::device::DeviceKind;

    /// The plans of the stages of `nano` with four layers on four stages, with 8 micro batches of one sequence of 64 tokens.
    fn stages(schedule: &str, sp: usize) -> Vec<StagePlan> {
        let config = json!({
            "train_batch_size": 8, "gradient_accumulation_steps": 8, "pipeline_parallel_size": 4, "mesh_param": [1, sp],
            "ulysses": { "seq_len": 64, "pipeline": { "schedule": schedule } },
        });
        let config = Config::from_json_str(&config.to_string(), "c.json").unwrap();
        let model = preset("nano").unwrap().with_num_layers(4);
        let workload =
            Workload { config, model, document_len: None, ranks_per_node: 2, device: DeviceKind::Cpu };
        assert!((workload.pipeline_bubble() - 3.0 / 11.0).abs() < 1e-12);
        let plans = workload.stage_plans().unwrap();
        let largest = plans.iter().map(|stage| stage.plan.peak_bytes).max();
        assert_eq!(Some(workload.plan().unwrap().peak_bytes), largest);
        plans
    }

    #[test]
    fn a_stage_sends_hidden_states_forward_and_their_gradients_backward() {
        for sp in [1, 2] {
            let sent = stages("1f1b", sp).into_iter().map(|stage| {
                let sent = stage.plan.sent_by_purpose.get(&Purpose::PassActivations).copied();
                sent.unwrap_or_default()
            });
            let sent: Vec<_> = sent.collect();
            // 8 micro batches, 64 elements per token, in f32.
            let hidden = (8 * 64 / sp * 64 * 4) as u64;
            let totals: Vec<u64> = sent.iter().map(|sent| sent.total()).collect();
            assert_eq!(totals, [hidden, 2 * hidden, 2 * hidden, hidden], "sp {sp}");
            // Two ranks per node: without sp, pairs of stages share one.
            let within: Vec<u64> = sent.iter().map(|sent| sent.intra_node_bytes).collect();
            assert_eq!(within, [if sp == 1 { hidden } else { 0 }; 4], "sp {sp}");
        }
    }

    #[test]
    fn a_stage_has_the_micro_batches_in_memory_that_its_schedule_starts() {
        let peaks = |schedule| -> Vec<u64> {
            let plans = stages(schedule, 1).into_iter();
            plans.map(|stage| stage.plan.peak_bytes - stage.plan.persistent_bytes).collect()
        };
        let (gpipe, in_turn) = (peaks("gpipe"), peaks("1f1b"));
        // The two stages within have equal layers. By 1f1b they start 3 and 2 micro batches before the first backward pass.
        let of_micro_batch = in_turn[1] - in_turn[2];
        assert!(of_micro_batch > 64 * 64 * 4, "{in_turn:?}");
        assert_eq!(gpipe[1], gpipe[2]);
        assert!(gpipe[1] - in_turn[1] >= 4 * of_micro_batch, "{gpipe:?} and {in_turn:?}");
    }
}
