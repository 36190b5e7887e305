//! The FLOPs of a model's parts, by which documents and stages are balanced.
//!
//! 6 FLOPs per token and weight of a matrix product, 12 per visible pair and query element of a head (two products forward,
//! four backward, 2 FLOPs per multiplication).

use crate::config::{Config, StagesError};
use crate::data::DocumentCost;
use crate::model::Model;
use crate::nn::{Layer, ParameterSpec};
use crate::pipeline::balanced_stages;
use std::ops::Range;

/// The FLOPs of a document in a forward and backward pass of a model, without recomputation. Layers with different windows count as
/// having the widest.
pub(super) fn document_cost(model: &Model) -> DocumentCost {
    let layers = || model.layers.iter().map(|layer| layer_cost(&**layer));
    // A chunk counts as a window of its size.
    let windows: Option<Vec<usize>> =
        layers().filter(|layer| layer.per_pair > 0).map(|layer| layer.window.or(layer.chunk)).collect();
    DocumentCost {
        per_token: layers().map(|layer| layer.per_token).sum::<u64>()
            + 6 * weights(model.objective.parameters()),
        per_pair: layers().map(|layer| layer.per_pair).sum(),
        window: windows.and_then(|windows| windows.into_iter().max()),
        chunk: None,
    }
}

fn layer_cost(layer: &dyn Layer) -> DocumentCost {
    let extent = layer.attention_extent();
    DocumentCost {
        per_token: 6 * weights(layer.parameters()),
        per_pair: extent.map_or(0, |extent| 12 * extent.width as u64),
        window: extent.and_then(|extent| extent.mask.window),
        chunk: extent.and_then(|extent| extent.mask.chunk).map(|chunk| chunk as usize),
    }
}

/// Weights of matrix products.
fn weights(parameters: &[ParameterSpec]) -> u64 {
    let matrices = parameters.iter().filter(|parameter| parameter.shape.len() == 2);
    matrices.map(|parameter| parameter.numel() as u64).sum()
}

/// Sets `ulysses.pipeline.layers_per_stage` to [`layers_of_stages`], so that the stages stay when the config changes. Nothing without
/// a pipeline.
///
/// # Errors
/// As [`layers_of_stages`].
pub fn set_stages(model: &Model, config: &mut Config) -> Result<(), StagesError> {
    let layers = layers_of_stages(model, config)?;
    if config.mesh.pp_size > 1 {
        let counts = layers.iter().map(ExactSizeIterator::len).collect();
        config.ulysses.pipeline.layers_per_stage = Some(counts);
    }
    Ok(())
}

/// Returns the layers of each pipeline stage, first stage first: as the config states them, or balanced by the FLOPs of a step.
///
/// The FLOPs of a layer are those of its matrix products, once more where they are recomputed, and of attention to whole sequences
/// of the config's longest length. The last stage also computes the loss: 8 FLOPs per token and weight, as its backward pass computes the
/// logits again. An embedding has none. The same config and model give the same stages: in a run, in its plan, and when it is resumed.
///
/// # Errors
/// When the layers of the model do not fill the stages.
pub fn layers_of_stages(model: &Model, config: &Config) -> Result<Vec<Range<usize>>, StagesError> {
    let (pp, num_layers) = (config.mesh.pp_size, model.layers.len());
    let num_stages = pp * config.ulysses.pipeline.stages_per_rank(pp);
    if let Some(stated) = config.ulysses.pipeline.stated_layers(pp, num_layers)? {
        return Ok(stated);
    }
    let seq_len = config.longest_seq_len().unwrap_or(1);
    let interval = config.ulysses.activation_checkpointing_interval as u64;
    let cost = |layer: DocumentCost| {
        let recomputed =
            if config.ulysses.activation_checkpointing { layer.per_token / 3 / interval } else { 0 };
        DocumentCost { per_token: layer.per_token + recomputed, ..layer }.flops(seq_len)
    };
    let layers: Vec<u128> = model.layers.iter().map(|layer| cost(layer_cost(&**layer))).collect();
    let of_objective = 8 * u128::from(weights(model.objective.parameters())) * seq_len as u128;
    // Rounded, so that sums of squares can be counted.
    let unit = ((layers.iter().sum::<u128>() + of_objective) >> 40).max(1);
    let rounded = |flops: u128| u64::try_from(flops / unit).unwrap_or(u64::MAX);
    let layers: Vec<u64> = layers.into_iter().map(rounded).collect();
    Ok(balanced_stages(&layers, rounded(of_objective), num_stages))
}
