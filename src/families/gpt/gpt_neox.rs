//! GPT-NeoX (arXiv 2204.06745) and Pythia: attention and MLP side by side, each behind its own norm; a part of each head rotates;
//! queries, keys and values of a head are adjacent in one parameter.

use super::with_layer_norm;
use crate::families::read::remove_fields;
use crate::families::{
    DecoderParts, Family, HfConfig, KnownModel, ModelConfig, ModelError, ModelNames, ParallelDecoderLayer,
    Sizes,
};
use crate::nn::{AttentionProjections, MlpProjections, QkvNames};
use serde_json::{Value, json};
use ulysses_kernels::glu::Activation;

pub(in crate::families) static GPT_NEOX: Family = Family {
    model_type: "gpt_neox",
    class: "GPTNeoXForCausalLM",
    names: ModelNames {
        embedding: "gpt_neox.embed_in.weight",
        layers: "gpt_neox.layers",
        norm: "gpt_neox.final_layer_norm",
        head: "embed_out.weight",
        ..ModelNames::LLAMA
    },
    read,
    write,
    block: |config, index| Box::new(ParallelDecoderLayer::with_parts(config, index, PARTS)),
    models: &[
        KnownModel::new("pythia-70m", 70_426_624, 2048, || published([512, 6, 8, 8, 2048], 50_304)),
        KnownModel::new("pythia-160m", 162_322_944, 2048, || published([768, 12, 12, 12, 3072], 50_304)),
        KnownModel::new("pythia-410m", 405_334_016, 2048, || published([1024, 24, 16, 16, 4096], 50_304)),
        KnownModel::new("pythia-1b", 1_011_781_632, 2048, || published([2048, 16, 8, 8, 8192], 50_304)),
        KnownModel::new("pythia-1.4b", 1_414_647_808, 2048, || published([2048, 24, 16, 16, 8192], 50_304)),
        KnownModel::new("pythia-2.8b", 2_775_208_960, 2048, || published([2560, 32, 32, 32, 10240], 50_304)),
        KnownModel::new("pythia-6.9b", 6_857_302_016, 2048, || published([4096, 32, 32, 32, 16384], 50_432)),
        KnownModel::new("pythia-12b", 11_846_072_320, 2048, || published([5120, 36, 40, 40, 20480], 50_688)),
    ],
};

const PARTS: DecoderParts = DecoderParts {
    attention: AttentionProjections {
        qkv: QkvNames::OneByHead("attention.query_key_value"),
        o: "attention.dense",
        ..AttentionProjections::LLAMA
    },
    mlp: MlpProjections::Plain(["mlp.dense_h_to_4h", "mlp.dense_4h_to_h"]),
    activation: Activation::Gelu,
    ..DecoderParts::LLAMA
};

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_activation("hidden_act", "gelu")?;
    file.accept(&["classifier_dropout"]);
    if !file.flag_or_set("use_parallel_residual")? {
        let expected = "this version computes attention and MLP side by side here: it must be true";
        return Err(file.error("use_parallel_residual", expected));
    }
    for key in ["rope_theta", "partial_rotary_factor"] {
        if file.get(key).is_some() {
            return Err(file.error(key, "this model_type has `rotary_emb_base` and `rotary_pct` instead"));
        }
    }
    let rope =
        file.partial_rope(file.number("rotary_emb_base", 10_000.0)?, file.number("rotary_pct", 0.25)?)?;
    let bias = file.flag_or_set("attention_bias")?;
    let (hidden_size, num_heads) = (file.size("hidden_size")?, file.size("num_attention_heads")?);
    if num_heads == 0 || !hidden_size.is_multiple_of(num_heads) {
        return Err(file.error("num_attention_heads", &format!("it must divide hidden_size = {hidden_size}")));
    }
    let num_layers = file.num_layers("num_hidden_layers")?;
    let sizes = [hidden_size, num_layers, num_heads, num_heads, file.size("intermediate_size")?];
    let config = published(sizes, file.size("vocab_size")?)
        .with_attention(|layer| (layer.rope, layer.qkv_bias, layer.o_bias) = (Some(rope), bias, bias));
    Ok(ModelConfig {
        rms_norm_eps: file.eps("layer_norm_eps", 1e-5)?,
        initializer_range: file.number("initializer_range", 0.02)?,
        tie_word_embeddings: file.flag("tie_word_embeddings")?,
        ..config
    })
}

fn write(config: &ModelConfig, json: &mut Value) {
    const OTHERS: [&str; 5] =
        ["num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "partial_rotary_factor"];
    remove_fields(json, &OTHERS);
    json["hidden_act"] = json!("gelu");
    json["layer_norm_eps"] = json!(config.rms_norm_eps);
    json["attention_bias"] = json!(config.attention_layers().next().is_some_and(|layer| layer.o_bias));
    if let Some(rope) = config.rope() {
        json["rotary_emb_base"] = json!(rope.theta);
        json["rotary_pct"] = json!(rope.partial_rotary_factor);
    }
}

fn published(sizes: Sizes, vocab_size: usize) -> ModelConfig {
    let config = ModelConfig::with_sizes(&GPT_NEOX, sizes)
        .with_attention(|layer| (layer.qkv_bias, layer.o_bias) = (true, true))
        .with_rope(|rope| rope.partial_rotary_factor = 0.25);
    ModelConfig { vocab_size, ..with_layer_norm(config) }
}
