//! The sizes that a rank's step follows from.

use crate::config::Config;
use crate::engine::EngineError;
use crate::mesh::{DeviceMesh, shard_range};
use crate::model::LlamaConfig;
use crate::ulysses::{AttentionShape, ExchangePlan};

/// A group of the mesh and this rank's place in it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) ranks: usize,
    pub(super) rank: usize,
}

impl Place {
    /// That of `global_rank` along an axis that may be missing.
    pub(super) fn along(mesh: &DeviceMesh, axis: &str, global_rank: usize) -> Result<Self, EngineError> {
        if !mesh.has_axis(axis) {
            return Ok(Self { ranks: 1, rank: 0 });
        }
        Ok(Self { ranks: mesh.axis_size(axis)?, rank: mesh.coordinate_on(axis, global_rank)? })
    }
}

/// Sizes of one rank; `tokens` are those of a micro batch that it holds.
#[derive(Debug, Clone)]
pub(super) struct Dims {
    pub(super) batch: usize,
    pub(super) seq_len: usize,
    pub(super) seq_len_local: usize,
    pub(super) hidden: usize,
    pub(super) intermediate: usize,
    pub(super) vocab: usize,
    pub(super) head_dim: usize,
    pub(super) num_heads: usize,
    pub(super) num_kv_heads: usize,
    /// Query and KV heads of this rank once the exchange has sharded them.
    pub(super) num_heads_local: usize,
    pub(super) num_kv_heads_local: usize,
    pub(super) has_qkv_bias: bool,
    pub(super) has_qk_norm: bool,
    pub(super) window: Option<usize>,
    /// Tokens of a document; rows without documents are one.
    pub(super) document_len: usize,
    pub(super) loss_tile: usize,
}

impl Dims {
    pub(super) fn new(
        config: &Config,
        model: &LlamaConfig,
        document_len: Option<usize>,
        sp: Place,
    ) -> Result<(Self, ExchangePlan), EngineError> {
        let LlamaConfig { num_heads, num_kv_heads, head_dim, architecture, .. } = *model;
        let (batch, seq_len) = (config.micro_batch_size, config.require_seq_len()?);
        let shape = AttentionShape { batch, seq_len, num_heads, num_kv_heads, head_dim };
        let plan = ExchangePlan::new(shape, &model.q_to_kv(), sp.ranks, sp.rank)?;
        let seq_len_local = shard_range(seq_len, sp.ranks, sp.rank).len();
        let dims = Self {
            batch,
            seq_len,
            seq_len_local,
            hidden: model.hidden_size,
            intermediate: model.intermediate_size,
            vocab: model.vocab_size,
            head_dim,
            num_heads,
            num_kv_heads,
            num_heads_local: plan.q_head_ranges()[sp.rank].len(),
            num_kv_heads_local: plan.kv_head_ranges()[sp.rank].len(),
            has_qkv_bias: architecture.has_qkv_bias(),
            has_qk_norm: architecture.has_qk_norm(),
            window: architecture.sliding_window(),
            document_len: document_len.unwrap_or(seq_len).clamp(1, seq_len),
            loss_tile: config.loss_tile_tokens.clamp(1, batch * seq_len_local),
        };
        Ok((dims, plan))
    }

    /// Tokens of a micro batch on this rank.
    pub(super) fn tokens(&self) -> usize {
        self.batch * self.seq_len_local
    }

    /// Tokens of a micro batch on all ranks of the sp group.
    pub(super) fn all_tokens(&self) -> usize {
        self.batch * self.seq_len
    }

    /// Bytes of the positions and visible ranges of this rank's tokens.
    pub(super) fn geometry_bytes(&self) -> usize {
        size_of::<u32>() * (self.seq_len_local + 2 * self.tokens())
    }

    /// Pairs of a query and a key that it sees, over the whole micro batch, for one head.
    pub(super) fn visible_pairs(&self) -> f64 {
        let Self { batch, seq_len, document_len, .. } = *self;
        let (documents, rest) = (seq_len / document_len, seq_len % document_len);
        batch as f64 * (documents as f64 * self.pairs_of(document_len) + self.pairs_of(rest))
    }

    /// Those of one document: each token sees itself and what is before it, within the window.
    fn pairs_of(&self, len: usize) -> f64 {
        let causal = |len: usize| len as f64 * (len as f64 + 1.0) / 2.0;
        match self.window {
            Some(window) if window < len => causal(window) + (len - window) as f64 * window as f64,
            _ => causal(len),
        }
    }
}
