//! The optimizer step on the host, for state that is offloaded from a GPU to host memory.
//!
//! Master copy, optimizer state and gradients stay in host memory, where the rank's CPU threads update them. Only
//! what is not there is copied: whole gradients (stage 1) and parameters that are their own master copy (f32) before
//! the update, and updated parameters after it. A unit is updated in pieces, so that its temporary copies are small;
//! the copies of one piece overlap with the update of another.

use crate::config::OptimizerConfig;
use crate::optim::Step;
use crate::zero::flat_unit::{FlatUnit, Gradients};
use crate::zero::state::{SlotSlice, StateTensor, with_bytes};
use crate::zero::{ZeroError, ZeroOptimizer};
use std::ops::Range;
use std::sync::Arc;
use ulysses_kernels::cast;
use ulysses_kernels::offload::OffloadStore;
use ulysses_kernels::tensor::f32_elements;

/// A part of a flat unit's elements that this rank updates, with its tensors in host memory.
struct Piece<'a> {
    flat: &'a FlatUnit,
    elements: Range<usize>,
    /// The parameters in 16 bits, if they have a master copy.
    rounded: Option<SlotSlice>,
    /// The parameters, or their master copy.
    exact: SlotSlice,
    gradients: SlotSlice,
    state: Vec<SlotSlice>,
}

impl ZeroOptimizer {
    /// The store of the optimizer state, if updates run on the host. They do if that moves less: not for an optimizer
    /// without state and master copy. Rules by tensors exchange norms between the halves of a step, on the device.
    pub(in crate::zero) fn host_store(&self) -> Option<&Arc<OffloadStore>> {
        let has_state = self.trained_flats().any(|flat| flat.master.is_some() || !flat.state.is_empty());
        let are_parameters_near =
            self.storage.parameters.as_ref().is_none_or(|store| store.is_in_host_memory());
        let store = self.storage.optimizer.as_ref().filter(|store| store.is_in_host_memory());
        store.filter(|_| has_state && self.config.is_by_element() && are_parameters_near)
    }

    /// Updates this rank's elements in host memory.
    pub(super) fn update_on_host(
        &self,
        store: &Arc<OffloadStore>,
        config: &OptimizerConfig,
        step: Step,
    ) -> Result<(), ZeroError> {
        let mut pieces = self.trained_flats().flat_map(|flat| {
            let (end, size) = (flat.updated_numel(self.stage), self.max_piece_elements);
            let ranges = (0..end).step_by(size).map(move |start| start..end.min(start + size));
            ranges.map(move |elements| self.start_piece(flat, elements, store))
        });
        let mut next = pieces.next().transpose()?;
        // The previous piece's parameters are being copied to the device: their host memory is not reused yet.
        let mut previous = None;
        while let Some(piece) = next {
            next = pieces.next().transpose()?;
            self.update_piece(&piece, config, step)?;
            self.storage.settle()?;
            drop(previous.replace(piece));
        }
        Ok(())
    }

    /// Starts to copy what is not in host memory.
    fn start_piece<'a>(
        &self,
        flat: &'a FlatUnit,
        elements: Range<usize>,
        store: &Arc<OffloadStore>,
    ) -> Result<Piece<'a>, ZeroError> {
        let missing = || ZeroError::NoGradients { unit: flat.layout.name().to_owned() };
        let gradients = match &flat.gradients {
            Some(Gradients::Partitioned { partition, .. }) => partition.stored()?,
            _ => StateTensor::Resident(flat.updated_gradients(self.stage)?.ok_or_else(missing)?),
        };
        let rounded = flat.master.is_some().then(|| flat.updated_parameters(self.stage)).transpose()?;
        Ok(Piece {
            flat,
            rounded: rounded.map(|parameters| parameters.slot_or_blank(&elements, store)).transpose()?,
            exact: self.exact_parameters(flat)?.slot_or_copy(&elements, store)?,
            gradients: gradients.slot_or_copy(&elements, store)?,
            state: flat
                .state
                .iter()
                .map(|state| state.slot_or_copy(&elements, store))
                .collect::<Result<_, _>>()?,
            elements,
        })
    }

    /// Updates a piece and starts to copy its parameters to the device.
    fn update_piece(&self, piece: &Piece<'_>, config: &OptimizerConfig, step: Step) -> Result<(), ZeroError> {
        let Piece { flat, elements, rounded, exact, gradients, state } = piece;
        let slices: Vec<&SlotSlice> = rounded.iter().chain([exact, gradients]).chain(state).collect();
        let mut outcome = Ok(());
        with_bytes(&slices, &mut |mut bytes| {
            // A dry run has none.
            if !bytes.is_empty() {
                let tensors = bytes.split_off(usize::from(rounded.is_some()));
                let tensors = tensors.into_iter().map(f32_elements).collect();
                outcome = self.update_elements(piece, bytes.pop(), tensors, config, step);
            }
        })?;
        outcome?;
        flat.updated_parameters(self.stage)?.load_from(rounded.as_ref().unwrap_or(exact), elements)
    }

    /// `tensors`: parameters, gradients and optimizer state.
    fn update_elements(
        &self,
        Piece { flat, elements: piece, .. }: &Piece<'_>,
        rounded: Option<&mut [u8]>,
        mut tensors: Vec<&mut [f32]>,
        config: &OptimizerConfig,
        step: Step,
    ) -> Result<(), ZeroError> {
        let [parameters, gradients, state @ ..] = tensors.as_mut_slice() else {
            unreachable!("the tensors of `Piece`")
        };
        for range in &flat.param_group_ranges {
            let (start, end) = (range.elements.start.max(piece.start), range.elements.end.min(piece.end));
            if start >= end {
                continue;
            }
            let at = || start - piece.start..end - piece.start;
            let mut state: Vec<_> = state.iter_mut().map(|tensor| &mut tensor[at()]).collect();
            let rule = range.settings.rule(config, step).by_element();
            rule.apply_on_host(&mut parameters[at()], &gradients[at()], &mut state)?;
        }
        match rounded {
            Some(rounded) => Ok(cast::round_on_host(parameters, rounded, self.storage.options.dtype)?),
            None => Ok(()),
        }
    }
}
