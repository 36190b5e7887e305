//! Qwen2 and 2.5: Llama with biases on the projections of queries, keys and values, and windows in the upper layers.

use super::read::write_windows;
use super::{DecoderLayer, Family, HfConfig, KnownModel, ModelConfig, ModelError};
use serde_json::{Value, json};

pub(super) static QWEN2: Family = Family {
    model_type: "qwen2",
    class: "Qwen2ForCausalLM",
    read,
    write: write_used_windows,
    block: |config, index| Box::new(DecoderLayer::new(config, index).with_qkv_bias()),
    models: &[KnownModel::new("Qwen2.5-7B", 7_615_616_512, 131_072, qwen2_5_7b)],
};

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_block()?;
    file.require_kv_heads()?;
    let mut config = file.decoder(&QWEN2, file.attention()?)?;
    read_used_windows(file, &mut config)?;
    Ok(config)
}

/// The windows of the layers from `max_window_layers` on, or those of `layer_types`, if `use_sliding_window` is set.
pub(super) fn read_used_windows(file: &HfConfig<'_>, config: &mut ModelConfig) -> Result<(), ModelError> {
    if !file.flag("use_sliding_window")? {
        return file.check_full_attention(config);
    }
    let window = file.size("sliding_window")?;
    let first = file.optional_size("max_window_layers")?.unwrap_or(28);
    let windowed = file.windowed_layers(config.num_layers(), |index| index >= first)?;
    for (layer, _) in config.layers.iter_mut().zip(windowed).filter(|(_, windowed)| *windowed) {
        layer.window = Some(window);
    }
    Ok(())
}

/// The inverse of [`read_used_windows`].
pub(super) fn write_used_windows(config: &ModelConfig, json: &mut Value) {
    if config.layers.iter().any(|layer| layer.window.is_some()) {
        json["use_sliding_window"] = json!(true);
        write_windows(config, json);
    }
}

fn qwen2_5_7b() -> ModelConfig {
    let config = ModelConfig::with_sizes(&QWEN2, [3584, 28, 28, 4, 18944]);
    let config = config.with_rope(|rope| rope.theta = 1_000_000.0);
    ModelConfig { vocab_size: 152_064, rms_norm_eps: 1e-6, ..config }
}
