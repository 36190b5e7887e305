//! The stages of a pipeline, each with the plan of its ranks.

use super::{RankClass, RankPlan, Workload};
use crate::engine::{EngineError, layers_of_stages, pipeline_bubble, pipeline_schedule};
use crate::model::Model;
use std::ops::Range;

/// The most micro batches of a drawn schedule.
const MAX_DRAWN_MICRO_BATCHES: usize = 32;

/// The plan of the ranks with the same pipeline stages.
#[derive(Debug, Clone, PartialEq)]
pub struct StagePlan {
    /// The layers of its ranks: a range for each of their virtual stages.
    pub layers: Vec<Range<usize>>,
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
        let of_row = self.rank_classes_of_row()?;
        let stage_plan = |(stage, layers): (usize, Vec<Range<usize>>)| {
            let first = stage * self.ranks_per_stage();
            let plans = of_row.iter().map(|RankClass { rank, .. }| self.plan_of(mesh.ranks()[first + rank]));
            Ok(StagePlan { layers, plan: RankPlan::largest(plans.collect::<Result<_, EngineError>>()?) })
        };
        self.layers_of_stages()?.into_iter().enumerate().map(stage_plan).collect()
    }

    /// Draws the schedule of a pipeline, with stages that take equally long; `None` without one, or if it is too wide.
    ///
    /// # Errors
    /// Micro batches that the schedule cannot divide.
    pub fn draw_schedule(&self) -> Result<Option<String>, EngineError> {
        let micro_batches = self.config.gradient_accumulation_steps;
        if self.config.mesh.pp_size == 1 || micro_batches > MAX_DRAWN_MICRO_BATCHES {
            return Ok(None);
        }
        Ok(pipeline_schedule(&self.config, micro_batches)?.draw()?)
    }

    /// Returns the layers of the pipeline's ranks: a range for each of their stages.
    fn layers_of_stages(&self) -> Result<Vec<Vec<Range<usize>>>, EngineError> {
        let layers = layers_of_stages(&Model::new(&self.model)?, &self.config).map_err(Box::new)?;
        let (pp, mut of_ranks) = (self.config.mesh.pp_size, vec![Vec::new(); self.config.mesh.pp_size]);
        layers.into_iter().enumerate().for_each(|(stage, layers)| of_ranks[stage % pp].push(layers));
        Ok(of_ranks)
    }

    /// Returns the number of ranks of a pipeline stage.
    pub(super) fn ranks_per_stage(&self) -> usize {
        self.config.mesh.dp_size * self.config.mesh.ranks_per_sequence()
    }

    /// Returns the stages by what they compute and to whom they send: stages in between with the same layers at the same place of
    /// their nodes are equal.
    pub(super) fn equal_stages(&self) -> Result<Vec<Vec<usize>>, EngineError> {
        let layers = self.layers_of_stages()?;
        let (ranks, per_node) = (self.ranks_per_stage(), self.ranks_per_node.max(1));
        let place = |stage: usize| match per_node.is_multiple_of(ranks) {
            // Whole stages: those before and after are on the same node, or on another one.
            true => {
                let node = |stage: usize| stage * ranks / per_node;
                (usize::from(node(stage) == node(stage - 1)), usize::from(node(stage) == node(stage + 1)))
            }
            false => (stage * ranks % per_node, 0),
        };
        let is_equal = |stage: usize, other: usize| {
            let is_between = |stage: usize| stage > 0 && stage + 1 < layers.len();
            let kinds = |stage: usize| layers[stage].iter().map(|layers| &self.model.layers[layers.clone()]);
            let are_between = is_between(stage) && is_between(other);
            are_between && kinds(stage).eq(kinds(other)) && place(stage) == place(other)
        };
        // Groups name single layers.
        let are_alike = self.config.ulysses.parameter_groups.is_empty();
        let mut equal: Vec<Vec<usize>> = Vec::new();
        for stage in 0..layers.len() {
            match equal.iter_mut().find(|stages| are_alike && is_equal(stage, stages[0])) {
                Some(stages) => stages.push(stage),
                None => equal.push(vec![stage]),
            }
        }
        Ok(equal)
    }

    /// Returns the share of a step in which a pipeline stage has nothing to compute, if all stages take as long for a micro batch
    /// and a forward pass as long as each half of a backward pass; 0 without a pipeline.
    pub fn pipeline_bubble(&self) -> f64 {
        pipeline_bubble(&self.config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::estimate::event::{Event, Purpose};
    use crate::model::{preset, shape};
    use crate::pipeline::Pass;
    use serde_json::json;
    use ulysses_kernels::device::DeviceKind;
    use ulysses_kernels::device::dry::MatmulOp;

    /// The plans of the stages of `nano` with four layers on four stages, with 8 micro batches of one sequence of 64 tokens.
    fn stages(schedule: &str, sp: usize) -> Vec<StagePlan> {
        let workload = pipelined(schedule, sp);
        let schedule = pipeline_schedule(&workload.config, 8).unwrap();
        assert!((workload.pipeline_bubble() - schedule.check().unwrap().idle).abs() < 1e-12);
        let plans = workload.stage_plans().unwrap();
        let largest = plans.iter().map(|stage| stage.plan.peak_bytes).max();
        assert_eq!(Some(workload.plan().unwrap().peak_bytes), largest);
        plans
    }

    fn pipelined(schedule: &str, sp: usize) -> Workload {
        let config = json!({
            "train_batch_size": 8, "gradient_accumulation_steps": 8, "pipeline_parallel_size": 4, "mesh_param": [1, sp],
            "ulysses": { "seq_len": 64, "pipeline": { "schedule": schedule } },
        });
        let config = Config::from_json_str(&config.to_string(), "c.json").unwrap();
        let model = preset("nano").unwrap().with_num_layers(4);
        Workload { config, model, document_len: None, ranks_per_node: 2, device: DeviceKind::Cpu }
    }

    fn staged(pp: usize, ulysses: serde_json::Value) -> Workload {
        let config = json!({
            "train_batch_size": 8, "gradient_accumulation_steps": 8, "pipeline_parallel_size": pp, "ulysses": ulysses,
        });
        let config = Config::from_json_str(&config.to_string(), "c.json").unwrap();
        let model = shape("llama3-8b").unwrap();
        Workload { config, model, document_len: None, ranks_per_node: 8, device: DeviceKind::Cpu }
    }

    fn counts(workload: &Workload) -> Vec<usize> {
        workload.layers_of_stages().unwrap().iter().flatten().map(ExactSizeIterator::len).collect()
    }

    #[test]
    fn the_last_stage_has_fewer_layers_by_the_loss_which_counts_less_in_long_sequences() {
        let at = |seq_len: usize| counts(&staged(4, json!({ "seq_len": seq_len })));
        // The head has as many FLOPs as three layers, at 131,072 tokens as one.
        assert_eq!((at(512), at(131_072)), (vec![9, 9, 9, 5], vec![8, 8, 8, 8]));
        let recomputed = staged(4, json!({ "seq_len": 512, "activation_checkpointing": true }));
        assert_eq!(counts(&recomputed), [9, 9, 8, 6]);
        let stated = staged(4, json!({ "seq_len": 4096, "pipeline": { "layers_per_stage": [1, 1, 1, 29] } }));
        assert_eq!(counts(&stated), [1, 1, 1, 29]);
    }

    #[test]
    fn stages_are_those_of_the_configs_longest_length_in_plans_of_any_length() {
        let longer = json!([[4, 131_072]]);
        let scheduled = staged(4, json!({ "seq_len": 4096, "seq_len_schedule": longer }));
        let (longest, short) =
            (staged(4, json!({ "seq_len": 131_072 })), staged(4, json!({ "seq_len": 4096 })));
        for workload in [&longest, &scheduled] {
            assert_eq!(counts(&workload.with_seq_len(4096)), [8, 8, 8, 8]);
        }
        assert_eq!(counts(&short.with_seq_len(131_072)), [9, 9, 8, 6]);
    }

    #[test]
    fn stages_that_compute_as_much_are_planned_once() {
        let workload = staged(8, json!({ "seq_len": 131_072 }));
        assert_eq!(counts(&workload), [4; 8]);
        assert_eq!(workload.equal_stages().unwrap(), [vec![0], (1..7).collect(), vec![7]]);
        // Two stages on each node: those in between send to the other node, or receive from it.
        let on_nodes = Workload { ranks_per_node: 2, ..workload };
        assert_eq!(on_nodes.equal_stages().unwrap(), [vec![0], vec![1, 3, 5], vec![2, 4, 6], vec![7]]);
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
        // Later stages have operands of weights' gradients in memory instead of whole micro batches.
        let zero_bubble = peaks("zero_bubble");
        assert!(zero_bubble[2] > in_turn[2] && zero_bubble[2] < gpipe[2], "{zero_bubble:?} and {in_turn:?}");
    }

    #[test]
    fn linear_weights_have_their_gradients_in_a_pass_of_their_own() {
        let workload = pipelined("zero_bubble", 1);
        let mesh = workload.mesh().unwrap();
        let step = workload.first_step(&mesh, mesh.ranks()[1]).unwrap();
        let flops = |of: Pass| -> f64 {
            let passes = step.passes.iter().filter(|pass| pass.action.pass == of);
            let events = passes.flat_map(|pass| &pass.events);
            let linear = events.filter_map(|event| match event {
                Event::Compute(work) if work.op == MatmulOp::Linear => Some(work.flops),
                _ => None,
            });
            linear.sum()
        };
        let forward = flops(Pass::Forward);
        assert!(forward > 0.0);
        assert_eq!([flops(Pass::InputBackward), flops(Pass::WeightBackward)], [forward; 2]);
    }
}
