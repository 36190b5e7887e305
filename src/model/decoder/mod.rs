//! The Llama block: attention and MLP with their hand-written backward passes.

mod attention;
mod attention_backward;
mod chunk_pipeline;
mod layer;
mod mlp;
mod qkv_projection;
mod saved_attention;
mod weights;

pub use layer::DecoderLayer;
