//! The sizes that a rank's step follows from.

use super::event::Axis;
use crate::config::Config;
use crate::engine::EngineError;
use crate::mesh::{DeviceMesh, REPLICAS_AXIS, SHARD_AXIS, shard_range};
use crate::model::{HeadChunk, LlamaConfig, ModelError};
use crate::sequence_parallel::{AttentionShape, ExchangePlan};
use std::num::NonZero;
use ulysses_kernels::attention::grouped_heads;

/// A group of the mesh and this rank's place in it.
#[derive(Debug, Clone, Copy)]
pub(super) struct GroupPlace {
    pub(super) ranks: usize,
    pub(super) rank: usize,
}

impl GroupPlace {
    /// That of `global_rank` along an axis that may be missing.
    pub(super) fn along(mesh: &DeviceMesh, axis: &str, global_rank: usize) -> Result<Self, EngineError> {
        if !mesh.has_axis(axis) {
            return Ok(Self { ranks: 1, rank: 0 });
        }
        Ok(Self { ranks: mesh.axis_size(axis)?, rank: mesh.coordinate_on(axis, global_rank)? })
    }
}

/// A rank's place in each of its groups.
#[derive(Debug, Clone, Copy)]
pub(super) struct Places {
    pub(super) dp: GroupPlace,
    pub(super) sp: GroupPlace,
    /// Those in ZeRO's groups, partitions and replicas, where these are not dp and sp.
    hybrid: Option<(GroupPlace, GroupPlace)>,
}

impl Places {
    pub(super) fn of(config: &Config, mesh: &DeviceMesh, global_rank: usize) -> Result<Self, EngineError> {
        let along = |mesh: &DeviceMesh, axis| GroupPlace::along(mesh, axis, global_rank);
        let hybrid = match config.zero_shard_size() {
            None => None,
            Some(size) => {
                let mesh = mesh.hybrid_sharded(size)?;
                Some((along(&mesh, SHARD_AXIS)?, along(&mesh, REPLICAS_AXIS)?))
            }
        };
        Ok(Self { dp: along(mesh, "dp")?, sp: along(mesh, "sp")?, hybrid })
    }

    pub(super) fn shard_axis(&self) -> Axis {
        if self.hybrid.is_some() { Axis::Shard } else { Axis::Dp }
    }

    pub(super) fn replicas_axis(&self) -> Axis {
        if self.hybrid.is_some() { Axis::Replicas } else { Axis::Sp }
    }

    pub(super) fn shard(&self) -> GroupPlace {
        self.along(self.shard_axis())
    }

    pub(super) fn replicas(&self) -> GroupPlace {
        self.along(self.replicas_axis())
    }

    pub(super) fn along(&self, axis: Axis) -> GroupPlace {
        match axis {
            Axis::Dp => self.dp,
            Axis::Sp => self.sp,
            Axis::Shard => self.hybrid.map_or(self.dp, |(shard, _)| shard),
            Axis::Replicas => self.hybrid.map_or(self.sp, |(_, replicas)| replicas),
        }
    }
}

/// The chunks of heads, with the exchange of each on `rank` of `sp_size`.
///
/// # Errors
/// More chunks than KV heads, or fewer heads in a chunk, or fewer tokens, than ranks.
pub(in crate::engine) fn chunk_plans(
    config: &Config,
    model: &LlamaConfig,
    sp_size: usize,
    rank: usize,
) -> Result<Vec<(HeadChunk, ExchangePlan)>, EngineError> {
    let (batch, seq_len, head_dim) = (config.micro_batch_size, config.require_seq_len()?, model.head_dim);
    let (chunks, num_kv_heads) = (config.ulysses.head_chunks, model.num_kv_heads);
    if chunks == 0 || chunks > num_kv_heads {
        let layer = "model.layers.0".to_owned();
        return Err(ModelError::HeadChunks { layer, chunks, num_kv_heads }.into());
    }
    let with_plan = |chunk: HeadChunk| {
        let (num_heads, num_kv_heads) = (chunk.q.len(), chunk.kv.len());
        let shape = AttentionShape { batch, seq_len, num_heads, num_kv_heads, head_dim };
        let plan = ExchangePlan::new(shape, &grouped_heads(num_heads, num_kv_heads), sp_size, rank)?;
        Ok((chunk, plan))
    };
    model.head_chunks(chunks).into_iter().map(with_plan).collect()
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
    /// The parts in which the heads pass through attention.
    pub(super) chunks: Vec<Heads>,
    /// Tokens that norms, projections and the MLP work on at a time; all without it.
    pub(super) tile_tokens: Option<NonZero<usize>>,
    pub(super) has_qkv_bias: bool,
    pub(super) has_qk_norm: bool,
    pub(super) window: Option<usize>,
    /// Tokens of a document; rows without documents are one.
    pub(super) document_len: usize,
    pub(super) loss_tile: usize,
}

/// Some heads of every layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Heads {
    pub(super) num_heads: usize,
    pub(super) num_kv_heads: usize,
    /// Those of this rank once the exchange has sharded them.
    pub(super) num_heads_local: usize,
    pub(super) num_kv_heads_local: usize,
}

/// Tokens that are worked on at a time, and how many times as many follow one another in the same way.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tile {
    pub(super) tokens: usize,
    pub(super) times: usize,
}

impl Dims {
    pub(super) fn new(
        config: &Config,
        model: &LlamaConfig,
        document_len: Option<usize>,
        sp: GroupPlace,
    ) -> Result<(Self, Vec<ExchangePlan>), EngineError> {
        let LlamaConfig { num_heads, head_dim, architecture, .. } = *model;
        let (batch, seq_len) = (config.micro_batch_size, config.require_seq_len()?);
        let chunks = chunk_plans(config, model, sp.ranks, sp.rank)?;
        let heads = |(chunk, plan): &(HeadChunk, ExchangePlan)| Heads {
            num_heads: chunk.q.len(),
            num_kv_heads: chunk.kv.len(),
            num_heads_local: plan.q_head_ranges()[sp.rank].len(),
            num_kv_heads_local: plan.kv_head_ranges()[sp.rank].len(),
        };
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
            chunks: chunks.iter().map(heads).collect(),
            tile_tokens: config.ulysses.tile_tokens,
            has_qkv_bias: architecture.has_qkv_bias(),
            has_qk_norm: architecture.has_qk_norm(),
            window: architecture.sliding_window(),
            document_len: document_len.unwrap_or(seq_len).clamp(1, seq_len),
            loss_tile: config.ulysses.loss_tile_tokens.clamp(1, batch * seq_len_local),
        };
        Ok((dims, chunks.into_iter().map(|(_, plan)| plan).collect()))
    }

    /// Tokens of a micro batch on this rank.
    pub(super) fn tokens(&self) -> usize {
        self.batch * self.seq_len_local
    }

    /// All tokens at once.
    pub(super) fn all(&self) -> Tile {
        Tile { tokens: self.tokens(), times: 1 }
    }

    /// The tokens in tiles. The first takes from the workspace what all later ones find there, so these are alike.
    pub(super) fn tiles(&self) -> impl Iterator<Item = Tile> + use<> {
        let tokens = self.tokens();
        let tile = self.tile_tokens.map_or(tokens, NonZero::get).min(tokens);
        let whole = tokens / tile.max(1);
        let tiles = [(tile, whole.min(1)), (tile, whole.saturating_sub(1)), (tokens - whole * tile, 1)];
        tiles
            .into_iter()
            .map(|(tokens, times)| Tile { tokens, times })
            .filter(|tile| tile.tokens * tile.times > 0)
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
