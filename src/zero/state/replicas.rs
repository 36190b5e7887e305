//! Hashes of replicated state. If they differ, the replicas have drifted apart.

use super::state_tensor::StateTensor;
use crate::fnv1a::{OFFSET_BASIS, step};
use crate::zero::{ZeroError, ZeroOptimizer};
use candle_core::{DType, Device, Tensor};

/// Independent hashes, so that multiplications do not wait for each other and memory bandwidth is the limit.
const LANES: usize = 8;

impl ZeroOptimizer {
    /// Hash of the parameters that this rank keeps. Equal on all ranks of the replica group, and below stage 3 on all
    /// ranks of the shard group.
    ///
    /// # Errors
    /// A tensor that cannot be read.
    pub fn parameter_hash(&self) -> Result<u64, ZeroError> {
        hash(self.units.iter().map(|unit| unit.parameters.persistent().fetch()))
    }

    /// Hash of the optimizer state that this rank keeps, including the master copy of 16-bit parameters. Equal on all
    /// ranks of the replica group, and at stage 0 on all ranks of the shard group.
    ///
    /// # Errors
    /// A tensor that cannot be read.
    pub fn optimizer_hash(&self) -> Result<u64, ZeroError> {
        hash(self.units.iter().flat_map(|unit| unit.master.iter().chain(&unit.state)).map(StateTensor::fetch))
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
