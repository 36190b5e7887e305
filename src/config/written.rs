//! A resolved config as the file that would say the same.

use super::checkpoint::CheckpointConfig;
use super::data::{DataSource, Packing, SeqLenChange, ValidationConfig};
use super::memory::{MemoryConfig, Offload};
use super::mesh_rules::MeshRule;
use super::monitoring::{CommsLoggerConfig, EventFilesConfig, FlopsProfilerConfig};
use super::optimizer::OptimizerConfig;
use super::parameter_groups::ParameterGroup;
use super::precision::{Precision, WrittenPrecision};
use super::resolved::{Backend, Config, LossNormalization};
use super::schedule::SchedulerConfig;
use super::zero_stage::ZeroStage;
use serde::{Serialize, Serializer};

#[derive(Serialize)]
struct WrittenConfig<'a> {
    train_batch_size: usize,
    train_micro_batch_size_per_gpu: usize,
    gradient_accumulation_steps: usize,
    data_parallel_size: usize,
    sequence_parallel_size: usize,
    zero_optimization: WrittenZero<'a>,
    optimizer: &'a OptimizerConfig,
    #[serde(skip_serializing_if = "Option::is_none")]
    scheduler: Option<&'a SchedulerConfig>,
    gradient_clipping: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    bf16: Option<WrittenPrecision>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fp16: Option<WrittenPrecision>,
    loss_normalization: LossNormalization,
    seed: u64,
    steps_per_print: u64,
    wall_clock_breakdown: bool,
    comms_logger: &'a CommsLoggerConfig,
    flops_profiler: &'a FlopsProfilerConfig,
    tensorboard: &'a EventFilesConfig,
    csv_monitor: &'a EventFilesConfig,
    #[serde(skip_serializing_if = "Option::is_none")]
    checkpoint: Option<&'a CheckpointConfig>,
    #[serde(skip_serializing_if = "Option::is_none")]
    activation_checkpointing: Option<WrittenCheckpointing>,
    ulysses: WrittenUlysses<'a>,
}

#[derive(Serialize)]
struct WrittenZero<'a> {
    stage: ZeroStage,
    #[serde(skip_serializing_if = "Option::is_none")]
    mics_shard_size: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    offload_optimizer: Option<WrittenOffload<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    offload_param: Option<WrittenOffload<'a>>,
}

#[derive(Serialize)]
struct WrittenOffload<'a> {
    device: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    nvme_path: Option<&'a str>,
}

impl<'a> WrittenOffload<'a> {
    fn of(offload: &'a Offload) -> Option<Self> {
        let nvme_path = if let Offload::Nvme(path) = offload { path.as_deref() } else { None };
        (*offload != Offload::None).then(|| Self { device: offload.device(), nvme_path })
    }
}

#[derive(Serialize)]
struct WrittenCheckpointing {
    cpu_checkpointing: bool,
}

#[derive(Serialize)]
struct WrittenUlysses<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<&'a str>,
    #[serde(skip_serializing_if = "<[_]>::is_empty", serialize_with = "write_sources")]
    data: &'a [DataSource],
    text_field: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    end_of_document: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tokenizer: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seq_len: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    steps: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    epochs: Option<u64>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    seq_len_schedule: &'a [SeqLenChange],
    packing: Packing,
    #[serde(skip_serializing_if = "Option::is_none")]
    validation: Option<&'a ValidationConfig>,
    #[serde(skip_serializing_if = "Option::is_none")]
    threads_per_rank: Option<usize>,
    backend: Backend,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    mesh_rules: &'a [MeshRule],
    comm: WrittenComm,
    activation_checkpointing: bool,
    loss_tile_tokens: usize,
    #[serde(flatten)]
    memory: &'a MemoryConfig,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    parameter_groups: &'a [ParameterGroup],
}

fn write_sources<S: Serializer>(sources: &[DataSource], serializer: S) -> Result<S::Ok, S::Error> {
    DataSource::write_all(sources, serializer)
}

#[derive(Serialize)]
struct WrittenComm {
    check: &'static str,
    timeout_seconds: u64,
}

impl Serialize for Config {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let precision = WrittenPrecision::of(self.precision);
        let (bf16, fp16) = match self.precision {
            Precision::Fp16 { .. } => (None, precision),
            _ => (precision, None),
        };
        let written = WrittenConfig {
            train_batch_size: self.train_batch_size,
            train_micro_batch_size_per_gpu: self.micro_batch_size,
            gradient_accumulation_steps: self.gradient_accumulation_steps,
            data_parallel_size: self.dp_size,
            sequence_parallel_size: self.sp_size,
            zero_optimization: WrittenZero {
                stage: self.zero_stage,
                mics_shard_size: self.stated_shard_size,
                offload_optimizer: WrittenOffload::of(&self.memory.offload_optimizer),
                offload_param: WrittenOffload::of(&self.memory.offload_parameters),
            },
            optimizer: &self.optimizer,
            scheduler: self.scheduler.as_ref(),
            gradient_clipping: self.gradient_clipping,
            bf16,
            fp16,
            loss_normalization: self.loss_normalization,
            seed: self.seed,
            steps_per_print: self.steps_per_print,
            wall_clock_breakdown: self.monitoring.wall_clock_breakdown,
            comms_logger: &self.monitoring.comms_logger,
            flops_profiler: &self.monitoring.flops_profiler,
            tensorboard: &self.monitoring.tensorboard,
            csv_monitor: &self.monitoring.csv_monitor,
            checkpoint: self.checkpoint.as_ref(),
            activation_checkpointing: (self.memory.offload_checkpoints)
                .then_some(WrittenCheckpointing { cpu_checkpointing: true }),
            ulysses: WrittenUlysses {
                model: self.model.as_deref(),
                data: &self.data,
                text_field: &self.text_field,
                end_of_document: self.end_of_document,
                tokenizer: self.tokenizer.as_deref(),
                output: self.output.as_deref(),
                seq_len: self.seq_len,
                steps: self.steps,
                epochs: self.epochs,
                seq_len_schedule: &self.seq_len_schedule,
                packing: self.packing,
                validation: self.validation.as_ref(),
                threads_per_rank: self.threads_per_rank,
                backend: self.backend,
                mesh_rules: &self.mesh_rules,
                comm: WrittenComm {
                    check: if self.comm_check { "on" } else { "off" },
                    timeout_seconds: self.comm_timeout_seconds,
                },
                activation_checkpointing: self.activation_checkpointing,
                loss_tile_tokens: self.loss_tile_tokens,
                memory: &self.memory,
                parameter_groups: &self.parameter_groups,
            },
        };
        written.serialize(serializer)
    }
}
