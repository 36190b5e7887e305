//! GPT-J (Wang & Komatsuzaki 2021): attention and MLP side by side behind one LayerNorm; neighboring elements rotate as pairs, those
//! of a part of each head; biases in the MLP and the output projection.

use super::with_layer_norm;
use crate::families::read::remove_fields;
use crate::families::{
    DecoderParts, Family, HfConfig, KnownModel, ModelConfig, ModelError, ModelNames, ParallelDecoderLayer,
    Sizes,
};
use crate::nn::{AttentionProjections, BranchNorms, MlpProjections, QkvNames};
use serde_json::{Value, json};
use ulysses_kernels::glu::Activation;

pub(in crate::families) static GPTJ: Family = Family {
    model_type: "gptj",
    class: "GPTJForCausalLM",
    names: ModelNames {
        embedding: "transformer.wte.weight",
        layers: "transformer.h",
        norm: "transformer.ln_f",
        ..ModelNames::LLAMA
    },
    read,
    write,
    block: |config, index| Box::new(ParallelDecoderLayer::with_parts(config, index, PARTS)),
    models: &[KnownModel::new("gpt-j-6b", 6_050_882_784, 2048, || ModelConfig {
        vocab_size: 50_400,
        ..published([4096, 28, 16, 16, 16_384], 64)
    })],
};

const PARTS: DecoderParts = DecoderParts {
    attention_norms: BranchNorms { before: Some("ln_1"), after: None },
    mlp_norms: BranchNorms { before: None, after: None },
    attention: AttentionProjections {
        qkv: QkvNames::Each(["attn.q_proj", "attn.k_proj", "attn.v_proj"]),
        o: "attn.out_proj",
        ..AttentionProjections::LLAMA
    },
    mlp: MlpProjections::Plain(["mlp.fc_in", "mlp.fc_out"]),
    activation: Activation::GeluTanh,
    ..DecoderParts::LLAMA
};

/// Fields of a model for other tasks and of the first implementation. transformers always divides the logits of attention.
const UNUSED: [&str; 9] = [
    "n_ctx",
    "n_positions",
    "rotary",
    "scale_attn_weights",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
];

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_activation("activation_function", "gelu_new")?;
    file.accept(&UNUSED);
    let (hidden_size, num_heads) = (file.size("n_embd")?, file.size("n_head")?);
    if num_heads == 0 || !hidden_size.is_multiple_of(num_heads) {
        return Err(file.error("n_head", &format!("it must divide n_embd = {hidden_size}")));
    }
    let head_dim = hidden_size / num_heads;
    let rotary_dim = if file.has("rotary_dim") { file.size("rotary_dim")? } else { 64 };
    if !(2..=head_dim).contains(&rotary_dim) || !rotary_dim.is_multiple_of(2) {
        let expected = format!("it must be even, and at most n_embd / n_head = {head_dim}");
        return Err(file.error("rotary_dim", &expected));
    }
    let intermediate_size = file.optional_size("n_inner")?.unwrap_or(4 * hidden_size);
    let sizes = [hidden_size, file.num_layers("n_layer")?, num_heads, num_heads, intermediate_size];
    Ok(ModelConfig {
        vocab_size: file.size("vocab_size")?,
        rms_norm_eps: file.eps("layer_norm_epsilon", 1e-5)?,
        initializer_range: file.number("initializer_range", 0.02)?,
        tie_word_embeddings: file.flag("tie_word_embeddings")?,
        ..published(sizes, rotary_dim)
    })
}

fn write(config: &ModelConfig, json: &mut Value) {
    const OTHERS: [&str; 10] = [
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
        "partial_rotary_factor",
    ];
    remove_fields(json, &OTHERS);
    let attention = config.attention_layers().next();
    json["activation_function"] = json!("gelu_new");
    json["n_embd"] = json!(config.hidden_size);
    json["n_inner"] = json!(config.intermediate_size);
    json["n_layer"] = json!(config.num_layers());
    json["n_head"] = json!(attention.map(|layer| layer.num_heads));
    json["rotary_dim"] = json!(attention.and_then(|layer| Some(layer.rope?.rotary_dim(layer.head_dim))));
    json["layer_norm_epsilon"] = json!(config.rms_norm_eps);
}

fn published(sizes: Sizes, rotary_dim: usize) -> ModelConfig {
    let config = ModelConfig::with_sizes(&GPTJ, sizes).with_attention(|layer| {
        let part = rotary_dim as f64 / layer.head_dim as f64;
        layer.rope.iter_mut().for_each(|rope| (rope.partial_rotary_factor, rope.interleaved) = (part, true));
    });
    ModelConfig { head_bias: true, ..with_layer_norm(config) }
}
