//! [`StoredLayouts`]: where the elements of a parameter are in the files of a checkpoint. Integers only.

use super::manifest::Manifest;
use crate::mesh::ShardRun;
use crate::zero::{CheckpointPart, FlatLayout, FlatParameter};
use std::collections::HashMap;
use std::ops::Range;

/// The layouts of a checkpoint's files, and an index of their parameters.
#[derive(Debug, Clone)]
pub(super) struct StoredLayouts {
    /// The layouts of the units of every rank along tp.
    tp_ranks: Vec<Vec<FlatLayout>>,
    /// The stage of each unit.
    stages: Vec<usize>,
    places: HashMap<String, ParameterPlace>,
}

/// Where the layouts have a parameter.
#[derive(Debug, Clone, Copy)]
struct ParameterPlace {
    unit: usize,
    /// Index within the unit.
    parameter: usize,
}

/// Elements that are consecutive in a buffer that is read, and in a flat buffer of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StoredPiece {
    /// Rank along tp whose flat buffer it is.
    pub(super) tp_rank: usize,
    /// Index of the unit.
    pub(super) unit: usize,
    /// Elements of the flat buffer.
    pub(super) elements: Range<usize>,
    /// First element within the buffer that is read.
    pub(super) target: usize,
}

/// Consecutive indices of a parameter's divided dimension, which one rank has.
struct Segment<'a> {
    indices: Range<usize>,
    tp_rank: usize,
    /// The first of them, counted within the rank's part.
    first_local: usize,
    part: &'a FlatParameter,
}

impl StoredLayouts {
    /// Returns the layouts of a valid manifest's files.
    pub(super) fn new(manifest: &Manifest) -> Self {
        let first = manifest.units.iter().map(|unit| unit.layout_at(0, manifest.num_partitions));
        let first: Vec<FlatLayout> = first.collect();
        // The ranges of all ranks are in memory once.
        let at = |tp_rank| first.iter().map(|unit| unit.at_tp_rank(tp_rank)).collect();
        let units = manifest.units.iter().enumerate();
        let places = units.flat_map(|(unit, entry)| {
            let parameters = entry.parameters.iter().enumerate();
            parameters.map(move |(parameter, of)| (of.name.clone(), ParameterPlace { unit, parameter }))
        });
        let stages = manifest.units.iter().map(|unit| unit.stage).collect();
        Self { tp_ranks: (0..manifest.mesh.tp).map(at).collect(), stages, places: places.collect() }
    }

    /// Returns the layouts of the units of a rank along tp.
    pub(super) fn tp_rank(&self, tp_rank: usize) -> &[FlatLayout] {
        &self.tp_ranks[tp_rank]
    }

    /// Returns the layouts of the units of which a part has elements, of either division.
    pub(super) fn part_layouts(
        &self,
        CheckpointPart { tp_rank, stage, .. }: CheckpointPart,
    ) -> impl Iterator<Item = &FlatLayout> {
        let units = self.tp_rank(tp_rank).iter().zip(&self.stages);
        let units = units.filter(move |(_, of_unit)| **of_unit == stage).map(|(unit, _)| unit);
        units.filter(move |unit| tp_rank == 0 || unit.is_sharded())
    }

    /// Finds the elements `range` of a flat buffer with the given layout, of a run on any mesh.
    ///
    /// # Errors
    /// The first parameter that the checkpoint does not have in this shape.
    pub(super) fn find<'a>(
        &self,
        layout: &'a FlatLayout,
        range: Range<usize>,
    ) -> Result<Vec<StoredPiece>, &'a FlatParameter> {
        let mut pieces = Vec::new();
        for piece in layout.pieces(range) {
            let parameter = &layout.parameters()[piece.parameter];
            let place = self.places.get(&parameter.name).filter(|place| self.has_shape(**place, parameter));
            let place = place.ok_or(parameter)?;
            let segments = self.segments(*place);
            for ShardRun { local, whole, len } in parameter.whole_runs(piece.elements.clone()) {
                let target = piece.target.start + local - piece.elements.start;
                find_run(place.unit, &segments, whole..whole + len, target, &mut pieces);
            }
        }
        Ok(pieces)
    }

    /// Cuts a piece at the boundaries of partitions: part, elements of the unit's tensor in its files, elements of the buffer
    /// that is read.
    pub(super) fn cut(
        &self,
        piece: &StoredPiece,
    ) -> impl Iterator<Item = (CheckpointPart, Range<usize>, Range<usize>)> {
        let StoredPiece { tp_rank, unit, elements, target } = piece.clone();
        let (layout, stage) = (&self.tp_ranks[tp_rank][unit], self.stages[unit]);
        let size = layout.partition_numel().max(1);
        (elements.start / size..elements.end.div_ceil(size)).map(move |partition| {
            let first = partition * size;
            let (start, end) = (elements.start.max(first), elements.end.min(first + size));
            let target = target + start - elements.start..target + end - elements.start;
            (CheckpointPart { partition, tp_rank, stage }, start - first..end - first, target)
        })
    }

    fn has_shape(&self, place: ParameterPlace, parameter: &FlatParameter) -> bool {
        self.stored(0, place).whole_shape() == parameter.whole_shape()
    }

    fn stored(&self, tp_rank: usize, ParameterPlace { unit, parameter }: ParameterPlace) -> &FlatParameter {
        &self.tp_ranks[tp_rank][unit].parameters()[parameter]
    }

    /// Returns who has which indices of a parameter's divided dimension, in ascending order. A parameter that is not divided
    /// has all of its first dimension at the first rank.
    fn segments(&self, place: ParameterPlace) -> Vec<Segment<'_>> {
        let part = |tp_rank: usize| self.stored(tp_rank, place);
        let Some(shard) = &part(0).shard else {
            let indices = 0..part(0).shape.first().copied().unwrap_or(1);
            return vec![Segment { indices, tp_rank: 0, first_local: 0, part: part(0) }];
        };
        let mut segments = Vec::new();
        for (tp_rank, ranges) in shard.ranks.iter().enumerate() {
            let mut first_local = 0;
            for indices in ranges.iter().filter(|range| !range.is_empty()).cloned() {
                let next = first_local + indices.len();
                segments.push(Segment { indices, tp_rank, first_local, part: part(tp_rank) });
                first_local = next;
            }
        }
        segments.sort_by_key(|segment| segment.indices.start);
        segments
    }
}

/// Appends the pieces with the elements `whole` of a whole parameter, which is divided into `segments`.
fn find_run(
    unit: usize,
    segments: &[Segment<'_>],
    whole: Range<usize>,
    target: usize,
    pieces: &mut Vec<StoredPiece>,
) {
    let part = segments[0].part;
    let dim = part.shard.as_ref().map_or(0, |shard| shard.dim);
    let inner: usize = part.shape.iter().skip(dim + 1).product();
    let row = segments.iter().map(|segment| segment.indices.len()).sum::<usize>() * inner;
    let mut at = whole.start;
    while at < whole.end {
        let (outer, within) = (at / row, at % row);
        let before = segments.partition_point(|segment| segment.indices.end * inner <= within);
        let Segment { indices, tp_rank, first_local, part } = &segments[before];
        let local_row = part.shard.as_ref().map_or(row, |shard| shard.local_len() * inner);
        let end = whole.end.min(outer * row + indices.end * inner);
        let first = part.offset + outer * local_row + first_local * inner + within - indices.start * inner;
        let elements = first..first + end - at;
        push(StoredPiece { tp_rank: *tp_rank, unit, elements, target: target + at - whole.start }, pieces);
        at = end;
    }
}

/// Appends a piece, to the last one if it continues that: a buffer of the same layout is one piece.
fn push(piece: StoredPiece, pieces: &mut Vec<StoredPiece>) {
    match pieces.last_mut() {
        Some(last)
            if (last.tp_rank, last.unit, last.elements.end)
                == (piece.tp_rank, piece.unit, piece.elements.start)
                && last.target + last.elements.len() == piece.target =>
        {
            last.elements.end = piece.elements.end;
        }
        _ => pieces.push(piece),
    }
}
