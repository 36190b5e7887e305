//! [`Engine`]: its parts, and what a caller may read of them.

use super::EngineError;
use super::blocks::BlockAttention;
use super::flops::layers_of_stages;
use super::initialize::{attention, check_mesh, check_parameters, warn_about_candle_threads, zero_optimizer};
use super::loss_scale::LossScaler;
use super::memory::{PartPeak, PeakRecorder};
use super::offload::{ActivationOffload, storage};
use super::parallel_plan::divide_model;
use super::pipeline::Pipeline;
use super::step::Accumulation;
use super::step_part::StepPart;
use super::times::{StepPhase, StepTimer, StepTimes};
use crate::comm::{CallTimes, CommTimer, EachCall, MeshGroups, ProcessGroup, TrainingGroups};
use crate::config::{Config, LrSchedule};
use crate::model::{Model, WeightSource};
use crate::nn::{TensorRank, TokenExchange, TokenLayout};
use crate::tensor_parallel::TensorParallel;
use crate::zero::ZeroOptimizer;
use candle_core::{Device, Tensor};
use std::sync::Arc;
use ulysses_kernels::Workspace;
use ulysses_kernels::attention::AttentionCompute;
use ulysses_kernels::device::dry;
use ulysses_kernels::linear::bf16_gemm;
use ulysses_kernels::tensor::TensorOptions;

/// Index of the input's unit. The units are in forward order.
pub(super) const INPUT_UNIT: usize = 0;

/// Index of the unit of a layer.
pub(super) fn layer_unit(layer: usize) -> usize {
    INPUT_UNIT + 1 + layer
}

/// A model in training on one rank of the mesh.
pub struct Engine {
    pub(super) config: Config,
    pub(super) model: Model,
    pub(super) zero: ZeroOptimizer,
    pub(super) groups: TrainingGroups,
    pub(super) global_rank: usize,
    pub(super) attention: BlockAttention,
    /// The exchange of tokens, if there are tensor-parallel ranks.
    pub(super) token_exchange: Option<Arc<dyn TokenExchange>>,
    /// The pipeline of which the model is a stage, if there is one.
    pub(super) pipeline: Option<Pipeline>,
    pub(super) workspace: Arc<Workspace>,
    /// The layout of the last micro batch's tokens, which usually fits the next one too.
    pub(super) token_layout: Option<Arc<TokenLayout>>,
    /// The layout of this rank's tokens between the modules of tensor-parallel layers.
    pub(super) own_token_layout: Option<Arc<TokenLayout>>,
    /// Storage for offloaded activation checkpoints, if configured.
    pub(super) activation_offload: Option<ActivationOffload>,
    pub(super) schedule: LrSchedule,
    pub(super) accumulation: Accumulation,
    /// Updates done.
    pub(super) step: u64,
    /// Steps done, including skipped ones.
    pub(super) attempted_steps: u64,
    pub(super) scaler: LossScaler,
    pub(super) consecutive_skips: u64,
    /// Set while gradients or parameters are incomplete; stays set after an error.
    pub(super) is_broken: bool,
    /// Bytes sent up to the last report.
    pub(super) reported_bytes: u64,
    pub(super) comm_timer: Arc<CommTimer>,
    pub(super) timer: StepTimer,
    /// Records memory peaks while they are watched.
    pub(super) memory: Option<PeakRecorder>,
    /// The part of a step that began last.
    pub(super) part: Option<StepPart>,
}

/// Creates the engine for `model` on this rank of the mesh. Allocates what the ZeRO stage keeps on this
/// rank and fills it from `weights`; a rank reads only what it keeps. All ranks pass equal arguments.
/// `groups` belong to a mesh with the axes `dp` and `sp`, `tp` if the weights of layers are divided and `pp` if the layers are, and
/// determine the device.
///
/// # Errors
/// A mesh that lacks an axis or differs from the config's, or weights that do not fit the model.
pub fn initialize(
    model: Model,
    weights: &dyn WeightSource,
    config: &Config,
    groups: &MeshGroups,
) -> Result<Engine, EngineError> {
    let device = groups.device();
    let of_training = TrainingGroups::new(groups, config.zero_shards())?
        .with_ring(groups, config.seq_sharding().ring_size)?
        .with_sp_blocks(groups, config.ulysses.flexible_sp)?;
    let attention = Arc::new(attention(config, device)?);
    Engine::with_attention(model, weights, config, of_training, attention, device)
}

impl Engine {
    /// As [`initialize`], with another local attention and given groups. The attention sees whole sequences, or
    /// blocks of a ring: it is wrapped here in the [`UlyssesAttention`](crate::sequence_parallel::UlyssesAttention) and, if the
    /// config says so, the [`RingAttention`](crate::sequence_parallel::RingAttention) of the config.
    ///
    /// # Errors
    /// As [`initialize`].
    pub fn with_attention(
        model: Model,
        weights: &dyn WeightSource,
        config: &Config,
        groups: TrainingGroups,
        local_attention: Arc<dyn AttentionCompute>,
        device: &Device,
    ) -> Result<Self, EngineError> {
        // Reports an invalid environment variable early.
        bf16_gemm()?;
        let options = TensorOptions { device: device.clone(), dtype: config.precision.dtype() };
        let comm_timer = Arc::new(match &config.monitoring.comms_logger {
            logger if logger.enabled => CommTimer::recording_calls(device, logger.verbose),
            _ => CommTimer::new(device),
        });
        let groups = groups.map(|axis, group| comm_timer.wrap(axis, group));
        if !dry::is_dry() {
            warn_about_candle_threads();
        }
        check_mesh(config, &groups)?;
        check_parameters(&model, config)?;
        let workspace = Arc::new(Workspace::with_options(options.clone()));
        let tp = groups.tensor.as_ref().map(|groups| &groups.tp);
        // Of the whole model: what layers cost differs between ranks of tp, and all must have the same stages.
        let stages = match &groups.pipeline {
            Some(_) => layers_of_stages(&model, config).map_err(Box::new)?,
            None => Vec::new(),
        };
        // First of the whole model: input and objective may share parameters.
        let tp_rank = tp.map(|tp| TensorRank { size: tp.world_size(), rank: tp.rank() });
        let plan = &config.tensor_parallel.partition_config.layer_specs;
        let model = divide_model(model, plan, tp_rank.unwrap_or(TensorRank { size: 1, rank: 0 }))?;
        let (model, pipeline) = match &groups.pipeline {
            None => (model, None),
            Some(groups) => {
                let (stage, pipeline) = Pipeline::divide(model, config, stages, groups, &workspace)?;
                (stage, Some(pipeline))
            }
        };
        let tied = pipeline.as_ref().map_or(&[][..], |pipeline| &pipeline.tied);
        let token_exchange = tp.map(|tp| Arc::new(TensorParallel::new(tp.clone())) as Arc<dyn TokenExchange>);
        let activation_offload = ActivationOffload::of(config, device)?;
        let zero = zero_optimizer(&model, tied, weights, config, groups.clone(), storage(config, options)?)?;
        tracing::debug!(
            stage = u8::from(config.zero.stage),
            dp_rank = groups.dp.rank(),
            sp_rank = groups.sp.rank(),
            held_bytes = zero.state_bytes().total(),
            "initialized"
        );
        let attention = BlockAttention::new(config, &groups, local_attention);
        let timer = StepTimer::new(device);
        Ok(Self {
            schedule: config.lr_schedule(),
            config: config.clone(),
            model,
            zero,
            global_rank: groups.dp.global_ranks()[groups.dp.rank()],
            groups,
            attention,
            token_exchange,
            pipeline,
            workspace,
            token_layout: None,
            own_token_layout: None,
            activation_offload,
            accumulation: Accumulation::default(),
            step: 0,
            attempted_steps: 0,
            scaler: LossScaler::of(config.precision),
            consecutive_skips: 0,
            is_broken: false,
            reported_bytes: 0,
            comm_timer,
            timer,
            memory: None,
            part: None,
        })
    }

    /// The resolved config.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The partitioned optimizer, with its layouts and state bytes.
    pub fn zero(&self) -> &ZeroOptimizer {
        &self.zero
    }

    /// Gathers every parameter, whole and by name, on every rank. Collective.
    ///
    /// # Errors
    /// A failed collective.
    pub fn gather_parameters(&mut self) -> Result<Vec<(String, Tensor)>, EngineError> {
        let own = self.zero.gather_parameters()?;
        self.gather_stage_tensors(own)
    }

    /// The data-parallel group. It is the ZeRO world by default.
    pub fn dp_group(&self) -> &Arc<dyn ProcessGroup> {
        &self.groups.dp
    }

    /// The sequence-parallel group.
    pub fn sp_group(&self) -> &Arc<dyn ProcessGroup> {
        &self.groups.sp
    }

    /// All groups that this engine communicates over.
    pub fn groups(&self) -> &TrainingGroups {
        &self.groups
    }

    /// Updates done so far; skipped steps do not count.
    pub fn global_step(&self) -> u64 {
        self.step
    }

    /// Steps done so far, including skipped ones.
    pub fn attempted_steps(&self) -> u64 {
        self.attempted_steps
    }

    /// The recycled storage of layers and steps.
    pub fn workspace(&self) -> &Workspace {
        &self.workspace
    }

    /// Frees the recycled storage of layers and steps, and that of offloaded activations. It serves tensors of the same
    /// sizes only: call this between steps if the sequence length changes.
    ///
    /// # Errors
    /// A failed copy of an offloaded activation.
    pub fn free_recycled_storage(&self) -> Result<(), EngineError> {
        self.workspace.clear();
        Ok(self.activation_offload.as_ref().map_or(Ok(()), ActivationOffload::trim)?)
    }

    /// Index of the model's objective's unit.
    pub(super) fn objective_unit(&self) -> usize {
        if self.model.is_tied() { INPUT_UNIT } else { layer_unit(self.model.layers.len()) }
    }

    /// Starts to record the memory peak of each part of a step ([`StepPart`]). This costs a clock read and
    /// some counter reads per part, and a few bytes of memory.
    pub fn watch_memory(&mut self) {
        self.memory = Some(PeakRecorder::start(false));
    }

    /// As [`watch_memory`](Self::watch_memory), but records only the last micro batch and the update, so
    /// that the record does not grow with the accumulation.
    pub fn watch_last_micro_batch(&mut self) {
        self.memory = Some(PeakRecorder::start(true));
    }

    /// Stops [`watch_memory`](Self::watch_memory) and returns the recorded parts in order. Anything
    /// before the first part counts toward it, anything after the last part toward that one.
    pub fn take_part_peaks(&mut self) -> Vec<PartPeak> {
        self.memory.take().map_or_else(Vec::new, PeakRecorder::finish)
    }

    /// Marks the beginning of a part of the step.
    pub(super) fn begin_part(&mut self, at: StepPart) {
        self.part = Some(at);
        if let Some(memory) = &mut self.memory {
            memory.begin(at);
        }
    }

    /// The part of a step that began last; `None` before the first step.
    pub fn part(&self) -> Option<StepPart> {
        self.part
    }

    /// Returns the times of the steps that [`train_batch`](Self::train_batch) has run since the last
    /// call. Waits for a GPU to finish them.
    ///
    /// # Errors
    /// A GPU that failed.
    pub fn take_times(&mut self) -> Result<StepTimes, EngineError> {
        let mut times = self.timer.take()?;
        let mut comm = self.comm_timer.take_seconds()?;
        let mut comm_in = |phase: StepPhase| comm.remove(phase.name()).unwrap_or_default();
        times.forward.comm = comm_in(StepPhase::Forward);
        times.backward.comm = comm_in(StepPhase::Backward);
        times.update.comm = comm_in(StepPhase::Update);
        Ok(times)
    }

    /// Totals of this rank's collectives so far, by axis, operation and size, with their time.
    pub fn comm_calls(&self) -> Vec<CallTimes> {
        self.comm_timer.calls()
    }

    /// Every collective so far, if the config enables the communication log.
    pub fn each_comm_call(&self) -> Vec<EachCall> {
        self.comm_timer.each_call()
    }

    pub(super) fn timed<T>(
        &mut self,
        phase: StepPhase,
        run: impl FnOnce(&mut Self) -> Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        let begin = self.timer.now()?;
        let span = match phase {
            StepPhase::Forward => tracing::debug_span!("forward"),
            StepPhase::Backward => tracing::debug_span!("backward"),
            StepPhase::Update => tracing::debug_span!("update"),
        };
        self.comm_timer.set_phase(phase.name());
        let value = span.in_scope(|| run(self));
        self.comm_timer.set_phase("");
        let value = value?;
        self.timer.add(phase, begin)?;
        Ok(value)
    }
}
