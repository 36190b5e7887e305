//! The options of latent attention.

/// The sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), in addition to its heads. Of the `head_dim` elements of each query
/// and key, the last `rope_head_dim` rotate; all heads have those of one key.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LatentConfig {
    /// The latent of the queries; `None` if they are projected directly.
    pub q_rank: Option<usize>,
    /// The latent of keys and values.
    pub kv_rank: usize,
    /// Elements of each head that rotate; even, and fewer than the head has.
    pub rope_head_dim: usize,
    /// Elements per value head, at most as many as those of a query head.
    pub value_head_dim: usize,
    /// `mscale_all_dim` of a YaRN rotary embedding, which the factor on the logits depends on; 0 without it.
    pub mscale_all_dim: f64,
}
