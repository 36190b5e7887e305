//! Comparison of two checkpoints, element by element, independent of their meshes.

use super::CheckpointError;
use super::load::Checkpoint;
use std::collections::BTreeMap;

/// The comparison of one kind of state of one parameter in two checkpoints.
#[derive(Debug, Clone, PartialEq)]
pub enum Comparison {
    /// All elements are bit-equal.
    Equal,
    /// Some elements differ.
    Differs {
        /// Number of differing elements.
        elements: usize,
        /// Largest absolute difference; NaN if either side has NaN.
        largest: f64,
    },
    /// The shapes differ: shape in the first checkpoint, shape in the second.
    Shapes(Vec<usize>, Vec<usize>),
    /// Only the first checkpoint has it.
    OnlyFirst,
    /// Only the second checkpoint has it.
    OnlySecond,
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
            Some(other) => {
                let (at, parameter) = index;
                let (other_at, other_parameter) = other;
                compare(
                    &reader.parameter(at, parameter)?,
                    &other_reader.parameter(other_at, other_parameter)?,
                )
            }
        };
        comparisons.insert(name, comparison);
    }
    comparisons.extend(others.into_keys().map(|name| (name, Comparison::OnlySecond)));
    Ok(comparisons)
}

/// `(unit, kind)`, and the parameter's index within the unit.
type TensorIndex = ((usize, usize), usize);

fn tensor_indices(checkpoint: &Checkpoint) -> BTreeMap<(String, String), TensorIndex> {
    let mut indices = BTreeMap::new();
    for (kind, kind_name) in checkpoint.manifest().kinds.iter().enumerate() {
        let layouts = checkpoint.layouts().iter().enumerate();
        for (unit, layout) in layouts.filter(|(_, layout)| checkpoint.manifest().has(layout, kind_name)) {
            for (index, parameter) in layout.parameters().iter().enumerate() {
                indices.insert((kind_name.clone(), parameter.name.clone()), ((unit, kind), index));
            }
        }
    }
    indices
}

fn shape(checkpoint: &Checkpoint, ((unit, _), parameter): TensorIndex) -> &[usize] {
    &checkpoint.layouts()[unit].parameters()[parameter].shape
}

fn compare(first: &[f32], second: &[f32]) -> Comparison {
    let differing = || first.iter().zip(second).filter(|(a, b)| a.to_bits() != b.to_bits());
    let elements = differing().count();
    if elements == 0 {
        return Comparison::Equal;
    }
    let distances = differing().map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs());
    // `f64::max` would ignore NaN.
    let maximum = |a: f64, b: f64| if a.is_nan() || b <= a { a } else { b };
    Comparison::Differs { elements, largest: distances.fold(0.0, maximum) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_difference_is_nan_if_any_difference_is() {
        let Comparison::Differs { elements, largest } = compare(&[0.0, f32::NAN, 3.0], &[1.0, 2.0, 5.0])
        else {
            panic!("the elements differ");
        };
        assert!(elements == 3 && largest.is_nan(), "{largest}");
        let expected = Comparison::Differs { elements: 2, largest: 2.0 };
        assert_eq!(compare(&[0.0, 4.0, 3.0], &[1.0, 4.0, 5.0]), expected);
    }
}
