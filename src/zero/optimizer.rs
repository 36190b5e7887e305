//! [`ZeroOptimizer`]: all units of a model on one rank.

use super::flat_unit::{FlatUnit, Gradients, Parameters};
use super::reduce::{self, Reduction};
use super::state::StateTensor;
use super::unit_split::{UnitSplit, split_units};
use super::{Buffer, Division, FlatLayout, StateBytes, Storage, ZeroError};
use crate::comm::{ProcessGroupExt, TrainingGroups};
use crate::config::{OptimizerConfig, ParameterGroup, ZeroStage};
use crate::placement::Placement;
use crate::placement::ledger::{self, sums};
use candle_core::{DType, Tensor};
use std::ops::Range;
use ulysses_kernels::cast::cast;
use ulysses_kernels::device::dry;
use ulysses_kernels::memory::{self, Category, with_category};
use ulysses_kernels::tensor::TensorOptions;

/// Maximum number of elements of a piece of an update on the host: 1 GiB of f32.
pub(super) const MAX_PIECE_ELEMENTS: usize = (1 << 30) / size_of::<f32>();

/// Parameters, gradients and optimizer state of a model, partitioned over `dp` by stage.
///
/// Methods take a unit by its index in the list given to [`new`](Self::new), and panic if there is none.
/// Methods that read or restore state take an index into [`layouts`](Self::layouts) instead. Methods that
/// communicate are collective: every rank of the groups calls them for the same units in the same order.
pub struct ZeroOptimizer {
    pub(super) stage: ZeroStage,
    pub(super) config: OptimizerConfig,
    pub(super) groups: TrainingGroups,
    pub(super) storage: Storage,
    /// The model's units, each with its entries of `flats`.
    pub(super) splits: Vec<UnitSplit>,
    /// The flat units, each of parameters of one kind: of the eight of `unit_split.rs`.
    pub(super) flats: Vec<FlatUnit>,
    in_flight: Option<Reduction>,
    /// Maximum number of elements that one piece of an update on the host has.
    pub(super) max_piece_elements: usize,
    state_bytes: StateBytes,
}

/// Writes elements `range` of parameter `(unit, parameter)`, in row-major order, to a slice of the same
/// length.
pub type Initialize<'a, E> = &'a dyn Fn((usize, usize), Range<usize>, &mut [f32]) -> Result<(), E>;

impl ZeroOptimizer {
    /// Allocates this rank's part of every unit, and calls `initialize` for exactly the parameter elements
    /// that this rank keeps. Parameters in a frozen group have no gradient and no optimizer state.
    ///
    /// # Errors
    /// An error of `initialize`, or a failed allocation.
    pub fn new<E: From<ZeroError>>(
        units: Vec<FlatLayout>,
        stage: ZeroStage,
        config: OptimizerConfig,
        parameter_groups: &[ParameterGroup],
        groups: TrainingGroups,
        storage: impl Into<Storage>,
        initialize: Initialize<'_, E>,
    ) -> Result<Self, E> {
        let shard_rank = groups.shard().rank();
        let is_frozen = |name: &str| ParameterGroup::is_frozen(parameter_groups, name);
        let units = units.into_iter().map(|unit| unit.with_frozen(is_frozen)).collect();
        let (layouts, splits) = split_units(units);
        let storage: Storage = storage.into();
        let options = &storage.options;
        let meter = memory::AllocationMeter::start();
        let parameters = each(Category::Parameters, &layouts, |layout| {
            let store = storage.parameters.as_ref();
            Parameters::zeros(layout, stage.partitions_parameters(), options, store)
        })?;
        storage.settle()?;
        let parameter_bytes = meter.bytes();
        let meter = memory::AllocationMeter::start();
        let gradients = each(Category::Gradients, &layouts, |layout| {
            let store = storage.gradients(stage);
            let zeros = || Gradients::zeros(layout, stage.partitions_gradients(), &options.device, store);
            (!layout.is_frozen()).then(zeros).transpose()
        })?;
        storage.settle()?;
        let gradient_bytes = meter.bytes();
        let meter = memory::AllocationMeter::start();
        let state =
            each(Category::Optimizer, &layouts, |layout| optimizer_state(layout, stage, &config, &storage))?;
        storage.settle()?;
        let state_bytes =
            StateBytes { parameters: parameter_bytes, gradients: gradient_bytes, optimizer: meter.bytes() };
        let parts = layouts.into_iter().zip(parameters).zip(gradients).zip(state);
        let flats = parts
            .map(|(((layout, parameters), gradients), (master, state))| FlatUnit {
                layout,
                shard_rank,
                parameters,
                gradients,
                master,
                state,
                param_group_ranges: Vec::new(),
            })
            .collect();
        let mut this = Self {
            stage,
            config,
            groups,
            storage,
            splits,
            flats,
            in_flight: None,
            max_piece_elements: MAX_PIECE_ELEMENTS,
            state_bytes,
        };
        if !this.storage.options.device.is_cpu() {
            // The allocator counts host memory. Device memory holds the tensors and nothing else.
            this.state_bytes = this.expected_state_bytes();
        }
        let updates_all = !stage.partitions_optimizer();
        for flat in this.flats.iter_mut().filter(|flat| !flat.layout.is_frozen()) {
            flat.param_group_ranges = flat.param_group_ranges(
                updates_all,
                &this.config,
                parameter_groups,
                &this.storage.options.device,
            )?;
        }
        this.flats.iter().for_each(|flat| flat.place_state(&this.groups, stage));
        this.initialize(initialize)?;
        Ok(this)
    }

    fn initialize<E: From<ZeroError>>(&self, initialize: Initialize<'_, E>) -> Result<(), E> {
        if dry::is_dry() {
            return Ok(());
        }
        let flats = self.splits.iter().enumerate().flat_map(|(unit, split)| {
            split.flats.clone().map(move |index| (unit, &self.flats[index], split.parameters_of(index)))
        });
        for (unit, flat, parameters) in flats {
            let range = match flat.parameters {
                Parameters::Whole(_) => 0..flat.layout.padded_numel(),
                Parameters::Partitioned { .. } => flat.layout.partition(flat.shard_rank),
            };
            let fill = |elements: &mut [f32]| {
                flat.layout.pieces(range.clone()).try_for_each(|piece| {
                    let place = (unit, parameters[piece.parameter]);
                    initialize(place, piece.elements, &mut elements[piece.target])
                })
            };
            let TensorOptions { device, dtype } = &self.storage.options;
            if *dtype == DType::F32 && device.is_cpu() {
                let stored = flat.parameters.persistent();
                let parameters = stored.blank()?;
                ulysses_kernels::tensor::with_slice_mut(&parameters, fill).map_err(ZeroError::from)??;
                self.storage.settle()?;
                stored.put(parameters)?;
            } else {
                let mut elements = vec![0.0; range.len()];
                fill(&mut elements)?;
                self.store(flat, elements)?;
            }
        }
        Ok(self.storage.settle()?)
    }

    /// Copies initial parameters to the device, into `parameters.persistent()` and the master copy.
    fn store(&self, flat: &FlatUnit, elements: Vec<f32>) -> Result<(), ZeroError> {
        let stored = flat.parameters.persistent();
        let exact = Tensor::from_vec(elements, stored.numel(), &self.storage.options.device)?;
        let parameters = stored.blank()?;
        cast(&exact, &parameters)?;
        self.storage.settle()?;
        stored.put(parameters)?;
        if let Some(stored) = &flat.master {
            let updated = match flat.parameters {
                Parameters::Whole(_) if self.stage.partitions_optimizer() => {
                    let own = flat.layout.partition(flat.shard_rank);
                    exact.narrow(0, own.start, own.len())?
                }
                _ => exact,
            };
            let master = stored.blank()?;
            cast(&updated, &master)?;
            stored.put(master)?;
        }
        Ok(())
    }

    /// Number of ranks that share the partitions: by default `dp_size`. Read from
    /// the live process group.
    pub fn world_size(&self) -> usize {
        self.groups.shard().world_size()
    }

    /// The ZeRO stage.
    pub fn stage(&self) -> ZeroStage {
        self.stage
    }

    /// The layouts of the flat units: for each unit those of its trained parameters, then those of its frozen ones, each
    /// in the order of [`Division::ALL`](super::Division::ALL), as far as it has them.
    pub fn layouts(&self) -> impl Iterator<Item = &FlatLayout> {
        self.flats.iter().map(|flat| &flat.layout)
    }

    /// Elements of one kind of optimizer state on this rank (Adam has two kinds).
    pub fn state_numel(&self) -> usize {
        self.flats.iter().filter_map(|flat| flat.state.first()).map(StateTensor::numel).sum()
    }

    /// Bytes of state on this rank, measured at allocation. All zero unless the program's allocator is a
    /// [`memory::CountingAllocator`].
    pub fn state_bytes(&self) -> StateBytes {
        self.state_bytes
    }

    /// Bytes of state on this rank, by formula.
    pub fn expected_state_bytes(&self) -> StateBytes {
        let padded_numel = |frozen| {
            let layouts = self.layouts().filter(|layout| layout.is_frozen() == frozen);
            layouts.map(FlatLayout::padded_numel).sum()
        };
        let (stage, dp_size, dtype) = (self.stage, self.world_size(), self.storage.options.dtype);
        let state_tensors = self.config.params().state_kinds().len();
        let all = StateBytes::expected(stage, padded_numel(false), dp_size, state_tensors, dtype)
            + StateBytes::expected_frozen(stage, padded_numel(true), dp_size, dtype);
        all.without(stage, self.storage.parameters.is_some(), self.storage.optimizer.is_some())
    }

    /// Views of a unit's parameters, in the order of its layout. Partitioned parameters are gathered over the shard group
    /// and stay gathered until [`release`](Self::release). Do not write to them.
    ///
    /// # Errors
    /// A failed collective.
    pub fn parameters(&mut self, unit: usize) -> Result<Vec<Tensor>, ZeroError> {
        let _gather = tracing::trace_span!("gather", unit).entered();
        self.prefetch(unit)?;
        let split = &self.splits[unit];
        let flats = self.flats[split.flats.clone()].iter_mut();
        let views: Vec<_> =
            flats.map(|flat| flat.gather(&**self.groups.shard())).collect::<Result<_, ZeroError>>()?;
        Ok(split.in_order(&views))
    }

    /// Starts to gather the unit that is needed next; does nothing if parameters are not partitioned.
    ///
    /// # Errors
    /// A failed collective.
    pub fn prefetch(&mut self, unit: usize) -> Result<(), ZeroError> {
        let flats = self.splits[unit].flats.clone();
        self.flats[flats].iter_mut().try_for_each(|flat| flat.start_gather(&**self.groups.shard()))
    }

    /// Starts to load a unit's offloaded partition for a later [`prefetch`](Self::prefetch); does nothing if
    /// it is not offloaded.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn read_ahead(&self, unit: usize) -> Result<(), ZeroError> {
        self.flats[self.splits[unit].flats.clone()].iter().try_for_each(FlatUnit::read_ahead)
    }

    /// Frees a unit's gathered parameters; does nothing if parameters are not partitioned.
    pub fn release(&mut self, unit: usize) {
        let flats = self.splits[unit].flats.clone();
        self.flats[flats].iter_mut().for_each(FlatUnit::release);
    }

    /// Frees all gathered parameters.
    pub fn release_all(&mut self) {
        self.flats.iter_mut().for_each(FlatUnit::release);
    }

    /// Views for the gradients of a unit's backward, in the order of its parameters; `None` for frozen
    /// parameters.
    ///
    /// # Errors
    /// A failed allocation.
    pub fn gradients(&mut self, unit: usize) -> Result<Vec<Option<Tensor>>, ZeroError> {
        let split = &self.splits[unit];
        let views = self.flats[split.flats.clone()].iter_mut().map(FlatUnit::gradient_views);
        let views: Vec<_> = views.collect::<Result<_, ZeroError>>()?;
        Ok(split.in_order(&views))
    }

    /// Starts to reduce the gradients of a unit after its backward, and completes the previous reduction. So
    /// one reduction overlaps with each unit's backward. `boundary` marks the last micro step before an
    /// update: before it, stages 0 and 1 do nothing. Frozen units have nothing to reduce.
    ///
    /// # Errors
    /// A failed collective, or at stages 2 and 3 a unit without gradients.
    pub fn reduce(&mut self, unit: usize, boundary: bool) -> Result<(), ZeroError> {
        let _reduce = tracing::trace_span!("reduce", unit).entered();
        let mut flats = self.splits[unit].flats.clone();
        flats.try_for_each(|index| {
            let (flat, storage) = (&mut self.flats[index], &self.storage);
            let next = reduce::start(index, flat, self.stage, &self.groups, storage, boundary)?;
            // Frozen parameters have nothing to reduce.
            if self.flats[index].gradients.is_some() {
                self.complete_reduction()?;
                self.in_flight = next;
            }
            Ok(())
        })
    }

    fn complete_reduction(&mut self) -> Result<(), ZeroError> {
        match self.in_flight.take() {
            Some(reduction) => {
                let flat = &mut self.flats[reduction.index];
                reduce::complete(reduction, flat, self.stage, &self.groups, &self.storage)
            }
            None => Ok(()),
        }
    }

    /// Completes the last reduction. Required before the norm is computed.
    ///
    /// # Errors
    /// A failed collective, or a write of an offloaded gradient that failed.
    pub fn finish_reductions(&mut self) -> Result<(), ZeroError> {
        self.complete_reduction()?;
        self.storage.settle()
    }

    /// Sums the gradients of tied parameters over the stages of a pipeline that have them. Required before the norm is computed,
    /// once per step, after the last reduction. Collective over these stages.
    ///
    /// # Errors
    /// A failed collective, or a write of an offloaded gradient that failed.
    pub fn sum_tied_gradients(&mut self) -> Result<(), ZeroError> {
        for flat in &mut self.flats {
            reduce::sum_tied(flat, self.stage, &self.groups, &self.storage)?;
        }
        self.storage.settle()
    }

    /// Zeroes all gradients, for the next accumulation.
    ///
    /// # Errors
    /// A refused operation.
    pub fn zero_gradients(&mut self) -> Result<(), ZeroError> {
        ledger::clear_gradients();
        self.flats.iter_mut().try_for_each(FlatUnit::zero_gradients)
    }

    /// Sum of the squares of all reduced gradients, in f64: first over the flat units of each partition, then over
    /// the partitions in order. So stages with equal gradients give equal bits.
    ///
    /// # Errors
    /// A failed collective.
    pub fn gradient_sum_of_squares(&self) -> Result<f64, ZeroError> {
        let _norm = tracing::trace_span!("norm").entered();
        sums::begin_norm();
        let mut sum = self.sum_of_squares(false)?;
        // The layers of another stage may be frozen.
        let other_stages = self.groups.tensor.is_some() && self.groups.pipeline.is_some();
        if other_stages || self.trained_flats().any(|flat| flat.layout.division().over_tp) {
            sum += self.sum_of_squares(true)?;
        }
        sums::end_norm()?;
        Ok(sum)
    }

    /// [`gradient_sum_of_squares`](Self::gradient_sum_of_squares) of the parameters that the ranks of tp divide, or of the others.
    fn sum_of_squares(&self, over_tp: bool) -> Result<f64, ZeroError> {
        let is_counted =
            |division: Division| division.over_tp == over_tp && self.groups.is_of_stage(division);
        let flats = || self.trained_flats().filter(|flat| is_counted(flat.layout.division()));
        sums::begin_squares(flats().filter_map(FlatUnit::placed_gradient))?;
        let own = match self.known_sum_of_squares(flats()) {
            Some(own) => vec![own],
            None => self.squares_of_partitions(flats)?,
        };
        let sum = self.sum_over_shards(own, over_tp)?;
        sums::end()?;
        Ok(sum)
    }

    /// The sums over some flat units, for each partition that this rank has.
    fn squares_of_partitions<'a, U: Iterator<Item = &'a FlatUnit>>(
        &self,
        flats: impl Fn() -> U,
    ) -> Result<Vec<f64>, ZeroError> {
        let of_partition = |rank: usize| {
            let of_flats = flats().filter_map(|flat| flat.gradient_partition(rank).transpose());
            of_flats.collect::<Result<Vec<Tensor>, ZeroError>>()
        };
        let is_partitioned = self.stage.partitions_optimizer();
        let own = self.groups.shard().rank();
        let ranks = if is_partitioned { own..own + 1 } else { 0..self.world_size() };
        let partitions = ranks.map(of_partition).collect::<Result<Vec<_>, _>>()?;
        // All in one call, which synchronizes with a GPU once.
        let tensors: Vec<&Tensor> = partitions.iter().flatten().collect();
        let mut squares = ulysses_kernels::elementwise::sums_of_squares(&tensors)?.into_iter();
        let of_partitions = partitions
            .iter()
            .map(|flats| squares.by_ref().take(flats.len()).fold(0.0, |sum, square| sum + square));
        Ok(of_partitions.collect())
    }

    /// Sums a value per partition that this rank has, in their order, over the axes along which gradients are sharded. Each stage
    /// adds its own, so pp is one of them.
    fn sum_over_shards(&self, mut of_partitions: Vec<f64>, over_tp: bool) -> Result<f64, ZeroError> {
        let division = Division { over_tp, is_tied: false };
        for axis in self.groups.layout(Buffer::OptimizerState, self.stage, division).axes() {
            if axis.placement != Placement::Replicate {
                of_partitions = axis.group.all_gather_values(&of_partitions)?;
            }
        }
        Ok(of_partitions.into_iter().sum())
    }

    /// The sum over some flat units of this rank's partition, if it is known without loading offloaded gradients.
    fn known_sum_of_squares<'a>(&self, mut flats: impl Iterator<Item = &'a FlatUnit>) -> Option<f64> {
        self.storage.gradients(self.stage)?;
        flats.try_fold(0.0, |sum, flat| match &flat.gradients {
            Some(Gradients::Partitioned { partition, .. }) => Some(sum + partition.known_sum_of_squares()?),
            _ => None,
        })
    }
}

fn each<T>(
    category: Category,
    layouts: &[FlatLayout],
    make: impl Fn(&FlatLayout) -> Result<T, ZeroError>,
) -> Result<Vec<T>, ZeroError> {
    with_category(category, || layouts.iter().map(make).collect())
}

/// Allocates the zeroed master copy, if parameters are not f32, and the initial optimizer state, for the
/// elements that this rank updates.
fn optimizer_state(
    layout: &FlatLayout,
    stage: ZeroStage,
    config: &OptimizerConfig,
    storage: &Storage,
) -> Result<(Option<StateTensor>, Vec<StateTensor>), ZeroError> {
    if layout.is_frozen() {
        return Ok((None, Vec::new()));
    }
    let numel = if stage.partitions_optimizer() { layout.partition_numel() } else { layout.padded_numel() };
    let initially = |value: f64| {
        let tensor = storage.options.zeros_f32(numel)?;
        if value != 0.0 {
            ulysses_kernels::elementwise::fill(&tensor, value as f32)?;
        }
        StateTensor::new(tensor, Category::Optimizer, storage.optimizer.as_ref())
    };
    let master = (storage.options.dtype != DType::F32).then(|| initially(0.0)).transpose()?;
    let state = config.params().state_kinds().iter().map(|_| initially(config.params().initial_state()));
    Ok((master, state.collect::<Result<_, ZeroError>>()?))
}
