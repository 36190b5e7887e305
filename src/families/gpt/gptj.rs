//! GPT-J (Wang & Komatsuzaki 2021): attention and MLP side by side behind one LayerNorm; neighboring elements rotate as pairs, those
//! of a part of each head; biases in the MLP and the output projection.

use super::{read_sizes, with_layer_norm, write_sizes};
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
    let sizes @ [hidden_size, _, num_heads, ..] = read_sizes(file)?;
    let head_dim = hidden_size / num_heads;
    let rotary_dim = if file.has("rotary_dim") { file.size("rotary_dim")? } else { 64 };
    if !(2..=head_dim).contains(&rotary_dim) || !rotary_dim.is_multiple_of(2) {
        let expected = format!("it must be even, and at most n_embd / n_head = {head_dim}");
        return Err(file.error("rotary_dim", &expected));
    }
    Ok(ModelConfig {
        vocab_size: file.size("vocab_size")?,
        rms_norm_eps: file.eps("layer_norm_epsilon", 1e-5)?,
        initializer_range: file.number("initializer_range", 0.02)?,
        tie_word_embeddings: file.flag("tie_word_embeddings")?,
        ..published(sizes, rotary_dim)
    })
}

fn write(config: &ModelConfig, json: &mut Value) {
    write_sizes(config, json);
    remove_fields(json, &["partial_rotary_factor"]);
    let attention = config.attention_layers().next();
    json["rotary_dim"] = json!(attention.and_then(|layer| Some(layer.rope?.rotary_dim(layer.head_dim))));
}

fn published(sizes: Sizes, rotary_dim: usize) -> ModelConfig {
    let config = ModelConfig::with_sizes(&GPTJ, sizes).with_attention(|layer| {
        let part = rotary_dim as f64 / layer.head_dim as f64;
        layer.rope.iter_mut().for_each(|rope| (rope.partial_rotary_factor, rope.interleaved) = (part, true));
    });
    ModelConfig { head_bias: true, ..with_layer_norm(config) }
}
