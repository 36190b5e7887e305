//! GPT-2 (Radford et al. 2019): learned position embeddings, and weights `[in, out]`.

use super::{read_sizes, with_layer_norm, write_sizes};
use crate::families::{
    DecoderLayer, DecoderParts, Family, HfConfig, KnownModel, ModelConfig, ModelError, ModelNames, Sizes,
};
use crate::nn::{AttentionProjections, BranchNorms, MlpProjections, QkvNames, WeightLayout};
use serde_json::{Value, json};
use ulysses_kernels::glu::Activation;

pub(in crate::families) static GPT2: Family = Family {
    model_type: "gpt2",
    class: "GPT2LMHeadModel",
    names: ModelNames {
        embedding: "transformer.wte.weight",
        positions: "transformer.wpe.weight",
        layers: "transformer.h",
        norm: "transformer.ln_f",
        head: "lm_head.weight",
    },
    read,
    write,
    block: |config, index| Box::new(DecoderLayer::with_parts(config, index, PARTS)),
    models: &[
        KnownModel::new("gpt2", 124_439_808, 1024, || published([768, 12, 12, 12, 3072])),
        KnownModel::new("gpt2-medium", 354_823_168, 1024, || published([1024, 24, 16, 16, 4096])),
        KnownModel::new("gpt2-large", 774_030_080, 1024, || published([1280, 36, 20, 20, 5120])),
        KnownModel::new("gpt2-xl", 1_557_611_200, 1024, || published([1600, 48, 25, 25, 6400])),
    ],
};

const PARTS: DecoderParts = DecoderParts {
    attention_norms: BranchNorms { before: Some("ln_1"), after: None },
    mlp_norms: BranchNorms { before: Some("ln_2"), after: None },
    attention: AttentionProjections {
        qkv: QkvNames::One("attn.c_attn"),
        o: "attn.c_proj",
        ..AttentionProjections::LLAMA
    },
    mlp: MlpProjections::Plain(["mlp.c_fc", "mlp.c_proj"]),
    weights: WeightLayout::InOut,
    activation: Activation::GeluTanh,
    ..DecoderParts::LLAMA
};

/// Fields of a model for other tasks, and one that changes the precision of attention only.
const UNUSED: [&str; 7] = [
    "n_ctx",
    "reorder_and_upcast_attn",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
];

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_activation("activation_function", "gelu_new")?;
    file.accept(&UNUSED);
    if !file.flag_or_set("scale_attn_weights")? {
        let expected =
            "this version divides the logits of attention by the root of the head's size: it must be true";
        return Err(file.error("scale_attn_weights", expected));
    }
    if file.flag("scale_attn_by_inverse_layer_idx")? {
        let expected =
            "this version has the same factor on the logits of attention in every layer: it must be false";
        return Err(file.error("scale_attn_by_inverse_layer_idx", expected));
    }
    let config = ModelConfig {
        vocab_size: file.size("vocab_size")?,
        rms_norm_eps: file.eps("layer_norm_epsilon", 1e-5)?,
        learned_positions: Some(file.size("n_positions")?),
        initializer_range: file.number("initializer_range", 0.02)?,
        tie_word_embeddings: file.flag("tie_word_embeddings")?,
        ..published(read_sizes(file)?)
    };
    Ok(file.tied_by_default(config))
}

fn write(config: &ModelConfig, json: &mut Value) {
    write_sizes(config, json);
    json["n_positions"] = json!(config.learned_positions.unwrap_or(1024));
}

fn published(sizes: Sizes) -> ModelConfig {
    let config = ModelConfig::with_sizes(&GPT2, sizes)
        .with_attention(|layer| (layer.rope, layer.qkv_bias, layer.o_bias) = (None, true, true));
    ModelConfig {
        vocab_size: 50_257,
        learned_positions: Some(1024),
        tie_word_embeddings: true,
        ..with_layer_norm(config)
    }
}
