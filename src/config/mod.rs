//! The training configuration: JSON with DeepSpeed's keys, checked and resolved.
//!
//! Each key is defined once, as a field of the struct of its section: see `sections`, and `config_file` for the syntax of a
//! definition and for how a file is read. Reading order of the module:
//!
//! 1. `sections` are the sections of the file, [`Config`] is the whole file;
//! 2. the vocabulary is the tree of all keys, from their fields and a table of DeepSpeed's other keys: type, range,
//!    default, value of `"auto"`, and whether the key is supported, without effect or refused;
//! 3. [`RawConfig`] is a valid file, not yet complete. Otherwise every error is reported: file, line, column, excerpt, key
//!    path, valid values;
//! 4. [`Settings`], and the keys of a rule, replace values of the file before it is checked. [`RawConfig::resolve`] adds the other flags
//!    ([`Overrides`]), resolves mesh and batch sizes, and returns a complete [`Config`];
//! 5. [`LrSchedule`] turns the scheduler section into a learning rate per step.
//!
//! [`MachineProfile`] is a separate file, read by the same reader.
//!
//! [`explain`], [`reference_markdown`] (`docs/config.md`) and [`json_schema`] (`configs/ulysses.schema.json`) are
//! generated from the vocabulary.
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
#[expect(clippy::module_inception, reason = "the module is named after its type")]
mod config;
mod describe;
mod error;
mod machine;
mod mesh_shape;
mod overlay;
mod overrides;
mod partial;
mod raw;
mod resolve;
mod sections;
mod settings;

#[cfg(test)]
mod tests;

pub use crate::config_file::ConfigFileError;
pub use crate::config_file::reader::{Diagnostic, Excerpt, Note, Place, Position, Problem, Severity};
pub use crate::config_file::vocabulary::DEEPSPEED_VERSION;
pub use crate::mesh::MeshShape;
pub use crate::optim::{Adagrad, Adam, Lamb, Lion, OptimizerConfig, Sgd};
pub use batch::{BatchError, BatchSizes};
pub use config::{Config, LossNormalization, ResolvedAuto};
pub use describe::{UnknownKey, explain, json_schema, reference_markdown};
pub use error::ConfigError;
pub use machine::{LinkRates, Links, MachineProfile, Rates, RatesByFormat};
pub use mesh_shape::{MeshShapeError, SizeOrigin, StatedSize, StatedSizes};
pub use overrides::Overrides;
pub use partial::{PartiallyResolved, UnresolvedValue};
pub use raw::RawConfig;
pub use sections::activation_checkpointing::ActivationCheckpointingConfig;
pub use sections::checkpoint::{CheckpointConfig, OnSaveError};
pub use sections::data::{
    DataSource, HeldOut, LongConversations, OnBadLine, Packing, SeqLenChange, TokenDtype, ValidationConfig,
};
pub use sections::mesh::MeshConfig;
pub use sections::mesh_rules::MeshRule;
pub use sections::mesh_spec::StatedMesh;
pub use sections::monitoring::{CommsLoggerConfig, EventFilesConfig, MonitoringConfig};
pub use sections::parameter_groups::{GroupRate, NamePattern, ParameterGroup};
pub use sections::pipeline::{PipelineConfig, PipelineSchedule, StagesError};
pub use sections::precision::{CommunicationDtype, DynamicLossScale, LossScale, Precision};
pub use sections::scheduler::{
    LrRangeTest, LrSchedule, OneCycle, SchedulerConfig, WarmupCosineLr, WarmupDecayLr, WarmupLr, WarmupType,
};
pub use sections::tensor_parallel::{
    LayerSpec, MatchedSpec, PartitionConfig, PartitionType, TensorParallelConfig, TpPlanError,
};
pub use sections::ulysses::{AttentionChoice, Backend, CommCheck, CommConfig, UlyssesConfig};
pub use sections::zero::{Offload, PartitionAxes, ZeroConfig, ZeroStage};
pub use settings::{Setting, Settings};
pub use ulysses_chat::ChatDate;
