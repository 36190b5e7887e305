//! Fused tensor operations with hand-written gradients: the building blocks of the layers.
//!
//! | op | computes | gradient |
//! |---|---|---|
//! | [`linear`] | x·Wᵀ | input; weight added straight into the flat gradient |
//! | [`rms_norm`] | gain · x / √(mean(x²) + ε), and LayerNorm without a bias | input, weight |
//! | [`rope`] | rotary position embedding, in place | the inverse rotation, in place |
//! | [`glu`] | activation(gate) · up | both |
//! | [`embedding`] | rows of a table, or of tokens | summed per row |
//! | [`lm_head_loss`] | language-model head and loss, tiled over tokens | input, head weight and bias |
//! | [`optimizer`] | one step of an optimizer that treats every element by itself, on flat tensors | – |
//! | [`optimizer::lamb`] | one step of LAMB in two calls, with norms per parameter tensor in between | – |
//! | [`attention`] | causal attention within documents, blocked | queries, keys, values |
//! | [`attention_sink`] | attention with a learned logit per head, from attention without | the logits |
//! | [`linear_attention`] | linear attention by the gated delta rule or by sums (Mamba 2), in chunks | queries, keys, values, decays, rates |
//! | [`causal_conv`] | depthwise convolution along the tokens of a document, SiLU | input, weight, bias |
//! | [`decay_gates`] | decay and rate of linear attention | both projections and both parameters |
//! | [`cast`] | conversion between f32, bf16 and f16 | – |
//! | [`strided_copy`] | copies of strided blocks between tensors: the transposes of the exchange | the copy in the other direction |
//! | [`rank_reduce`] | sums, averages, products, maxima and minima over ranks, in rank order | – |
//! | [`elementwise`] | norms, finiteness, sums, fills and soft caps of flat tensors | – |
//!
//! Each op is a folder. `mod.rs` checks arguments and dispatches on the device; `cpu.rs` has the kernel on
//! slices; `reference.rs` has the same in slow, readable f64. `tests.rs` compares the two and checks the
//! reference's gradient against finite differences. ([`attention`] is larger: its kernels are in `cpu/` and
//! `cuda/`, and a README explains them.) [`gemm`] has the matmuls that ops build on, [`simd`] the instruction
//! sets of the kernels. [`Workspace`] recycles tensors between ops.
//!
//! # Conventions
//! - All tensors are contiguous; views into a larger flat buffer (`narrow`) are fine. Elements are f32, bf16
//!   or f16; arithmetic and statistics are f32.
//! - The caller allocates outputs. An output must not share storage with another argument, unless the op's
//!   documentation says that it works in place.
//! - Outputs are overwritten, except weight gradients and arguments with an `accumulate` flag, which are
//!   added to.
//! - Where a shape begins with n, the leading dimensions are multiplied; only the last one has a meaning.
//! - Results do not depend on the number of threads. Work is shared among the current rayon pool.
//!
//! # Shapes
//! | letter | means |
//! |---|---|
//! | B, S | batch, sequence |
//! | n | tokens here: B · S of this rank's shard |
//! | H, D | heads, `head_dim` |
//! | d, f | model width, feed-forward width |
//! | vocab | rows of the embedding or head |

#![allow(unsafe_code, reason = "kernels")]

mod arg_check;
pub mod attention;
pub mod attention_sink;
pub mod cast;
pub mod causal_conv;
pub mod decay_gates;
pub mod device;
mod device_table;
mod documents;
mod element;
pub mod elementwise;
pub mod embedding;
mod error;
pub mod gemm;
pub mod glu;
pub mod host_table;
pub mod linear;
pub mod linear_attention;
pub mod lm_head_loss;
mod matrix;
pub mod memory;
pub mod offload;
pub mod optimizer;
mod parallel;
pub mod rank_reduce;
pub mod rms_norm;
pub mod rope;
#[cfg(all(test, feature = "cuda"))]
#[path = "../../tests/support/sample.rs"]
mod sample;
mod scratch;
pub mod simd;
mod softcap;
pub mod strided_copy;
pub mod tensor;
#[cfg(test)]
mod testing;
mod token_table;
mod workspace;

pub use documents::Documents;
pub use error::OpError;
pub use token_table::TokenTable;
pub use workspace::Workspace;
