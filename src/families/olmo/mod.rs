//! OLMo 2 and 3.

mod olmo2;
mod olmo3;

pub(super) use olmo2::OLMO2;
pub(super) use olmo3::OLMO3;

use super::{HfConfig, ModelError};
use crate::nn::{AttentionConfig, QkNorm};

/// Heads with norms over all of them.
fn heads(file: &HfConfig<'_>) -> Result<AttentionConfig, ModelError> {
    Ok(AttentionConfig { qk_norm: Some(QkNorm::AllHeads), ..file.heads()? })
}
