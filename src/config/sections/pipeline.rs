//! `ulysses.pipeline`: the stages of pipeline parallelism, and the order of their passes.

use crate::config_file::define::words::{choice, count, counts};
use crate::config_file::define::{choices, keys};
use std::ops::Range;

keys! {
    /// Pipeline parallelism over `pipeline_parallel_size` stages.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct PipelineConfig {
        /// Order in which a stage computes the micro batches of a step. `gpipe`: all forward passes, then all backward passes;
        /// `1f1b`: a backward pass as soon as there is one, so that a stage keeps the activations of at most pp micro batches;
        /// `zero_bubble` (ZB-H1): as `1f1b`, but the gradients of the weights of linear layers are computed where a stage would
        /// wait. Their operands are copied, once per head chunk, and with ZeRO stage 2 or 3 a layer keeps its whole gradient until then.
        pub schedule: PipelineSchedule = choice().text("1f1b"),
        /// Stages of each rank of pp (Megatron-LM's virtual pipeline stages). With several, `1f1b` is interleaved: a rank waits for
        /// a shorter part of the model at the begin and the end of a step, and sends as many times more messages.
        pub virtual_stages: usize = count().integer(1),
        /// Number of layers of each stage, in order: pp × `virtual_stages` of them, of which rank r has the stages r, r + pp, ….
        pub layers_per_stage: Option<Vec<usize>> =
            counts().derived("those for which the slowest stage has the fewest FLOPs, with the loss, at the longest `ulysses.seq_len`"),
    }
}

choices! {
    /// Order of the forward and backward passes of a pipeline stage.
    pub enum PipelineSchedule {
        /// All forward passes of a step, then all backward passes.
        Gpipe = "gpipe",
        /// After a warm-up, one forward pass and one backward pass in turn.
        #[default]
        OneForwardOneBackward = "1f1b",
        /// As that, with the gradients of weights computed where a stage would wait.
        ZeroBubble = "zero_bubble",
    }
}

/// The errors of layers that cannot be divided into stages.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StagesError {
    /// A stage would have no layer.
    #[error(
        "pp is {pp} (`pipeline_parallel_size`){}, but the model has {num_layers} layers: expected at most {num_layers} stages",
        stages_of_each(*virtual_stages)
    )]
    TooMany {
        /// Ranks of the pipeline.
        pp: usize,
        /// Stages of each.
        virtual_stages: usize,
        /// Layers of the model.
        num_layers: usize,
    },
    /// The stages have more or fewer layers than the model.
    #[error(
        "`ulysses.pipeline.layers_per_stage` has {stated} layers in all, but the model has {num_layers}: the counts must add up \
         to that"
    )]
    OtherLayers {
        /// Layers of the stages.
        stated: usize,
        /// Layers of the model.
        num_layers: usize,
    },
}

/// Names the number of stages of each rank, if there are several.
pub(in crate::config) fn stages_of_each(virtual_stages: usize) -> String {
    match virtual_stages {
        1 => String::new(),
        _ => format!(" with {virtual_stages} stages each (`ulysses.pipeline.virtual_stages`)"),
    }
}

impl PipelineConfig {
    /// Returns a note on each key that has no effect with `pp` ranks.
    pub(crate) fn notes(&self, pp: usize) -> impl Iterator<Item = String> + use<> {
        let keys = [
            ("layers_per_stage", self.layers_per_stage.is_some()),
            ("virtual_stages", self.virtual_stages > 1),
        ];
        let without_effect = keys.into_iter().filter(move |(_, is_set)| pp == 1 && *is_set);
        without_effect.map(|(key, _)| format!("`ulysses.pipeline.{key}` has no effect: pp is 1"))
    }

    /// Returns the number of stages of each of `pp` ranks.
    pub fn stages_per_rank(&self, pp: usize) -> usize {
        if pp == 1 { 1 } else { self.virtual_stages }
    }

    /// Returns the layers of each stage of `pp` ranks as the file states them; `None` if it leaves the division open.
    ///
    /// # Errors
    /// When the layers of the model do not fill the stages.
    pub fn stated_layers(
        &self,
        pp: usize,
        num_layers: usize,
    ) -> Result<Option<Vec<Range<usize>>>, StagesError> {
        let virtual_stages = self.stages_per_rank(pp);
        if pp.saturating_mul(virtual_stages) > num_layers {
            return Err(StagesError::TooMany { pp, virtual_stages, num_layers });
        }
        // One stage has all layers; the config notes that the counts have no effect.
        let Some(counts) = self.layers_per_stage.as_ref().filter(|_| pp > 1) else { return Ok(None) };
        let stated = counts.iter().fold(0_usize, |sum, count| sum.saturating_add(*count));
        if stated != num_layers {
            return Err(StagesError::OtherLayers { stated, num_layers });
        }
        let layers = counts.iter().scan(0, |first, count| {
            *first += count;
            Some(*first - count..*first)
        });
        Ok(Some(layers.collect()))
    }
}
