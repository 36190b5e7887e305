//! The layers of the tensor-parallel ranks, whose heads head chunks and the exchange divide further.

use crate::config::Config;
use crate::engine::{EngineError, divide_model};
use crate::model::{Model, ModelConfig};
use crate::nn::{AttentionConfig, LayerError, MixerConfig, TensorRank};

/// Checks that each tensor-parallel rank can have a part of every layer, and that the plan of the config divides it so.
///
/// # Errors
/// A model that cannot be divided over so many ranks; the error names the layer and the valid sizes. A plan that differs.
pub fn check_tensor_parallel(model: &ModelConfig, config: &Config) -> Result<(), EngineError> {
    let (plan, size) = (&config.tensor_parallel.partition_config.layer_specs, config.mesh.tp_size);
    divide_model(Model::new(model)?, plan, TensorRank { size, rank: 0 })?;
    Ok(())
}

/// Returns the layers of a model that differ, for each tensor-parallel rank with the heads that it has.
///
/// # Errors
/// Heads that cannot be divided over so many ranks.
pub(super) fn mixers_of_tp_ranks(
    model: &ModelConfig,
    size: usize,
) -> Result<Vec<Vec<MixerConfig>>, LayerError> {
    let layers = model.distinct_layers();
    if size == 1 {
        return Ok(vec![layers]);
    }
    let of_rank = |rank| {
        let divided = |layer: &MixerConfig| {
            let index = model.layers.iter().position(|known| known == layer).unwrap_or(0);
            layer.divided(&model.layer_name(index), TensorRank { size, rank })
        };
        layers.iter().map(divided).collect()
    };
    (0..size).map(of_rank).collect()
}

/// Returns the attention of the layers of a model that differ, for each tensor-parallel rank with the heads that it has.
///
/// # Errors
/// Heads that cannot be divided over so many ranks.
pub fn layers_of_tp_ranks(model: &ModelConfig, size: usize) -> Result<Vec<Vec<AttentionConfig>>, LayerError> {
    let attention =
        |layers: Vec<MixerConfig>| layers.iter().filter_map(MixerConfig::attention).copied().collect();
    Ok(mixers_of_tp_ranks(model, size)?.into_iter().map(attention).collect())
}
