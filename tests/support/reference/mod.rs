//! The reference implementation that every mesh, stage and kernel is compared with.
//!
//! A Llama-style decoder in f64, composed of plain candle ops and differentiated by candle's autograd. It has no
//! batch dimension, cache, fused op or parallelism. It uses no code of the library, so both cannot share a bug.
//! `tests/parity/reference.rs` compares it with tensors computed by PyTorch and Hugging Face transformers.
//!
//! Reading order: [`weights`] (configuration, names, shapes), [`batch`],
//! [`model`] (logits; [`rope`] has the angles, [`families`] the parts of other families than Llama, [`linear_attention`] that of Qwen3.5 and Qwen3-Next, [`kimi_delta`] that of Kimi Linear, [`latent_attention`] that of DeepSeek, [`short_conv`] that of LFM2, [`mamba2`] that of Granite 4 and Nemotron-H), [`loss`] (loss and gradients), [`optimizer`], [`train`].

pub mod batch;
pub mod families;
pub mod kimi_delta;
pub mod latent_attention;
pub mod linear_attention;
pub mod loss;
pub mod mamba2;
pub mod model;
pub mod optimizer;
pub mod rope;
pub mod short_conv;
pub mod train;
pub mod weights;

pub use batch::{Batch, IGNORED};
pub use families::Family;
pub use loss::{forward, loss_and_grads, loss_and_grads_over, micro_batch_loss_and_grads};
pub use optimizer::{
    Adagrad, AdagradConfig, AdamW, AdamWConfig, Lamb, LambConfig, Lion, LionConfig, Optimizer, Sgd,
    clip_by_global_norm, global_norm,
};
pub use train::{Step, Training, train};
pub use weights::{
    ReferenceConfig, RopeScaling, Tensors, Weights, as_tensors, load_tensors, load_weights, random_weights,
    weights_from,
};
