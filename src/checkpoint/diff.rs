//! Comparison of two checkpoints, element by element, independent of their meshes.

use super::CheckpointError;
use super::load::Checkpoint;
use crate::zero::{FlatParameter, StateIndex};
use std::collections::BTreeMap;

/// The comparison of one kind of state of one parameter in two checkpoints.
#[derive(Debug, Clone, PartialEq)]
pub enum Comparison {
    /// All elements are bit-equal.
    Equal,
    /// Some elements differ.
    Differs(Difference),
    /// The shapes differ: shape in the first checkpoint, shape in the second.
    Shapes(Vec<usize>, Vec<usize>),
    /// Only the first checkpoint has it.
    OnlyFirst,
    /// Only the second checkpoint has it.
    OnlySecond,
}

/// How far two tensors of one shape are apart.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Difference {
    /// Number of elements whose bits differ.
    pub elements: usize,
    /// Largest absolute difference; infinite if one of two elements that differ is not finite.
    pub largest: f64,
    /// Number of elements that are not finite in one of the tensors, or in both.
    pub non_finite: usize,
}

impl Difference {
    /// Compares two tensors of one shape.
    pub fn between(first: &[f32], second: &[f32]) -> Self {
        let mut all = Self { elements: 0, largest: 0.0, non_finite: 0 };
        for (a, b) in first.iter().zip(second) {
            let is_finite = a.is_finite() && b.is_finite();
            all.non_finite += usize::from(!is_finite);
            if a.to_bits() != b.to_bits() {
                let distance = (f64::from(*a) - f64::from(*b)).abs();
                all.elements += 1;
                // `f64::max` would ignore NaN.
                all.largest = all.largest.max(if is_finite { distance } else { f64::INFINITY });
            }
        }
        all
    }
}

/// Comparisons by (kind, parameter name), for everything in either checkpoint.
pub type Comparisons = BTreeMap<(String, String), Comparison>;

/// Compares every kind of state of every parameter.
///
/// # Errors
/// Fails if a checkpoint cannot be read.
pub fn diff(first: &Checkpoint, second: &Checkpoint) -> Result<Comparisons, CheckpointError> {
    let (indices, mut others) = (tensor_indices(first), tensor_indices(second));
    let (mut reader, mut other_reader) = (first.reader(), second.reader());
    let mut comparisons = Comparisons::new();
    for (name, index) in indices {
        let comparison = match others.remove(&name) {
            None => Comparison::OnlyFirst,
            Some(other) if shape(first, index) != shape(second, other) => {
                Comparison::Shapes(shape(first, index).to_vec(), shape(second, other).to_vec())
            }
            Some(other) => compare(
                &reader.parameter(index.state, index.parameter)?,
                &other_reader.parameter(other.state, other.parameter)?,
            ),
        };
        comparisons.insert(name, comparison);
    }
    comparisons.extend(others.into_keys().map(|name| (name, Comparison::OnlySecond)));
    Ok(comparisons)
}

/// One kind of state of one parameter.
#[derive(Clone, Copy)]
struct TensorIndex {
    state: StateIndex,
    /// Index of the parameter within the unit.
    parameter: usize,
}

fn tensor_indices(checkpoint: &Checkpoint) -> BTreeMap<(String, String), TensorIndex> {
    let mut indices = BTreeMap::new();
    for (kind, kind_name) in checkpoint.manifest().kinds.iter().enumerate() {
        let layouts = checkpoint.layouts().iter().enumerate();
        for (unit, layout) in layouts.filter(|(_, layout)| checkpoint.manifest().has(layout, kind_name)) {
            for (parameter, FlatParameter { name, .. }) in layout.parameters().iter().enumerate() {
                let index = TensorIndex { state: StateIndex { unit, kind }, parameter };
                indices.insert((kind_name.clone(), name.clone()), index);
            }
        }
    }
    indices
}

fn shape(checkpoint: &Checkpoint, index: TensorIndex) -> &[usize] {
    &checkpoint.layouts()[index.state.unit].parameters()[index.parameter].shape
}

fn compare(first: &[f32], second: &[f32]) -> Comparison {
    match Difference::between(first, second) {
        Difference { elements: 0, .. } => Comparison::Equal,
        difference => Comparison::Differs(difference),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_that_is_not_finite_differs_infinitely_from_any_other() {
        for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for (first, second) in [(wrong, 2.0), (2.0, wrong), (wrong, -wrong)] {
                let difference = Difference::between(&[0.0, first, 3.0], &[1.0, second, 5.0]);
                let expected = Difference { elements: 3, largest: f64::INFINITY, non_finite: 1 };
                assert_eq!(difference, expected, "{first} and {second}");
            }
            let difference = Difference::between(&[wrong, 1.0], &[wrong, 1.0]);
            assert_eq!(difference, Difference { elements: 0, largest: 0.0, non_finite: 1 });
        }
        let expected = Comparison::Differs(Difference { elements: 2, largest: 2.0, non_finite: 0 });
        assert_eq!(compare(&[0.0, 4.0, 3.0], &[1.0, 4.0, 5.0]), expected);
        assert_eq!(compare(&[f32::NAN], &[f32::NAN]), Comparison::Equal);
    }
}
