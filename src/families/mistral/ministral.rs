//! Ministral: Mistral with a window in some layers.

use crate::families::read::write_windows;
use crate::families::{DecoderLayer, Family, HfConfig, ModelConfig, ModelError, ModelNames};

pub(in crate::families) static MINISTRAL: Family = Family {
    model_type: "ministral",
    class: "MinistralForCausalLM",
    names: ModelNames::LLAMA,
    read,
    write: write_windows,
    block: |config, index| Box::new(DecoderLayer::new(config, index)),
    models: &[],
};

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_block()?;
    file.require_kv_heads()?;
    let config = file.decoder(&MINISTRAL, file.attention()?, 1e-6)?;
    let window = file.window_or(4096)?;
    let windowed = file.windowed_layers(config.num_layers(), |_| window.is_some())?;
    file.with_windows(config, &windowed, window, None)
}
