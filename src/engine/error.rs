//! Errors of the engine.

use crate::checkpoint::CheckpointError;
use crate::comm::CommError;
use crate::config::{Config, ConfigError, PartitionType, StagesError};
use crate::data::DataError;
use crate::mesh::{MeshError, TokenRanges};
use crate::model::ModelError;
use crate::nn::LayerError;
use crate::pipeline::ScheduleError;
use crate::sequence_parallel::SequenceParallelError;
use crate::zero::ZeroError;
use ulysses_kernels::OpError;
use ulysses_kernels::attention::AttentionError;
use ulysses_kernels::offload::OffloadError;

/// An error of the engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The mesh of the process groups differs from the config's.
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
         for example, there is {}", similar.join(", ")
    )]
    ParameterGroup {
        /// Index of the group.
        index: usize,
        /// Its pattern.
        pattern: String,
        /// Parameter names that resemble the pattern.
        similar: Vec<String>,
    },
    /// Every parameter that the group's pattern matches belongs to an earlier group.
    #[error(
        "`ulysses.parameter_groups[{index}].match`: every parameter with a name that matches {pattern:?} is in an \
         earlier group, and the first match wins: move this group before that one, or remove it"
    )]
    ParameterGroupShadowed {
        /// Index of the group.
        index: usize,
        /// Its pattern.
        pattern: String,
    },
    /// The parameter groups freeze all parameters.
    #[error(
        "`ulysses.parameter_groups` freezes every parameter ({}), so there is nothing to train; \
         narrow a pattern", patterns.join(", ")
    )]
    AllFrozen {
        /// Patterns of the frozen groups.
        patterns: Vec<String>,
    },
    /// The pattern of a plan of tensor parallelism matches no weight.
    #[error(
        "`tensor_parallel.partition_config.layer_specs[{index}].patterns`: no parameter with two dimensions has a name that {pattern:?} \
         matches from its start on; for example, there is {}", similar.join(", ")
    )]
    UnmatchedLayerSpec {
        /// Index of the spec.
        index: usize,
        /// The pattern.
        pattern: String,
        /// Names that resemble the pattern.
        similar: Vec<String>,
    },
    /// A plan of tensor parallelism divides a weight in another way than its layer.
    #[error(
        "`tensor_parallel.partition_config.layer_specs[{index}]`: {pattern:?} matches `{parameter}`, which the spec divides as \
         \"{}\", but its layer as \"{actual}\": write \"{actual}\", or a pattern that does not match it",
        planned.name(), actual = actual.name()
    )]
    PartitionType {
        /// Index of the spec.
        index: usize,
        /// The pattern.
        pattern: String,
        /// The weight.
        parameter: String,
        /// How the plan divides it.
        planned: PartitionType,
        /// How the layer does.
        actual: PartitionType,
    },
    /// A machine profile lacks a rate that a step needs.
    #[error("the machine profile of {machine:?} lacks `{key}`, but {needed_by}")]
    MachineRate {
        /// The profile's name.
        machine: String,
        /// The missing key.
        key: &'static str,
        /// What needs it.
        needed_by: String,
    },
    /// A step exceeds 64 bits in tokens or bytes, or has more documents than a plan supports.
    #[error(
        "a step of {train_batch_size} sequences of {seq_len} tokens is too large: its tokens or bytes exceed 2^64, or a micro \
         batch has more than 4194304 documents; choose a \
         smaller `train_batch_size` (`gradient_accumulation_steps`, `train_micro_batch_size_per_gpu`)"
    )]
    StepTooLarge {
        /// Sequences per step on all ranks.
        train_batch_size: usize,
        /// Tokens per sequence.
        seq_len: usize,
    },
    /// Offloading failed.
    #[error(transparent)]
    Offload(#[from] OffloadError),
    /// A tensor on a GPU cannot be offloaded to a file.
    #[error(
        "`{key}`: \"nvme\" offloads {what} from CPU memory to a file; a GPU can offload to host memory only: set it \
         to \"cpu\" or \"none\""
    )]
    OffloadToFile {
        /// The config key.
        key: &'static str,
        /// What it offloads.
        what: &'static str,
    },
    /// A micro batch does not fit the config or the mesh.
    #[error("micro batch: {what} is {got}, expected {expected}")]
    MicroBatch {
        /// The quantity that does not fit.
        what: &'static str,
        /// Its value.
        got: usize,
        /// The expected value.
        expected: usize,
    },
    /// A micro batch has the tokens of another rank.
    #[error("micro batch: it has the tokens {got} of each sequence, expected {expected}, this rank's shard")]
    Shard {
        /// The tokens that it has.
        got: TokenRanges,
        /// This rank's tokens.
        expected: TokenRanges,
    },
    /// A micro batch is shared by a number of sp ranks that have no group.
    #[error(
        "micro batch: it is shared by {block_size} sp ranks; there are groups of {available:?} ranks (`ulysses.flexible_sp` \
         makes one for every divisor of sp)"
    )]
    NoBlock {
        /// Ranks that share the micro batch.
        block_size: usize,
        /// Sizes of the groups.
        available: Vec<usize>,
    },
    /// `backward` was called too often for the configured accumulation.
    #[error(
        "backward was called {accumulation} times since the last step \
         (gradient_accumulation_steps = {accumulation}); call step before the next one"
    )]
    StepDue {
        /// Micro steps per update.
        accumulation: usize,
    },
    /// Gradients were requested before the accumulation was complete.
    #[error("gradients are complete after {accumulation} backward calls; so far there were {done}")]
    NotAtBoundary {
        /// Micro steps per update.
        accumulation: usize,
        /// Micro steps done.
        done: usize,
    },
    /// Loss or gradient norm of an f32 step is not finite.
    #[error("step {step}: loss {loss}, gradient norm {norm}: not finite; the parameters are unchanged")]
    NonFinite {
        /// The step, from 1.
        step: u64,
        /// Its loss.
        loss: f64,
        /// Its gradient norm.
        norm: f64,
    },
    /// Too many consecutive steps overflowed, or the loss scale is at its minimum.
    #[error(
        "step {step}: the gradient is not finite, in {skips} step(s) in a row, with a loss scale of {scale}{}; first \
         overflow of the backward pass: {part}{}; the parameters are unchanged",
        if *is_scale_at_minimum { ", which is its minimum" } else { "" },
        if loss.is_finite() { String::new() } else { format!("; the loss is {loss}, so the forward pass overflows") },
    )]
    Overflow {
        /// The step, from 1.
        step: u64,
        /// Consecutive overflows, including this one.
        skips: u64,
        /// The loss scale.
        scale: f64,
        /// Whether the loss scale is at its minimum.
        is_scale_at_minimum: bool,
        /// Loss of the step.
        loss: f64,
        /// The first part of the model, in backward order, with a non-finite gradient.
        part: String,
    },
    /// Partitions that tensor parallelism does not support.
    #[error("with tensor-parallel ranks, ZeRO partitions over dp: neither over a part of it nor over sp")]
    ShardsWithTensorParallelism,
    /// A feature that pipeline parallelism does not support.
    #[error("{feature} does not support pipeline parallelism: use pp 1")]
    WithPipeline {
        /// The feature.
        feature: &'static str,
    },
    /// Layers that do not fill the stages of the pipeline.
    #[error(transparent)]
    Stages(#[from] Box<StagesError>),
    /// An input whose stages do not know the size of hidden states.
    #[error(
        "the input {input:?} does not say how many elements a token's hidden states have (`InputLayer::hidden_size`), which the \
         stages of a pipeline exchange: use pp 1, or implement it"
    )]
    NoHiddenSize {
        /// Name of the input.
        input: String,
    },
    /// A pipeline's schedule is invalid.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// An sp rank has fewer tokens than tensor-parallel ranks that share them.
    #[error(
        "{tokens} tokens per sequence and sp rank cannot be shared by tp = {tp_size} ranks: every rank needs a token, so the \
         largest valid tp is {tokens}; longer sequences allow more"
    )]
    TooFewTokens {
        /// Tokens per sequence of an sp rank.
        tokens: usize,
        /// Number of ranks.
        tp_size: usize,
    },
    /// Replicas of parameters or optimizer state differ.
    #[error("{what} differ along {axis} between rank {rank} and rank {first}")]
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
    /// The ranks of an sp group hold shards of different sequences.
    #[error(
        "rank {rank} holds shards of other sequences than rank {first} of its sp group: all ranks must read the same \
         data, in the same order, with the same settings"
    )]
    SequencesDiffer {
        /// Global rank that differs.
        rank: usize,
        /// Global rank of the group's first member.
        first: usize,
    },
    /// Ranks disagree on a value.
    #[error(
        "{what} differs between rank {rank} and rank {first}: do all ranks read the same data and config?"
    )]
    Disagreement {
        /// Name of the value.
        what: &'static str,
        /// Global rank that differs.
        rank: usize,
        /// Global rank of the group's first member.
        first: usize,
    },
    /// A loss went backward after a step had changed its parameters.
    #[error("this loss was computed before step {now} (after step {made}); run forward again")]
    StaleLoss {
        /// Steps done when the loss was computed.
        made: u64,
        /// Steps done now.
        now: u64,
    },
    /// An earlier call failed part-way.
    #[error(
        "an earlier backward or step failed part-way, so gradients or parameters are incomplete; restart from a checkpoint"
    )]
    Broken,
    /// Two parameters share a name.
    #[error("two parameters are named {name}; parameter names must be unique, so give each layer its own")]
    DuplicateParameter {
        /// The name.
        name: String,
    },
    /// Values of a micro batch whose number does not fit its tokens on this rank.
    #[error("the micro batch has {got} values {name:?}, which is no multiple of its {tokens} local tokens")]
    MicroBatchValues {
        /// The name of the values.
        name: String,
        /// Their number.
        got: usize,
        /// Number of local tokens.
        tokens: usize,
    },
    /// Two units of the model have the same name, by which checkpoints store them.
    #[error(
        "two of the model's input, layers and objective are called {name:?}; a checkpoint needs different names"
    )]
    DuplicateUnit {
        /// The name.
        name: String,
    },
    /// Input and objective share a parameter by its name, with different shapes.
    #[error(
        "parameter {name} has the shape {of_input:?} in the model's input and {of_objective:?} in its objective; \
         parameters of one name are one parameter"
    )]
    TiedShapes {
        /// The name.
        name: String,
        /// Shape in the input.
        of_input: Vec<usize>,
        /// Shape in the objective.
        of_objective: Vec<usize>,
    },
    /// The kernels of `ulysses.attention` do not run on the device.
    #[error("`ulysses.attention`: {0}")]
    Attention(Box<AttentionError>),
    /// A layer failed.
    #[error(transparent)]
    Layer(Box<LayerError>),
    /// A model or its weights are invalid.
    #[error(transparent)]
    Model(Box<ModelError>),
    /// The config lacks a value.
    #[error(transparent)]
    Config(Box<ConfigError>),
    /// The mesh lacks the rank or the axis.
    #[error(transparent)]
    Mesh(Box<MeshError>),
    /// The partitioned optimizer failed.
    #[error(transparent)]
    Zero(Box<ZeroError>),
    /// The exchange plan failed.
    #[error(transparent)]
    SequenceParallel(Box<SequenceParallelError>),
    /// The caller's source of micro batches failed.
    #[error(transparent)]
    Source(Box<dyn std::error::Error + Send + Sync>),
    /// The data loader failed.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A checkpoint was not saved, or was refused.
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
    /// The error for a config whose steps exceed 64 bits in tokens or bytes.
    pub(crate) fn step_too_large(config: &Config) -> Self {
        Self::StepTooLarge {
            train_batch_size: config.train_batch_size,
            seq_len: config.ulysses.seq_len.unwrap_or_default(),
        }
    }
}

/// Boxes the errors that carry shapes and names, so that every `Result` of the engine stays small.
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
    Attention(AttentionError), Config(ConfigError), Layer(LayerError), Mesh(MeshError), Model(ModelError), Zero(ZeroError), SequenceParallel(SequenceParallelError), Checkpoint(CheckpointError), Comm(CommError),
}
