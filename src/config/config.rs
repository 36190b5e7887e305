//! The resolved configuration: [`Config`].

use super::error::ConfigError;
use super::sections::activation_checkpointing::ActivationCheckpointingConfig;
use super::sections::checkpoint::CheckpointConfig;
use super::sections::data::DataSource;
use super::sections::mesh::MeshConfig;
use super::sections::monitoring::MonitoringConfig;
use super::sections::precision::{CommunicationDtype, Precision};
use super::sections::scheduler::{LrSchedule, SchedulerConfig};
use super::sections::tensor_parallel::TensorParallelConfig;
use super::sections::ulysses::UlyssesConfig;
use super::sections::zero::{Offload, PartitionAxes, ZeroConfig};
use crate::config_file::define::words::{choice, count, index, number, section};
use crate::config_file::define::{Keys, choices, keys, section_keys};
use crate::config_file::reader::Note;
use crate::config_file::vocabulary::{Entry, Key, Literal, entries_of};
use crate::mesh::{
    MeshError, MeshShape, MeshSpec, PlacedMesh, RankHosts, SeqSharding, ShardShape, TrainingShape,
};
use crate::optim::OptimizerConfig;
use serde::{Serialize, Serializer};
use std::sync::LazyLock;
use ulysses_kernels::device::DeviceKind;

static ROOT: LazyLock<&'static [Key]> = LazyLock::new(|| section_keys::<Config>(""));

/// The keys at the top of the file.
pub(super) fn root() -> &'static [Key] {
    *ROOT
}

/// Every key of the file, sections before what is in them.
pub(super) fn entries() -> Vec<Entry> {
    entries_of(root())
}

/// The origin of a derived batch size, as the reference names it.
const BATCH: &str = "the other two batch keys and dp";

keys! {
    /// The resolved configuration of a training run, section by section: `config.zero.stage` is
    /// `zero_optimization.stage` in the file.
    ///
    /// It serializes to the keys it is read from (except [`notes`](Self::notes)); the output reads back as the same
    /// config.
    #[derive(Clone, Debug, PartialEq)]
    pub struct Config {
        /// Sequences per optimizer step over all ranks: micro batch × accumulation × dp, never × sp.
        pub train_batch_size: usize = count().derived(BATCH),
        /// Sequences per forward pass of one data-parallel rank.
        pub micro_batch_size: usize = count()
            .named("train_micro_batch_size_per_gpu")
            .derived(BATCH)
            .auto_derived("the other two batch keys and dp, or 8"),
        /// Forward passes per optimizer step.
        pub gradient_accumulation_steps: usize = count().derived("the other two batch keys and dp, or 1"),
        /// The sizes of the mesh.
        pub mesh: MeshConfig,
        /// How the ranks of tp divide weights.
        pub tensor_parallel: TensorParallelConfig = section(),
        /// ZeRO: the stage, its partitions and offload. (`true` is an old form of stage 1.)
        pub zero: ZeroConfig = section().named("zero_optimization").or_switch(),
        /// The optimizer; AdamW if absent.
        pub optimizer: OptimizerConfig = section(),
        /// The learning-rate schedule; if absent, the optimizer's `lr` throughout.
        pub scheduler: Option<SchedulerConfig> = section(),
        /// Maximum norm of the global gradient; 0 disables clipping. (DeepSpeed 0.19's default is 1.)
        pub gradient_clipping: f64 = number().number(0.0).auto(Literal::Number(1.0)),
        /// The dtype of parameters and activations.
        pub precision: Precision,
        /// The dtype in which gradients are sent to be summed, on a mesh with sp 1: "bf16" rounds the gradient of each rank once
        /// and halves the bytes; the sum is f32. (DeepSpeed's default is the dtype of the parameters.)
        pub communication_data_type: CommunicationDtype = choice().text("fp32").or_null(),
        /// The same on a mesh with sp > 1, over dp and sp; `communication_data_type` then has no effect.
        pub seq_parallel_communication_data_type: CommunicationDtype = choice().text("fp32").or_null(),
        /// `global`: sum of token losses / valid tokens of the global batch; `micro_batch`: DeepSpeed's mean of means.
        pub loss_normalization: LossNormalization = choice().text("global"),
        /// Seed of the initial weights and of the data order.
        pub seed: u64 = index().integer(1234),
        /// Steps between progress lines.
        pub steps_per_print: u64 = count().integer(10).or_null(),
        /// Logs, profilers and monitors of the run.
        pub monitoring: MonitoringConfig,
        /// Interval, retention and form of checkpoints.
        pub checkpoint: Option<CheckpointConfig> = section(),
        /// Storage of checkpointed activations.
        pub activation_checkpointing: ActivationCheckpointingConfig = section(),
        /// Settings that DeepSpeed leaves to the training script.
        pub ulysses: UlyssesConfig = section(),
    }
    without keys {
        /// Notes to log: keys without effect, notable defaults.
        pub notes: Vec<Note>,
        /// The resolved value of each `"auto"` in the file.
        pub autos: Vec<ResolvedAuto>,
    }
}

/// A key whose value in the file is `"auto"`.
#[derive(Clone, Debug, PartialEq)]
pub struct ResolvedAuto {
    /// The path of the key.
    pub key: String,
    /// The resolved value, as JSON; `None` for a key without effect.
    pub value: Option<serde_json::Value>,
    /// Source of the value.
    pub source: String,
}

choices! {
    /// The divisor of the summed token losses.
    pub enum LossNormalization {
        /// The valid tokens of the global batch.
        #[default]
        Global = "global",
        /// The valid tokens of each micro batch, followed by the mean over micro batches and
        /// data-parallel ranks, as in DeepSpeed.
        MicroBatch = "micro_batch",
    }
}

impl Serialize for Config {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = serde_json::Map::new();
        self.write_into(&mut object);
        object.serialize(serializer)
    }
}

impl Config {
    /// Returns the number of ranks of the mesh.
    pub fn world_size(&self) -> usize {
        self.mesh.shape().num_ranks()
    }

    /// Returns the sizes of the mesh, with its ring.
    pub fn training_shape(&self) -> TrainingShape {
        let ring_size = Some(self.seq_sharding().ring_size);
        TrainingShape { sizes: self.mesh.shape(), ring_size, shard_size: None }
    }

    /// Returns how the sp ranks share each sequence. A ring that does not divide sp counts as none.
    pub fn seq_sharding(&self) -> SeqSharding {
        let sp_size = self.mesh.sp_size;
        match self.ulysses.ring_size {
            ring_size if sp_size.is_multiple_of(ring_size) => {
                SeqSharding { ring_size, ulysses_size: sp_size / ring_size }
            }
            _ => SeqSharding::from(sp_size),
        }
    }

    /// Returns the mesh, with the rank at each coordinate: by `ulysses.mesh` if it has these sizes, else row-major. `hosts`
    /// are those of all ranks.
    ///
    /// # Errors
    /// When a hybrid mesh does not fit the hosts.
    pub fn placed_mesh(&self, hosts: Option<&RankHosts>) -> Result<PlacedMesh, MeshError> {
        let has_sizes =
            |spec: &&MeshSpec| spec.training_shape().is_ok_and(|shape| shape.sizes == self.mesh.shape());
        PlacedMesh::new(self.mesh.shape().row_major()?, self.ulysses.mesh.as_ref().filter(has_sizes), hosts)
    }

    /// Returns whether ZeRO's shard size divides `dp`; training requires it.
    pub(crate) fn partitions_fill(&self, dp: usize) -> bool {
        self.zero.mics_shard_size.is_none_or(|size| dp.is_multiple_of(size))
    }

    /// Returns the number of dp ranks that share ZeRO's partitions, if it is not dp (hybrid sharding).
    pub fn zero_shard_size(&self) -> Option<usize> {
        self.zero.mics_shard_size.filter(|size| *size != self.mesh.dp_size)
    }

    /// Returns whether recomputed layers save their attention output; if `ulysses.save_attention_output` is not set,
    /// unless checkpoints are offloaded.
    pub fn saves_attention_output(&self) -> bool {
        let is_offloaded = self.activation_checkpointing.cpu_checkpointing;
        self.ulysses.activation_checkpointing && self.ulysses.save_attention_output.unwrap_or(!is_offloaded)
    }

    /// Returns whether recomputed layers save their attention output only if it fits into memory.
    pub fn saves_attention_output_if_it_fits(&self) -> bool {
        self.ulysses.save_attention_output.is_none() && self.saves_attention_output()
    }

    /// Returns whether the exchange of head chunks overlaps with their attention.
    pub fn overlaps_exchange(&self) -> bool {
        self.ulysses.overlap_exchange && self.ulysses.head_chunks > 1 && self.seq_sharding().ulysses_size > 1
    }

    /// Returns whether ZeRO can partition over sp too: sp has ranks, and no other axis divides the model.
    pub fn can_partition_over_sp(&self) -> bool {
        self.mesh.sp_size > 1 && !self.mesh.shape().divides_model()
    }

    /// Returns the axes of more than one rank over which ZeRO partitions, or dp.
    pub fn zero_axes(&self) -> PartitionAxes {
        if self.mesh.sp_size > 1 { self.ulysses.zero_partition_axes } else { PartitionAxes::Dp }
    }

    /// Returns the ranks that share ZeRO's partitions, if they are not exactly dp.
    pub fn zero_shards(&self) -> Option<ShardShape> {
        let MeshConfig { dp_size, .. } = self.mesh;
        let shards = ShardShape {
            dp_size: self.zero.mics_shard_size.unwrap_or(dp_size),
            spans_sp: self.zero_axes() == PartitionAxes::DpSp,
        };
        (shards.spans_sp || shards.dp_size != dp_size).then_some(shards)
    }

    /// Returns the number of ranks that share ZeRO's partitions: by default dp.
    pub fn zero_world_size(&self) -> usize {
        self.zero_shards().map_or(self.mesh.dp_size, |shards| {
            shards.dp_size * if shards.spans_sp { self.mesh.sp_size } else { 1 }
        })
    }

    /// Returns the dtype in which gradients are sent to be summed.
    pub fn gradient_communication(&self) -> CommunicationDtype {
        match self.mesh.sp_size {
            1 => self.communication_data_type,
            _ => self.seq_parallel_communication_data_type,
        }
    }

    /// Returns a warning if `communication_data_type` asks for what `seq_parallel_communication_data_type` decides.
    pub(super) fn communication_note(&self) -> Option<String> {
        let (asked, effective) = (self.communication_data_type, self.gradient_communication());
        (asked != CommunicationDtype::default() && asked != effective).then(|| {
            let sp = self.mesh.sp_size;
            format!(
                "`communication_data_type` has no effect: sp is {sp}, and gradients are sent in \
                 `seq_parallel_communication_data_type`, \"{}\", as in DeepSpeed",
                effective.name()
            )
        })
    }

    /// Returns a note if the ZeRO stage has a single partition, which saves nothing; `None` for one rank.
    pub fn zero_partition_note(&self) -> Option<String> {
        let stage = u8::from(self.zero.stage);
        if stage == 0 || self.zero_world_size() != 1 || self.world_size() == 1 {
            return None;
        }
        let why = if self.mesh.dp_size == 1 { "dp is 1" } else { "its shard size is 1" };
        let MeshShape { pp, tp, .. } = self.mesh.shape();
        let owner = match (pp, tp) {
            (1, 1) => "",
            (1, _) => " of its tp rank",
            (_, 1) => " of its stage",
            _ => " of its stage and tp rank",
        };
        let remedy = match self.mesh.sp_size {
            _ if self.mesh.shape().divides_model() => "partition it over more dp ranks".to_owned(),
            1 => "set a shard size > 1 (`zero_optimization.mics_shard_size`)".to_owned(),
            sp => format!(
                "set --zero-partition-axes dp,sp (`ulysses.zero_partition_axes`) to partition it over the {sp} sp ranks"
            ),
        };
        Some(format!(
            "ZeRO stage {stage} has 1 partition, because {why}: every rank stores the whole model state{owner}; {remedy}"
        ))
    }

    /// Returns a note if state is to be offloaded to host memory and ranks on `device` have it there anyway.
    pub fn offload_note(&self, device: DeviceKind) -> Option<String> {
        let sections = [
            ("offload_optimizer", &self.zero.offload_optimizer),
            ("offload_param", &self.zero.offload_param),
        ];
        let idle = |offload: &Offload| *offload != Offload::None && !offload.is_moved_from(device);
        let keys: Vec<_> = sections
            .into_iter()
            .filter(|(_, offload)| idle(offload))
            .map(|(key, _)| format!("`{key}`"))
            .collect();
        (!keys.is_empty()).then(|| {
            format!(
                "{} with device \"cpu\" {} no memory on CPU ranks, whose state is in host memory; device \"nvme\" offloads \
                 it to files",
                keys.join(" and "),
                if keys.len() == 1 { "saves" } else { "save" }
            )
        })
    }

    /// Returns the longest sequence length of the job; `None` without `ulysses.seq_len`.
    pub fn longest_seq_len(&self) -> Option<usize> {
        let scheduled = self.ulysses.seq_len_schedule.iter().map(|change| change.seq_len);
        scheduled.chain(self.ulysses.seq_len).max()
    }

    /// Returns the config with another `seq_len`.
    #[must_use]
    pub fn with_seq_len(mut self, seq_len: usize) -> Self {
        self.ulysses.seq_len = Some(seq_len);
        self
    }

    /// Returns the learning-rate schedule.
    pub fn lr_schedule(&self) -> LrSchedule {
        let base_lr = self.optimizer.lr();
        self.scheduler
            .as_ref()
            .map_or(LrSchedule::constant(base_lr), |scheduler| LrSchedule::new(scheduler, base_lr))
    }

    /// Returns `ulysses.model`.
    ///
    /// # Errors
    /// When neither the file nor a flag sets it.
    pub fn require_model(&self) -> Result<&str, ConfigError> {
        self.ulysses.model.as_deref().ok_or(ConfigError::Unset { key: "model", flag: "model" })
    }

    /// Returns `ulysses.data`.
    ///
    /// # Errors
    /// When neither the file nor a flag sets it.
    pub fn require_data(&self) -> Result<&[DataSource], ConfigError> {
        match self.ulysses.data.as_slice() {
            [] => Err(ConfigError::Unset { key: "data", flag: "data" }),
            sources => Ok(sources),
        }
    }

    /// Returns `ulysses.seq_len`.
    ///
    /// # Errors
    /// When neither the file nor a flag sets it.
    pub fn require_seq_len(&self) -> Result<usize, ConfigError> {
        self.ulysses.seq_len.ok_or(ConfigError::Unset { key: "seq_len", flag: "seq-len" })
    }

    /// Returns `ulysses.steps`.
    ///
    /// # Errors
    /// When neither the file nor a flag sets it.
    pub fn require_steps(&self) -> Result<u64, ConfigError> {
        self.ulysses.steps.ok_or(ConfigError::Unset { key: "steps", flag: "steps or --epochs" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(stage: u8, dp: usize, sp: usize, shard_size: i64) -> Option<String> {
        let text = format!(
            r#"{{"train_batch_size": {dp}, "mesh_param": [{dp}, {sp}],
                "zero_optimization": {{"stage": {stage}, "mics_shard_size": {shard_size}}}}}"#
        );
        Config::from_json_str(&text, "c.json").unwrap().zero_partition_note()
    }

    #[test]
    fn only_a_stage_with_one_partition_is_noted() {
        assert!(note(3, 1, 4, -1).unwrap().starts_with("ZeRO stage 3 has 1 partition, because dp is 1"));
        assert!(note(1, 2, 2, 1).unwrap().contains("because its shard size is 1"));
        assert!(note(1, 2, 2, 1).unwrap().ends_with("to partition it over the 2 sp ranks"));
        assert!(note(2, 2, 1, 1).unwrap().contains("`zero_optimization.mics_shard_size`"));
        for (stage, dp, sp, shard_size) in [(0, 1, 4, -1), (2, 2, 4, -1), (3, 1, 1, -1), (3, 4, 1, 2)] {
            assert_eq!(note(stage, dp, sp, shard_size), None, "stage {stage} on {dp} × {sp}");
        }
    }
}
