//! Qwen3-Next without experts: as Qwen3.5, with the projections of linear attention in two parameters, by key head.

use super::qwen3_5::{read_hybrid, write as write_hybrid};
use crate::families::{DecoderLayer, DecoderParts, Family, HfConfig, ModelConfig, ModelError, ModelNames};
use crate::nn::{DeltaNetProjections, LinearAttentionProjections};
use serde_json::{Value, json};

pub(in crate::families) static QWEN3_NEXT: Family = Family {
    model_type: "qwen3_next",
    class: "Qwen3NextForCausalLM",
    names: ModelNames::LLAMA,
    read,
    write,
    block: |config, index| Box::new(DecoderLayer::with_parts(config, index, PARTS)),
    // The published models have experts.
    models: &[],
};

const PARTS: DecoderParts = DecoderParts {
    linear_attention: LinearAttentionProjections {
        delta_net: DeltaNetProjections::ByKeyHead,
        ..DecoderParts::LLAMA.linear_attention
    },
    ..DecoderParts::LLAMA
};

const NUM_EXPERTS: &str = "num_experts";
const DENSE_LAYERS: &str = "mlp_only_layers";
const WINDOWS: &str = "use_sliding_window";

/// Fields of experts, for models without any.
const EXPERT_FIELDS: [&str; 6] = [
    "moe_intermediate_size",
    "norm_topk_prob",
    "num_experts_per_tok",
    "output_router_logits",
    "router_aux_loss_coef",
    "shared_expert_intermediate_size",
];

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.accept(&EXPERT_FIELDS);
    if file.flag(WINDOWS)? {
        return Err(file.error(WINDOWS, "this version has no windows for this model_type: it must be false"));
    }
    let config = read_hybrid(file, &QWEN3_NEXT)?;
    let has_experts = file.optional_size(NUM_EXPERTS)? != Some(0);
    match first_sparse_layer(file, config.num_layers())? {
        Some(layer) if has_experts => {
            let expected = format!(
                "this version has no experts, which layer {layer} would have: it must be 0, or all layers in `{DENSE_LAYERS}`"
            );
            Err(file.error(NUM_EXPERTS, &expected))
        }
        _ => Ok(config),
    }
}

/// The first layer that has experts if the model has any: every `decoder_sparse_step`-th one, but for those that have an MLP alone.
fn first_sparse_layer(file: &HfConfig<'_>, num_layers: usize) -> Result<Option<usize>, ModelError> {
    let step = file.interval("decoder_sparse_step", 1)?;
    let dense: Option<Vec<u64>> = match file.get(DENSE_LAYERS) {
        None => Some(Vec::new()),
        Some(layers) => layers.as_array().and_then(|layers| layers.iter().map(Value::as_u64).collect()),
    };
    let dense = dense.ok_or_else(|| file.error(DENSE_LAYERS, "it must be a list of layers, from 0"))?;
    let is_sparse = |layer: &usize| (layer + 1).is_multiple_of(step) && !dense.contains(&(*layer as u64));
    Ok((0..num_layers).find(is_sparse))
}

fn write(config: &ModelConfig, json: &mut Value) {
    write_hybrid(config, json);
    json[NUM_EXPERTS] = json!(0);
}
