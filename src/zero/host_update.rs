//! The optimizer step on the host, for state that is offloaded from a GPU to host memory.
//!
//! Master copy, optimizer state and gradients stay in host memory, where the rank's CPU threads update them. Only
//! what is not there is copied: whole gradients (stage 1) and parameters that are their own master copy (f32) before
//! the update, and updated parameters after it. So copies of one unit overlap with the update of another.

use super::optimizer_step::{self, Step};
use super::state_tensor::{Slot, StateTensor, with_bytes};
use super::unit::{Gradients, Unit};
use super::{ZeroError, ZeroOptimizer};
use crate::config::OptimizerConfig;
use std::sync::Arc;
use ulysses_kernels::cast;
use ulysses_kernels::offload::OffloadStore;
use ulysses_kernels::tensor::f32_elements;

/// The tensors of one unit's update in host memory.
struct HostTensors {
    /// The parameters in 16 bits, if they have a master copy.
    rounded: Option<Arc<Slot>>,
    /// The parameters, or their master copy.
    exact: Arc<Slot>,
    gradients: Arc<Slot>,
    state: Vec<Arc<Slot>>,
}

impl ZeroOptimizer {
    /// The store of the optimizer state, if updates run on the host. They do if that moves less: not for an optimizer
    /// without state and master copy. LAMB exchanges norms between the halves of its step, and runs on the device.
    pub(super) fn host_store(&self) -> Option<&Arc<OffloadStore>> {
        let has_state = self.trained_units().any(|unit| unit.master.is_some() || !unit.state.is_empty());
        let is_elementwise = !matches!(self.config, OptimizerConfig::Lamb { .. });
        let are_parameters_near =
            self.storage.parameters.as_ref().is_none_or(|store| store.is_in_host_memory());
        let store = self.storage.optimizer.as_ref().filter(|store| store.is_in_host_memory());
        store.filter(|_| has_state && is_elementwise && are_parameters_near)
    }

    /// Updates this rank's elements in host memory.
    pub(super) fn update_on_host(
        &self,
        store: &Arc<OffloadStore>,
        config: &OptimizerConfig,
        step: Step,
    ) -> Result<(), ZeroError> {
        let mut units = self.trained_units().peekable();
        let mut next = units.peek().map(|first| self.host_tensors(first, store)).transpose()?;
        // The previous unit's parameters are being copied to the device: their host memory is not reused yet.
        let mut previous = None;
        while let (Some(unit), Some(tensors)) = (units.next(), next.take()) {
            next = units.peek().map(|next| self.host_tensors(next, store)).transpose()?;
            self.update_unit_on_host(unit, &tensors, config, step)?;
            self.storage.settle()?;
            drop(previous.replace(tensors));
        }
        Ok(())
    }

    /// Starts to copy what is not in host memory.
    fn host_tensors(&self, unit: &Unit, store: &Arc<OffloadStore>) -> Result<HostTensors, ZeroError> {
        let missing = || ZeroError::NoGradients { unit: unit.layout.name().to_owned() };
        let gradients = match &unit.gradients {
            Some(Gradients::Partitioned { partition, .. }) => partition.stored()?,
            _ => StateTensor::Resident(unit.updated_gradients(self.stage)?.ok_or_else(missing)?),
        };
        let rounded = unit.master.is_some().then(|| unit.updated_parameters(self.stage)).transpose()?;
        Ok(HostTensors {
            rounded: rounded.map(|parameters| parameters.slot_or_blank(store)),
            exact: self.exact_parameters(unit)?.slot_or_copy(store)?,
            gradients: gradients.slot_or_copy(store)?,
            state: unit.state.iter().map(|state| state.slot_or_copy(store)).collect::<Result<_, _>>()?,
        })
    }

    /// Updates a unit and starts to copy its parameters to the device.
    fn update_unit_on_host(
        &self,
        unit: &Unit,
        tensors: &HostTensors,
        config: &OptimizerConfig,
        step: Step,
    ) -> Result<(), ZeroError> {
        let HostTensors { rounded, exact, gradients, state } = tensors;
        let slots: Vec<&Slot> =
            rounded.iter().chain([exact, gradients]).chain(state).map(|slot| &**slot).collect();
        let mut outcome = Ok(());
        with_bytes(&slots, &mut |mut bytes| {
            // A dry run has none.
            if !bytes.is_empty() {
                let elements = bytes.split_off(usize::from(rounded.is_some()));
                let elements = elements.into_iter().map(f32_elements).collect();
                outcome = self.update_elements(unit, bytes.pop(), elements, config, step);
            }
        })?;
        outcome?;
        unit.updated_parameters(self.stage)?.load_from(rounded.as_ref().unwrap_or(exact))
    }

    /// `elements`: parameters, gradients and optimizer state.
    fn update_elements(
        &self,
        unit: &Unit,
        rounded: Option<&mut [u8]>,
        mut elements: Vec<&mut [f32]>,
        config: &OptimizerConfig,
        step: Step,
    ) -> Result<(), ZeroError> {
        let [parameters, gradients, state @ ..] = elements.as_mut_slice() else {
            unreachable!("the tensors of `HostTensors`")
        };
        for range in &unit.param_group_ranges {
            let (config, step) = range.settings.applied(config, step);
            let at = || range.elements.clone();
            let state = state.iter_mut().map(|tensor| &mut tensor[at()]).collect();
            let (parameters, gradients) = (&mut parameters[at()], &gradients[at()]);
            optimizer_step::update_on_host(&config, (parameters, gradients, state), step)?;
        }
        match rounded {
            Some(rounded) => Ok(cast::round_on_host(parameters, rounded, self.storage.options.dtype)?),
            None => Ok(()),
        }
    }
}
