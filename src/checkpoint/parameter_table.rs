//! The parameter table of a manifest: the units, their whole parameters, and the shards of these along tp.

use crate::mesh::TensorShard;
use crate::zero::{FlatLayout, FlatParameter};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// A unit: parameters stored consecutively in one flat buffer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnitEntry {
    /// Name of the unit, and of its tensor in every file.
    pub name: String,
    /// Parameters in buffer order.
    pub parameters: Vec<ParameterEntry>,
    /// Whether the unit is frozen. A frozen unit has only the first kind, `parameters`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub frozen: bool,
    /// The stage of the pipeline that has the unit.
    #[serde(default, skip_serializing_if = "is_first")]
    pub stage: usize,
}

/// A parameter within its unit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParameterEntry {
    /// Full name.
    pub name: String,
    /// Shape of the whole parameter.
    pub shape: Vec<usize>,
    /// Offset in the unit's flat buffer, in elements, as if all parameters were whole.
    pub offset: usize,
    /// The parts of the ranks along tp, if each rank's files have only a part of the parameter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard: Option<ShardEntry>,
}

/// A division of a parameter over the ranks along tp.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardEntry {
    /// The dimension that is divided.
    pub dim: usize,
    /// The indices of every rank, ascending.
    pub ranks: Vec<Vec<Range<usize>>>,
}

pub(super) fn is_first(rank: &usize) -> bool {
    *rank == 0
}

impl UnitEntry {
    /// Returns the entry of a unit of the first stage, which is the same on all ranks along tp.
    pub fn of(layout: &FlatLayout) -> Self {
        let mut offset = 0;
        let entry = |parameter: &FlatParameter| {
            let shape = parameter.whole_shape();
            let shard = parameter.shard.as_ref();
            let entry = ParameterEntry {
                name: parameter.name.clone(),
                offset,
                shard: shard.map(|shard| ShardEntry { dim: shard.dim, ranks: shard.ranks.to_vec() }),
                shape,
            };
            offset += entry.shape.iter().product::<usize>();
            entry
        };
        let parameters = layout.parameters().iter().map(entry).collect();
        Self { name: layout.name().to_owned(), parameters, frozen: layout.is_frozen(), stage: 0 }
    }

    /// Returns the layout of the whole parameters.
    pub(super) fn layout(&self, num_partitions: usize) -> FlatLayout {
        self.layout_with(num_partitions, |_| None)
    }

    /// Returns the layout of the parts that a rank along tp has.
    pub(super) fn layout_at(&self, tp_rank: usize, num_partitions: usize) -> FlatLayout {
        self.layout_with(num_partitions, |parameter| parameter.shard_of(tp_rank))
    }

    fn layout_with(
        &self,
        num_partitions: usize,
        shard: impl Fn(&ParameterEntry) -> Option<TensorShard>,
    ) -> FlatLayout {
        let shards: Vec<_> = self.parameters.iter().map(shard).collect();
        let shapes = self.parameters.iter().zip(&shards).map(|(parameter, shard)| {
            let shape = shard.as_ref().map(|shard| shard.local_shape(&parameter.shape));
            (parameter.name.clone(), shape.unwrap_or_else(|| parameter.shape.clone()))
        });
        let layout = FlatLayout::new(self.name.clone(), shapes, num_partitions).with_shards(shards);
        layout.with_frozen(|_| self.frozen)
    }

    /// Checks that parameters are contiguous, that their sizes do not overflow, and that their shards over `tp` ranks are
    /// complete.
    pub(super) fn check(&self, tp: usize) -> Result<(), String> {
        let mut offset = 0_usize;
        for parameter in &self.parameters {
            if parameter.offset != offset {
                let (name, found) = (&parameter.name, parameter.offset);
                return Err(format!("parameter {name} has offset {found}, expected {offset}"));
            }
            let numel = parameter.shape.iter().try_fold(1, |numel: usize, dim| numel.checked_mul(*dim));
            offset = numel
                .and_then(|numel| offset.checked_add(numel))
                .filter(|&end| end < usize::MAX / 64)
                .ok_or_else(|| {
                format!("parameter {} is too large: shape {:?}", parameter.name, parameter.shape)
            })?;
            parameter.check_shard(tp)?;
        }
        // Only the first rank's files have what is not sharded, so a buffer has either.
        let sharded = self.parameters.iter().filter(|parameter| parameter.shard.is_some()).count();
        match sharded == 0 || sharded == self.parameters.len() {
            true => Ok(()),
            false => Err(format!("unit {} has sharded and whole parameters", self.name)),
        }
    }
}

impl ParameterEntry {
    /// The part of a rank along tp.
    fn shard_of(&self, tp_rank: usize) -> Option<TensorShard> {
        let ShardEntry { dim, ranks } = self.shard.as_ref()?;
        Some(TensorShard::new(*dim, self.shape[*dim], ranks.clone(), tp_rank))
    }

    /// Checks that every index of the divided dimension belongs to one of the `tp` ranks.
    fn check_shard(&self, tp: usize) -> Result<(), String> {
        let Some(ShardEntry { dim, ranks }) = &self.shard else { return Ok(()) };
        let refuse = |reason: String| Err(format!("parameter {}: {reason}", self.name));
        let Some(&len) = self.shape.get(*dim) else {
            return refuse(format!("its shard is of dimension {dim}, but its shape is {:?}", self.shape));
        };
        if ranks.len() != tp {
            return refuse(format!("its shard has {} ranks, but the mesh has tp {tp}", ranks.len()));
        }
        let is_ascending = |ranges: &Vec<Range<usize>>| {
            ranges.iter().all(|range| range.start <= range.end)
                && ranges.windows(2).all(|pair| pair[0].end <= pair[1].start)
        };
        if let Some(rank) = ranks.iter().position(|ranges| !is_ascending(ranges)) {
            return refuse(format!("the ranges of tp rank {rank} are not ascending: {:?}", ranks[rank]));
        }
        let mut all: Vec<&Range<usize>> = ranks.iter().flatten().collect();
        all.sort_by_key(|range| (range.start, range.end));
        let mut end = 0;
        for range in all {
            if range.start != end {
                return refuse(format!(
                    "the range {range:?} of its shards begins at {}, expected {end}",
                    range.start
                ));
            }
            end = range.end;
        }
        if end != len {
            return refuse(format!(
                "its shards end at {end}, but dimension {dim} of {:?} has {len}",
                self.shape
            ));
        }
        Ok(())
    }
}
