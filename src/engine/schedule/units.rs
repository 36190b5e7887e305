//! What ZeRO does with the parameters and gradients of the units: the counterpart of
//! [`ZeroOptimizer`](crate::zero::ZeroOptimizer), with its order of gathers and reductions.

mod update;

use super::dims::{GroupPlace, Places};
use super::event::{Axis, Event, Purpose, Transfer};
use super::ledger::{Away, Buffer, ElementType, Ledger};
use crate::comm::traffic::{DIRECT_REDUCE_MAX_ELEMS, all_reduce_chunk};
use crate::comm::{CollectiveOp, Traffic};
use crate::config::{Config, Offload, OptimizerConfig, ParameterGroup, ZeroStage};
use crate::model::{Model, UnitSpec};
use crate::zero::{FlatLayout, HeldBytes, split, state_kinds};
use candle_core::DType;
use std::ops::Range;
use ulysses_kernels::device::DeviceKind;
use ulysses_kernels::memory::Category;

/// Parameters, gradients and optimizer state of one rank.
#[derive(Debug)]
pub(super) struct Units {
    /// The model's units, each of one or two of `flats`.
    units: Vec<Range<usize>>,
    flats: Vec<Flat>,
    stage: ZeroStage,
    places: Places,
    stored_bytes: usize,
    is_lamb: bool,
    state: State,
    in_flight: Option<Reduction>,
}

/// What an update goes by, and where of it waits what is offloaded.
#[derive(Debug, Clone, Copy)]
struct State {
    has_master: bool,
    tensors: usize,
    parameters_away: Option<Away>,
    optimizer_away: Option<Away>,
}

impl State {
    /// Where the parameters wait that are updated, and what they count as: the master copy where there is one.
    fn exact(self) -> (Option<Away>, Category) {
        match self.has_master {
            true => (self.optimizer_away, Category::Optimizer),
            false => (self.parameters_away, Category::Parameters),
        }
    }
}

/// The trained or the frozen parameters of a unit.
#[derive(Debug)]
struct Flat {
    is_frozen: bool,
    partition_numel: usize,
    padded_numel: usize,
    num_parameters: usize,
    /// Whole parameters of stage 3, while they are gathered.
    gathered: Option<Buffer>,
    /// Whether their gather is under way.
    is_gathering: bool,
    /// The own partition on its way back from the host's memory.
    arriving: Option<Buffer>,
    /// The own partition out of its store, until the gather is complete.
    fetched: Option<Buffer>,
    /// The whole gradient of stages 2 and 3, from the unit's backward to its reduction.
    whole_gradient: Option<Buffer>,
}

/// A reduction over the partitions that has been started.
#[derive(Debug)]
struct Reduction {
    flat: usize,
    /// What peers still read.
    lent: Option<Buffer>,
    /// Where the own partition arrives.
    received: Option<Buffer>,
    boundary: bool,
}

impl Units {
    /// Lays the units of `model` out, and holds what outlives a step.
    pub(super) fn new(
        (config, device): (&Config, DeviceKind),
        model: &Model,
        places: Places,
        ledger: &mut Ledger,
    ) -> Self {
        let partitions = places.shard().ranks;
        let layout = |spec: UnitSpec| {
            let parameters = spec.parameters.into_iter().map(|parameter| (parameter.name, parameter.shape));
            FlatLayout::new(spec.name, parameters, partitions)
        };
        let layouts = model.units().into_iter().map(layout).collect();
        let is_frozen = |name: &str| ParameterGroup::is_frozen(&config.ulysses.parameter_groups, name);
        let (layouts, splits) = split(layouts, is_frozen);
        let flat = |layout: &FlatLayout| Flat {
            is_frozen: layout.is_frozen(),
            partition_numel: layout.partition_numel(),
            padded_numel: layout.padded_numel(),
            num_parameters: layout.parameters().len(),
            gathered: None,
            is_gathering: false,
            arriving: None,
            fetched: None,
            whole_gradient: None,
        };
        let flats: Vec<Flat> = layouts.iter().map(flat).collect();
        let (stage, dtype) = (config.zero.stage, config.precision.dtype());
        let padded_numel = |is_frozen| {
            flats.iter().filter(|flat| flat.is_frozen == is_frozen).map(|flat| flat.padded_numel).sum()
        };
        let away = |offload: &Offload| offload.is_moved_from(device).then(|| Away::from(device));
        let state = State {
            has_master: dtype != DType::F32,
            tensors: state_kinds(&config.optimizer).len(),
            parameters_away: away(&config.zero.offload_param),
            optimizer_away: away(&config.zero.offload_optimizer),
        };
        let all = HeldBytes::expected(stage, padded_numel(false), partitions, state.tensors, dtype)
            + HeldBytes::expected_frozen(stage, padded_numel(true), partitions, dtype);
        let held = all.without(state.parameters_away.is_some(), state.optimizer_away.is_some());
        for place in [state.parameters_away, state.optimizer_away].into_iter().flatten() {
            ledger.hold(Category::Other, place.read_ahead_bytes() as i64);
        }
        ledger.offload((all.total() - held.total()) as i64);
        ledger.hold(Category::Parameters, held.parameters as i64);
        ledger.hold(Category::Gradients, held.gradients as i64);
        ledger.hold(Category::Optimizer, held.optimizer as i64);
        let is_lamb = matches!(config.optimizer, OptimizerConfig::Lamb { .. });
        let stored_bytes = ledger.bytes_of(ElementType::Stored);
        let units = splits.into_iter().map(|split| split.flats).collect();
        Self { units, flats, stage, places, stored_bytes, is_lamb, state, in_flight: None }
    }

    /// A collective over `axis`, if that has more than one rank. A group of one moves nothing.
    pub(super) fn transfer(
        &self,
        ledger: &mut Ledger,
        (op, axis, purpose): (CollectiveOp, Axis, Purpose),
        (elems, element_bytes): (usize, usize),
    ) {
        let GroupPlace { ranks, rank } = self.places.along(axis);
        if ranks == 1 {
            return;
        }
        let traffic = match op {
            CollectiveOp::AllReduce => Traffic::all_reduce(ranks, rank, elems),
            CollectiveOp::ReduceScatter => Traffic::reduce_scatter(ranks, rank, elems / ranks),
            _ => Traffic::all_gather(ranks, rank, elems),
        };
        ledger.push(Event::Collective(transfer_of((op, axis, purpose), elems, element_bytes, &traffic)));
    }

    /// Gathers a unit whose parameters are partitioned, unless that is done.
    pub(super) fn gather(&mut self, unit: usize, ledger: &mut Ledger) {
        self.prefetch(unit, ledger);
        for flat in &mut self.flats[self.units[unit].clone()] {
            if std::mem::take(&mut flat.is_gathering) {
                ledger.push(Event::Wait(Purpose::GatherParameters));
            }
            flat.fetched.take().into_iter().for_each(|own| ledger.free(own));
        }
    }

    /// Which tensors of each unit exist besides what outlives a step.
    pub(super) fn kept(&self) -> Vec<[bool; 5]> {
        let kept = |flat: &Flat| {
            let Flat { gathered, arriving, fetched, whole_gradient, is_gathering, .. } = flat;
            let tensors = [gathered, arriving, fetched, whole_gradient].map(Option::is_some);
            [tensors[0], tensors[1], tensors[2], tensors[3], *is_gathering]
        };
        self.flats.iter().map(kept).collect()
    }

    /// Starts to gather a unit whose parameters are partitioned, unless that is done or under way.
    pub(super) fn prefetch(&mut self, unit: usize, ledger: &mut Ledger) {
        for flat in self.units[unit].clone() {
            if !self.stage.partitions_parameters() || self.flats[flat].gathered.is_some() {
                continue;
            }
            let Flat { partition_numel, padded_numel, .. } = self.flats[flat];
            let arrived = self.flats[flat].arriving.take();
            let mut allocate = |elems| ledger.allocate(Category::Parameters, ElementType::Stored, elems);
            let away = self.state.parameters_away;
            let fetched = arrived.or_else(|| away.map(|_| allocate(partition_numel)));
            let whole = allocate(padded_numel);
            if let Some(place) = away {
                ledger.move_to_or_from(place, partition_numel * self.stored_bytes);
            }
            (self.flats[flat].gathered, self.flats[flat].fetched) = (Some(whole), fetched);
            let gather = (CollectiveOp::AllGather, self.places.shard_axis(), Purpose::GatherParameters);
            self.transfer(ledger, gather, (partition_numel, self.stored_bytes));
            self.flats[flat].is_gathering = self.places.shard().ranks > 1;
            if self.places.shard().ranks == 1 {
                // Complete at once.
                self.flats[flat].fetched.take().into_iter().for_each(|own| ledger.free(own));
            }
        }
    }

    /// Starts to bring back the own partition of a unit, before it is gathered.
    pub(super) fn read_ahead(&mut self, unit: usize, ledger: &mut Ledger) {
        if self.state.parameters_away != Some(Away::Host) {
            return;
        }
        for flat in &mut self.flats[self.units[unit].clone()] {
            if flat.gathered.is_none() && flat.arriving.is_none() {
                let own = ledger.allocate(Category::Parameters, ElementType::Stored, flat.partition_numel);
                flat.arriving = Some(own);
            }
        }
    }

    /// Frees a unit's gathered parameters.
    pub(super) fn release(&mut self, unit: usize, ledger: &mut Ledger) {
        for flat in &mut self.flats[self.units[unit].clone()] {
            if std::mem::take(&mut flat.is_gathering) {
                ledger.push(Event::Wait(Purpose::GatherParameters));
            }
            [flat.gathered.take(), flat.fetched.take()]
                .into_iter()
                .flatten()
                .for_each(|held| ledger.free(held));
        }
    }

    /// The part of a unit that has gradients.
    fn trained(&self, unit: usize) -> Option<usize> {
        self.units[unit].clone().find(|flat| !self.flats[*flat].is_frozen)
    }

    /// Makes a place for a unit's gradients.
    pub(super) fn gradients(&mut self, unit: usize, ledger: &mut Ledger) {
        let Some(trained) = self.trained(unit) else { return };
        let flat = &mut self.flats[trained];
        if self.stage.partitions_gradients() && flat.whole_gradient.is_none() {
            flat.whole_gradient =
                Some(ledger.allocate(Category::Gradients, ElementType::F32, flat.padded_numel));
            ledger.touch(flat.padded_numel * size_of::<f32>());
        }
    }

    /// Starts to reduce a unit, then completes the reduction before it. Of a frozen unit there is nothing to reduce.
    pub(super) fn reduce(&mut self, unit: usize, boundary: bool, ledger: &mut Ledger) {
        let Some(trained) = self.trained(unit) else { return };
        let next = self.start_reduction(trained, boundary, ledger);
        self.finish_reductions(ledger);
        self.in_flight = next;
    }

    fn start_reduction(&mut self, flat: usize, boundary: bool, ledger: &mut Ledger) -> Option<Reduction> {
        let f32 = size_of::<f32>();
        let Flat { partition_numel, padded_numel, .. } = self.flats[flat];
        if !self.stage.partitions_gradients() && !boundary {
            return None;
        }
        if !self.stage.partitions_optimizer() {
            let reduce = (CollectiveOp::AllReduce, self.places.shard_axis(), Purpose::ReduceGradients);
            self.transfer(ledger, reduce, (padded_numel, f32));
            return Some(Reduction { flat, lent: None, received: None, boundary });
        }
        let received = ledger.allocate(Category::Gradients, ElementType::F32, partition_numel);
        ledger.touch(partition_numel * f32);
        let scatter = (CollectiveOp::ReduceScatter, self.places.shard_axis(), Purpose::ReduceGradients);
        self.transfer(ledger, scatter, (padded_numel, f32));
        // Of a group of one the collective is complete at once, and nobody reads the whole any more.
        let mut lent = self.flats[flat].whole_gradient.take();
        if self.places.shard().ranks == 1 {
            lent.take().into_iter().for_each(|whole| ledger.free(whole));
        }
        Some(Reduction { flat, lent, received: Some(received), boundary })
    }

    /// Completes the last reduction.
    pub(super) fn finish_reductions(&mut self, ledger: &mut Ledger) {
        let Some(Reduction { flat, lent, received, boundary }) = self.in_flight.take() else { return };
        let Flat { partition_numel, padded_numel, .. } = self.flats[flat];
        if self.places.shard().ranks > 1 {
            ledger.push(Event::Wait(Purpose::ReduceGradients));
        }
        lent.into_iter().for_each(|whole| ledger.free(whole));
        match received {
            None => {
                ledger.scratch(reduce_scratch_bytes(self.places.shard(), padded_numel));
                self.sum_over_replicas(padded_numel, ledger);
            }
            Some(received) => {
                // Added to the partition, or copied there.
                ledger.touch(3 * partition_numel * size_of::<f32>());
                if boundary {
                    self.sum_over_replicas(partition_numel, ledger);
                }
                ledger.free(received);
            }
        }
    }

    fn sum_over_replicas(&self, elems: usize, ledger: &mut Ledger) {
        let reduce = (CollectiveOp::AllReduce, self.places.replicas_axis(), Purpose::ReduceGradients);
        self.transfer(ledger, reduce, (elems, size_of::<f32>()));
        ledger.scratch(reduce_scratch_bytes(self.places.replicas(), elems));
    }
}

/// A transfer of which `traffic` says how many elements go to and come from each member.
pub(super) fn transfer_of(
    (op, axis, purpose): (CollectiveOp, Axis, Purpose),
    input_elems: usize,
    element_bytes: usize,
    traffic: &Traffic,
) -> Transfer {
    let bytes = element_bytes as u64;
    Transfer {
        op,
        axis,
        purpose,
        input_bytes: input_elems as u64 * bytes,
        sent_to: traffic.sent.iter().map(|elems| elems * bytes).collect(),
        received_bytes: traffic.total_received() * bytes,
    }
}

/// Bytes that an all_reduce of f32 elements in place allocates: the result, or this rank's chunk of it.
fn reduce_scratch_bytes(GroupPlace { ranks, rank }: GroupPlace, elems: usize) -> usize {
    let reduced = match ranks {
        1 => 0,
        _ if elems <= DIRECT_REDUCE_MAX_ELEMS => elems,
        _ => all_reduce_chunk(ranks, rank, elems).len(),
    };
    reduced * size_of::<f32>()
}
