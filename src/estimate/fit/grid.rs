//! The settings of a mesh, from cheap to memory-saving.

use crate::config::{Offload, PartitionAxes, ZeroStage};
use crate::engine::EngineError;
use crate::estimate::{Workload, layers_of_tp_ranks};
use crate::nn::AttentionConfig;
use std::num::NonZero;
use ulysses_kernels::device::DeviceKind;

/// Tile sizes, besides all tokens.
const TILES: [usize; 3] = [8192, 2048, 512];

/// All offloads of state.
const OFFLOADS: [Value; 3] = [
    Value::Offload { optimizer: false, parameters: false },
    Value::Offload { optimizer: true, parameters: false },
    Value::Offload { optimizer: true, parameters: true },
];

/// All kinds of recomputation: of no layer, of every other and of every layer but its attention, of every layer, and of
/// every layer from inputs that are offloaded.
const RECOMPUTATIONS: [Value; 5] = [
    Value::Recomputation { interval: None, saves_attention: None, offloads_inputs: false },
    Value::Recomputation { interval: Some(2), saves_attention: Some(true), offloads_inputs: false },
    Value::Recomputation { interval: Some(1), saves_attention: Some(true), offloads_inputs: false },
    Value::Recomputation { interval: Some(1), saves_attention: Some(false), offloads_inputs: false },
    Value::Recomputation { interval: Some(1), saves_attention: Some(false), offloads_inputs: true },
];

/// A setting, in the order in which values are applied.
#[derive(Debug, Clone, Copy)]
pub(super) enum Setting {
    Stage,
    Offload,
    Axes,
    HeadChunks,
    Tiles,
    MicroBatch,
    Recomputation,
}

impl Setting {
    const COUNT: usize = Self::Recomputation as usize + 1;

    /// Those that are made as cheap as fits, the most costly first.
    pub(super) const BY_COST: [Self; 5] =
        [Self::Stage, Self::Axes, Self::HeadChunks, Self::Tiles, Self::MicroBatch];
}

/// A value of a setting.
#[derive(Debug, Clone, Copy)]
enum Value {
    Stage(ZeroStage),
    Offload { optimizer: bool, parameters: bool },
    Axes(PartitionAxes),
    HeadChunks(usize),
    Tiles(Option<NonZero<usize>>),
    MicroBatch(usize),
    Recomputation { interval: Option<usize>, saves_attention: Option<bool>, offloads_inputs: bool },
}

/// The settings of one mesh.
#[derive(Debug, Clone)]
pub(super) struct Grid {
    /// The workload on this mesh.
    base: Workload,
    /// The values of each [`Setting`], from cheap to memory-saving.
    values: [Vec<Value>; Setting::COUNT],
}

/// The index of each setting's value.
#[derive(Debug, Clone, Copy)]
pub(super) struct Point([usize; Setting::COUNT]);

impl Point {
    pub(super) fn level(self, setting: Setting) -> usize {
        self.0[setting as usize]
    }

    /// Returns the point with another value of a setting.
    pub(super) fn with(mut self, setting: Setting, level: usize) -> Self {
        self.0[setting as usize] = level;
        self
    }
}

impl Grid {
    pub(super) fn new(base: Workload) -> Result<Self, EngineError> {
        let (config, model) = (&base.config, &base.model);
        let num_stages = if config.world_size() > 1 { ZeroStage::ALL.len() } else { 1 };
        let num_axes = if config.can_partition_over_sp() { 2 } else { 1 };
        // All ranks of a Ulysses group share every chunk of the heads of their tp rank.
        let ulysses_size = config.seq_sharding().ulysses_size;
        let layers = layers_of_tp_ranks(model, config.mesh.tp_size)?.concat();
        let max_chunks = AttentionConfig::common_head_chunks(&layers).max(1);
        let is_shared = |chunks: &usize| {
            let mut chunks = layers.iter().flat_map(|layer| layer.heads().chunks(*chunks));
            chunks.all(|chunk| chunk.q.len() >= ulysses_size)
        };
        let head_chunks = std::iter::successors(Some(1), |chunks| Some(2 * chunks));
        let head_chunks = head_chunks.take_while(|chunks| *chunks <= max_chunks).filter(is_shared);
        let micro_batches = base.chosen_micro_batches();
        let largest = micro_batches.first().copied().unwrap_or(1);
        let tokens = config.require_seq_len()?.div_ceil(config.mesh.sp_size).saturating_mul(largest);
        let tiles = TILES.into_iter().filter(|tile| *tile < tokens).map(NonZero::new);
        let values = [
            ZeroStage::ALL.into_iter().take(num_stages).map(Value::Stage).collect(),
            OFFLOADS.to_vec(),
            [PartitionAxes::Dp, PartitionAxes::DpSp].into_iter().take(num_axes).map(Value::Axes).collect(),
            head_chunks.map(Value::HeadChunks).collect(),
            std::iter::once(None).chain(tiles).map(Value::Tiles).collect(),
            micro_batches.into_iter().map(Value::MicroBatch).collect(),
            RECOMPUTATIONS.to_vec(),
        ];
        Ok(Self { base, values })
    }

    /// Returns the number of points.
    pub(super) fn num_points(&self) -> usize {
        self.values.iter().map(Vec::len).product()
    }

    pub(super) fn num_levels(&self, setting: Setting) -> usize {
        self.values[setting as usize].len()
    }

    /// Keeps only these values of a setting.
    pub(super) fn keep(&mut self, setting: Setting, levels: &[usize]) {
        let values = &mut self.values[setting as usize];
        *values = levels.iter().map(|level| values[*level]).collect();
    }

    /// Returns the point with the last value of every setting.
    pub(super) fn most_saving(&self) -> Point {
        Point(std::array::from_fn(|setting| self.values[setting].len() - 1))
    }

    /// Returns the workload with the settings of a point.
    pub(super) fn workload(&self, point: Point) -> Workload {
        let mut workload = self.base.clone();
        for (values, level) in self.values.iter().zip(point.0) {
            values[level].apply(&mut workload);
        }
        workload
    }
}

impl Value {
    fn apply(self, workload: &mut Workload) {
        let (config, device) = (&mut workload.config, workload.device);
        match self {
            Self::Stage(stage) => config.zero.stage = stage,
            Self::Offload { optimizer, parameters } => {
                let zero = &mut config.zero;
                let needed = match (optimizer, parameters) {
                    (_, true) => ZeroStage::Parameters,
                    (true, false) => ZeroStage::OptimizerStates,
                    (false, false) => ZeroStage::Disabled,
                };
                zero.stage = zero.stage.max(needed);
                for (offload, is_offloaded) in
                    [(&mut zero.offload_optimizer, optimizer), (&mut zero.offload_param, parameters)]
                {
                    *offload = match (is_offloaded, device) {
                        (false, _) => Offload::None,
                        (true, device) if offload.is_moved_from(device) => continue,
                        (true, DeviceKind::Cpu) => Offload::Nvme(None),
                        (true, DeviceKind::Cuda) => Offload::Cpu,
                    };
                }
            }
            Self::Axes(axes) => {
                let has_partitions = config.zero.stage != ZeroStage::Disabled;
                config.ulysses.zero_partition_axes = if has_partitions { axes } else { PartitionAxes::Dp };
            }
            Self::HeadChunks(chunks) => config.ulysses.head_chunks = chunks,
            Self::Tiles(tokens) => config.ulysses.tile_tokens = tokens,
            Self::MicroBatch(size) => *workload = workload.with_micro_batch(size),
            Self::Recomputation { interval, saves_attention, offloads_inputs } => {
                config.ulysses.activation_checkpointing = interval.is_some();
                config.ulysses.activation_checkpointing_interval =
                    interval.unwrap_or(1).min(workload.model.num_layers());
                config.ulysses.save_attention_output = saves_attention;
                config.activation_checkpointing.cpu_checkpointing = offloads_inputs;
            }
        }
    }
}
