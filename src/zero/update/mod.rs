//! The optimizer step on this rank's elements, and access to whole parameters and gradients.

mod by_tensor;
mod on_host;
pub(super) mod param_group_ranges;

use super::flat_unit::{FlatUnit, Gradients, Parameters};
use super::state::StateTensor;
use super::unit_split::{Place, UnitSplit};
use super::{FlatParameter, ZeroError, ZeroOptimizer};
use crate::comm::{Pending, ProcessGroupExt, TrainingGroups};
use crate::config::OptimizerConfig;
use crate::mesh::ShardRun;
use crate::optim::Step;
use crate::placement::ledger;
use candle_core::{DType, Tensor};
use std::collections::HashMap;
use std::ops::Range;
use ulysses_kernels::cast;
use ulysses_kernels::memory::{Category, with_category};

/// The elements to update, with their gradients and optimizer state: tensors of equal length.
pub(super) struct UpdateTensors {
    /// Parameters, or their master copy if there is one.
    parameters: Tensor,
    gradients: Tensor,
    /// One tensor of each kind.
    state: Vec<Tensor>,
}

impl UpdateTensors {
    /// A range of the elements.
    fn narrow(&self, elements: &Range<usize>) -> Result<Self, ZeroError> {
        let narrow = |tensor: &Tensor| tensor.narrow(0, elements.start, elements.len());
        Ok(Self {
            parameters: narrow(&self.parameters)?,
            gradients: narrow(&self.gradients)?,
            state: self.state.iter().map(narrow).collect::<Result<_, _>>()?,
        })
    }
}

impl ZeroOptimizer {
    /// Updates this rank's elements. If parameters are whole but the optimizer is partitioned, then all-gathers the
    /// updated parameters over the shard group.
    ///
    /// `step` counts updates from 1. Gradients are multiplied by `grad_scale` on the fly (normalization and
    /// clipping); afterwards the content of their buffer is unspecified. `betas` overrides the optimizer's,
    /// for schedules that change them. Collective over the shard group.
    ///
    /// # Errors
    /// A failed collective.
    pub fn update(
        &mut self,
        step: u64,
        lr: f64,
        betas: Option<[f64; 2]>,
        grad_scale: f64,
    ) -> Result<(), ZeroError> {
        let config = match betas {
            Some(betas) => self.config.clone().with_betas(betas),
            None => self.config.clone(),
        };
        let step = Step { number: step, lr, grad_scale };
        // Parameters that were gathered before the update are stale.
        self.release_all();
        self.trained_flats().try_for_each(FlatUnit::place_updated)?;
        tracing::trace_span!("optimizer").in_scope(|| match self.host_store() {
            _ if !config.is_by_element() => self.update_by_tensor(&config, step),
            Some(store) => self.update_on_host(store, &config, step),
            None => self.each_trained_flat(|flat| self.update_flat(flat, &config, step)),
        })?;
        self.storage.settle()?;
        let _publish = tracing::trace_span!("publish").entered();
        self.gather_updated_parameters()
    }

    /// The flat units that an update changes.
    pub(super) fn trained_flats(&self) -> impl Iterator<Item = &FlatUnit> {
        self.flats.iter().filter(|flat| !flat.layout.is_frozen())
    }

    /// Calls a function for one trained flat unit after another, and loads the next one's offloaded tensors
    /// meanwhile.
    pub(super) fn each_trained_flat(
        &self,
        mut work: impl FnMut(&FlatUnit) -> Result<(), ZeroError>,
    ) -> Result<(), ZeroError> {
        let mut flats = self.trained_flats().peekable();
        flats.peek().map_or(Ok(()), |first| first.read_state_ahead())?;
        while let Some(flat) = flats.next() {
            flats.peek().map_or(Ok(()), |next| next.read_state_ahead())?;
            work(flat)?;
        }
        Ok(())
    }

    /// Rounds restored master copies to the 16-bit parameters.
    pub(super) fn round_master(&self) -> Result<(), ZeroError> {
        if self.flats.iter().all(|flat| flat.master.is_none()) {
            return Ok(());
        }
        for flat in &self.flats {
            if let Some(master) = &flat.master {
                let master = master.fetch()?;
                self.storage.settle()?;
                self.round_to_stored(flat, &master)?;
            }
        }
        self.storage.settle()?;
        self.gather_updated_parameters()
    }

    /// All-gathers updated parameters, if they are whole but the optimizer is partitioned.
    fn gather_updated_parameters(&self) -> Result<(), ZeroError> {
        if self.stage.partitions_optimizer() && self.world_size() > 1 {
            // Two gathers in flight: each holds a copy of this rank's partition.
            let mut in_flight: Option<Pending> = None;
            for flat in self.trained_flats() {
                let next = self.start_gather_updated(flat)?;
                if let Some(pending) = std::mem::replace(&mut in_flight, next) {
                    pending.wait()?;
                }
            }
            in_flight.map_or(Ok(()), Pending::wait)?;
        }
        Ok(())
    }

    fn update_flat(&self, flat: &FlatUnit, config: &OptimizerConfig, step: Step) -> Result<(), ZeroError> {
        let update = self.update_tensors(flat)?;
        for range in &flat.param_group_ranges {
            let UpdateTensors { parameters, gradients, state } = update.narrow(&range.elements)?;
            range.settings.rule(config, step).by_element().apply(&parameters, &gradients, &state)?;
        }
        self.put_back(flat, update)
    }

    /// The elements that this rank updates, with gradients and state; copies of offloaded tensors.
    pub(super) fn update_tensors(&self, flat: &FlatUnit) -> Result<UpdateTensors, ZeroError> {
        let state = flat.state.iter().map(StateTensor::fetch).collect::<Result<_, _>>()?;
        Ok(UpdateTensors { state, ..self.update_tensors_without_state(flat)? })
    }

    /// The same without optimizer state.
    pub(super) fn update_tensors_without_state(&self, flat: &FlatUnit) -> Result<UpdateTensors, ZeroError> {
        let missing = || ZeroError::NoGradients { unit: flat.layout.name().to_owned() };
        let gradients = flat.updated_gradients(self.stage)?.ok_or_else(missing)?;
        let parameters = self.exact_parameters(flat)?.fetch()?;
        Ok(UpdateTensors { parameters, gradients, state: Vec::new() })
    }

    /// The parameters that this rank updates; their master copy if there is one.
    pub(super) fn exact_parameters(&self, flat: &FlatUnit) -> Result<StateTensor, ZeroError> {
        flat.master.clone().map_or_else(|| flat.updated_parameters(self.stage), Ok)
    }

    /// Rounds the updated master copy, if any, to the parameters. Offloaded tensors are written back once the
    /// previous ones are written.
    pub(super) fn put_back(&self, flat: &FlatUnit, update: UpdateTensors) -> Result<(), ZeroError> {
        let UpdateTensors { parameters, state, .. } = update;
        self.storage.settle()?;
        if flat.master.is_some() {
            self.round_to_stored(flat, &parameters)?;
        }
        self.exact_parameters(flat)?.put(parameters)?;
        flat.put_state(state)
    }

    /// Writes updated state and overwritten gradients back, if offloaded, once the previous ones are written.
    pub(super) fn put_back_state(&self, flat: &FlatUnit, update: UpdateTensors) -> Result<(), ZeroError> {
        let UpdateTensors { gradients, state, .. } = update;
        self.storage.settle()?;
        flat.put_gradients(gradients)?;
        flat.put_state(state)
    }

    /// Rounds a master copy to the parameters.
    fn round_to_stored(&self, flat: &FlatUnit, master: &Tensor) -> Result<(), ZeroError> {
        let stored = flat.updated_parameters(self.stage)?;
        let rounded = stored.blank()?;
        cast::cast(master, &rounded)?;
        ledger::copy(master, &rounded)?;
        stored.put(rounded)
    }

    /// Starts to all-gather the updated parameters of a flat unit.
    fn start_gather_updated(&self, flat: &FlatUnit) -> Result<Option<Pending>, ZeroError> {
        match &flat.parameters {
            Parameters::Whole(whole) => {
                // A copy: input and output of the gather must not share storage.
                let own = flat.updated_parameters(self.stage)?.fetch()?;
                let own = with_category(Category::Parameters, || ulysses_kernels::tensor::copy_of(&own))?;
                ledger::copy(&whole.flat, &own)?;
                Ok(Some(self.groups.shard().start_all_gather(&own, &whole.flat)?))
            }
            Parameters::Partitioned { .. } => Ok(None),
        }
    }

    /// Gathers every parameter, whole and by name, in f32, on every rank of the shard group: the master
    /// copy if there is one. Collective.
    ///
    /// # Errors
    /// A failed collective.
    pub fn gather_parameters(&mut self) -> Result<Vec<(String, Tensor)>, ZeroError> {
        let mut all = HashMap::new();
        for index in 0..self.flats.len() {
            let master = self.whole_master(index)?;
            let flat = &mut self.flats[index];
            let views = match master {
                Some(whole) => flat.layout.views(&whole)?,
                None => flat.gather(&**self.groups.shard())?,
            };
            for (number, (parameter, view)) in flat.layout.parameters().iter().zip(views).enumerate() {
                // Frozen parameters have no master copy.
                let part = view.to_dtype(DType::F32)?.force_contiguous()?;
                let whole = whole_parameter(parameter, part, &self.groups)?;
                all.insert(Place { flat: index, parameter: number }, (parameter.name.clone(), whole));
            }
            flat.release();
        }
        Ok(self.in_model_order(all))
    }

    /// A flat unit's whole master copy, if it has one.
    fn whole_master(&self, index: usize) -> Result<Option<Tensor>, ZeroError> {
        let flat = &self.flats[index];
        match &flat.master {
            Some(own) if self.stage.partitions_optimizer() => {
                let own = own.fetch()?;
                let whole = Tensor::zeros(flat.layout.padded_numel(), own.dtype(), own.device())?;
                self.groups.shard().all_gather(&own, &whole)?;
                Ok(Some(whole))
            }
            master => master.as_ref().map(StateTensor::fetch).transpose(),
        }
    }

    /// Gathers every reduced gradient, whole and by name, on every rank of the shard group, except those of
    /// frozen parameters. Collective; valid between the last reduction and the update.
    ///
    /// # Errors
    /// A failed collective.
    pub fn gather_gradients(&self) -> Result<Vec<(String, Tensor)>, ZeroError> {
        let mut all = HashMap::new();
        for (index, flat) in self.flats.iter().enumerate().filter(|(_, flat)| !flat.layout.is_frozen()) {
            let whole = match &flat.gradients {
                Some(Gradients::Whole(whole)) if !self.stage.partitions_optimizer() => whole.flat.copy()?,
                _ => {
                    let own = flat
                        .gradient_partition(flat.shard_rank)?
                        .map(|own| own.force_contiguous())
                        .transpose()?;
                    let missing = || ZeroError::NoGradients { unit: flat.layout.name().to_owned() };
                    let own = own.ok_or_else(missing)?;
                    let whole = Tensor::zeros(flat.layout.padded_numel(), own.dtype(), own.device())?;
                    self.groups.shard().all_gather(&own, &whole)?;
                    whole
                }
            };
            let views = flat.layout.views(&whole)?;
            for (number, (parameter, part)) in flat.layout.parameters().iter().zip(views).enumerate() {
                let whole = whole_parameter(parameter, part, &self.groups)?;
                all.insert(Place { flat: index, parameter: number }, (parameter.name.clone(), whole));
            }
        }
        Ok(self.in_model_order(all))
    }

    /// The values by flat unit and parameter, in the order of the model.
    fn in_model_order<T>(&self, mut by_place: HashMap<Place, T>) -> Vec<T> {
        let places = self.splits.iter().flat_map(UnitSplit::places);
        places.filter_map(|place| by_place.remove(place)).collect()
    }
}

/// Gathers the parts of a parameter, or of its gradient, that the ranks of tp have.
fn whole_parameter(
    parameter: &FlatParameter,
    part: Tensor,
    groups: &TrainingGroups,
) -> Result<Tensor, ZeroError> {
    let (Some(shard), Some(tensor)) = (&parameter.shard, &groups.tensor) else { return Ok(part) };
    let shape = shard.whole_shape(&parameter.shape);
    let mut whole = vec![0.0; shape.iter().product()];
    let parts = tensor.tp.all_gather_varied(&ulysses_kernels::tensor::to_vec::<f32>(&part)?)?;
    for (rank, part) in parts.iter().enumerate() {
        let shard = shard.at(rank);
        for ShardRun { local, whole: at, len } in shard.runs(&shard.local_shape(&shape), 0..part.len()) {
            whole[at..at + len].copy_from_slice(&part[local..local + len]);
        }
    }
    Ok(Tensor::from_vec(whole, shape, part.device())?)
}
