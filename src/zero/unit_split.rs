//! Separates the parameters of a unit that are treated differently, into flat units of their own: frozen ones have no
//! gradient and no optimizer state; those that the ranks of tp divide are replicated over other ranks than whole ones, and tied
//! ones are summed over the stages that have them. That makes up to eight flat units, in this order: trained ones, then frozen ones, each
//! in the order of [`Division::ALL`].

use super::{Division, FlatLayout, FlatParameter};
use std::ops::Range;

/// The flat units that hold the parameters of one unit of the model.
pub(crate) struct UnitSplit {
    /// Indices of its flat units, one for each kind of parameters that it has, in the order above.
    pub(crate) flats: Range<usize>,
    places: Vec<Place>,
}

/// The place of a parameter among the flat units.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Place {
    /// Index of the flat unit.
    pub(super) flat: usize,
    /// Index of the parameter within it.
    pub(super) parameter: usize,
}

impl UnitSplit {
    /// Reorders one value per parameter, given per flat unit, into the unit's order of parameters.
    pub(super) fn in_order<T: Clone>(&self, of_flats: &[Vec<T>]) -> Vec<T> {
        self.places
            .iter()
            .map(|place| of_flats[place.flat - self.flats.start][place.parameter].clone())
            .collect()
    }

    /// The place of each parameter, in the unit's order.
    pub(super) fn places(&self) -> &[Place] {
        &self.places
    }

    /// The unit's indices of the parameters in flat unit `flat`.
    pub(super) fn parameters_of(&self, flat: usize) -> Vec<usize> {
        self.places
            .iter()
            .enumerate()
            .filter(|(_, place)| place.flat == flat)
            .map(|(index, _)| index)
            .collect()
    }
}

/// The kinds of parameters in the order of flat units.
fn kinds() -> impl Iterator<Item = Kind> {
    let with = |is_frozen| Division::ALL.map(|division| Kind { is_frozen, division });
    [false, true].into_iter().flat_map(with)
}

/// The properties that the parameters of a flat unit have in common.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Kind {
    is_frozen: bool,
    division: Division,
}

impl Kind {
    fn of(parameter: &FlatParameter) -> Self {
        Self { is_frozen: parameter.is_frozen, division: parameter.division() }
    }

    /// The name of the flat unit of these parameters.
    fn flat_name(self, unit: &FlatLayout, has_others: bool) -> String {
        let mut name = unit.name().to_owned();
        if unit.is_sharded() && !self.division.over_tp {
            name += " (replicated)";
        }
        if self.division.is_tied && has_others {
            name += " (tied)";
        }
        if self.is_frozen {
            name += " (frozen)";
        }
        name
    }
}

/// Splits each unit. One with parameters of one kind keeps its layout.
pub(crate) fn split_units(units: Vec<FlatLayout>) -> (Vec<FlatLayout>, Vec<UnitSplit>) {
    let mut layouts = Vec::new();
    let split_unit = |unit: FlatLayout| {
        let first = layouts.len();
        let mut places = vec![Place { flat: 0, parameter: 0 }; unit.parameters().len()];
        for kind in kinds() {
            let all = unit.parameters().iter().enumerate();
            let (indices, parameters): (Vec<usize>, Vec<_>) =
                all.filter(|(_, parameter)| Kind::of(parameter) == kind).unzip();
            // A unit without any parameters counts as trained: it keeps its place in checkpoints.
            let trained = Kind { is_frozen: false, division: Division::default() };
            if parameters.is_empty() && !(unit.parameters().is_empty() && kind == trained) {
                continue;
            }
            for (parameter, index) in indices.into_iter().enumerate() {
                places[index] = Place { flat: layouts.len(), parameter };
            }
            let name = kind.flat_name(&unit, parameters.len() < unit.parameters().len());
            let parameters = parameters.into_iter().cloned();
            layouts.push(FlatLayout::with_parameters(name, parameters, unit.num_partitions()));
        }
        UnitSplit { flats: first..layouts.len(), places }
    };
    let splits = units.into_iter().map(split_unit).collect();
    (layouts, splits)
}
