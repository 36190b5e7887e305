//! The engine: what DeepSpeed calls `initialize`, `forward`, `backward` and `step`.
//!
//! ```text
//! let loss = engine.forward(&micro_batch)?;   // gather, layers, Ulysses exchange, loss
//! engine.backward(loss)?;                     // layers backwards, reduce over dp and sp
//! engine.step()?;                             // at the accumulation boundary: norm, clip, update
//! ```
//!
//! [`Engine::train_batch`] does all of it for one global batch.
//!
//! **Loss and gradient.** The loss of a step is the sum of all token losses of the global batch divided
//! by the number N of its valid tokens, over dp, sp and accumulation. N is unknown until all ranks have
//! counted. So `backward` scales by the constant `1/C` (`C = train_batch_size · seq_len`), and `step`
//! multiplies by `C/N` before it computes the norm. A rank without a valid label contributes zeros.

mod backward;
mod blocks;
#[expect(clippy::module_inception, reason = "`Engine` is the main type of this module")]
mod engine;
mod error;
mod flops;
mod forward;
mod initialize;
mod local_tokens;
mod loss_scale;
mod memory;
mod offload;
mod parallel_plan;
mod parameter_groups;
mod pipeline;
mod report;
mod stages;
mod state;
mod step;
mod step_part;
mod times;
mod train;

pub use engine::{Engine, initialize};
pub use error::EngineError;
pub use flops::{layers_of_stages, set_stages};
pub use forward::Loss;
pub(crate) use initialize::attention;
pub use memory::PartPeak;
pub use offload::{check_offload, check_offload_device};
pub use parallel_plan::divide_model;
pub use parameter_groups::check_parameter_groups;
pub(crate) use pipeline::{pipeline_bubble, pipeline_schedule};
pub use report::{Passes, StepReport};
pub(crate) use stages::OpenPasses;
pub use state::RunRecord;
pub use step_part::StepPart;
pub use times::{PhaseTimes, StepTimes};
pub use train::BatchOutcome;
