//! The state of an engine that leaves it: checkpoints, tensors of the whole mesh, and the summary.

use super::pipeline::pipeline_bubble;
use super::report::{by_axis, pairs};
use super::{Engine, EngineError, Passes};
use crate::checkpoint::{
    Checkpoint, DataCursor, EvaluationSummary, LocalStorage, Manifest, MemoryCheckpoint, MemoryCopies,
    MeshSizes, SaveOptions, SavedCheckpoint, Saver, TrainingProgress, UnitEntry,
};
use crate::comm::{ProcessGroup, ProcessGroupExt, RingGroups};
use crate::data::{DataError, DataLoader};
use crate::mesh::{MeshShape, SeqSharding};
use crate::model::{HfSource, ModelConfig};
use crate::monitor::{RankSummary, StageIdle};
use crate::nn::TensorRank;
use crate::sequence_parallel::{AttentionShape, ExchangePlan, ExchangeVolume, SpShard};
use crate::zero::{FlatLayout, StateBytes, StateIndex};
use candle_core::{DType, Device, Tensor};
use serde_json::Value;
use std::cell::RefCell;
use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use ulysses_kernels::device::gpu_memory;
use ulysses_kernels::memory;

/// Data about a run in its checkpoints that the engine does not know.
#[derive(Debug, Clone, PartialEq)]
pub struct RunRecord {
    /// Name of the run; resumed runs keep it.
    pub run_id: String,
    /// The model in the vocabulary of Hugging Face's `config.json`, or null.
    pub model: Value,
    /// Files for the export, if the run started from a model directory.
    pub source: Option<HfSource>,
    /// Position in the data.
    pub data: DataCursor,
    /// Results of the evaluations so far.
    pub evaluations: EvaluationSummary,
}

impl RunRecord {
    /// The record of a run that reads from `loader`. `model` describes the model as Hugging Face's
    /// `config.json` does ([`ModelConfig::to_hf_json`](crate::model::ModelConfig::to_hf_json)); an export
    /// needs it, otherwise it may be null. A run that started from a model directory also sets `source`.
    ///
    /// # Errors
    /// Data that cannot be read, so that its hash is unknown.
    pub fn new(run_id: impl Into<String>, model: Value, loader: &DataLoader) -> Result<Self, DataError> {
        let data = loader.data();
        let data = DataCursor {
            samples_consumed: loader.samples_consumed(),
            seed: loader.options().seed,
            seq_len: data.seq_len(),
            num_sequences: data.num_sequences(),
            data_hash: Some(data.sampled_hash()?),
        };
        Ok(Self {
            run_id: run_id.into(),
            model,
            source: None,
            data,
            evaluations: EvaluationSummary::default(),
        })
    }
}

impl Engine {
    /// Returns a [`Saver`] that writes this engine's checkpoints to `directory`, which must exist.
    /// `group` must meet the requirements of [`Saver::new`]. The ranks that hold the same partition of the
    /// same shards share its files. Collective.
    ///
    /// # Errors
    /// As [`Saver::new`], or parts of the model with the same name.
    pub fn saver(
        &self,
        group: Arc<dyn ProcessGroup>,
        directory: &Path,
        options: SaveOptions,
    ) -> Result<Saver, EngineError> {
        let mut names = HashSet::new();
        let units = self.unit_entries()?;
        if let Some(unit) = units.iter().find(|unit| !names.insert(&unit.name)) {
            return Err(EngineError::DuplicateUnit { name: unit.name.clone() });
        }
        let part = self.groups.part_replica();
        Ok(Saver::new(group, Arc::new(LocalStorage), directory, part, options)?)
    }

    /// Starts to save the state of all ranks, after comparing the replicas. Gradients of an unfinished
    /// accumulation are not saved. Collective. Returns the result of the previous save ([`Saver::begin`]).
    ///
    /// # Errors
    /// Replicas that differ, or a failed save.
    pub fn save_checkpoint(
        &mut self,
        saver: &mut Saver,
        run: RunRecord,
    ) -> Result<Option<SavedCheckpoint>, EngineError> {
        let manifest = self.checked_manifest(run)?;
        Ok(saver.begin(&self.zero, manifest)?)
    }

    /// Opens the copies in host memory, as [`MemoryCopies::new`]. Of the ranks that hold the same partition, one writes it.
    /// Collective.
    ///
    /// # Errors
    /// As [`MemoryCopies::new`].
    pub fn memory_copies(
        &self,
        group: Arc<dyn ProcessGroup>,
        directory: Option<&Path>,
    ) -> Result<Option<MemoryCopies>, EngineError> {
        if self.pipeline.is_some() {
            return Err(EngineError::WithPipeline { feature: "`checkpoint.memory_interval`" });
        }
        Ok(MemoryCopies::new(group, directory, self.groups.written_part())?)
    }

    /// Returns the bytes of each partition that this rank of tp writes to a checkpoint, without the headers of files.
    pub(crate) fn saved_bytes(&self) -> Vec<u64> {
        self.zero.saved_bytes()
    }

    /// Saves a copy of the state in host memory, after comparing the replicas. Collective.
    ///
    /// # Errors
    /// Replicas that differ, or as [`MemoryCopies::save`].
    pub fn copy_to_memory(
        &mut self,
        copies: &mut MemoryCopies,
        run: RunRecord,
    ) -> Result<SavedCheckpoint, EngineError> {
        let manifest = self.checked_manifest(run)?;
        Ok(copies.save(&self.zero, manifest)?)
    }

    /// Gathers the files of a copy that this engine will load, as [`MemoryCopies::gather`]. Collective.
    ///
    /// # Errors
    /// As [`MemoryCopies::gather`].
    pub fn gather_from_memory(
        &self,
        copies: &MemoryCopies,
        found: MemoryCheckpoint,
    ) -> Result<Checkpoint, EngineError> {
        let layouts: Vec<_> = self.zero.layouts().collect();
        let ranges = self.zero.restored_ranges().into_iter();
        let ranges: Vec<_> = ranges.map(|(of, range)| (layouts[of.unit], of.kind, range)).collect();
        let needed = Checkpoint::files_with(found.manifest(), &ranges);
        Ok(copies.gather(found, &needed)?)
    }

    /// Compares the replicas, and returns the manifest of a save.
    fn checked_manifest(&mut self, run: RunRecord) -> Result<Manifest, EngineError> {
        self.check_usable()?;
        let sent = self.bytes_sent();
        self.check_replicas()?;
        // The bytes sent by a save do not count toward a step's metrics.
        self.reported_bytes += self.bytes_sent() - sent;
        self.manifest(run)
    }

    fn manifest(&self, run: RunRecord) -> Result<Manifest, EngineError> {
        let RunRecord { run_id, model, source, data, evaluations } = run;
        let config = &self.config;
        let MeshShape { pp, dp, sp, tp } = config.mesh.shape();
        let mesh = MeshSizes { dp, sp, tp, pp };
        Ok(Manifest {
            format_version: mesh.format_version(),
            run_id,
            saved_unix_seconds: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs()),
            mesh,
            zero_stage: config.zero.stage.into(),
            num_partitions: self.zero.world_size(),
            progress: TrainingProgress {
                step: self.attempted_steps,
                optimizer_step: self.step,
                scheduler_step: self.step,
                data,
                precision: config.precision.section().map(str::to_owned),
                loss_scaler: self.scaler.state(),
                consecutive_skips: self.consecutive_skips,
                evaluations,
            },
            config: serde_json::to_value(config).map_err(|error| EngineError::Source(error.into()))?,
            model,
            source,
            kinds: self.zero.state_kinds().into_iter().map(str::to_owned).collect(),
            units: self.unit_entries()?,
            files: Vec::new(),
        })
    }

    /// Returns the units of all stages. Collective over these.
    fn unit_entries(&self) -> Result<Vec<UnitEntry>, EngineError> {
        let stage = self.groups.pp_rank();
        // The boundaries of stages have no parameters, and all the same name.
        let is_unit = |layout: &&FlatLayout| self.pipeline.is_none() || layout.numel() > 0;
        let own = self.zero.saved_layouts().filter(is_unit);
        let own = own.map(|layout| UnitEntry { stage, ..UnitEntry::of(layout) }).collect();
        Ok(self.gather_stages::<Vec<UnitEntry>>(own)?.concat())
    }

    /// Resumes from a checkpoint, saved on any mesh and at any ZeRO stage. Restores parameters, optimizer
    /// state and counters; each rank reads only its own part. Verify the checkpoint first
    /// ([`open_verified`](crate::checkpoint::open_verified)).
    ///
    /// # Errors
    /// A checkpoint of another model or optimizer, which leaves the engine unchanged; or one that cannot be
    /// read, which leaves it unusable.
    pub fn load_checkpoint(&mut self, checkpoint: &Checkpoint) -> Result<(), EngineError> {
        checkpoint.check_fits(&self.unit_entries()?, &self.zero.state_kinds())?;
        let reader = RefCell::new(checkpoint.reader());
        let layouts: Vec<_> = self.zero.layouts().cloned().collect();
        self.is_broken = true;
        self.zero.restore_state::<EngineError>(&|StateIndex { unit, kind }, range, out| {
            Ok(reader.borrow_mut().read(&layouts[unit], kind, range, out)?)
        })?;
        let progress = &checkpoint.manifest().progress;
        self.step = progress.optimizer_step;
        self.attempted_steps = progress.step;
        self.consecutive_skips = progress.consecutive_skips;
        if let Some(state) = progress.loss_scaler {
            self.scaler.restore(state);
        }
        self.zero_grad();
        self.is_broken = false;
        // The bytes sent by a restore do not count toward the next step's metrics.
        self.reported_bytes = self.bytes_sent();
        Ok(())
    }

    /// Gathers a per-token tensor of the global batch on every rank. Collective.
    ///
    /// # Shapes
    /// `local`: `[micro_batch, seq_local, width]` → `[micro_batch · dp, seq, width]`.
    ///
    /// # Errors
    /// Failed communication.
    pub fn assemble_tokens(&self, local: &Tensor) -> Result<Tensor, EngineError> {
        let (batch, _, width) = local.dims3()?;
        let local = ulysses_kernels::tensor::to_vec::<f32>(&local.to_dtype(DType::F32)?)?;
        let shards = self.groups.tokens().all_gather_varied(&local)?;
        let shards = shards.into_iter().map(|shard| {
            let seq_len_local = shard.len() / (batch * width).max(1);
            Tensor::from_vec(shard, (batch, seq_len_local, width), &Device::Cpu)
        });
        let sequences = Tensor::cat(&shards.collect::<candle_core::Result<Vec<_>>>()?, 1)?;
        let seq_len = sequences.dim(1)?;
        let sharding = self.config.seq_sharding();
        let in_rank_order = (0..sharding.sp_size())
            .flat_map(|rank| sharding.tokens(seq_len, rank).positions().collect::<Vec<_>>());
        let mut index = vec![0; seq_len];
        in_rank_order.zip(0u32..).for_each(|(position, at)| index[position] = at);
        let sequences = sequences.index_select(&Tensor::new(index, &Device::Cpu)?, 1)?;
        let all = self.groups.dp.all_gather_values(&ulysses_kernels::tensor::to_vec::<f32>(&sequences)?)?;
        Ok(Tensor::from_vec(all, (batch * self.config.mesh.dp_size, seq_len, width), &Device::Cpu)?)
    }

    /// Returns the bytes that this rank sent and holds, next to the formulas for a Llama-style model and all `passes` of
    /// the run. Collective.
    ///
    /// # Errors
    /// Failed communication.
    pub fn summary(&self, model: &ModelConfig, passes: &[Passes]) -> Result<RankSummary, EngineError> {
        // The count of sent bytes is complete once all other ranks have received them.
        let groups = self.groups.by_axis();
        groups.iter().try_for_each(|(_, group)| group.barrier())?;
        let (measured, expected) = (self.zero.state_bytes(), self.zero.expected_state_bytes());
        Ok(RankSummary {
            rank: self.global_rank,
            // By axis: a group that spans the world is the world group and has its name.
            groups: by_axis(&groups),
            expected_exchange_bytes: passes
                .iter()
                .map(|passes| self.exchange_bytes(model, *passes))
                .sum::<Result<u64, EngineError>>()?,
            held_bytes: pairs(measured, expected),
            peak_by_category: match gpu_memory(&self.workspace.options().device) {
                Some(gpu) => self.state_by_category().with_rest_of(gpu.peak),
                None => memory::peak_by_category(),
            },
            pipeline: self.pipeline.is_some().then(|| StageIdle {
                seconds: self.comm_timer.pp_seconds(),
                expected: pipeline_bubble(&self.config),
            }),
        })
    }

    /// Returns the bytes of the state that this rank stores on its device: parameters, gradients and optimizer state. The
    /// driver of a GPU knows no categories, so all else there is other memory.
    pub fn state_by_category(&self) -> memory::ByCategory {
        let StateBytes { parameters, gradients, optimizer, .. } = self.zero.state_bytes();
        memory::ByCategory { parameters, gradients, optimizer, ..memory::ByCategory::default() }
    }

    /// Bytes that this rank sends in the Ulysses exchanges of some passes, by formula.
    fn exchange_bytes(&self, model: &ModelConfig, passes: Passes) -> Result<u64, EngineError> {
        let Passes { seq_len, block_size, trained, evaluated } = passes;
        let sp = &self.groups.sp;
        let block_size = block_size.filter(|size| *size < sp.world_size());
        let (sharing, ring_rank, group) = match (&self.groups.ring, block_size) {
            (None, None) => (sp, 0, sp),
            (Some(RingGroups { ring, ulysses }), _) => (sp, ring.rank(), ulysses),
            (None, Some(size)) => match self.groups.sp_blocks.iter().find(|group| group.world_size() == size)
            {
                Some(group) => (group, 0, group),
                // A block of one rank exchanges nothing.
                None => return Ok(0),
            },
        };
        let sharding = SeqSharding { ulysses_size: group.world_size(), ..self.config.seq_sharding() };
        let tp = self.groups.tensor.as_ref();
        let tp = tp.map(|groups| TensorRank { size: groups.tp.world_size(), rank: groups.tp.rank() });
        let ring_tokens = sharding.ring_tokens(seq_len, ring_rank).len();
        let batch = passes.block_size.map_or(self.config.micro_batch_size, |_| 1);
        let elem_bytes = self.workspace.options().dtype.size_in_bytes() as u64;
        let passes_states = self.config.ulysses.state_passing;
        let shard = SpShard { sharding, rank: sharing.rank(), batch, seq_len };
        let mut bytes = 0;
        for index in 0..self.model.layers.len() {
            let layer = model.layers[self.layer_number(index)];
            let layer = tp.map_or(Ok(layer), |tp| layer.divided(self.model.layers[index].name(), tp))?;
            let mut add = |volume: ExchangeVolume, saves_output| {
                let again = match self.is_recomputed(index) {
                    true => volume.recompute_bytes(saves_output, elem_bytes),
                    false => 0,
                };
                bytes += trained * (volume.total_elems() * elem_bytes + again);
                bytes += evaluated * volume.forward_elems * elem_bytes;
            };
            if let Some(volume) = ExchangeVolume::of_mixer(&layer, shard, passes_states, elem_bytes) {
                add(volume, false);
            }
            let Some(layer) = layer.attention() else { continue };
            for chunk in layer.heads().chunks(self.config.ulysses.head_chunks) {
                let shape = AttentionShape::new(layer, chunk.num_heads(), batch, ring_tokens);
                let plan = ExchangePlan::grouped(shape, group.world_size(), group.rank())?;
                add(plan.volume(), self.config.saves_attention_output());
            }
        }
        Ok(bytes)
    }
}
