//! Hugging Face's `config.json`: typed access, the allow-list of its fields, and the rotary embedding.

mod config;
mod fields;
mod rope;

pub(crate) use config::HfConfig;
pub(super) use rope::scaling_to_hf;
