//! The projections of self-attention, by the names of their parameters.

use crate::nn::GroupNames;

/// The projections of self-attention, by the names of their parameters.
#[derive(Debug, Clone, Copy)]
pub struct AttentionProjections {
    /// The projections of queries, keys and values.
    pub qkv: QkvNames,
    /// The projection of the output.
    pub o: &'static str,
    /// The norms of queries and keys, if there are any.
    pub qk_norms: [&'static str; 2],
    /// The sinks, if there are any.
    pub sinks: &'static str,
}

/// The parameters of the projections of queries, keys and values.
#[derive(Debug, Clone, Copy)]
pub enum QkvNames {
    /// One for each.
    Each([&'static str; 3]),
    /// One for all: all queries, then all keys, then all values.
    One(&'static str),
    /// One for all: queries, keys and values of one head after the other (GPT-NeoX).
    OneByHead(&'static str),
}

impl AttentionProjections {
    /// `q_proj`, `k_proj`, `v_proj` and `o_proj`, as in Llama.
    pub const LLAMA: Self = Self {
        qkv: QkvNames::Each(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
        o: "self_attn.o_proj",
        qk_norms: ["self_attn.q_norm", "self_attn.k_norm"],
        sinks: "self_attn.sinks",
    };

    /// As Llama, with `qkv_proj` for queries, keys and values.
    pub const FUSED: Self = Self { qkv: QkvNames::One("self_attn.qkv_proj"), ..Self::LLAMA };

    pub(super) fn qkv(self, head_dim: usize) -> GroupNames<'static, 3> {
        match self.qkv {
            QkvNames::Each(names) => GroupNames::Each(names),
            QkvNames::One(name) => GroupNames::One(name),
            QkvNames::OneByHead(name) => GroupNames::Interleaved(name, [head_dim; 3]),
        }
    }
}
