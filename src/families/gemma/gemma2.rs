//! Gemma 2: norms before and after every module, soft caps on the logits of attention and head, and a window in every other
//! layer (arXiv 2408.00118).

use super::{SANDWICH, read_shared, softcap, with_constants, write_shared};
use crate::families::read::write_windows;
use crate::families::{
    DecoderLayer, Family, HfConfig, KnownModel, ModelConfig, ModelError, ModelNames, Sizes,
};
use crate::nn::AttentionConfig;
use serde_json::{Value, json};

pub(in crate::families) static GEMMA2: Family = Family {
    model_type: "gemma2",
    class: "Gemma2ForCausalLM",
    names: ModelNames::LLAMA,
    read,
    write,
    block: |config, index| Box::new(DecoderLayer::with_parts(config, index, SANDWICH)),
    models: &[
        KnownModel::new("gemma-2-2b", 2_614_341_888, 8192, || published([2304, 26, 8, 4, 9216], 256, 256.0)),
        KnownModel::new("gemma-2-9b", 9_241_705_984, 8192, || {
            published([3584, 42, 16, 8, 14336], 256, 256.0)
        }),
        KnownModel::new("gemma-2-27b", 27_227_128_320, 8192, || {
            published([4608, 46, 32, 16, 36864], 128, 144.0)
        }),
    ],
};

/// The caps of all published models.
const ATTENTION_CAP: Option<f64> = Some(50.0);
const FINAL_CAP: Option<f64> = Some(30.0);

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    let layer = AttentionConfig {
        head_dim: file.optional_size("head_dim")?.unwrap_or(256),
        scale: Some(read_shared(file)?),
        softcap: softcap(file, "attn_logit_softcapping", ATTENTION_CAP)?,
        ..file.attention()?
    };
    let final_softcap = softcap(file, "final_logit_softcapping", FINAL_CAP)?;
    let config = ModelConfig { final_softcap, ..file.decoder(&GEMMA2, layer, 1e-6)? };
    let windowed = file.windowed_layers(config.num_layers(), |index| index % 2 == 0)?;
    let config = file.with_windows(config, &windowed, file.window_or(4096)?, None)?;
    Ok(with_constants(file.tied_by_default(config)))
}

fn write(config: &ModelConfig, json: &mut Value) {
    write_windows(config, json);
    write_shared(config, json);
    json["attn_logit_softcapping"] = json!(config.attention_layers().next().and_then(|layer| layer.softcap));
    json["final_logit_softcapping"] = json!(config.final_softcap);
}

fn published(sizes: Sizes, head_dim: usize, query_scalar: f64) -> ModelConfig {
    let config = ModelConfig::with_sizes(&GEMMA2, sizes).with_attention(|layer| {
        (layer.head_dim, layer.softcap) = (head_dim, ATTENTION_CAP);
        layer.scale = Some(1.0 / query_scalar.sqrt());
    });
    let config = ModelConfig {
        vocab_size: 256_000,
        rms_norm_eps: 1e-6,
        tie_word_embeddings: true,
        final_softcap: FINAL_CAP,
        ..config
    };
    let windowed: Vec<bool> = (0..config.num_layers()).map(|layer| layer % 2 == 0).collect();
    with_constants(config.with_windows(&windowed, 4096, None))
}
