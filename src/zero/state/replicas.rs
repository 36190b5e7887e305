//! Hashes of replicated state. If they differ, the replicas have drifted apart.

use super::state_tensor::StateTensor;
use crate::comm::ProcessGroup;
use crate::fnv1a::{OFFSET_BASIS, step};
use crate::zero::{Buffer, Division, ZeroError, ZeroOptimizer};
use candle_core::{DType, Device, Tensor};
use std::sync::Arc;
use ulysses_kernels::device::dry;

/// Independent hashes, so that multiplications do not wait for each other and memory bandwidth is the limit.
const LANES: usize = 8;

/// A comparison of replicas: of all parameters with a division, along a group.
pub(crate) struct Comparison<'a> {
    /// The compared tensors.
    pub(crate) buffer: Buffer,
    /// The division of the parameters.
    pub(crate) division: Division,
    /// The ranks that have replicas.
    pub(crate) group: &'a Arc<dyn ProcessGroup>,
}

impl ZeroOptimizer {
    /// Hash of what this rank keeps of a buffer, over all parameters with this division. Equal
    /// on all ranks along an axis that replicates it by [`TrainingGroups::layout`](crate::comm::TrainingGroups::layout). 0 in a dry run,
    /// which has no elements.
    ///
    /// # Errors
    /// A tensor that cannot be read.
    pub fn hash(&self, buffer: Buffer, division: Division) -> Result<u64, ZeroError> {
        let tensors = self.persistent(buffer, division);
        if dry::is_dry() { Ok(0) } else { hash(tensors.map(|tensor| tensor.fetch())) }
    }

    /// In a dry run, checks that every buffer is among those that are `compared`, along exactly the groups that replicate it.
    ///
    /// # Errors
    /// A comparison that is missing, or one of shards.
    pub(crate) fn check_compared(&self, compared: &[Comparison<'_>]) -> Result<(), ZeroError> {
        if !dry::is_dry() {
            return Ok(());
        }
        for flat in &self.flats {
            let check = |buffer: Buffer, tensor: &StateTensor| {
                let is_of_buffer = |other: &&Comparison<'_>| {
                    other.buffer == buffer && other.division == flat.layout.division()
                };
                let groups = compared.iter().filter(is_of_buffer).map(|other| &**other.group);
                let groups: Vec<_> = groups.collect();
                tensor.placed().map_or(Ok(()), |placed| placed.check_compared(&groups))
            };
            check(Buffer::Parameters, &flat.parameters.persistent())?;
            let mut state = flat.master.iter().chain(&flat.state);
            state.try_for_each(|tensor| check(Buffer::OptimizerState, tensor))?;
        }
        Ok(())
    }

    /// The tensors of a buffer on this rank.
    fn persistent(&self, buffer: Buffer, division: Division) -> impl Iterator<Item = StateTensor> {
        let flats = self.flats.iter().filter(move |flat| flat.layout.division() == division);
        flats.flat_map(move |flat| match buffer {
            Buffer::Parameters => vec![flat.parameters.persistent()],
            Buffer::OptimizerState => flat.master.iter().chain(&flat.state).cloned().collect(),
        })
    }
}

fn hash(tensors: impl Iterator<Item = Result<Tensor, ZeroError>>) -> Result<u64, ZeroError> {
    let mut lanes = [OFFSET_BASIS; LANES];
    for tensor in tensors {
        let on_host = tensor?.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
        ulysses_kernels::tensor::with_slice(&on_host, |elements: &[f32]| update(&mut lanes, elements))?;
    }
    Ok(lanes.into_iter().fold(OFFSET_BASIS, step))
}

fn update(lanes: &mut [u64; LANES], elements: &[f32]) {
    let (groups, rest) = elements.as_chunks::<{ 2 * LANES }>();
    for group in groups {
        let (pairs, _) = group.as_chunks::<2>();
        for (lane, [low, high]) in lanes.iter_mut().zip(pairs) {
            *lane = step(*lane, u64::from(high.to_bits()) << 32 | u64::from(low.to_bits()));
        }
    }
    for (lane, element) in lanes.iter_mut().zip(rest) {
        *lane = step(*lane, element.to_bits().into());
    }
    // `rest` has up to two elements per lane.
    for (lane, element) in lanes.iter_mut().zip(rest.get(LANES..).unwrap_or_default()) {
        *lane = step(*lane, element.to_bits().into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash_of(parts: &[&[f32]]) -> u64 {
        let tensors =
            parts.iter().map(|part| Tensor::new(*part, &Device::Cpu)).collect::<Result<Vec<_>, _>>();
        hash(tensors.unwrap().into_iter().map(Ok)).unwrap()
    }

    #[test]
    fn a_change_of_any_bit_of_any_element_changes_the_hash() {
        // Whole groups, and remainders of every length.
        for length in [1, 7, 8, 9, 16, 31, 32, 45] {
            let elements: Vec<f32> = (0..length).map(|i| i as f32).collect();
            let expected = hash_of(&[&elements]);
            assert_eq!(expected, hash_of(&[&elements]));
            for (index, bit) in (0..length).flat_map(|index| (0..32).map(move |bit| (index, bit))) {
                let mut changed = elements.clone();
                changed[index] = f32::from_bits(changed[index].to_bits() ^ 1 << bit);
                assert_ne!(hash_of(&[&changed]), expected, "bit {bit} of element {index} of {length}");
            }
        }
    }

    #[test]
    fn the_order_of_elements_and_of_tensors_matters() {
        let elements: Vec<f32> = (0..64).map(|i| i as f32).collect();
        let mut swapped = elements.clone();
        swapped.swap(3, 3 + 2 * LANES);
        assert_ne!(hash_of(&[&elements]), hash_of(&[&swapped]));
        assert_ne!(hash_of(&[&elements, &swapped]), hash_of(&[&swapped, &elements]));
    }
}
