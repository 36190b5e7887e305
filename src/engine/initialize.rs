//! [`Engine`] and its construction.

use super::EngineError;
use super::blocks::BlockAttention;
use super::loss_scale::LossScaler;
use super::memory::PeakRecorder;
use super::moment::Moment;
use super::offload::{ActivationOffload, storage};
use super::parameter_groups::check_parameter_groups;
use super::step::Accumulation;
use super::times::StepTimer;
use crate::comm::{CommTimer, MeshGroups, ProcessGroup};
use crate::config::{AttentionChoice, Config, LrSchedule};
use crate::mesh::{RING_AXIS, SHARD_AXIS};
use crate::model::{Model, WeightSource};
use crate::nn::TokenLayout;
use crate::zero::{FlatLayout, Storage, ZeroGroups, ZeroOptimizer};
use candle_core::{Device, Tensor};
use std::collections::HashSet;
use std::sync::Arc;
use ulysses_kernels::Workspace;
use ulysses_kernels::attention::{AttentionCompute, AttentionKernels, FlashAttention};
use ulysses_kernels::device::dry;
use ulysses_kernels::linear::bf16_gemm;
use ulysses_kernels::lm_head_loss::default_tile_tokens;
use ulysses_kernels::tensor::TensorOptions;

/// A model in training on one rank of the mesh.
pub struct Engine {
    pub(super) config: Config,
    pub(super) model: Model,
    pub(super) zero: ZeroOptimizer,
    pub(super) groups: ZeroGroups,
    pub(super) global_rank: usize,
    pub(super) attention: BlockAttention,
    pub(super) workspace: Arc<Workspace>,
    /// The last micro batch's, which usually fits the next one too.
    pub(super) token_layout: Option<Arc<TokenLayout>>,
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
    pub(super) part: Option<Moment>,
}

/// Creates the engine for `model` on this rank of the mesh. Allocates what the ZeRO stage keeps on this
/// rank and fills it from `weights`; a rank reads only what it keeps. All ranks pass equal arguments.
/// `groups` belong to a mesh with the axes `dp` and `sp`, and determine the device.
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
    let zero_groups = ZeroGroups::new(groups, config.zero_shards())?;
    let zero_groups = zero_groups.with_ring(groups, config.seq_sharding().ring_size)?;
    let groups = zero_groups.with_sp_blocks(groups, config.ulysses.flexible_sp)?;
    let attention = Arc::new(attention(config, device)?);
    Engine::with_attention(model, weights, config, groups, attention, device)
}

/// The attention of a config on a device.
pub(crate) fn attention(config: &Config, device: &Device) -> Result<FlashAttention, EngineError> {
    let kernels = match config.ulysses.attention {
        None => AttentionKernels::Auto,
        Some(AttentionChoice::Fused) => AttentionKernels::Fused,
        Some(AttentionChoice::Tiled) => AttentionKernels::Tiled,
    };
    let kernels = kernels.on(device, config.precision.dtype())?;
    Ok(FlashAttention::new(kernels))
}

impl Engine {
    /// As [`initialize`], with another local attention and given groups. The attention sees whole sequences, or
    /// blocks of a ring: it is wrapped here in the [`UlyssesAttention`](crate::sequence_parallel::UlyssesAttention) and, if the
    /// config says so, the [`RingAttention`](crate::sequence_parallel::RingAttention) of the config.
    ///
    /// # Errors
    /// As [`initialize`].
    pub fn with_attention(
        mut model: Model,
        weights: &dyn WeightSource,
        config: &Config,
        groups: ZeroGroups,
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
        let groups = ZeroGroups { gradient_dtype: config.gradient_communication(), ..groups };
        if !dry::is_dry() {
            warn_about_candle_threads();
        }
        check_mesh(config, &groups)?;
        let loss_tile = match config.ulysses.loss_tile_tokens {
            Some(tokens) => tokens.get(),
            None => default_tile_tokens(model.head.vocab_size(), device)?,
        };
        model.head = model.head.with_tile_tokens(loss_tile);
        let activation_offload = ActivationOffload::of(config, device)?;
        let zero =
            zero_optimizer(&model, weights, config, groups.clone(), storage(config, options.clone())?)?;
        tracing::debug!(
            stage = u8::from(config.zero.stage),
            dp_rank = groups.dp.rank(),
            sp_rank = groups.sp.rank(),
            held_bytes = zero.state_bytes().total(),
            "initialized"
        );
        let workspace = Arc::new(Workspace::with_options(options));
        let attention = BlockAttention::new(config, &groups, local_attention);
        let timer = StepTimer::new(device, model.layers.len());
        Ok(Self {
            schedule: config.lr_schedule(),
            config: config.clone(),
            model,
            zero,
            global_rank: groups.dp.global_ranks()[groups.dp.rank()],
            groups,
            attention,
            workspace,
            token_layout: None,
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
        Ok(self.zero.gather_parameters()?)
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
    pub fn groups(&self) -> &ZeroGroups {
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

    /// Index of the head's unit. The units are in forward order: the embedding is 0, layer i is i + 1.
    pub(super) fn head_unit(&self) -> usize {
        if self.model.is_tied() { 0 } else { self.model.layers.len() + 1 }
    }

    /// The unit that follows layer `index` in the forward pass.
    pub(super) fn unit_after(&self, index: usize) -> usize {
        if index + 1 < self.model.layers.len() { index + 2 } else { self.head_unit() }
    }
}

/// Creates the partitioned optimizer of a model, whose parameters are read from `weights`.
fn zero_optimizer(
    model: &Model,
    weights: &dyn WeightSource,
    config: &Config,
    groups: ZeroGroups,
    storage: Storage,
) -> Result<ZeroOptimizer, EngineError> {
    let units = model.units();
    let mut names = HashSet::new();
    let parameters = units.iter().flat_map(|unit| &unit.parameters);
    if let Some(duplicate) = parameters.map(|spec| &spec.name).find(|name| !names.insert(*name)) {
        return Err(EngineError::DuplicateParameter { name: duplicate.clone() });
    }
    check_parameter_groups(&config.ulysses.parameter_groups, &units)?;
    let layout = |unit: &crate::model::UnitSpec| {
        let parameters = unit.parameters.iter().map(|spec| (spec.name.clone(), spec.shape.clone()));
        FlatLayout::new(unit.name.clone(), parameters, config.zero_world_size())
    };
    let layouts = units.iter().map(layout).collect();
    let fill = |(unit, parameter): (usize, usize), elements, out: &mut [f32]| {
        Ok(weights.read(&units[unit].parameters[parameter], elements, out)?)
    };
    ZeroOptimizer::new::<EngineError>(
        layouts,
        config.zero.stage,
        config.optimizer.clone(),
        &config.ulysses.parameter_groups,
        groups,
        storage,
        &fill,
    )
}

/// Warns about candle's own thread pool. The library's ops do not use it, but layers written with candle
/// ops do, and all ranks of a process would queue for it. Only the program may change the environment.
fn warn_about_candle_threads() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        if std::env::var("CANDLE_NUM_THREADS").as_deref() != Ok("1") {
            tracing::info!(
                "CANDLE_NUM_THREADS is not 1: candle ops on more than 64 K elements share one pool among all ranks"
            );
        }
    });
}

/// Checks that the groups have the sizes of the config's axes.
fn check_mesh(config: &Config, groups: &ZeroGroups) -> Result<(), EngineError> {
    check_axis("dp", config.mesh.dp_size, &*groups.dp)?;
    check_axis("sp", config.mesh.sp_size, &*groups.sp)?;
    let ring_size = groups.ring.as_ref().map_or(1, |groups| groups.ring.world_size());
    if ring_size != config.seq_sharding().ring_size {
        let (axis, configured) = (RING_AXIS, config.seq_sharding().ring_size);
        return Err(EngineError::MeshMismatch { axis, configured, actual: ring_size });
    }
    check_axis(SHARD_AXIS, config.zero_world_size(), &**groups.shard())
}

fn check_axis(axis: &'static str, configured: usize, group: &dyn ProcessGroup) -> Result<(), EngineError> {
    let actual = group.world_size();
    if configured == actual { Ok(()) } else { Err(EngineError::MeshMismatch { axis, configured, actual }) }
}
