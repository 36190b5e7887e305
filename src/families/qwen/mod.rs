//! Qwen 2, 3, 3.5 and Next.

mod qwen2;
mod qwen3;
mod qwen3_5;
mod qwen3_next;

pub(super) use qwen2::QWEN2;
pub(super) use qwen3::QWEN3;
pub(super) use qwen3_5::QWEN3_5;
pub(super) use qwen3_next::QWEN3_NEXT;

use super::read::write_windows;
use super::{HfConfig, ModelConfig, ModelError};
use serde_json::{Value, json};

/// The windows of the layers from `max_window_layers` on, or those of `layer_types`, if `use_sliding_window` is set.
fn with_used_windows(file: &HfConfig<'_>, config: ModelConfig) -> Result<ModelConfig, ModelError> {
    if !file.flag("use_sliding_window")? {
        file.check_full_attention(&config)?;
        return Ok(config);
    }
    let window = file.size("sliding_window")?;
    let first = file.optional_size("max_window_layers")?.unwrap_or(28);
    let windowed = file.windowed_layers(config.num_layers(), |index| index >= first)?;
    Ok(config.with_windows(&windowed, window, None))
}

/// The inverse of [`with_used_windows`].
fn write_used_windows(config: &ModelConfig, json: &mut Value) {
    if config.attention_layers().any(|layer| layer.window.is_some()) {
        json["use_sliding_window"] = json!(true);
        write_windows(config, json);
    }
}
