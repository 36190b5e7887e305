//! Frozen parameters apart from trained ones: what is frozen has no gradient and no state, so it lies in a flat
//! buffer of its own.

use super::FlatLayout;
use std::ops::Range;

/// A unit of the model: the flat buffers that its parameters lie in, at most two.
pub(crate) struct FrozenSplit {
    /// Indices of its flat buffers; of its trained parameters before those of its frozen ones.
    pub(crate) flats: Range<usize>,
    /// Each parameter's flat buffer and its index there.
    places: Vec<(usize, usize)>,
}

impl FrozenSplit {
    /// One element for each of the unit's parameters, in their order, from those of each of its flat buffers.
    pub(super) fn in_order<T: Clone>(&self, of_flats: &[Vec<T>]) -> Vec<T> {
        self.places
            .iter()
            .map(|&(flat, parameter)| of_flats[flat - self.flats.start][parameter].clone())
            .collect()
    }

    /// The parameters of flat buffer `flat`, by their indices in the unit.
    pub(super) fn parameters_of(&self, flat: usize) -> Vec<usize> {
        self.places.iter().enumerate().filter(|(_, place)| place.0 == flat).map(|(index, _)| index).collect()
    }
}

/// Divides units by whether their parameters are frozen. A unit without frozen parameters keeps its layout.
pub(crate) fn split_frozen(
    units: Vec<FlatLayout>,
    is_frozen: impl Fn(&str) -> bool,
) -> (Vec<FlatLayout>, Vec<FrozenSplit>) {
    let mut layouts = Vec::new();
    let split_unit = |unit: FlatLayout| {
        let first = layouts.len();
        let mut places = vec![(0, 0); unit.parameters().len()];
        for frozen in [false, true] {
            let parameters = || {
                let all = unit.parameters().iter().enumerate();
                all.filter(|(_, parameter)| is_frozen(&parameter.name) == frozen)
            };
            // A unit without any parameters is trained: it keeps its place in checkpoints.
            if parameters().next().is_none() && (frozen || !unit.parameters().is_empty()) {
                continue;
            }
            for (position, (index, _)) in parameters().enumerate() {
                places[index] = (layouts.len(), position);
            }
            let shapes = parameters().map(|(_, parameter)| (parameter.name.clone(), parameter.shape.clone()));
            let layout = |name| FlatLayout::new(name, shapes, unit.num_partitions());
            layouts.push(match frozen {
                false => layout(unit.name().to_owned()),
                true => layout(format!("{} (frozen)", unit.name())).frozen(),
            });
        }
        FrozenSplit { flats: first..layouts.len(), places }
    };
    let splits = units.into_iter().map(split_unit).collect();
    (layouts, splits)
}
