//! Two checkpoints element by element, whatever meshes saved them.

use super::CheckpointError;
use super::load::Checkpoint;
use std::collections::BTreeMap;

/// How one parameter (or one kind of its state) of two checkpoints compares.
#[derive(Debug, Clone, PartialEq)]
pub enum Comparison {
    /// Every element has the same bits.
    Equal,
    /// Some elements differ.
    Differs {
        /// How many.
        elements: usize,
        /// The largest absolute difference; NaN where one side is.
        largest: f64,
    },
    /// The shapes differ: first, second.
    Shapes(Vec<usize>, Vec<usize>),
    /// Only the first checkpoint has it.
    OnlyFirst,
    /// Only the second checkpoint has it.
    OnlySecond,
}

/// Kind, parameter, and how they compare; of everything that either checkpoint has, by name.
pub type Comparisons = BTreeMap<(String, String), Comparison>;

/// Compares every kind of state of every parameter.
///
/// # Errors
/// A checkpoint that cannot be read.
pub fn diff(first: &Checkpoint, second: &Checkpoint) -> Result<Comparisons, CheckpointError> {
    let (places, mut others) = (places(first), places(second));
    let (mut reader, mut other_reader) = (first.reader(), second.reader());
    let mut comparisons = Comparisons::new();
    for (name, place) in places {
        let comparison = match others.remove(&name) {
            None => Comparison::OnlyFirst,
            Some(other) if shape(first, place) != shape(second, other) => {
                Comparison::Shapes(shape(first, place).to_vec(), shape(second, other).to_vec())
            }
            Some(other) => {
                let (at, parameter) = place;
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

/// `(unit, kind)` and index within the unit.
type Place = ((usize, usize), usize);

fn places(checkpoint: &Checkpoint) -> BTreeMap<(String, String), Place> {
    let mut places = BTreeMap::new();
    for (kind, kind_name) in checkpoint.manifest().kinds.iter().enumerate() {
        let layouts = checkpoint.layouts().iter().enumerate();
        for (unit, layout) in layouts.filter(|(_, layout)| checkpoint.manifest().has(layout, kind_name)) {
            for (index, parameter) in layout.parameters().iter().enumerate() {
                places.insert((kind_name.clone(), parameter.name.clone()), ((unit, kind), index));
            }
        }
    }
    places
}

fn shape(checkpoint: &Checkpoint, ((unit, _), parameter): Place) -> &[usize] {
    &checkpoint.layouts()[unit].parameters()[parameter].shape
}

fn compare(first: &[f32], second: &[f32]) -> Comparison {
    let differing = || first.iter().zip(second).filter(|(a, b)| a.to_bits() != b.to_bits());
    let elements = differing().count();
    if elements == 0 {
        return Comparison::Equal;
    }
    let distances = differing().map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs());
    // Not `f64::max`, which passes over NaN.
    let largest =
        distances.fold(0.0, |largest: f64, distance| if distance <= largest { largest } else { distance });
    Comparison::Differs { elements, largest }
}
