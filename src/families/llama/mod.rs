//! Llama 2 to 4.

mod llama4;
mod shapes;

pub(super) use llama4::LLAMA4;

use super::{DecoderLayer, Family, HfConfig, ModelConfig, ModelError, ModelNames};

pub(super) static LLAMA: Family = Family {
    model_type: "llama",
    class: "LlamaForCausalLM",
    names: ModelNames::LLAMA,
    read,
    write: |_, _| {},
    block: |config, index| Box::new(DecoderLayer::new(config, index)),
    models: shapes::MODELS,
};

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_block()?;
    if file.get("sliding_window").is_some() {
        return Err(file.error("sliding_window", "Llama attends to the whole document: leave it out"));
    }
    let config = file.decoder(&LLAMA, file.attention()?, 1e-6)?;
    file.check_full_attention(&config)?;
    Ok(config)
}
