//! DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437): Llama with latent attention. Of their layers the dense ones: a model has
//! no others.

use super::latent;
use super::read::MUST_BE_GIVEN;
use super::{DecoderLayer, Family, HfConfig, ModelConfig, ModelError, ModelNames};
use serde_json::{Value, json};
use ulysses_kernels::rope::Rope;

pub(super) static DEEPSEEK_V2: Family = Family {
    model_type: "deepseek_v2",
    class: "DeepseekV2ForCausalLM",
    names: ModelNames::LLAMA,
    read: |file| read(file, &DEEPSEEK_V2, Rope { interleaved: true, ..file.rope()? }),
    write,
    block: |config, index| Box::new(DecoderLayer::new(config, index)),
    models: &[],
};

pub(super) static DEEPSEEK_V3: Family = Family {
    model_type: "deepseek_v3",
    class: "DeepseekV3ForCausalLM",
    names: ModelNames::LLAMA,
    read: |file| {
        file.require_kv_heads()?;
        read(file, &DEEPSEEK_V3, latent::interleaved(file, file.rope()?)?)
    },
    write: |config, json| {
        write(config, json);
        json["rope_interleave"] = json!(config.rope().is_none_or(|rope| rope.interleaved));
    },
    block: |config, index| Box::new(DecoderLayer::new(config, index)),
    models: &[],
};

/// The number of layers before those with experts.
const DENSE_LAYERS: &str = "first_k_dense_replace";

/// Fields of experts, which these models do not have, and of predictors of further tokens, which are not trained.
const WITHOUT_EFFECT: [&str; 18] = [
    "aux_loss_alpha",
    "ep_size",
    "moe_intermediate_size",
    "moe_layer_freq",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_experts_per_tok",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "output_router_logits",
    "routed_scaling_factor",
    "router_aux_loss_coef",
    "scoring_func",
    "seq_aux",
    "topk_group",
    "topk_method",
];

fn read(file: &HfConfig<'_>, family: &'static Family, rope: Rope) -> Result<ModelConfig, ModelError> {
    file.check_activation("hidden_act", "silu")?;
    file.accept(&WITHOUT_EFFECT);
    let layer = latent::read(file, Some(rope), file.size("v_head_dim")?)?;
    let config = file.decoder(family, layer, 1e-6)?;
    let num_layers = config.num_layers();
    if !file.has(DENSE_LAYERS) {
        return Err(file.error(DENSE_LAYERS, MUST_BE_GIVEN));
    }
    match file.size(DENSE_LAYERS)? < num_layers {
        true => {
            let expected = format!(
                "this version has no experts: all {num_layers} layers must be dense, so it must be at least {num_layers}"
            );
            Err(file.error(DENSE_LAYERS, &expected))
        }
        false => Ok(config),
    }
}

fn write(config: &ModelConfig, json: &mut Value) {
    latent::write(config, json);
    json[DENSE_LAYERS] = json!(config.num_layers());
}
