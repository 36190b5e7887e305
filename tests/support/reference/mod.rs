//! The truth that every mesh, stage and kernel is compared with.
//!
//! A Llama-style decoder in f64, composed of plain candle ops and
//! differentiated by candle's autograd. It has no batch dimension, no cache, no
//! fused op and no parallelism, and takes nothing from the library, so a mistake
//! there cannot hide in a mistake here. `tests/parity/reference.rs` holds it against
//! tensors that PyTorch and Hugging Face transformers computed.
//!
//! Reading order: [`weights`] (configuration, names, shapes), [`batch`],
//! [`model`] (logits; [`rope`] has the angles), [`loss`] (loss and gradients), [`optimizer`], [`train`].

pub mod batch;
pub mod loss;
pub mod model;
pub mod optimizer;
pub mod rope;
pub mod train;
pub mod weights;

pub use batch::{Batch, IGNORED};
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
