//! The settings of a mesh, from cheap to memory-saving.

use crate::config::{Offload, PartitionAxes, UlyssesConfig, ZeroConfig, ZeroStage};
use crate::engine::EngineError;
use crate::estimate::Workload;
use std::num::NonZero;
use ulysses_kernels::device::DeviceKind;

/// Tile sizes, besides all tokens.
const TILES: [usize; 3] = [8192, 2048, 512];

/// State that is offloaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum OffloadedState {
    None,
    Optimizer,
    OptimizerAndParameters,
}

/// All offloads of state, from cheap to memory-saving.
pub(super) const STATES: [OffloadedState; 3] =
    [OffloadedState::None, OffloadedState::Optimizer, OffloadedState::OptimizerAndParameters];

/// Recomputation of layers, and the place of their inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Recomputation {
    None,
    EveryOtherLayerButAttention,
    EveryLayerButAttention,
    EveryLayer,
    OffloadedInputs,
}

impl Recomputation {
    /// All kinds, from cheap to memory-saving.
    pub(super) const ALL: [Self; 5] = [
        Self::None,
        Self::EveryOtherLayerButAttention,
        Self::EveryLayerButAttention,
        Self::EveryLayer,
        Self::OffloadedInputs,
    ];

    /// Returns `ulysses.save_attention_output`.
    fn saves_attention_output(self) -> Option<bool> {
        match self {
            Self::None => None,
            Self::EveryOtherLayerButAttention | Self::EveryLayerButAttention => Some(true),
            Self::EveryLayer | Self::OffloadedInputs => Some(false),
        }
    }
}

/// A setting whose values are ordered from cheap to memory-saving.
#[derive(Debug, Clone, Copy)]
pub(super) enum Setting {
    Stage,
    Axes,
    HeadChunks,
    Tiles,
    MicroBatch,
}

impl Setting {
    /// All settings, the most costly first.
    pub(super) const ALL: [Self; 5] =
        [Self::Stage, Self::Axes, Self::HeadChunks, Self::Tiles, Self::MicroBatch];
}

/// The settings of one mesh.
#[derive(Debug, Clone)]
pub(super) struct Grid {
    /// The workload on this mesh.
    base: Workload,
    stages: Vec<ZeroStage>,
    axes: Vec<PartitionAxes>,
    head_chunks: Vec<usize>,
    tiles: Vec<Option<NonZero<usize>>>,
    micro_batches: Vec<usize>,
}

impl Grid {
    pub(super) fn new(base: Workload) -> Result<Self, EngineError> {
        let (config, model) = (&base.config, &base.model);
        let sp_size = config.mesh.sp_size;
        let axes =
            if sp_size > 1 { vec![PartitionAxes::Dp, PartitionAxes::DpSp] } else { vec![PartitionAxes::Dp] };
        let has_partitions = config.world_size() > 1;
        let stages = ZeroStage::ALL.into_iter().take(if has_partitions { 4 } else { 1 }).collect();
        // All ranks of a Ulysses group share every chunk.
        let ulysses_size = config.seq_sharding().ulysses_size;
        let is_shared =
            |chunks: &usize| model.head_chunks(*chunks).iter().all(|chunk| chunk.q.len() >= ulysses_size);
        let powers = std::iter::successors(Some(1), |chunks| Some(2 * chunks));
        let head_chunks =
            powers.take_while(|chunks| *chunks <= model.num_kv_heads).filter(is_shared).collect();
        let micro_batches = base.micro_batches();
        let largest = micro_batches.first().copied().unwrap_or(1);
        let tokens = config.require_seq_len()?.div_ceil(sp_size).saturating_mul(largest);
        let tiles = TILES.into_iter().filter(|tile| *tile < tokens).map(NonZero::new);
        let tiles = std::iter::once(None).chain(tiles).collect();
        Ok(Self { stages, axes, head_chunks, tiles, micro_batches, base })
    }

    /// Returns the number of points.
    pub(super) fn num_points(&self) -> usize {
        let of_setting = Setting::ALL.map(|setting| self.num_levels(setting));
        STATES.len() * Recomputation::ALL.len() * of_setting.into_iter().product::<usize>()
    }

    pub(super) fn num_levels(&self, setting: Setting) -> usize {
        match setting {
            Setting::Stage => self.stages.len(),
            Setting::Axes => self.axes.len(),
            Setting::HeadChunks => self.head_chunks.len(),
            Setting::Tiles => self.tiles.len(),
            Setting::MicroBatch => self.micro_batches.len(),
        }
    }

    /// Keeps only these values of tiles or head chunks.
    pub(super) fn keep(&mut self, setting: Setting, levels: &[usize]) {
        match setting {
            Setting::HeadChunks => {
                self.head_chunks = levels.iter().map(|level| self.head_chunks[*level]).collect()
            }
            Setting::Tiles => self.tiles = levels.iter().map(|level| self.tiles[*level]).collect(),
            Setting::Stage | Setting::Axes | Setting::MicroBatch => {}
        }
    }

    /// Returns the point with this offload and recomputation that needs least memory.
    pub(super) fn most_saving_with(&self, state: OffloadedState, recomputation: Recomputation) -> Point<'_> {
        let levels = Setting::ALL.map(|setting| self.num_levels(setting) - 1);
        Point { grid: self, state, recomputation, levels }
    }
}

/// A value of every setting.
#[derive(Debug, Clone, Copy)]
pub(super) struct Point<'a> {
    grid: &'a Grid,
    state: OffloadedState,
    recomputation: Recomputation,
    /// The index of each setting's value.
    levels: [usize; Setting::ALL.len()],
}

impl Point<'_> {
    pub(super) fn level(&self, setting: Setting) -> usize {
        self.levels[setting as usize]
    }

    /// Returns the point with another value of a setting.
    pub(super) fn with(mut self, setting: Setting, level: usize) -> Self {
        self.levels[setting as usize] = level;
        self
    }

    /// Returns the workload with these settings.
    pub(super) fn workload(&self) -> Workload {
        let grid = self.grid;
        let mut workload = grid.base.with_micro_batch(grid.micro_batches[self.level(Setting::MicroBatch)]);
        let offloaded = |configured: &Offload| match workload.device {
            device if configured.is_moved_from(device) => configured.clone(),
            DeviceKind::Cpu => Offload::Nvme(None),
            DeviceKind::Cuda => Offload::Cpu,
        };
        let (zero, ulysses) = (&workload.config.zero, &workload.config.ulysses);
        let (optimizer, parameters) = (offloaded(&zero.offload_optimizer), offloaded(&zero.offload_param));
        let (optimizer, parameters, needed) = match self.state {
            OffloadedState::None => (Offload::None, Offload::None, ZeroStage::Disabled),
            OffloadedState::Optimizer => (optimizer, Offload::None, ZeroStage::OptimizerStates),
            OffloadedState::OptimizerAndParameters => (optimizer, parameters, ZeroStage::Parameters),
        };
        let stage = grid.stages[self.level(Setting::Stage)].max(needed);
        let has_partitions = stage != ZeroStage::Disabled;
        let axes = if has_partitions { grid.axes[self.level(Setting::Axes)] } else { PartitionAxes::Dp };
        let is_every_other = self.recomputation == Recomputation::EveryOtherLayerButAttention;
        let interval = if is_every_other { 2 } else { 1 };
        let zero =
            ZeroConfig { stage, offload_optimizer: optimizer, offload_param: parameters, ..zero.clone() };
        let ulysses = UlyssesConfig {
            zero_partition_axes: axes,
            activation_checkpointing: self.recomputation != Recomputation::None,
            activation_checkpointing_interval: interval.min(workload.model.num_layers),
            save_attention_output: self.recomputation.saves_attention_output(),
            tile_tokens: grid.tiles[self.level(Setting::Tiles)],
            head_chunks: grid.head_chunks[self.level(Setting::HeadChunks)],
            ..ulysses.clone()
        };
        let is_offloaded = self.recomputation == Recomputation::OffloadedInputs;
        workload.config.activation_checkpointing.cpu_checkpointing = is_offloaded;
        (workload.config.zero, workload.config.ulysses) = (zero, ulysses);
        workload
    }
}
