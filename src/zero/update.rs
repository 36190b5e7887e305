//! The optimizer step on what this rank owns, and access to whole parameters.

use super::state_tensor::StateTensor;
use super::optimizer_step::{self, UpdateTensors, Step};
use super::unit::{Gradients, Parameters, Unit};
use super::{ZeroError, ZeroOptimizer};
use crate::comm::{Pending, ProcessGroupExt};
use crate::config::OptimizerConfig;
use candle_core::{DType, Tensor};
use ulysses_kernels::cast;
use ulysses_kernels::memory::{Category, with_category};

impl ZeroOptimizer {
    /// Updates the elements that this rank owns and, where parameters are whole but the
    /// optimizer is partitioned, gathers the others' over dp.
    ///
    /// `step` counts updates from 1. Gradients are multiplied by `grad_scale` on the fly
    /// (normalisation and clipping); what is in their buffer afterwards has no meaning. `betas`
    /// replaces the optimizer's for schedules that move them. Collective over dp.
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
        // What was gathered before the update is stale after it.
        self.release_all();
        tracing::trace_span!("optimizer").in_scope(|| match config {
            OptimizerConfig::Lamb { .. } => self.update_by_lamb(&config, step),
            _ => self.each_trained_unit(|unit| self.update_unit(unit, &config, step)),
        })?;
        self.storage.settle()?;
        let _publish = tracing::trace_span!("publish").entered();
        self.publish_all()
    }

    /// The units that an update changes.
    pub(super) fn trained_units(&self) -> impl Iterator<Item = &Unit> {
        self.units.iter().filter(|unit| !unit.layout.is_frozen())
    }

    /// Works on one unit after another. What the next one has elsewhere is fetched meanwhile.
    pub(super) fn each_trained_unit(
        &self,
        mut work: impl FnMut(&Unit) -> Result<(), ZeroError>,
    ) -> Result<(), ZeroError> {
        let mut units = self.trained_units().peekable();
        units.peek().map_or(Ok(()), |first| first.read_state_ahead())?;
        while let Some(unit) = units.next() {
            units.peek().map_or(Ok(()), |next| next.read_state_ahead())?;
            work(unit)?;
        }
        Ok(())
    }

    /// Rounds restored master copies to the parameters, where these are 16 bits wide.
    pub(super) fn round_master(&self) -> Result<(), ZeroError> {
        if self.units.iter().all(|unit| unit.master.is_none()) {
            return Ok(());
        }
        for unit in &self.units {
            if let Some(master) = &unit.master {
                let master = master.fetch()?;
                self.storage.settle()?;
                self.round_to_stored(unit, &master)?;
            }
        }
        self.storage.settle()?;
        self.publish_all()
    }

    /// Gathers updated parameters where they are whole but the optimizer is partitioned.
    fn publish_all(&self) -> Result<(), ZeroError> {
        if self.stage.partitions_optimizer() && self.world_size() > 1 {
            // Two gathers at a time: each holds a copy of the own partition.
            let mut in_flight: Option<Pending> = None;
            for unit in self.trained_units() {
                let next = self.publish(unit)?;
                if let Some(pending) = std::mem::replace(&mut in_flight, next) {
                    pending.wait()?;
                }
            }
            in_flight.map_or(Ok(()), Pending::wait)?;
        }
        Ok(())
    }

    fn update_unit(&self, unit: &Unit, config: &OptimizerConfig, step: Step) -> Result<(), ZeroError> {
        let owned = self.update_tensors(unit)?;
        for span in &unit.param_group_ranges {
            let (config, step) = span.settings.applied(config, step);
            optimizer_step::update(&config, &owned.narrow(&span.elements)?, step)?;
        }
        self.put_back(unit, owned)
    }

    /// The elements that this rank updates, with their gradients and state; copies of what is elsewhere.
    pub(super) fn update_tensors(&self, unit: &Unit) -> Result<UpdateTensors, ZeroError> {
        let state = unit.state.iter().map(StateTensor::fetch).collect::<Result<_, _>>()?;
        Ok(UpdateTensors { state, ..self.update_tensors_without_state(unit)? })
    }

    /// The same without the state.
    pub(super) fn update_tensors_without_state(&self, unit: &Unit) -> Result<UpdateTensors, ZeroError> {
        let gradients = if self.stage.partitions_optimizer() {
            unit.gradient_partition(unit.shard_rank)?
        } else {
            unit.persistent_gradients().cloned()
        };
        let missing = || ZeroError::NoGradients { unit: unit.layout.name().to_owned() };
        let gradients = gradients.ok_or_else(missing)?;
        let parameters = self.exact_parameters(unit)?.fetch()?;
        Ok(UpdateTensors { parameters, gradients, state: Vec::new() })
    }

    /// The parameters that this rank updates: the master copy where there is one.
    fn exact_parameters(&self, unit: &Unit) -> Result<StateTensor, ZeroError> {
        unit.master.clone().map_or_else(|| unit.updated_parameters(self.stage), Ok)
    }

    /// Rounds the updated master copy, where there is one, to the parameters, and writes what belongs elsewhere once the
    /// unit before is written.
    pub(super) fn put_back(&self, unit: &Unit, owned: UpdateTensors) -> Result<(), ZeroError> {
        let UpdateTensors { parameters, state, .. } = owned;
        self.storage.settle()?;
        if unit.master.is_some() {
            self.round_to_stored(unit, &parameters)?;
        }
        self.exact_parameters(unit)?.put(parameters)?;
        unit.put_state(state)
    }

    /// Writes updated state, where it belongs elsewhere, once the unit before is written.
    pub(super) fn put_back_state(&self, unit: &Unit, state: Vec<Tensor>) -> Result<(), ZeroError> {
        self.storage.settle()?;
        unit.put_state(state)
    }

    /// Rounds a master copy to the parameters.
    fn round_to_stored(&self, unit: &Unit, master: &Tensor) -> Result<(), ZeroError> {
        let stored = unit.updated_parameters(self.stage)?;
        let rounded = stored.blank()?;
        cast::cast(master, &rounded)?;
        stored.put(rounded)
    }

    /// Starts to gather a unit whose parameters are whole on every rank.
    fn publish(&self, unit: &Unit) -> Result<Option<Pending>, ZeroError> {
        match &unit.parameters {
            Parameters::Whole(whole) => {
                // A copy: the gather's input must not share storage with its output.
                let own = unit.updated_parameters(self.stage)?.fetch()?;
                let own = with_category(Category::Parameters, || ulysses_kernels::tensor::copy_of(&own))?;
                Ok(Some(self.groups.shard().start_all_gather(&own, &whole.flat)?))
            }
            Parameters::Partitioned { .. } => Ok(None),
        }
    }

    /// Every parameter whole, by name, on every rank of the dp group, in f32: the master copy where there is
    /// one. A collective call.
    ///
    /// # Errors
    /// A failed collective.
    pub fn gather_parameters(&mut self) -> Result<Vec<(String, Tensor)>, ZeroError> {
        let mut all = Vec::new();
        for index in 0..self.units.len() {
            let master = self.whole_master(index)?;
            let unit = &mut self.units[index];
            let views = match master {
                Some(whole) => unit.layout.views(&whole)?,
                None => unit.gather(&**self.groups.shard())?,
            };
            for (parameter, view) in unit.layout.parameters().iter().zip(views) {
                // What is frozen has no master copy.
                all.push((parameter.name.clone(), view.to_dtype(DType::F32)?.force_contiguous()?));
            }
            unit.release();
        }
        Ok(all)
    }

    /// All of a unit's master copy, where there is one.
    fn whole_master(&self, index: usize) -> Result<Option<Tensor>, ZeroError> {
        let unit = &self.units[index];
        match &unit.master {
            Some(own) if self.stage.partitions_optimizer() => {
                let own = own.fetch()?;
                let whole = Tensor::zeros(unit.layout.padded_numel(), own.dtype(), own.device())?;
                self.groups.shard().all_gather(&own, &whole)?;
                Ok(Some(whole))
            }
            master => master.as_ref().map(StateTensor::fetch).transpose(),
        }
    }

    /// Every reduced gradient whole, by name, on every rank of the dp group, but those of frozen parameters: a
    /// collective call, valid between the last reduction and the update.
    ///
    /// # Errors
    /// A failed collective.
    pub fn gather_gradients(&self) -> Result<Vec<(String, Tensor)>, ZeroError> {
        let mut all = Vec::new();
        for unit in self.trained_units() {
            let whole = match &unit.gradients {
                Some(Gradients::Whole(whole)) if !self.stage.partitions_optimizer() => whole.flat.copy()?,
                _ => {
                    let own = unit
                        .gradient_partition(unit.shard_rank)?
                        .map(|own| own.force_contiguous())
                        .transpose()?;
                    let missing = || ZeroError::NoGradients { unit: unit.layout.name().to_owned() };
                    let own = own.ok_or_else(missing)?;
                    let whole = Tensor::zeros(unit.layout.padded_numel(), own.dtype(), own.device())?;
                    self.groups.shard().all_gather(&own, &whole)?;
                    whole
                }
            };
            let views = unit.layout.views(&whole)?;
            let names = unit.layout.parameters().iter().map(|parameter| parameter.name.clone());
            all.extend(names.zip(views));
        }
        Ok(all)
    }
}
