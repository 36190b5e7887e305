//! Training configuration: JSON in DeepSpeed's vocabulary, checked and resolved.
//!
//! Reading order of the module:
//!
//! 1. `vocabulary` is the table of all keys: type, range, default, what `"auto"` stands for, and
//!    whether the key is honoured, without effect or refused;
//! 2. `document` parses strict JSON into a tree that knows where each value stands;
//! 3. `check` holds the tree against the table, and `report` collects every fault it meets, with
//!    file, line, column, excerpt, key path and what would be valid;
//! 4. `reader` gives typed access to what has been checked. [`RawConfig`] is what one file says,
//!    faultless but not yet complete;
//! 5. [`Settings`] change what a file says before it is checked, and [`RawConfig::resolve`] adds the rest of the
//!    command line ([`Overrides`]), settles the mesh and the batch arithmetic, and gives a [`Config`] without open questions;
//! 6. [`LrSchedule`] turns its scheduler section into a learning rate per step.
//!
//! [`MachineProfile`] is a file of its own that goes through the same reader.
//!
//! From the same table come [`explain`], [`reference_markdown`] (`docs/config.md`) and
//! [`json_schema`] (`configs/ulysses.schema.json`).
//!
//! ```
//! use ulysses::config::Config;
//!
//! let json = r#"{
//!     "train_micro_batch_size_per_gpu": 2,
//!     "gradient_accumulation_steps": 4,
//!     "mesh_param": [2, 4],
//!     "zero_optimization": { "stage": 3 }
//! }"#;
//! let config = Config::from_json_str(json, "example.json")?;
//! assert_eq!(config.train_batch_size, 2 * 4 * 2); // never × sp
//! assert_eq!(config.world_size(), 8);
//! # Ok::<(), ulysses::config::ConfigError>(())
//! ```

mod auto;
mod batch;
mod check;
mod checkpoint;
mod data;
mod diagnostic;
mod document;
mod error;
mod explain;
mod machine;
mod memory;
mod mesh_rules;
mod mesh_shape;
mod monitoring;
mod note;
mod open;
mod optimizer;
mod parameter_groups;
mod precision;
mod raw;
mod reader;
mod reference;
mod report;
mod resolved;
mod schedule;
mod schema;
mod settings;
mod vocabulary;
mod written;
mod zero_note;
mod zero_stage;

#[cfg(test)]
mod tests;

pub use batch::{BatchError, BatchSizes};
pub use checkpoint::{CheckpointConfig, OnSaveError};
pub use data::{DataSource, HeldOut, Packing, SeqLenChange, ValidationConfig};
pub use diagnostic::{Diagnostic, Excerpt, Position, Problem};
pub use error::ConfigError;
pub use explain::{UnknownKey, explain};
pub use machine::{LinkRates, Links, MachineProfile, Rates, RatesByFormat};
pub use memory::{MemoryConfig, Offload};
pub use mesh_rules::{MeshRule, sizes_of};
pub use mesh_shape::{MeshShape, MeshShapeError, SizeOrigin, StatedSize};
pub use monitoring::{CommsLoggerConfig, EventFilesConfig, FlopsProfilerConfig, MonitoringConfig};
pub use note::{Note, Severity};
pub use open::{OpenValue, PartlyResolved};
pub use optimizer::OptimizerConfig;
pub use parameter_groups::{GroupRate, NamePattern, ParameterGroup};
pub use precision::{DynamicLossScale, LossScale, Precision};
pub use raw::RawConfig;
pub use reference::reference_markdown;
pub use resolved::{Backend, Config, LossNormalization, Overrides, ResolvedAuto};
pub use schedule::{
    LrRangeTest, LrSchedule, OneCycle, SchedulerConfig, WarmupCosineLr, WarmupDecayLr, WarmupLr, WarmupType,
};
pub use schema::json_schema;
pub use settings::{Setting, Settings};
pub use vocabulary::DEEPSPEED_VERSION;
pub use zero_stage::ZeroStage;
