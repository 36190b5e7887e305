//! The optimizer step on what this rank owns, and access to whole parameters.

use super::rule::{self, Owned, Step};
use super::unit::{Gradients, Parameters, Unit};
use super::{ZeroError, ZeroOptimizer};
use crate::comm::{Pending, ProcessGroupExt};
use crate::config::OptimizerConfig;
use crate::ops::cast;
use candle_core::{DType, Tensor};

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
            _ => self.trained_units().try_for_each(|unit| self.update_unit(unit, &config, step)),
        })?;
        let _publish = tracing::trace_span!("publish").entered();
        self.publish_all()
    }

    /// The units that an update changes.
    pub(super) fn trained_units(&self) -> impl Iterator<Item = &Unit> {
        self.units.iter().filter(|unit| !unit.layout.is_frozen())
    }

    /// Rounds restored master copies to the parameters, where these are 16 bits wide.
    pub(super) fn round_master(&self) -> Result<(), ZeroError> {
        if self.units.iter().all(|unit| unit.master.is_none()) {
            return Ok(());
        }
        self.units.iter().try_for_each(|unit| self.round_to_stored(unit))?;
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
        let owned = self.owned(unit)?;
        for span in &unit.spans {
            let (config, step) = span.settings.applied(config, step);
            rule::update(&config, &owned.narrow(&span.elements)?, step)?;
        }
        self.round_to_stored(unit)
    }

    /// The elements that this rank updates.
    pub(super) fn owned(&self, unit: &Unit) -> Result<Owned, ZeroError> {
        let gradients = if self.stage.partitions_optimizer() {
            unit.gradient_partition(unit.dp_rank)?
        } else {
            unit.persistent_gradients().cloned()
        };
        let missing = || ZeroError::NoGradients { unit: unit.layout.name().to_owned() };
        let gradients = gradients.ok_or_else(missing)?;
        let parameters = match &unit.master {
            Some(master) => master.clone(),
            None => unit.updated_parameters(self.stage)?,
        };
        Ok(Owned { parameters, gradients, state: unit.state.clone() })
    }

    /// Rounds the master copy, where there is one, to the parameters.
    pub(super) fn round_to_stored(&self, unit: &Unit) -> Result<(), ZeroError> {
        match &unit.master {
            Some(master) => Ok(cast::cast(master, &unit.updated_parameters(self.stage)?)?),
            None => Ok(()),
        }
    }

    /// Starts to gather a unit whose parameters are whole on every rank.
    fn publish(&self, unit: &Unit) -> Result<Option<Pending>, ZeroError> {
        match &unit.parameters {
            Parameters::Whole(whole) => {
                // A copy: the gather's input must not share storage with its output.
                let own = unit.parameter_partition()?.force_contiguous()?;
                Ok(Some(self.groups.dp.start_all_gather(&own, &whole.flat)?))
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
                None => unit.gather(&*self.groups.dp)?,
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
                let whole = Tensor::zeros(unit.layout.padded_numel(), own.dtype(), own.device())?;
                self.groups.dp.all_gather(own, &whole)?;
                Ok(Some(whole))
            }
            master => Ok(master.clone()),
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
                        .gradient_partition(unit.dp_rank)?
                        .map(|own| own.force_contiguous())
                        .transpose()?;
                    let missing = || ZeroError::NoGradients { unit: unit.layout.name().to_owned() };
                    let own = own.ok_or_else(missing)?;
                    let whole = Tensor::zeros(unit.layout.padded_numel(), own.dtype(), own.device())?;
                    self.groups.dp.all_gather(&own, &whole)?;
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
