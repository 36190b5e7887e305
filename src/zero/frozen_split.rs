//! Separates frozen from trained parameters. Frozen parameters have no gradient and no optimizer state, so
//! they lie in a separate flat buffer.

use super::FlatLayout;
use std::ops::Range;

/// The flat buffers, at most two, that hold the parameters of one unit of the model.
pub(crate) struct FrozenSplit {
    /// Indices of its flat buffers: first that of the trained parameters, then that of the frozen ones.
    pub(crate) flats: Range<usize>,
    /// Flat buffer of each parameter, and its index within it.
    places: Vec<(usize, usize)>,
}

impl FrozenSplit {
    /// Reorders one value per parameter, given per flat buffer, into the unit's order of parameters.
    pub(super) fn in_order<T: Clone>(&self, of_flats: &[Vec<T>]) -> Vec<T> {
        self.places
            .iter()
            .map(|&(flat, parameter)| of_flats[flat - self.flats.start][parameter].clone())
            .collect()
    }

    /// The unit's indices of the parameters in flat buffer `flat`.
    pub(super) fn parameters_of(&self, flat: usize) -> Vec<usize> {
        self.places.iter().enumerate().filter(|(_, place)| place.0 == flat).map(|(index, _)| index).collect()
    }
}

/// Splits each unit into trained and frozen parameters. A unit without frozen parameters keeps its layout.
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
            // A unit without any parameters counts as trained: it keeps its place in checkpoints.
            if parameters().next().is_none() && (frozen || !unit.parameters().is_empty()) {
                continue;
            }
            for (position, (index, _)) in parameters().enumerate() {
                places[index] = (layouts.len(), position);
            }
            let shapes = parameters().map(|(_, parameter)| (parameter.name.clone(), parameter.shape.clone()));
            let shards = parameters().map(|(_, parameter)| parameter.shard.clone());
            let layout = |name| FlatLayout::new(name, shapes, unit.num_partitions()).with_shards(shards);
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
