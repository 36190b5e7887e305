//! OLMo 3: OLMo 2 with windows in three of four layers, whose positions are not scaled.

use super::heads;
use crate::families::hf::{FULL, WINDOWED};
use crate::families::read::write_windows;
use crate::families::{
    DecoderLayer, DecoderParts, Family, HfConfig, KnownModel, ModelConfig, ModelError, ModelNames,
};
use crate::nn::{AttentionConfig, QkNorm};
use serde_json::{Value, json};
use ulysses_kernels::rope::{Rope, Scaling};

pub(in crate::families) static OLMO3: Family = Family {
    model_type: "olmo3",
    class: "Olmo3ForCausalLM",
    names: ModelNames::LLAMA,
    read,
    write,
    block: |config, index| Box::new(DecoderLayer::with_parts(config, index, DecoderParts::NORMS_AFTER)),
    models: &[KnownModel::new("Olmo-3-1025-7B", 7_298_011_136, 65_536, olmo3_7b)],
};

const THETA: f64 = 500_000.0;

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_block()?;
    let (full, windowed_rope) = file.rope_of_layer_types(THETA)?;
    if windowed_rope.is_none() && full.theta != THETA {
        let expected = "versions of transformers differ in what it means for layers with a window: use rope_parameters by layer type";
        return Err(file.error("rope_theta", expected));
    }
    let windowed_rope = windowed_rope.unwrap_or(Rope::from(THETA));
    let config = file.decoder(&OLMO3, AttentionConfig { rope: Some(full), ..heads(file)? }, 1e-5)?;
    let windowed = file.windowed_layers(config.num_layers(), |index| (index + 1) % 4 != 0)?;
    file.with_windows(config, &windowed, file.window_or(4096)?, Some(windowed_rope))
}

fn write(config: &ModelConfig, json: &mut Value) {
    write_windows(config, json);
    // The scaling of the others is in `rope_scaling`, which is merged.
    let theta = |rope: Option<Rope>| json!({ "rope_type": "default", "rope_theta": rope.map_or(THETA, |rope| rope.theta) });
    let windowed = config.attention_layers().find(|layer| layer.window.is_some());
    json["rope_parameters"] =
        json!({ FULL: theta(config.rope()), WINDOWED: theta(windowed.and_then(|layer| layer.rope)) });
}

fn olmo3_7b() -> ModelConfig {
    let original_len = 8192;
    let attention_factor = 0.1 * 8.0f64.ln() + 1.0;
    let scaling = Scaling::Yarn {
        factor: 8.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: true,
        attention_factor,
        original_len,
    };
    let config = ModelConfig::with_sizes(&OLMO3, [4096, 32, 32, 32, 11008])
        .with_attention(|layer| layer.qk_norm = Some(QkNorm::AllHeads))
        .with_rope(|rope| *rope = Rope { scaling, ..THETA.into() });
    let config = ModelConfig { vocab_size: 100_278, rms_norm_eps: 1e-6, ..config };
    let windowed: Vec<bool> = (1..=32).map(|layer| layer % 4 != 0).collect();
    config.with_windows(&windowed, 4096, Some(Rope::from(THETA)))
}
