//! The configuration without open questions.

use super::auto::resolve_autos;
use super::batch::BatchSizes;
use super::checkpoint::CheckpointConfig;
use super::data::{DataSource, Packing, SeqLenChange, ValidationConfig};
use super::error::ConfigError;
use super::memory::{MemoryConfig, Offload};
use super::mesh_rules::{MeshRule, Ruled};
use super::mesh_shape::{MeshShape, SizeOrigin, StatedSize};
use super::monitoring::MonitoringConfig;
use super::note::Note;
use super::optimizer::OptimizerConfig;
use super::parameter_groups::ParameterGroup;
use super::precision::Precision;
use super::raw::RawConfig;
use super::schedule::{LrSchedule, SchedulerConfig};
use super::zero_stage::ZeroStage;
use crate::mesh::Preset;
use serde::Serialize;
use std::path::Path;
use ulysses_kernels::device::DeviceKind;

/// Everything that a training run is told. It serializes in the vocabulary it is read
/// from (except [`notes`](Self::notes)), and what it writes reads back as the same config.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Rows per optimizer step over all ranks: `micro_batch_size × gradient_accumulation_steps × dp_size`.
    pub train_batch_size: usize,
    /// `train_micro_batch_size_per_gpu`: rows per forward pass of one data-parallel rank. All
    /// sequence-parallel ranks of a group hold shards of the same rows.
    pub micro_batch_size: usize,
    /// Forward passes per optimizer step; default 1.
    pub gradient_accumulation_steps: usize,
    /// The optimizer; default AdamW (DeepSpeed has no default).
    pub optimizer: OptimizerConfig,
    /// The learning-rate schedule; default none: the optimizer's `lr` throughout.
    pub scheduler: Option<SchedulerConfig>,
    /// The largest norm of the gradient; default 0: no clipping. (DeepSpeed's default was 0 for
    /// long and is 1.0 in 0.19.8; a note tells when the key is missing.)
    pub gradient_clipping: f64,
    /// The number format of parameters and activations; default f32.
    pub precision: Precision,
    /// What ZeRO partitions; default nothing (stage 0), as in DeepSpeed.
    pub zero_stage: ZeroStage,
    /// Data-parallel ranks; default 1, or what fills the world.
    pub dp_size: usize,
    /// Sequence-parallel ranks; default 1.
    pub sp_size: usize,
    /// `zero_optimization.mics_shard_size` or `zero_hpz_partition_size`: neighbours along dp that partition among them
    /// what the next ones hold once more; default none: all of dp.
    pub zero_shard_size: Option<usize>,
    /// The same as it is stated, all of dp included: dp of any other mesh must be a multiple of it too.
    pub stated_shard_size: Option<usize>,
    /// Optimizer steps between two progress lines; default 10.
    pub steps_per_print: u64,
    /// Seed of the initial weights and of the order of the data; default 1234, as in DeepSpeed.
    pub seed: u64,
    /// What the loss is divided by; default [`LossNormalization::Global`].
    pub loss_normalization: LossNormalization,
    /// When and how checkpoints are saved; default never.
    pub checkpoint: Option<CheckpointConfig>,
    /// `ulysses.model`: a directory in Hugging Face's layout or the name of a preset.
    pub model: Option<String>,
    /// `ulysses.data`: files of text, JSONL or tokens, directories, and patterns.
    pub data: Vec<DataSource>,
    /// `ulysses.text_field`: the field of a JSON line or column of a Parquet file with the text; default `text`.
    pub text_field: String,
    /// `ulysses.end_of_document`: the token between documents in token files that do not say where these end; default
    /// none: such a file is one document.
    pub end_of_document: Option<u32>,
    /// `ulysses.tokenizer`: a Hugging Face `tokenizer.json`; default bytes.
    pub tokenizer: Option<String>,
    /// `ulysses.output`: the directory for metrics and the resolved config.
    pub output: Option<String>,
    /// `ulysses.seq_len`: tokens per row, over all sequence-parallel ranks.
    pub seq_len: Option<usize>,
    /// `ulysses.steps`: optimizer steps to train.
    pub steps: Option<u64>,
    /// `ulysses.epochs`: times that the data is gone through; set only where `steps` is not.
    pub epochs: Option<u64>,
    /// `ulysses.seq_len_schedule`: later lengths of the rows, by ascending step; default none.
    pub seq_len_schedule: Vec<SeqLenChange>,
    /// `ulysses.packing`: how documents come to be rows; default [`Packing::Greedy`].
    pub packing: Packing,
    /// `ulysses.validation`: data that is held out; default none.
    pub validation: Option<ValidationConfig>,
    /// `ulysses.threads_per_rank`: CPU threads of one rank; default a fair share of the cores.
    pub threads_per_rank: Option<usize>,
    /// `ulysses.backend`: what carries the communication; default threads.
    pub backend: Backend,
    /// `ulysses.mesh_rules`: meshes by machine; the one that applies is in the sizes above. Default none.
    pub mesh_rules: Vec<MeshRule>,
    /// `ulysses.comm.check`: compare the calls of all ranks, where that costs messages; default off.
    pub comm_check: bool,
    /// `ulysses.comm.timeout_seconds`: how long a rank waits for the others in an operation; default 300.
    pub comm_timeout_seconds: u64,
    /// `ulysses.activation_checkpointing`: recompute activations in the backward pass; default false.
    pub activation_checkpointing: bool,
    /// `ulysses.loss_tile_tokens`: tokens whose logits exist at a time; default 1024.
    pub loss_tile_tokens: usize,
    /// What exists at a time.
    pub memory: MemoryConfig,
    /// What the run tells of itself.
    pub monitoring: MonitoringConfig,
    /// `ulysses.parameter_groups`: parameters with settings of their own; default none.
    pub parameter_groups: Vec<ParameterGroup>,
    /// What the user should know, to be logged: keys without effect, notable defaults.
    pub notes: Vec<Note>,
    /// What each `"auto"` of the file became.
    pub autos: Vec<ResolvedAuto>,
}

/// A key that the file left to `"auto"`.
#[derive(Clone, Debug, PartialEq)]
pub struct ResolvedAuto {
    /// The path of the key.
    pub key: String,
    /// Its value in the resolved config, as JSON; `None` for a key without effect.
    pub value: Option<serde_json::Value>,
    /// Where the value comes from.
    pub source: String,
}

/// What the sum of the token losses is divided by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LossNormalization {
    /// The valid tokens of the whole global batch.
    #[default]
    Global,
    /// The valid tokens of each micro batch, then the mean over micro batches and
    /// data-parallel ranks, as DeepSpeed does.
    MicroBatch,
}

impl LossNormalization {
    pub(super) const CHOICES: &[(&str, Self)] =
        &[("global", Self::Global), ("micro_batch", Self::MicroBatch)];
}

/// What carries the communication between ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Backend {
    /// Ranks are threads of one process.
    #[default]
    Thread,
    /// The same, each with a GPU of its own and NCCL between them.
    Nccl,
    /// Ranks are processes of an MPI job.
    Mpi,
}

impl Backend {
    pub(super) const CHOICES: &[(&str, Self)] =
        &[("thread", Self::Thread), ("nccl", Self::Nccl), ("mpi", Self::Mpi)];

    /// What its ranks compute on, as long as nobody says otherwise.
    pub fn device(self) -> DeviceKind {
        if self == Self::Nccl { DeviceKind::Cuda } else { DeviceKind::Cpu }
    }
}

/// What the command line says. Flags override the file, except the mesh, where a
/// contradiction is an error.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Overrides {
    /// `--mesh`: the sizes of (dp, sp).
    pub mesh: Option<(usize, usize)>,
    /// `--mesh`: the preset that the sizes come from, which may stand for a ZeRO stage.
    pub preset: Option<Preset>,
    /// `--mesh`: the size of `dp_shard`, where dp is given as `dp_replicate` and `dp_shard`.
    pub shard_size: Option<usize>,
    /// `--mesh-selector`: what the patterns of `ulysses.mesh_rules` are matched with, as long as `mesh` is none;
    /// without it no rule applies.
    pub mesh_selector: Option<String>,
    /// How many ranks share a node, where a launcher says so: for meshes whose sizes follow from it.
    pub ranks_per_node: Option<usize>,
    /// How many ranks there are, where a launcher rather than the mesh says so; dp is then inferred from it.
    pub world_size: Option<usize>,
    /// `--seq-len`.
    pub seq_len: Option<usize>,
    /// `--steps`.
    pub steps: Option<u64>,
    /// `--epochs`.
    pub epochs: Option<u64>,
    /// `--seed`.
    pub seed: Option<u64>,
    /// `--threads-per-rank`.
    pub threads_per_rank: Option<usize>,
    /// `--model`.
    pub model: Option<String>,
    /// `--data`: replaces all of the file's where it is not empty.
    pub data: Vec<DataSource>,
    /// `--packing`.
    pub packing: Option<Packing>,
    /// `--tokenizer`.
    pub tokenizer: Option<String>,
    /// `--output`.
    pub output: Option<String>,
    /// `--backend`.
    pub backend: Option<Backend>,
}

impl RawConfig {
    /// Adds the command line, applies the defaults, and settles mesh and batch sizes.
    ///
    /// # Errors
    /// When the mesh or the batch sizes contradict themselves, or a flag is out of range.
    pub fn resolve(&self, overrides: &Overrides) -> Result<Config, ConfigError> {
        overrides.check()?;
        let ruled = self.ruled(overrides)?;
        let mesh = self.resolve_mesh(ruled.as_ref(), overrides)?;
        self.check_preset(ruled.as_ref(), overrides)?;
        let stated_shard_size = self.stated_shard_size(mesh.dp, ruled.as_ref(), overrides)?;
        let (train, micro) = (self.train_batch_size, self.micro_batch_size);
        let batch = BatchSizes::resolve(train, micro, self.gradient_accumulation_steps, mesh.dp).map_err(
            |reason| ConfigError::Batch {
                file: self.file.clone(),
                place: self.batch_place.clone().map(Box::new),
                reason: Box::new(reason),
            },
        )?;
        let file = &self.ulysses;
        let (steps, epochs) = match (overrides.steps, overrides.epochs) {
            (None, None) => (file.steps, file.epochs),
            flags => flags,
        };
        let scheduler = self.resolve_scheduler(steps)?;
        let mut notes = self.resolved_notes(scheduler.as_ref());
        notes.extend(self.note_on_rules(ruled.as_ref(), overrides).map(Note::warning));
        let config = Config {
            train_batch_size: batch.train,
            micro_batch_size: batch.micro,
            gradient_accumulation_steps: batch.accumulation,
            optimizer: self.optimizer.clone(),
            scheduler,
            gradient_clipping: self.gradient_clipping,
            precision: self.precision,
            zero_stage: self.zero_stage,
            dp_size: mesh.dp,
            sp_size: mesh.sp,
            zero_shard_size: stated_shard_size.filter(|size| *size != mesh.dp),
            stated_shard_size,
            steps_per_print: self.steps_per_print,
            seed: overrides.seed.unwrap_or(self.seed),
            loss_normalization: self.loss_normalization,
            checkpoint: self.checkpoint.clone(),
            model: overrides.model.clone().or_else(|| file.model.clone()),
            data: if overrides.data.is_empty() { file.data.clone() } else { overrides.data.clone() },
            text_field: file.text_field.clone(),
            end_of_document: file.end_of_document,
            tokenizer: overrides.tokenizer.clone().or_else(|| file.tokenizer.clone()),
            output: overrides.output.clone().or_else(|| file.output.clone()),
            seq_len: overrides.seq_len.or(file.seq_len),
            steps,
            epochs,
            seq_len_schedule: file.seq_len_schedule.clone(),
            packing: overrides.packing.unwrap_or(file.packing),
            validation: file.validation.clone(),
            threads_per_rank: overrides.threads_per_rank.or(file.threads_per_rank),
            backend: overrides.backend.or(file.backend).unwrap_or_default(),
            mesh_rules: file.mesh_rules.clone(),
            comm_check: file.comm_check,
            comm_timeout_seconds: file.comm_timeout_seconds,
            activation_checkpointing: file.activation_checkpointing,
            loss_tile_tokens: file.loss_tile_tokens,
            memory: self.memory.clone(),
            monitoring: self.monitoring.clone(),
            parameter_groups: file.parameter_groups.clone(),
            notes,
            autos: Vec::new(),
        };
        Ok(Config { autos: resolve_autos(&self.remarks.autos, &config), ..config })
    }

    fn resolve_scheduler(&self, steps: Option<u64>) -> Result<Option<SchedulerConfig>, ConfigError> {
        let scheduler = self.scheduler.clone();
        if !self.decays_to_last_step {
            return Ok(scheduler);
        }
        let steps = steps.ok_or_else(|| ConfigError::AutoWithoutSource {
            file: self.file.clone(),
            key: "scheduler.params.total_num_steps",
            source_of_value: "the steps to train, `ulysses.steps` or --steps",
        })?;
        Ok(scheduler.map(|scheduler| scheduler.ending_at(steps)))
    }

    fn resolve_mesh(&self, ruled: Option<&Ruled>, overrides: &Overrides) -> Result<MeshShape, ConfigError> {
        let flag = |size| StatedSize { size, origin: SizeOrigin::Flag };
        let with_flag = |file: &[StatedSize], size: Option<usize>| -> Vec<_> {
            file.iter().copied().chain(size.map(flag)).collect()
        };
        let (dp_sizes, sp_sizes) = match ruled {
            None => (self.dp_sizes.clone(), self.sp_sizes.clone()),
            Some(ruled) => ruled.shape.map_or_else(Default::default, |shape| {
                let of_rule = |size| vec![StatedSize { size, origin: SizeOrigin::Rule }];
                (of_rule(shape.dp), of_rule(shape.sp))
            }),
        };
        let dp = with_flag(&dp_sizes, overrides.mesh.map(|(dp, _)| dp));
        let sp = with_flag(&sp_sizes, overrides.mesh.map(|(_, sp)| sp));
        MeshShape::resolve(&dp, &sp, overrides.world_size)
            .map_err(|reason| ConfigError::Mesh { file: self.file.clone(), reason: Box::new(reason) })
    }

    fn stated_shard_size(
        &self,
        dp: usize,
        ruled: Option<&Ruled>,
        overrides: &Overrides,
    ) -> Result<Option<usize>, ConfigError> {
        let ruled = ruled.and_then(|ruled| ruled.shape?.shard_size);
        let ruled = ruled.map(|size| StatedSize { size, origin: SizeOrigin::Rule });
        let flag = overrides.shard_size.map(|size| StatedSize { size, origin: SizeOrigin::Flag });
        let stated: Vec<StatedSize> = self.shard_sizes.iter().copied().chain(ruled).chain(flag).collect();
        MeshShape::shard_size(&stated, dp)
            .map_err(|reason| ConfigError::Mesh { file: self.file.clone(), reason: Box::new(reason) })
    }

    fn resolved_notes(&self, scheduler: Option<&SchedulerConfig>) -> Vec<Note> {
        let mut notes = self.remarks.notes.clone();
        if !self.names_gradient_clipping {
            let text = "`gradient_clipping` is not given: no clipping (DeepSpeed 0.19 would clip at 1.0)";
            notes.push(Note::warning(text));
        }
        let of_scheduler = scheduler.into_iter().flat_map(|scheduler| scheduler.notes(&self.optimizer));
        notes.extend(of_scheduler.map(Note::warning));
        notes
    }
}

impl Overrides {
    fn check(&self) -> Result<(), ConfigError> {
        let at_least_1 = |flag, value: Option<u64>| match value {
            Some(0) => {
                Err(ConfigError::InvalidFlag { flag, expected: "at least 1".into(), found: "0".into() })
            }
            _ => Ok(()),
        };
        at_least_1("mesh", self.mesh.map(|(dp, sp)| dp.min(sp) as u64))?;
        at_least_1("seq-len", self.seq_len.map(|tokens| tokens as u64))?;
        at_least_1("steps", self.steps)?;
        at_least_1("epochs", self.epochs)?;
        if let (Some(_), Some(epochs)) = (self.steps, self.epochs) {
            let expected = "either --steps or --epochs".into();
            return Err(ConfigError::InvalidFlag { flag: "epochs", expected, found: epochs.to_string() });
        }
        at_least_1("threads-per-rank", self.threads_per_rank.map(|threads| threads as u64))?;
        let strings = [("model", &self.model), ("tokenizer", &self.tokenizer), ("output", &self.output)];
        let paths = self.data.iter().map(|source| ("data", Some(source.path.as_str())));
        let mut all = strings.into_iter().map(|(flag, value)| (flag, value.as_deref())).chain(paths);
        match all.find(|(_, value)| *value == Some("")) {
            Some((flag, _)) => Err(ConfigError::InvalidFlag {
                flag,
                expected: "a string that is not empty".into(),
                found: "an empty one".into(),
            }),
            None => Ok(()),
        }
    }
}

impl Config {
    /// Reads, checks and resolves a file, without a command line.
    ///
    /// # Errors
    /// When the file cannot be read, has faults, or contradicts itself.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        RawConfig::from_file(path)?.resolve(&Overrides::default())
    }

    /// Checks and resolves the text of a config file, without a command line; `file` is
    /// what error messages call it.
    ///
    /// # Errors
    /// When the text has faults or contradicts itself.
    pub fn from_json_str(text: &str, file: &str) -> Result<Self, ConfigError> {
        RawConfig::from_json_str(text, file)?.resolve(&Overrides::default())
    }

    /// The number of ranks of the mesh.
    pub fn world_size(&self) -> usize {
        self.dp_size * self.sp_size
    }

    /// Whether ZeRO's partitions fill so many data-parallel ranks: training refuses others.
    pub(crate) fn partitions_fill(&self, dp: usize) -> bool {
        self.stated_shard_size.is_none_or(|size| dp.is_multiple_of(size))
    }

    /// The same on another mesh, whose dp the partitions fill.
    pub(crate) fn set_mesh(&mut self, dp: usize, sp: usize) {
        (self.dp_size, self.sp_size) = (dp, sp);
        self.zero_shard_size = self.stated_shard_size.filter(|size| *size != dp);
    }

    /// The same at another ZeRO stage, without the offload that the stage has nothing for.
    pub fn set_zero_stage(&mut self, stage: ZeroStage) {
        self.zero_stage = stage;
        if !stage.partitions_optimizer() {
            self.memory.offload_optimizer = Offload::None;
        }
        if !stage.partitions_parameters() {
            self.memory.offload_parameters = Offload::None;
        }
    }

    /// Ranks that share ZeRO's partitions: all of dp, or the shard size of hybrid sharding.
    pub fn zero_world_size(&self) -> usize {
        self.zero_shard_size.unwrap_or(self.dp_size)
    }

    /// The learning rate of every step.
    pub fn lr_schedule(&self) -> LrSchedule {
        let base_lr = self.optimizer.lr();
        self.scheduler
            .as_ref()
            .map_or(LrSchedule::constant(base_lr), |scheduler| LrSchedule::new(scheduler, base_lr))
    }

    /// [`model`](Self::model), for those that cannot do without.
    ///
    /// # Errors
    /// When neither the file nor a flag gives it.
    pub fn require_model(&self) -> Result<&str, ConfigError> {
        self.model.as_deref().ok_or(ConfigError::Unset { key: "model", flag: "model" })
    }

    /// [`data`](Self::data), for those that cannot do without.
    ///
    /// # Errors
    /// When neither the file nor a flag gives it.
    pub fn require_data(&self) -> Result<&[DataSource], ConfigError> {
        match self.data.as_slice() {
            [] => Err(ConfigError::Unset { key: "data", flag: "data" }),
            sources => Ok(sources),
        }
    }

    /// [`seq_len`](Self::seq_len), for those that cannot do without.
    ///
    /// # Errors
    /// When neither the file nor a flag gives it.
    pub fn require_seq_len(&self) -> Result<usize, ConfigError> {
        self.seq_len.ok_or(ConfigError::Unset { key: "seq_len", flag: "seq-len" })
    }

    /// [`steps`](Self::steps), for those that cannot do without.
    ///
    /// # Errors
    /// When neither the file nor a flag gives it.
    pub fn require_steps(&self) -> Result<u64, ConfigError> {
        self.steps.ok_or(ConfigError::Unset { key: "steps", flag: "steps" })
    }
}
