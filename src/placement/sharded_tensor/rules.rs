//! The placements of results.
//!
//! A rule maps the placements of the operands along one axis to that of the result. It holds for every axis by itself, and
//! needs no communication:
//!
//! | operation | operands | result |
//! |---|---|---|
//! | all, by element or `matmul` | Replicate, Replicate | Replicate |
//! | by element | Shard(d), Shard(d) | Shard(d) |
//! | by element, with one operand repeated along d | Shard(d), Replicate | Shard(d) |
//! | `add`, `sub` | Partial, Partial | Partial |
//! | `mul` | Partial, Replicate, in any order | Partial |
//! | `div` of floats | Partial, Replicate | Partial |
//! | `matmul` | Shard(0), Replicate | Shard(0) |
//! | `matmul` | Replicate, Shard(1) | Shard(1) |
//! | `matmul` | Shard(1), Shard(0) | Partial |
//! | `matmul` | Partial, Replicate, in any order | Partial |
//! | `map` | Shard(d) or Replicate | the same |
//! | `scale`, `transpose`, `unsqueeze` | any | the same, of the moved dimension |
//! | `narrow`, `squeeze` of d | any but Shard(d) | the same, of the moved dimension |
//! | `sum`, `mean` over d | Shard(d) | Partial |
//! | `sum`, `mean` over d | any other | the same |

use crate::placement::{Layout, LayoutAxis, Placement, PlacementError};
use Placement::{Partial, Replicate, Shard};

/// Placements of two operands, one a pending sum, for which an operation by element has a pending sum.
pub(super) type Sums = &'static [[Placement; 2]];

pub(super) const SUM: Sums = &[[Partial, Partial]];
pub(super) const PRODUCT: Sums = &[[Partial, Replicate], [Replicate, Partial]];
pub(super) const QUOTIENT: Sums = &[[Partial, Replicate]];

/// The rule of an operation by element, of operands with the shapes `a` and `b` that are broadcast to `shape`.
pub(super) fn by_element<'a>(
    sums: Sums,
    [a, b]: [&'a [usize]; 2],
    shape: &'a [usize],
) -> impl Fn(&[Placement]) -> Option<Placement> + 'a {
    // In dimensions of the result, of which an operand may lack the first ones.
    let placed = move |own: &[usize], placement| match placement {
        Shard(dim) => Shard(dim + shape.len() - own.len()),
        other => other,
    };
    let is_repeated = move |own: &[usize], dim: usize| {
        dim + own.len() < shape.len() || own[dim + own.len() - shape.len()] != shape[dim]
    };
    move |placements| match [placed(a, placements[0]), placed(b, placements[1])] {
        [Replicate, Replicate] => Some(Replicate),
        [Shard(dim), Shard(other)] if dim == other && !is_repeated(a, dim) && !is_repeated(b, dim) => {
            Some(Shard(dim))
        }
        [Shard(dim), Replicate] if is_repeated(b, dim) && !is_repeated(a, dim) => Some(Shard(dim)),
        [Replicate, Shard(dim)] if is_repeated(a, dim) && !is_repeated(b, dim) => Some(Shard(dim)),
        pair => sums.contains(&pair).then_some(Partial),
    }
}

/// The rule of `[m, k] × [k, n]`.
pub(super) fn matmul(placements: &[Placement]) -> Option<Placement> {
    match *placements {
        [Replicate, Replicate] => Some(Replicate),
        [Shard(0), Replicate] => Some(Shard(0)),
        [Replicate, Shard(1)] => Some(Shard(1)),
        [Shard(1), Shard(0)] | [Partial, Replicate] | [Replicate, Partial] => Some(Partial),
        _ => None,
    }
}

/// The layout of a result of this shape by a rule for each axis. The operands have the same axes.
pub(super) fn propagate(
    call: &'static str,
    operands: &[&Layout],
    shape: Vec<usize>,
    rule: impl Fn(&[Placement]) -> Option<Placement>,
) -> Result<Layout, PlacementError> {
    let axes = operands[0].axes();
    let along = |axis| operands.iter().map(|operand| operand.placement(axis)).collect::<Vec<_>>();
    let placements: Vec<_> = (0..axes.len()).map(|axis| rule(&along(axis))).collect();
    let Some(refused) = placements.iter().position(Option::is_none) else {
        let axes = axes.iter().zip(placements.into_iter().flatten());
        return Layout::new(shape, axes.map(|(axis, placement)| LayoutAxis { placement, ..axis.clone() }));
    };
    let valid: Vec<_> = (0..axes.len()).map(|axis| nearest(&along(axis), operands, &rule)).collect();
    let changed = |(index, operand): (usize, &&Layout)| {
        let placements: Vec<_> = valid.iter().map(|along| along[index]).collect();
        (placements != operand.placements()).then_some(placements)
    };
    let valid = operands.iter().enumerate().map(changed).collect();
    let (axis, placements) = (axes[refused].name.clone(), along(refused));
    Err(PlacementError::NoRule { call, axis, placements, valid })
}

/// Placements that have a rule: the given ones, else with another one of the last operand, of the first, or of both.
fn nearest(
    given: &[Placement],
    operands: &[&Layout],
    rule: &impl Fn(&[Placement]) -> Option<Placement>,
) -> Vec<Placement> {
    let choices = |operand: usize| {
        let dims = operands[operand].shape().len();
        [Replicate].into_iter().chain((0..dims).map(Shard)).chain([Partial])
    };
    let changed = |operand: usize, placement: Placement| {
        let mut changed = given.to_vec();
        changed[operand] = placement;
        changed
    };
    let last = given.len() - 1;
    let last_changed = choices(last).map(|placement| changed(last, placement));
    let first_changed = choices(0).map(|placement| changed(0, placement));
    let mut all = [given.to_vec()].into_iter().chain(last_changed).chain(first_changed);
    // All operations work on whole tensors.
    all.find(|placements| rule(placements).is_some()).unwrap_or_else(|| vec![Replicate; given.len()])
}
