//! Parameters and optimizer state as named, partitioned tensors, for checkpoints.

use super::state_tensor::{StateSlice, StateTensor};
use crate::zero::flat_unit::FlatUnit;
use crate::zero::{FlatLayout, ZeroError, ZeroOptimizer};
use candle_core::Tensor;
use std::ops::Range;
use ulysses_kernels::cast::cast;

/// Which tensor of the state: one kind of a flat unit's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateIndex {
    /// Index of the flat unit.
    pub unit: usize,
    /// Index of the kind in [`ZeroOptimizer::state_kinds`].
    pub kind: usize,
}

/// Writes elements `range` of a flat buffer to a slice of the same length.
pub type RestoreState<'a, E> = &'a dyn Fn(StateIndex, Range<usize>, &mut [f32]) -> Result<(), E>;

impl ZeroOptimizer {
    /// The names of the f32 state tensors: first the parameters (the master copy of 16-bit ones), then the
    /// optimizer's own state. Other methods take the index of a kind in this list. Frozen parameters have
    /// only the first kind.
    pub fn state_kinds(&self) -> Vec<&'static str> {
        [&["parameters"], self.config.params().state_kinds()].concat()
    }

    /// Returns whether a flat unit is in the part of the state that this rank has
    /// ([`TrainingGroups::part_replica`](crate::comm::TrainingGroups::part_replica)).
    fn is_saved(&self, flat: &FlatUnit) -> bool {
        let division = flat.layout.division();
        (division.over_tp || self.groups.tp_rank() == 0) && self.groups.is_of_stage(division)
    }

    /// The layouts of the flat units that checkpoints have from this rank's stage.
    pub fn saved_layouts(&self) -> impl Iterator<Item = &FlatLayout> {
        self.layouts().filter(|layout| self.groups.is_of_stage(layout.division()))
    }

    /// Returns the bytes of each partition in a checkpoint, over all flat units and kinds of the part that this rank has, without
    /// padding.
    pub fn saved_bytes(&self) -> Vec<u64> {
        let num_kinds = self.state_kinds().len();
        let of_flat = |flat: &FlatUnit, partition| {
            let kinds = (0..num_kinds).filter(|kind| flat.state_tensor(*kind).is_some()).count();
            (kinds * flat.layout.unpadded(flat.layout.partition(partition)).len() * size_of::<f32>()) as u64
        };
        let partitions = self.flats.first().map_or(0, |flat| flat.layout.num_partitions());
        let saved = || self.flats.iter().filter(|flat| self.is_saved(flat));
        (0..partitions).map(|partition| saved().map(|flat| of_flat(flat, partition)).sum()).collect()
    }

    /// This rank's partition of one kind of a flat unit's state, without padding: a view, or a copy if it is
    /// offloaded or not f32. `None` if the partition is all padding. At every stage, the partitions of all dp
    /// ranks make up the whole.
    ///
    /// # Shapes
    /// Result: flat, f32, the elements of `layout.partition(shard_rank)` that are below `layout.numel()`; none of
    /// the optimizer's state of a frozen one.
    ///
    /// # Errors
    /// A tensor that cannot be read.
    pub fn state_partition(&self, index: usize, kind: usize) -> Result<Option<Tensor>, ZeroError> {
        self.flats[index].state_part(kind).map(|part| part.tensor()).transpose()
    }

    /// As [`state_partition`](Self::state_partition), without loading it, of every flat unit that checkpoints have from this rank of tp
    /// or a replica, and that has elements in the partition.
    pub fn saved_parts(&self, kind: usize) -> impl Iterator<Item = StateSlice> {
        self.flats.iter().filter(|flat| self.is_saved(flat)).filter_map(move |flat| flat.state_part(kind))
    }

    /// Replaces parameters and optimizer state. `restore` is called for exactly the elements that this rank
    /// holds at its stage. Collective over the shard group.
    ///
    /// # Errors
    /// An error of `restore`, which leaves part of the state replaced.
    pub fn restore_state<E: From<ZeroError>>(&mut self, restore: RestoreState<'_, E>) -> Result<(), E> {
        // Gathered parameters would be stale.
        self.release_all();
        for (index, range) in self.restored_ranges() {
            let Some((stored, stored_range)) = self.flats[index.unit].state_tensor(index.kind) else {
                continue;
            };
            let mut elements = vec![0.0; range.len()];
            restore(index, range.clone(), &mut elements)?;
            let tensor = stored.fetch()?;
            overwrite(&tensor, range.start - stored_range.start, elements)?;
            self.storage.settle()?;
            stored.put(tensor)?;
        }
        Ok(self.round_master()?)
    }

    /// Returns the state that this rank holds at its stage, and which elements of its flat buffers.
    pub fn restored_ranges(&self) -> Vec<(StateIndex, Range<usize>)> {
        let kinds = self.state_kinds().len();
        let ranges = self.flats.iter().enumerate().flat_map(|(unit, flat)| {
            (0..kinds).filter_map(move |kind| {
                let (_, stored_range) = flat.state_tensor(kind)?;
                Some((StateIndex { unit, kind }, flat.layout.unpadded(stored_range)))
            })
        });
        // Padding keeps its initial value.
        ranges.filter(|(_, range)| !range.is_empty()).collect()
    }
}

impl FlatUnit {
    /// This rank's partition of one kind, without padding; `None` if it is all padding.
    fn state_part(&self, kind: usize) -> Option<StateSlice> {
        let (stored, stored_range) = self.state_tensor(kind)?;
        let own = self.layout.unpadded(self.layout.partition(self.shard_rank));
        (!own.is_empty()).then(|| StateSlice {
            tensor: stored,
            elements: own.start - stored_range.start..own.end - stored_range.start,
        })
    }

    /// The tensor of one kind, if any, and the element range of the flat buffer that it holds.
    fn state_tensor(&self, kind: usize) -> Option<(StateTensor, Range<usize>)> {
        let stored = match kind {
            0 => self.master.clone().unwrap_or_else(|| self.parameters.persistent()),
            kind => self.state.get(kind - 1)?.clone(),
        };
        let whole = stored.numel() == self.layout.padded_numel();
        let stored_range =
            if whole { 0..self.layout.padded_numel() } else { self.layout.partition(self.shard_rank) };
        Some((stored, stored_range))
    }
}

fn overwrite(tensor: &Tensor, start: usize, elements: Vec<f32>) -> Result<(), ZeroError> {
    let numel = elements.len();
    let source = Tensor::from_vec(elements, numel, tensor.device())?;
    Ok(cast(&source, &tensor.narrow(0, start, numel)?)?)
}
