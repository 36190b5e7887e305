//! EXAONE 4: norms after the modules, and over each head of queries and keys; layers with a window rotate, the others have no
//! position embedding if there are windows (arXiv 2507.11407).

use super::read::write_windows;
use super::{DecoderLayer, DecoderParts, Family, HfConfig, ModelConfig, ModelError, ModelNames};
use crate::nn::{AttentionConfig, QkNorm};
use serde_json::{Value, json};

pub(super) static EXAONE4: Family = Family {
    model_type: "exaone4",
    class: "Exaone4ForCausalLM",
    names: ModelNames::LLAMA,
    read,
    write,
    block: |config, index| Box::new(DecoderLayer::with_parts(config, index, DecoderParts::NORMS_AFTER)),
    models: &[],
};

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_block()?;
    file.require_kv_heads()?;
    let layer = AttentionConfig { qk_norm: Some(QkNorm::Head), ..file.attention()? };
    let config = file.decoder(&EXAONE4, layer, 1e-5)?;
    // Without a window, the number of layers between those without one has no effect.
    let Some(window) = file.window_or(4096)? else {
        file.accept(&["sliding_window_pattern"]);
        file.check_full_attention(&config)?;
        return Ok(config);
    };
    let pattern = match file.has("layer_types") {
        true => {
            file.accept(&["sliding_window_pattern"]);
            4
        }
        false => file.interval("sliding_window_pattern", 4)?,
    };
    let windowed = file.windowed_layers(config.num_layers(), |index| (index + 1) % pattern != 0)?;
    Ok(config.with_windows(&windowed, window, None).with_attention(|layer| {
        if layer.window.is_none() {
            layer.rope = None;
        }
    }))
}

fn write(config: &ModelConfig, json: &mut Value) {
    write_windows(config, json);
    if config.rope().is_none() {
        // Any window: no layer has it.
        json["sliding_window"] = json!(4096);
    }
}
