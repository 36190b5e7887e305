//! `ulysses.pipeline`: the stages of pipeline parallelism, and the order of their passes.

use crate::config::define::words::{choice, counts};
use crate::config::define::{choices, keys};
use std::ops::Range;

keys! {
    /// Pipeline parallelism over `pipeline_parallel_size` stages.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct PipelineConfig {
        /// Order in which a stage computes the micro batches of a step. `gpipe`: all forward passes, then all backward passes;
        /// `1f1b`: a backward pass as soon as there is one, so that a stage keeps the activations of at most pp micro batches.
        pub schedule: PipelineSchedule = choice().text("1f1b"),
        /// Number of layers of each stage, in order.
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
    }
}

/// The errors of layers that cannot be divided into stages.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StagesError {
    /// A stage would have no layer.
    #[error(
        "pp is {pp} (`pipeline_parallel_size`), but the model has {num_layers} layers: expected at most {num_layers} stages"
    )]
    TooMany {
        /// Stages.
        pp: usize,
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

impl PipelineConfig {
    /// Returns the layers of each of `pp` stages as the file states them; `None` if it leaves the division open.
    ///
    /// # Errors
    /// When the layers of the model do not fill the stages.
    pub fn stated_layers(
        &self,
        pp: usize,
        num_layers: usize,
    ) -> Result<Option<Vec<Range<usize>>>, StagesError> {
        if pp > num_layers {
            return Err(StagesError::TooMany { pp, num_layers });
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
