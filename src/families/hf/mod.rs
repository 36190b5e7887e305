//! Hugging Face's `config.json`: typed access, the allow-list of its fields, the rotary embedding, and language
//! models within larger ones.

mod config;
mod fields;
mod rope;
mod wrapper;

pub(crate) use config::{FULL, HfConfig, WINDOWED};
pub(crate) use rope::QUERY_GROWTH;
pub(super) use rope::{rope_to_hf, scaling_to_hf};
pub(crate) use wrapper::{language_model, language_model_name};
