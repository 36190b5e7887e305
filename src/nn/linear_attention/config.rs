//! Sizes and kind of a linear attention.

use crate::nn::{HeadKind, Init, NumHeads};

/// The heads of a layer's linear attention, its convolution, and its kind.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinearAttentionConfig {
    /// Key heads; queries have as many. In Mamba 2 the groups of B and C.
    pub num_key_heads: usize,
    /// Value heads; a multiple of the key heads.
    pub num_value_heads: usize,
    /// Elements per key head. In Mamba 2 the size of the state.
    pub key_head_dim: usize,
    /// Elements per value head.
    pub value_head_dim: usize,
    /// Tokens that the convolution reads, including the current one.
    pub conv_width: usize,
    /// The kind.
    pub kind: LinearAttentionKind,
}

/// A kind of linear attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LinearAttentionKind {
    /// Gated DeltaNet (arXiv 2412.06464), as in Qwen3-Next and Qwen3.5.
    GatedDeltaNet,
    /// Kimi Delta Attention (arXiv 2510.26692): as many key heads as value heads, all of the same size.
    KimiDelta,
    /// Mamba 2 (arXiv 2405.21060), as in Granite 4.
    Mamba2(Mamba2Config),
}

/// Options of Mamba 2.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mamba2Config {
    /// The smallest and the largest time step.
    pub time_step_limits: [f64; 2],
    /// Initial biases of the time steps.
    pub time_step_bias: Init,
    /// Whether the convolution has a bias.
    pub conv_bias: bool,
    /// Whether the projections have biases.
    pub projection_bias: bool,
}

impl LinearAttentionConfig {
    /// The heads.
    pub fn heads(&self) -> NumHeads {
        NumHeads { q: self.num_value_heads, kv: self.num_key_heads }
    }

    /// Elements of all keys, of all queries.
    pub fn key_dim(&self) -> usize {
        self.num_key_heads * self.key_head_dim
    }

    /// Elements of all values.
    pub fn value_dim(&self) -> usize {
        self.num_value_heads * self.value_head_dim
    }

    /// The Mamba 2, if it is that.
    pub fn mamba2(&self) -> Option<&Mamba2Config> {
        match &self.kind {
            LinearAttentionKind::GatedDeltaNet | LinearAttentionKind::KimiDelta => None,
            LinearAttentionKind::Mamba2(mamba) => Some(mamba),
        }
    }

    /// Decays of a head: one, or one per channel of its keys.
    pub fn decays_per_head(&self) -> usize {
        if self.has_channel_decays() { self.key_head_dim } else { 1 }
    }

    /// Whether each channel of a head's keys has its decay.
    pub fn has_channel_decays(&self) -> bool {
        self.kind == LinearAttentionKind::KimiDelta
    }

    /// The heads of the tensors that are exchanged before the state is computed: queries, keys, values, and each head's projections
    /// for rate and decay; Mamba 2 has one for both.
    pub fn exchanged(&self) -> &'static [HeadKind] {
        use HeadKind::{Key, Value};
        match self.kind {
            LinearAttentionKind::GatedDeltaNet | LinearAttentionKind::KimiDelta => {
                &[Key, Key, Value, Value, Value]
            }
            LinearAttentionKind::Mamba2(_) => &[Key, Key, Value, Value],
        }
    }
}
