//! Runs a rank's step dry: the real engine on tensors without elements and groups that move no data.

use super::Workload;
use super::event::Event;
use super::recorder::{Phase, Recorder};
use crate::comm::TrainingGroups;
use crate::comm::fake::{FakeCollective, FakeMeshGroups, FakeObserver};
use crate::config::PipelineSchedule;
use crate::data::MicroBatch;
use crate::engine::{Engine, EngineError, OpenPasses, PartPeak, attention};
use crate::mesh::{DeviceMesh, TP_AXIS};
use crate::model::{Model, ModelError, WeightSource};
use crate::nn::{MixerConfig, ParameterSpec};
use crate::pipeline::{Action, Pass};
use crate::placement::ledger::{self, LedgerGroup};
use crate::zero::CheckpointPart;
use candle_core::Device;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use ulysses_kernels::device::dry::{self, Allocation, DryDevice};
use ulysses_kernels::memory::live_bytes;

/// Maximum number of micro batches that are run per step: the first, the second, one that represents all others, and the
/// last, which reduces the gradients.
const MAX_MICRO_BATCHES: usize = 4;

/// Maximum number of micro batches of a planned step of the schedule `gpipe`, which has all of them in memory.
const MAX_GPIPE_MICRO_BATCHES: usize = 1024;

/// Maximum number of documents in a planned micro batch.
pub(super) const MAX_DOCUMENTS: usize = 1 << 22;

/// The events and the memory of a rank's step.
#[derive(Debug)]
pub(super) struct DryStep {
    /// The passes that were run, in order.
    pub(super) passes: Vec<DryPass>,
    pub(super) update: Vec<Event>,
    /// The peak memory of each part of the step, in order.
    pub(super) parts: Vec<PartPeak>,
    /// Memory before the first step.
    pub(super) persistent_bytes: u64,
    /// Peak of the offloaded bytes.
    pub(super) offloaded_bytes: u64,
}

/// The events of a pass.
#[derive(Debug)]
pub(super) struct DryPass {
    pub(super) action: Action,
    /// Number of consecutive micro batches that its micro batch represents.
    pub(super) times: u64,
    pub(super) events: Vec<Event>,
}

/// The weights of a dry rank, which are never read.
struct NoWeights;

impl WeightSource for NoWeights {
    fn read(&self, _: &ParameterSpec, _: Range<usize>, _: &mut [f32]) -> Result<(), ModelError> {
        Ok(())
    }
}

/// One rank of the workload's mesh.
struct DryRank {
    engine: Engine,
    batch: MicroBatch,
    recorder: Arc<Mutex<Recorder>>,
}

impl Workload {
    /// Runs a rank's second step, which recycles the storage of the first.
    pub(super) fn warm_step(&self, mesh: &DeviceMesh, rank: usize) -> Result<DryStep, EngineError> {
        self.warm_step_of(mesh, rank, MAX_MICRO_BATCHES)
    }

    /// Runs a rank's second step with at most `max_micro_batches` micro batches.
    pub(super) fn warm_step_of(
        &self,
        mesh: &DeviceMesh,
        rank: usize,
        max_micro_batches: usize,
    ) -> Result<DryStep, EngineError> {
        self.dry(mesh, rank, max_micro_batches, |rank, accumulation| {
            let persistent_bytes = u64::try_from(live_bytes()).unwrap_or(0);
            rank.step(accumulation)?;
            rank.engine.watch_memory();
            let step = rank.step(accumulation)?;
            let parts = rank.engine.take_part_peaks();
            rank.engine.check_replicas()?;
            Ok(DryStep { persistent_bytes, parts, ..step })
        })
    }

    /// Runs a rank's first step, for its compute and communication.
    pub(super) fn first_step(&self, mesh: &DeviceMesh, rank: usize) -> Result<DryStep, EngineError> {
        self.dry(mesh, rank, MAX_MICRO_BATCHES, DryRank::step)
    }

    /// Runs a rank's evaluation of a micro batch.
    pub(super) fn evaluation(&self, mesh: &DeviceMesh, rank: usize) -> Result<Vec<Event>, EngineError> {
        self.dry(mesh, rank, MAX_MICRO_BATCHES, |rank, _| {
            rank.engine.evaluate(&rank.batch)?;
            Ok(rank.recorder.lock().take())
        })
    }

    /// Returns the bytes of each of ZeRO's partitions in a checkpoint, by rank along tp, without the headers of files.
    pub(super) fn saved_bytes(&self, mesh: &DeviceMesh) -> Result<Vec<Vec<u64>>, EngineError> {
        let tp_ranks = match mesh.has_axis(TP_AXIS) {
            true => mesh.group_of(TP_AXIS, mesh.ranks()[0])?,
            false => vec![mesh.ranks()[0]],
        };
        let of_rank = |rank| self.dry(mesh, rank, MAX_MICRO_BATCHES, |rank, _| Ok(rank.engine.saved_bytes()));
        tp_ranks.into_iter().map(of_rank).collect()
    }

    /// Returns the part of the state that each rank writes to checkpoints, if any.
    pub(super) fn written_parts(
        &self,
        mesh: &DeviceMesh,
    ) -> Result<Vec<Option<CheckpointPart>>, EngineError> {
        let of_rank = |rank| Ok(self.fake_groups(mesh, rank, None)?.written_part());
        (0..mesh.world_size()).map(of_rank).collect()
    }

    fn dry<R>(
        &self,
        mesh: &DeviceMesh,
        rank: usize,
        max_micro_batches: usize,
        work: impl FnOnce(&mut DryRank, usize) -> Result<R, EngineError>,
    ) -> Result<R, EngineError> {
        self.dry_on(mesh, rank, max_micro_batches, |groups| groups, work)
    }

    /// Runs `work` on a dry rank, whose fake groups are changed by `change`.
    fn dry_on<R>(
        &self,
        mesh: &DeviceMesh,
        rank: usize,
        max_micro_batches: usize,
        change: impl FnOnce(TrainingGroups) -> TrainingGroups,
        work: impl FnOnce(&mut DryRank, usize) -> Result<R, EngineError>,
    ) -> Result<R, EngineError> {
        let mut config = self.config.clone();
        if !self.is_countable()? {
            return Err(EngineError::step_too_large(&config));
        }
        let accumulation = config.gradient_accumulation_steps;
        config.gradient_accumulation_steps = accumulation.min(self.most_micro_batches(max_micro_batches)?);
        config.monitoring.comms_logger.enabled = false;
        let recorder = Arc::new(Mutex::new(Recorder::new(self.device, &config)));
        let device = DryDevice { kind: self.device, threads: config.ulysses.threads_per_rank.unwrap_or(1) };
        let sink = recorder.clone();
        let run = || {
            let of_groups = recorder.clone();
            let observer = Arc::new(move |call: FakeCollective<'_>| of_groups.lock().record_collective(call));
            let groups = self.fake_groups(mesh, rank, Some(observer))?;
            let groups = change(groups.map(|_, group| Arc::new(LedgerGroup::new(group))));
            let model = Model::new(&self.model)?;
            let batch = self.batch(groups.sp.rank())?;
            let device = &Device::Cpu;
            let attention = Arc::new(attention(&config, device)?);
            let engine = Engine::with_attention(model, &NoWeights, &config, groups, attention, device)?;
            work(&mut DryRank { engine, batch, recorder }, accumulation)
        };
        // Logs and traces of the dry run are dropped.
        let silent = tracing::subscriber::NoSubscriber::default();
        let axes = mesh.split(config.zero_shards(), config.seq_sharding().ring_size)?;
        let outcome = tracing::subscriber::with_default(silent, || {
            dry::run(device, move |event| sink.lock().record(event), || ledger::run(axes, rank, run))
        });
        outcome??
    }

    /// Creates the fake groups of a rank. Those of blocks of sp are missing: a plan is that of the fixed layout.
    pub(super) fn fake_groups(
        &self,
        mesh: &DeviceMesh,
        rank: usize,
        observer: Option<Arc<FakeObserver>>,
    ) -> Result<TrainingGroups, EngineError> {
        let groups = FakeMeshGroups::new(mesh.clone(), rank, observer);
        let own = TrainingGroups::new(&groups, self.config.zero_shards())?;
        Ok(own.with_ring(&groups, self.config.seq_sharding().ring_size)?)
    }

    /// Returns the number of micro batches to run of a step for which `others` would be enough without a pipeline: so many that
    /// all are in memory that a step has at once.
    fn most_micro_batches(&self, others: usize) -> Result<usize, EngineError> {
        let (pp, micro_batches) = (self.config.mesh.pp_size, self.config.gradient_accumulation_steps);
        let pipeline = &self.config.ulysses.pipeline;
        match pipeline.schedule {
            _ if pp == 1 => Ok(others),
            // Groups of pp micro batches: two before a full one, two after it.
            _ if pipeline.virtual_stages > 1 => Ok(others.max(5 * pp)),
            // A stage starts up to pp - 1 micro batches before its first backward pass, and ends as many after its last forward
            // pass.
            PipelineSchedule::OneForwardOneBackward | PipelineSchedule::ZeroBubble => {
                Ok(others.max(2 * pp + 2))
            }
            PipelineSchedule::Gpipe if micro_batches <= MAX_GPIPE_MICRO_BATCHES => Ok(micro_batches),
            PipelineSchedule::Gpipe => Err(EngineError::step_too_large(&self.config)),
        }
    }

    /// Returns a micro batch without tokens.
    fn batch(&self, sp_rank: usize) -> Result<MicroBatch, EngineError> {
        let (batch_size, seq_len) = (self.config.micro_batch_size, self.config.require_seq_len()?);
        let document_len = self.document_len.unwrap_or(seq_len).clamp(1, seq_len);
        let starts = (0..seq_len).step_by(document_len).map(|start| start as u32);
        let boundaries: Vec<u32> = starts.chain([seq_len as u32]).collect();
        Ok(MicroBatch {
            batch_size,
            seq_len,
            shard: self.config.seq_sharding().tokens(seq_len, sp_rank),
            input_ids: Vec::new(),
            labels: Vec::new(),
            position_ids: Vec::new(),
            values: BTreeMap::new(),
            cu_seqlens: Arc::new(vec![boundaries; batch_size]),
            batch_hash: 0,
            flexible: None,
        })
    }

    /// Returns whether positions fit 32 bits, and the tokens of a step and the bytes of a micro batch on one rank 64 bits.
    fn is_countable(&self) -> Result<bool, EngineError> {
        /// Upper bound of the bytes per element of each width in a layer.
        const BYTES: f64 = 64.0;
        let (config, model) = (&self.config, &self.model);
        let seq_len = config.require_seq_len()?;
        let heads = model.layers.iter().map(MixerConfig::width).max().unwrap_or(0);
        let widths = [model.hidden_size, model.intermediate_size, model.vocab_size, heads];
        let of_token =
            widths.into_iter().map(|width| width as f64).sum::<f64>() * (model.num_layers() + 1) as f64;
        let bytes = BYTES * config.micro_batch_size as f64 * seq_len as f64 * of_token;
        let tokens = config.train_batch_size.checked_mul(seq_len);
        // Sequences and documents are listed one by one.
        let documents = seq_len.div_ceil(self.document_len.unwrap_or(seq_len).clamp(1, seq_len));
        let is_listable = config.micro_batch_size.saturating_mul(documents) <= MAX_DOCUMENTS;
        Ok(tokens.is_some() && is_listable && u32::try_from(seq_len).is_ok() && bytes < i64::MAX as f64)
    }
}

impl DryRank {
    /// Runs a step of `accumulation` micro batches.
    fn step(&mut self, accumulation: usize) -> Result<DryStep, EngineError> {
        self.recorder.lock().take();
        let num_run = self.engine.config().gradient_accumulation_steps;
        // One with only full turns before and after its passes, or a group of them, represents all that are not run.
        let (pp, pipeline) = (self.engine.config().mesh.pp_size, &self.engine.config().ulysses.pipeline);
        let repeated = match pipeline.stages_per_rank(pp) {
            1 => pp + 1..pp + 2,
            _ => 2 * pp..3 * pp,
        };
        let more = (accumulation - num_run) / repeated.len();
        let times = |index: usize| if repeated.contains(&index) { 1 + more } else { 1 };
        let (mut passes, mut open, mut tables) = (Vec::new(), OpenPasses::default(), BTreeMap::new());
        for action in self.engine.passes(num_run)? {
            let Action { pass, micro_batch, chunk } = action;
            if pass == Pass::Forward {
                // Ids, labels and positions are not in tensors.
                let tokens = self.batch.batch_size * self.batch.seq_len_local();
                let table = || Allocation::on_host(tokens * (2 * size_of::<u32>() + size_of::<i64>()));
                tables.insert((micro_batch, chunk), (chunk == 0).then(table));
                self.begin(Phase::Forward);
                let loss = self.engine.forward_chunk(&self.batch, chunk)?;
                open.insert(action, loss);
            } else {
                let _tables = tables.remove(&(micro_batch, chunk));
                self.begin(Phase::Backward);
                open.run_backward(&mut self.engine, action)?;
            }
            let (times, events) = (times(micro_batch) as u64, self.recorder.lock().take());
            passes.push(DryPass { action, times, events });
        }
        self.begin(Phase::Update);
        self.engine.step()?;
        let mut recorder = self.recorder.lock();
        Ok(DryStep {
            passes,
            update: recorder.take(),
            parts: Vec::new(),
            persistent_bytes: 0,
            offloaded_bytes: recorder.most_offloaded_bytes as u64,
        })
    }

    fn begin(&self, phase: Phase) {
        self.recorder.lock().phase = phase;
    }
}

impl DryStep {
    /// Returns every event with its number of repetitions.
    pub(super) fn events(&self) -> impl Iterator<Item = (u64, &Event)> + Clone {
        let of_passes =
            self.passes.iter().flat_map(|pass| pass.events.iter().map(|event| (pass.times, event)));
        of_passes.chain(self.update.iter().map(|event| (1, event)))
    }
}

#[cfg(test)]
mod tests;
