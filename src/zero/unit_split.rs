//! Separates the parameters of a unit that are treated differently, into flat buffers of their own: frozen ones have no
//! gradient and no optimizer state; those that the ranks of tp divide are replicated over other ranks than whole ones, and tied
//! ones are summed over the stages that have them.

use super::{Division, FlatLayout, FlatParameter};
use std::ops::Range;

/// The flat buffers that hold the parameters of one unit of the model.
pub(crate) struct UnitSplit {
    /// Indices of its flat buffers: first those of trained parameters, then those of frozen ones; of either, first that of
    /// parameters which tp divides, last that of tied ones.
    pub(crate) flats: Range<usize>,
    /// Flat buffer of each parameter, and its index within it.
    places: Vec<(usize, usize)>,
}

impl UnitSplit {
    /// Reorders one value per parameter, given per flat buffer, into the unit's order of parameters.
    pub(super) fn in_order<T: Clone>(&self, of_flats: &[Vec<T>]) -> Vec<T> {
        self.places
            .iter()
            .map(|&(flat, parameter)| of_flats[flat - self.flats.start][parameter].clone())
            .collect()
    }

    /// Flat buffer of each parameter, and its index within it, in the unit's order.
    pub(super) fn places(&self) -> &[(usize, usize)] {
        &self.places
    }

    /// The unit's indices of the parameters in flat buffer `flat`.
    pub(super) fn parameters_of(&self, flat: usize) -> Vec<usize> {
        self.places.iter().enumerate().filter(|(_, place)| place.0 == flat).map(|(index, _)| index).collect()
    }
}

/// The kinds of parameters, each with whether it is frozen, in the order of flat buffers.
fn kinds() -> impl Iterator<Item = (bool, Division)> {
    let divisions = [Division::OverTp, Division::Whole, Division::Tied];
    [false, true].into_iter().flat_map(move |frozen| divisions.map(|division| (frozen, division)))
}

fn division_of(parameter: &FlatParameter) -> Division {
    match (&parameter.shard, parameter.is_tied) {
        (_, true) => Division::Tied,
        (Some(_), false) => Division::OverTp,
        (None, false) => Division::Whole,
    }
}

/// Splits each unit. One with parameters of one kind keeps its layout.
pub(crate) fn split_units(
    units: Vec<FlatLayout>,
    is_frozen: impl Fn(&str) -> bool,
) -> (Vec<FlatLayout>, Vec<UnitSplit>) {
    let mut layouts = Vec::new();
    let split_unit = |unit: FlatLayout| {
        let first = layouts.len();
        let mut places = vec![(0, 0); unit.parameters().len()];
        for (frozen, division) in kinds() {
            let is_meant = |parameter: &FlatParameter| {
                is_frozen(&parameter.name) == frozen && division_of(parameter) == division
            };
            let all = unit.parameters().iter().enumerate();
            let parameters: Vec<_> = all.filter(|(_, parameter)| is_meant(parameter)).collect();
            // A unit without any parameters counts as trained: it keeps its place in checkpoints.
            let keeps_place = unit.parameters().is_empty() && !frozen && division == Division::Whole;
            if parameters.is_empty() && !keeps_place {
                continue;
            }
            for (position, (index, _)) in parameters.iter().enumerate() {
                places[*index] = (layouts.len(), position);
            }
            let shapes =
                parameters.iter().map(|(_, parameter)| (parameter.name.clone(), parameter.shape.clone()));
            let mut name = unit.name().to_owned();
            if unit.is_sharded() && division != Division::OverTp {
                name += " (replicated)";
            }
            if division == Division::Tied && parameters.len() < unit.parameters().len() {
                name += " (tied)";
            }
            if frozen {
                name += " (frozen)";
            }
            let layout = FlatLayout::new(name, shapes, unit.num_partitions());
            let layout = layout
                .with_shards(parameters.iter().map(|(_, parameter)| parameter.shard.as_deref().cloned()))
                .with_tied(|_| division == Division::Tied);
            layouts.push(if frozen { layout.frozen() } else { layout });
        }
        UnitSplit { flats: first..layouts.len(), places }
    };
    let splits = units.into_iter().map(split_unit).collect();
    (layouts, splits)
}
