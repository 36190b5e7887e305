//! Errors of the engine.

use crate::checkpoint::CheckpointError;
use crate::comm::CommError;
use crate::config::{Config, ConfigError};
use crate::data::DataError;
use crate::mesh::MeshError;
use crate::model::ModelError;
use crate::sequence_parallel::UlyssesError;
use crate::zero::ZeroError;
use ulysses_kernels::OpError;
use ulysses_kernels::offload::OffloadError;

/// What can go wrong in a training step.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The mesh of the process groups is not the config's.
    #[error("the config asks for {axis} = {configured}, the mesh has {axis} = {actual}")]
    MeshMismatch {
        /// Axis name.
        axis: &'static str,
        /// Size in the config.
        configured: usize,
        /// Size in the mesh.
        actual: usize,
    },
    /// The pattern of a parameter group matches no parameter.
    #[error(
        "`ulysses.parameter_groups[{index}].match`: no parameter has a name that matches {pattern:?}; \
         there is, for example, {}", similar.join(", ")
    )]
    ParameterGroup {
        /// Which group, from 0.
        index: usize,
        /// Its pattern.
        pattern: String,
        /// Names of parameters that resemble the pattern.
        similar: Vec<String>,
    },
    /// Every parameter that a group's pattern matches is in an earlier group.
    #[error(
        "`ulysses.parameter_groups[{index}].match`: every parameter with a name that matches {pattern:?} is in an \
         earlier group, and the first that matches counts: put this group before it, or leave it out"
    )]
    ParameterGroupShadowed {
        /// Which group, from 0.
        index: usize,
        /// Its pattern.
        pattern: String,
    },
    /// Parameter groups freeze everything.
    #[error(
        "`ulysses.parameter_groups` freezes every parameter ({}), so there is nothing to train; \
         leave some to other patterns", patterns.join(", ")
    )]
    AllFrozen {
        /// The patterns of the groups that are frozen.
        patterns: Vec<String>,
    },
    /// A machine profile lacks a rate that a step needs.
    #[error("the machine profile of {machine:?} does not tell `{key}`, but {needed_by}")]
    MachineRate {
        /// The profile's name.
        machine: String,
        /// The key that is absent or null.
        key: &'static str,
        /// What needs it.
        needed_by: String,
    },
    /// A step has more tokens, or moves more bytes, than 64 bits can count, or more documents than a plan lists.
    #[error(
        "a step of {train_batch_size} sequences of {seq_len} tokens is too large: its tokens or bytes exceed 2^64, or a micro \
         batch has more than 4194304 documents; choose a \
         smaller `train_batch_size` (`gradient_accumulation_steps`, `train_micro_batch_size_per_gpu`)"
    )]
    StepTooLarge {
        /// Sequences of a step on all ranks.
        train_batch_size: usize,
        /// Tokens of each.
        seq_len: usize,
    },
    /// Something could not be moved away or back.
    #[error(transparent)]
    Offload(#[from] OffloadError),
    /// What is to be offloaded to a file is on a GPU.
    #[error(
        "`{key}`: \"nvme\" keeps {what} in a file, where they go from a CPU's memory; from a GPU they go to the \
         host's memory: set it to \"cpu\", or to \"none\""
    )]
    OffloadToFile {
        /// The key that asks for it.
        key: &'static str,
        /// What it asks to move.
        what: &'static str,
    },
    /// A micro batch does not fit the config or the mesh.
    #[error("micro batch: {what} is {got}, expected {expected}")]
    MicroBatch {
        /// What does not fit.
        what: &'static str,
        /// Its value.
        got: usize,
        /// The value that would fit.
        expected: usize,
    },
    /// `backward` was called more often than the accumulation allows.
    #[error(
        "backward was called {accumulation} times since the last step \
         (gradient_accumulation_steps = {accumulation}); call step before the next one"
    )]
    StepDue {
        /// Micro steps per update.
        accumulation: usize,
    },
    /// Gradients were asked for before the accumulation was complete.
    #[error("gradients exist after {accumulation} backward calls, so far there were {done}")]
    NotAtBoundary {
        /// Micro steps per update.
        accumulation: usize,
        /// Micro steps done.
        done: usize,
    },
    /// An update with this gradient would destroy the parameters.
    #[error(
        "step {step}: loss {loss}, gradient norm {norm}: not finite, so the parameters were left as they are"
    )]
    NonFinite {
        /// The step, from 1.
        step: u64,
        /// Its loss.
        loss: f64,
        /// Its gradient norm.
        norm: f64,
    },
    /// Step after step overflowed, or the loss scale can fall no lower.
    #[error(
        "step {step}: the gradient is not finite, in {skips} step(s) in a row, with a loss scale of {scale}{}; \
         backward it begins in {part}{}; the parameters were left as they are",
        if *is_scale_at_minimum { ", which is its minimum already and cannot be lowered" } else { "" },
        if loss.is_finite() { String::new() } else { format!(", as the loss is {loss}: the forward pass overflows") },
    )]
    Overflow {
        /// The step, from 1.
        step: u64,
        /// Overflows in a row, this one included.
        skips: u64,
        /// The factor on the loss.
        scale: f64,
        /// Whether the scale was as low as it may be.
        is_scale_at_minimum: bool,
        /// Loss of the step.
        loss: f64,
        /// The first part of the model, in the order of the backward pass, whose gradient is not finite.
        part: String,
    },
    /// Ranks that must hold the same parameters and optimizer state do not.
    #[error("{what} differ along {axis}: rank {rank} does not hold what rank {first} holds")]
    ReplicasDiffer {
        /// "parameters" or "optimizer state".
        what: &'static str,
        /// Axis of the group.
        axis: &'static str,
        /// Global rank that differs.
        rank: usize,
        /// Global rank of the group's first member.
        first: usize,
    },
    /// Ranks that must hold parts of the same rows do not.
    #[error(
        "rank {rank} was given parts of other rows than rank {first} of its sp group: all of them must read the \
         same data, in the same order, with the same settings"
    )]
    SequencesDiffer {
        /// Global rank that differs.
        rank: usize,
        /// Global rank of the group's first member.
        first: usize,
    },
    /// Ranks that must go by the same number do not.
    #[error(
        "{what} differs: rank {rank} does not have what rank {first} has; do all read the same data and config?"
    )]
    Disagreement {
        /// What the number is.
        what: &'static str,
        /// Global rank that differs.
        rank: usize,
        /// Global rank of the group's first member.
        first: usize,
    },
    /// A loss went backward after a step had changed the parameters that it was computed with.
    #[error("this loss was computed before step {now} (after step {made}); run forward again")]
    StaleLoss {
        /// Steps done when the loss was computed.
        made: u64,
        /// Steps done now.
        now: u64,
    },
    /// An earlier call failed half-way.
    #[error(
        "an earlier backward or step failed half-way, so gradients or parameters are incomplete; start anew"
    )]
    Broken,
    /// Two parameters of the model have one name.
    #[error("two parameters are named {name}; names tell parameters apart, give each layer its own")]
    DuplicateParameter {
        /// The name.
        name: String,
    },
    /// A layer failed.
    #[error(transparent)]
    Model(Box<ModelError>),
    /// The config lacks what is needed here.
    #[error(transparent)]
    Config(Box<ConfigError>),
    /// The rank or an axis is not in the mesh.
    #[error(transparent)]
    Mesh(Box<MeshError>),
    /// The partitioned optimizer failed.
    #[error(transparent)]
    Zero(Box<ZeroError>),
    /// The exchange cannot be planned.
    #[error(transparent)]
    Ulysses(Box<UlyssesError>),
    /// The caller's source of micro batches failed.
    #[error(transparent)]
    Source(Box<dyn std::error::Error + Send + Sync>),
    /// The data failed.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A checkpoint was not saved, or is refused.
    #[error(transparent)]
    Checkpoint(Box<CheckpointError>),
    /// A collective failed.
    #[error(transparent)]
    Comm(Box<CommError>),
    /// An operation was refused.
    #[error(transparent)]
    Op(#[from] OpError),
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}

impl EngineError {
    /// Of a config whose tokens or bytes in a step 64 bits do not count.
    pub(crate) fn step_too_large(config: &Config) -> Self {
        Self::StepTooLarge {
            train_batch_size: config.train_batch_size,
            seq_len: config.ulysses.seq_len.unwrap_or_default(),
        }
    }
}

/// Boxes the errors that carry shapes and names: every `Result` of the engine would be as
/// large as the largest of them.
macro_rules! boxed {
    ($($variant:ident($error:ty)),* $(,)?) => {$(
        impl From<$error> for EngineError {
            fn from(error: $error) -> Self {
                Self::$variant(Box::new(error))
            }
        }
    )*};
}

boxed! {
    Config(ConfigError), Mesh(MeshError), Model(ModelError), Zero(ZeroError), Ulysses(UlyssesError), Checkpoint(CheckpointError), Comm(CommError),
}
