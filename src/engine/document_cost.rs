//! The FLOPs of a document, by which flexible sequence parallelism divides documents among the ranks.

use super::Engine;
use crate::data::DocumentCost;
use crate::model::Model;
use crate::nn::{AttentionExtent, ParameterSpec};

impl Engine {
    /// Returns the FLOPs of a document in a forward and backward pass of the model, without recomputation, by its length;
    /// `None` unless `ulysses.flexible_sp` divides documents among the ranks by them.
    pub fn document_cost(&self) -> Option<DocumentCost> {
        self.config.ulysses.flexible_sp.then(|| document_cost(&self.model))
    }
}

/// 6 FLOPs per token and weight of a matrix product, 12 per visible pair and query element of a head (two products forward,
/// four backward, 2 FLOPs per multiplication). Layers with different windows count as having the widest.
fn document_cost(model: &Model) -> DocumentCost {
    let weights = |parameters: &[ParameterSpec]| -> u64 {
        let matrices = parameters.iter().filter(|parameter| parameter.shape.len() == 2);
        matrices.map(|parameter| parameter.numel() as u64).sum()
    };
    let of_layers: u64 = model.layers.iter().map(|layer| weights(layer.parameters())).sum();
    let of_head = model.head.projection().numel() as u64;
    let extents: Vec<AttentionExtent> =
        model.layers.iter().filter_map(|layer| layer.attention_extent()).collect();
    let widths: u64 = extents.iter().map(|extent| extent.width as u64).sum();
    let windows: Option<Vec<usize>> = extents.iter().map(|extent| extent.window).collect();
    DocumentCost {
        per_token: 6 * (of_layers + of_head),
        per_pair: 12 * widths,
        window: windows.and_then(|windows| windows.into_iter().max()),
    }
}
