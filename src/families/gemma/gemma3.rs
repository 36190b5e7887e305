//! Gemma 3, its text model: norms before and after every module with weights around 0, GeGLU, five layers with a window
//! to one without, and another rotary base for each (arXiv 2503.19786).

use super::{SANDWICH, read_shared, softcap, with_constants, write_shared};
use crate::families::read::write_windows;
use crate::families::{
    DecoderLayer, Family, HfConfig, KnownModel, ModelConfig, ModelError, ModelNames, Sizes,
};
use crate::nn::{AttentionConfig, QkNorm};
use serde_json::{Value, json};
use ulysses_kernels::rope::Rope;

pub(in crate::families) static GEMMA3: Family = Family {
    model_type: "gemma3_text",
    class: "Gemma3ForCausalLM",
    names: ModelNames::LLAMA,
    read,
    write,
    block: |config, index| Box::new(DecoderLayer::with_parts(config, index, SANDWICH)),
    models: &[
        KnownModel::new("gemma-3-270m", 268_098_176, 32_768, || published([640, 18, 4, 1, 2048])),
        KnownModel::new("gemma-3-1b", 999_885_952, 32_768, || published([1152, 26, 4, 1, 6912])),
    ],
};

/// Rotary bases of the first models.
const THETA: f64 = 1_000_000.0;
const LOCAL_THETA: f64 = 10_000.0;

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    let scale = read_shared(file)?;
    if file.get("attn_logit_softcapping").is_some() {
        let expected = "transformers does not apply it to this model_type: it must be null";
        return Err(file.error("attn_logit_softcapping", expected));
    }
    let (global, local) = file.rope_of_layer_types(THETA)?;
    let local_theta = file.number("rope_local_base_freq", LOCAL_THETA)?;
    let local = local.unwrap_or(Rope::from(local_theta));
    let layer = AttentionConfig {
        head_dim: file.optional_size("head_dim")?.unwrap_or(256),
        rope: Some(global),
        scale: Some(scale),
        qk_norm: Some(QkNorm::Head),
        ..file.heads()?
    };
    let final_softcap = softcap(file, "final_logit_softcapping", None)?;
    let config = ModelConfig { final_softcap, ..file.decoder(&GEMMA3, layer, 1e-6)? };
    let pattern = file.interval("sliding_window_pattern", 6)?;
    let windowed = file.windowed_layers(config.num_layers(), |index| (index + 1) % pattern != 0)?;
    let window = file.window_or(4096)?;
    let config = file.with_windows(config, &windowed, window, Some(local))?;
    Ok(with_constants(file.tied_by_default(config)))
}

fn write(config: &ModelConfig, json: &mut Value) {
    write_windows(config, json);
    write_shared(config, json);
    json["final_logit_softcapping"] = json!(config.final_softcap);
    let windowed = config.attention_layers().find(|layer| layer.window.is_some());
    if let Some(Some(local)) = windowed.map(|layer| layer.rope) {
        json["rope_local_base_freq"] = json!(local.theta);
    }
}

fn published(sizes: Sizes) -> ModelConfig {
    let config = ModelConfig::with_sizes(&GEMMA3, sizes).with_rope(|rope| rope.theta = THETA).with_attention(
        |layer| (layer.head_dim, layer.scale, layer.qk_norm) = (256, Some(0.0625), Some(QkNorm::Head)),
    );
    let config = ModelConfig { vocab_size: 262_144, rms_norm_eps: 1e-6, tie_word_embeddings: true, ..config };
    let windowed: Vec<bool> = (1..=config.num_layers()).map(|layer| layer % 6 != 0).collect();
    let local = Rope::from(LOCAL_THETA);
    with_constants(config.with_windows(&windowed, 512, Some(local)))
}
