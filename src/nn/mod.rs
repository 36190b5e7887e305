//! Layers of models, and the modules that they are composed of, with hand-written backward passes.
//!
//! - [`Layer`]: the trait that the engine calls; [`AutogradLayer`] runs any block written with candle ops.
//! - [`ParameterList`]: the parameters of a layer. A module keeps a [`Parameter`] for each of its own.
//! - [`Linear`], [`Norm`], [`SelfAttention`], [`LatentAttention`], [`LinearAttention`], [`ShortConv`], [`Mlp`]: the modules of a block;
//!   a [`Branch`] joins one to the residual stream. A [`TokenMixer`] is one of those that mix tokens.
//! - [`HeadExchange`]: tokens for heads, and back, around a module that reads whole sequences.
//! - [`InputLayer`]: what comes before the layers, an [`Embedding`], also with [`LearnedPositions`], or [`Features`] of the
//!   [`LocalBatch`].
//! - [`LayerContext`]: the micro batch, and the services that a layer may use.
//!
//! The engine owns parameters and gradients; layers get views of them. This module does not communicate:
//! [`Attention`](ulysses_kernels::attention::Attention), [`HeadExchange`], [`ShardChain`] and, with tensor parallelism, [`TokenExchange`]
//! hide the other ranks.

mod attention;
mod attention_node;
mod autograd;
mod batch;
mod block_context;
mod branch;
mod causal_conv;
mod columns;
mod context;
mod deferred;
mod embedding;
mod error;
mod head_exchange;
mod heads;
mod input;
mod latent_attention;
mod layer;
mod learned_positions;
mod linear;
mod linear_attention;
mod mlp;
mod norm;
mod parameters;
mod projection;
mod shard;
mod short_conv;
mod sum_node;
mod tensor_parallel;
#[cfg(test)]
pub(crate) mod tests;
mod token_mixer;

pub use attention::{
    AttentionConfig, AttentionProjections, AttentionSaved, LatentConfig, QkNorm, QkvNames, Saves,
    SelfAttention,
};
pub use attention_node::autograd_attention;
pub(crate) use autograd::AutogradGraph;
pub use autograd::AutogradLayer;
pub use batch::LocalBatch;
pub use block_context::BlockContext;
pub(crate) use branch::recycle_unless;
pub use branch::{Branch, BranchGradients, BranchInput, BranchNorms};
pub use context::{AttentionMask, LayerContext, Tiling, TokenLayout};
pub use deferred::DeferredGradients;
pub use embedding::Embedding;
pub use error::LayerError;
pub use head_exchange::{ExchangedHeads, Gathered, HeadExchange, HeadKind, HeadTransfer};
pub use heads::{HeadDivision, HeadRanges, Heads, NumHeads};
pub use input::{Features, InputLayer};
pub use latent_attention::{LatentAttention, LatentAttentionSaved};
pub use layer::{AttentionExtent, Layer, Saved};
pub use learned_positions::LearnedPositions;
pub use linear::{GroupNames, Linear, ModuleWeights, WeightLayout, WeightSpec};
pub(crate) use linear::{add_bias, add_bias_gradient};
pub use linear_attention::{
    DeltaNetProjections, LinearAttention, LinearAttentionConfig, LinearAttentionKind,
    LinearAttentionProjections, LinearAttentionSaved, Mamba2Config,
};
pub use mlp::{Mlp, MlpConfig, MlpProjections, MlpSaved};
pub use norm::{Norm, NormConfig};
pub use parameters::{BackwardPass, ForwardPass, Init, Parameter, ParameterList, ParameterSpec};
pub use shard::{ShardBlocks, ShardChain};
pub use short_conv::{ShortConv, ShortConvConfig, ShortConvSaved};
pub use tensor_parallel::{ParallelStyle, TensorRank, TokenExchange};
pub use token_mixer::{MixerConfig, MixerKept, MixerParts, MixerSaved, TokenMixer};

use candle_core::Tensor;
use std::ops::Range;

/// A tile of tokens of `[batch, seq_local, …]` or `[batch, seq_local]`, as a matrix with one row per token.
/// Shares the storage.
fn token_rows(x: &Tensor, tile: &Range<usize>) -> Result<Tensor, LayerError> {
    let tokens = x.dims()[0] * x.dims()[1];
    let width = x.elem_count() / tokens.max(1);
    Ok(x.reshape((tokens, width))?.narrow(0, tile.start, tile.len())?)
}

/// `(batch, seq_local)` of a hidden state.
fn token_dims(x: &Tensor) -> (usize, usize) {
    (x.dims()[0], x.dims()[1])
}
