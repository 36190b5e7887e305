//! LFM2 (Liquid AI, arXiv 2511.23404; dense): gated short convolutions, and attention with norms over heads in some layers.

use super::read::{remove_fields, write_layer_types};
use super::{
    DecoderLayer, DecoderParts, Family, HfConfig, KnownModel, ModelConfig, ModelError, ModelNames, Sizes,
};
use crate::nn::{
    AttentionConfig, AttentionProjections, BranchNorms, MixerConfig, MlpProjections, QkNorm, ShortConvConfig,
};
use serde_json::{Value, json};

pub(super) static LFM2: Family = Family {
    model_type: "lfm2",
    class: "Lfm2ForCausalLM",
    names: ModelNames { norm: "model.embedding_norm", ..ModelNames::LLAMA },
    read,
    write,
    block: |config, index| Box::new(DecoderLayer::with_parts(config, index, PARTS)),
    models: &[
        KnownModel::new("LFM2-350M", 354_483_968, MAX_POSITIONS, || {
            published([1024, 16, 16, 8, 4608], &FIRST)
        }),
        KnownModel::new("LFM2-700M", 742_489_344, MAX_POSITIONS, || {
            published([1536, 16, 24, 8, 6912], &FIRST)
        }),
        KnownModel::new("LFM2-1.2B", 1_170_340_608, MAX_POSITIONS, || {
            published([2048, 16, 32, 8, 8192], &FIRST)
        }),
        KnownModel::new("LFM2-2.6B", 2_569_272_320, MAX_POSITIONS, || {
            published([2048, 30, 32, 8, 10752], &[2, 5, 9, 13, 17, 21, 24, 27])
        }),
    ],
};

const PARTS: DecoderParts = DecoderParts {
    attention_norms: BranchNorms { before: Some("operator_norm"), after: None },
    mlp_norms: BranchNorms { before: Some("ffn_norm"), after: None },
    attention: AttentionProjections {
        o: "self_attn.out_proj",
        qk_norms: ["self_attn.q_layernorm", "self_attn.k_layernorm"],
        ..AttentionProjections::LLAMA
    },
    mlp: MlpProjections::Gated(["feed_forward.w1", "feed_forward.w3", "feed_forward.w2"]),
    ..DecoderParts::LLAMA
};

const CONV: &str = "conv";
const MAX_POSITIONS: usize = 128_000;
const THETA: f64 = 1_000_000.0;

/// The layers with attention of the first models.
const FIRST: [usize; 6] = [2, 5, 8, 10, 12, 14];

/// Fields of published models that transformers does not read: other names of sizes, initial values, and the training program.
const WITHOUT_EFFECT: [&str; 19] = [
    "block__name_mlp",
    "block_dim",
    "block_ffn_te_autocast",
    "block_ffn_use_quantized_params",
    "block_mlp_init_scale",
    "block_norm_eps",
    "block_out_init_scale",
    "block_sequence_parallel_norm_across_tp",
    "block_use_swiglu",
    "block_use_xavier_init",
    "conv_dim",
    "conv_dim_out",
    "conv_use_xavier_init",
    "ffn_te_autocast",
    "ffn_use_quantized_params",
    "num_heads",
    "sequence_parallel_norm_across_tp",
    "theta",
    "use_pos_enc",
];

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_block()?;
    file.require_kv_heads()?;
    file.accept(&WITHOUT_EFFECT);
    let layer = AttentionConfig {
        rope: Some(file.rope_with_default(THETA)?),
        qk_norm: Some(QkNorm::Head),
        ..file.heads()?
    };
    let [hidden_size, vocab_size] = [file.size("hidden_size")?, file.size("vocab_size")?];
    let num_layers = file.num_layers("num_hidden_layers")?;
    let conv = ShortConvConfig {
        channels: hidden_size,
        taps: file.optional_size("conv_L_cache")?.unwrap_or(3),
        bias: file.flag("conv_bias")?,
    };
    let sizes = [hidden_size, num_layers, layer.num_heads, layer.num_kv_heads, intermediate_size(file)?];
    let config = ModelConfig::with_sizes(&LFM2, sizes)
        .with_attention(|attention| *attention = layer)
        .with_mixer(conv_layers(file, num_layers)?, conv);
    let [first, second] = ["tie_word_embeddings", "tie_embedding"].map(|key| (file.has(key), file.flag(key)));
    Ok(ModelConfig {
        vocab_size,
        rms_norm_eps: file.eps("norm_eps", 1e-5)?,
        initializer_range: file.number("initializer_range", 0.02)?,
        // The second name counts if both are there.
        tie_word_embeddings: match (first, second) {
            (_, (true, tied)) | ((true, tied), _) => tied?,
            _ => true,
        },
        ..config
    })
}

/// The width of the MLP: what the file says or, unless it says that it is exact, two thirds of it, times a factor and rounded up.
fn intermediate_size(file: &HfConfig<'_>) -> Result<usize, ModelError> {
    let stated = match file.optional_size("block_ff_dim")? {
        Some(stated) => {
            file.accept(&["intermediate_size"]);
            stated
        }
        None => file.size("intermediate_size")?,
    };
    let multiple = file.interval("block_multiple_of", 256)?;
    let factor = match file.has("block_ffn_dim_multiplier") && file.get("block_ffn_dim_multiplier").is_none()
    {
        true => None,
        false => Some(file.number("block_ffn_dim_multiplier", 1.0)?),
    };
    if !file.flag_or_set("block_auto_adjust_ff_dim")? {
        return Ok(stated);
    }
    let two_thirds = stated.saturating_mul(2) / 3;
    Ok(factor.map_or(two_thirds, |factor| {
        ((factor * two_thirds as f64) as usize).div_ceil(multiple).saturating_mul(multiple)
    }))
}

/// Which layers have a convolution: by `layer_types`, or else all but those of `full_attn_idxs`, or none.
fn conv_layers(file: &HfConfig<'_>, num_layers: usize) -> Result<Vec<bool>, ModelError> {
    const ATTENTION: &str = "full_attn_idxs";
    if let Some(types) = file.layers_of_type(&[CONV], num_layers)? {
        file.accept(&[ATTENTION]);
        return Ok(types);
    }
    let Some(list) = file.get(ATTENTION) else { return Ok(vec![false; num_layers]) };
    let indices: Option<Vec<u64>> =
        list.as_array().and_then(|indices| indices.iter().map(Value::as_u64).collect());
    let indices =
        indices.ok_or_else(|| file.error(ATTENTION, "it must be a list of the layers with attention"))?;
    Ok((0..num_layers as u64).map(|layer| !indices.contains(&layer)).collect())
}

fn write(config: &ModelConfig, json: &mut Value) {
    remove_fields(json, &["rms_norm_eps"]);
    write_layer_types(config, json, CONV);
    json["norm_eps"] = json!(config.rms_norm_eps);
    json["block_auto_adjust_ff_dim"] = json!(false);
    if let Some(conv) = config.layers.iter().find_map(MixerConfig::short_conv) {
        json["conv_L_cache"] = json!(conv.taps);
        json["conv_bias"] = json!(conv.bias);
    }
}

fn published(sizes: Sizes, attention: &[usize]) -> ModelConfig {
    let conv = ShortConvConfig { channels: sizes[0], taps: 3, bias: false };
    let is_conv = (0..sizes[1]).map(|layer| !attention.contains(&layer));
    let config = ModelConfig::with_sizes(&LFM2, sizes)
        .with_attention(|layer| layer.qk_norm = Some(QkNorm::Head))
        .with_rope(|rope| rope.theta = THETA)
        .with_mixer(is_conv, conv);
    ModelConfig { vocab_size: 65_536, tie_word_embeddings: true, ..config }
}
