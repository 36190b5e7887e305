//! The sizes of the mesh axes, on which a file, or the flags that replace its sizes, and the world size must agree.

use super::sections::pipeline::{PipelineSchedule, stages_of_each};
use crate::config_file::reader::Position;
use crate::mesh::{Axis, MeshShape, PerAxis};
use std::fmt;

/// The most ranks of a mesh. A plan of more would take hours.
const MAX_RANKS: usize = 1 << 17;

/// Every size that a config states, by axis.
pub type StatedSizes = PerAxis<Vec<StatedSize>>;

impl Default for StatedSizes {
    fn default() -> Self {
        Self { pp: Vec::new(), dp: Vec::new(), sp: Vec::new(), tp: Vec::new() }
    }
}

impl StatedSizes {
    /// Adds the sizes of a mesh.
    pub(super) fn add(&mut self, mesh: MeshShape, origin: SizeOrigin) {
        *self = std::mem::take(self).zip_with(mesh, |_, mut sizes, size| {
            sizes.push(StatedSize { size, origin });
            sizes
        });
    }
}

/// The size of an axis, and its origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatedSize {
    /// The size.
    pub size: usize,
    /// Place that sets the size.
    pub origin: SizeOrigin,
}

/// The place in a config that sets the size of a mesh axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SizeOrigin {
    /// A key of the config file.
    Key {
        /// The key.
        key: &'static str,
        /// The position of its value.
        position: Position,
    },
    /// The command line's `--mesh`.
    Flag,
    /// The rule of `ulysses.mesh_rules` that applies.
    Rule,
}

impl fmt::Display for StatedSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.origin {
            SizeOrigin::Key { key, position } => write!(f, "{} by `{key}` ({position})", self.size),
            SizeOrigin::Rule => write!(f, "{} by a rule of `ulysses.mesh_rules`", self.size),
            SizeOrigin::Flag => write!(f, "{} by the flag --mesh", self.size),
        }
    }
}

/// The errors of mesh sizes that do not agree.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MeshShapeError {
    /// Two settings give one axis different sizes.
    #[error(
        "the mesh sizes contradict each other: {axis} is {first}, but {second}; make them equal or remove one, \
         or give `--mesh DPxSP`, which replaces both"
    )]
    Contradiction {
        /// The axis, such as `dp`.
        axis: &'static str,
        /// The first size.
        first: StatedSize,
        /// The other size.
        second: StatedSize,
    },
    /// The mesh size is not the world size.
    #[error("the mesh of {mesh} = {} ranks does not fill a world of {world_size} ranks", mesh.num_ranks())]
    NotTheWorld {
        /// The mesh.
        mesh: MeshShape,
        /// Ranks that there are.
        world_size: usize,
    },
    /// The world size is not a multiple of the other axes' ranks.
    #[error("a world of {world_size} ranks does not divide into {}", groups(*others))]
    Indivisible {
        /// Ranks that there are.
        world_size: usize,
        /// The mesh, with a dp of 1.
        others: MeshShape,
    },
    /// The data-parallel size is not a multiple of ZeRO's shard size.
    #[error("dp {dp} is not a multiple of ZeRO's shard size, {shard_size}")]
    ShardSize {
        /// Data-parallel ranks.
        dp: usize,
        /// Ranks that share the partitions.
        shard_size: StatedSize,
    },
    /// More ranks than are supported.
    #[error("the mesh of {mesh} ranks is too large: expected at most {MAX_RANKS} ranks")]
    Overflow {
        /// The mesh.
        mesh: MeshShape,
    },
    /// The ring size does not divide sp.
    #[error("`ulysses.ring_size` {ring_size} does not divide sp {sp}: a ring has groups of equal size")]
    RingSize {
        /// Ranks of a ring.
        ring_size: usize,
        /// Sequence-parallel ranks.
        sp: usize,
    },
    /// Flexible sequence parallelism on a ring.
    #[error(
        "`ulysses.flexible_sp` does not support rings, but `ulysses.ring_size` is {ring_size}: set `ulysses.flexible_sp` to \
         false, or use no ring and at most as many sp ranks as the model has query heads"
    )]
    FlexibleRing {
        /// Ranks of a ring.
        ring_size: usize,
    },
    /// A feature that does not support an axis.
    #[error(
        "{axis} is {size}, but {feature} does not support {parallelism} parallelism: {remedy}, or use {axis} 1"
    )]
    Unsupported {
        /// The axis.
        axis: &'static str,
        /// Its ranks.
        size: usize,
        /// Its kind of parallelism.
        parallelism: &'static str,
        /// The feature, by its key or, if it has a value, in words.
        feature: String,
        /// The change that makes the config valid.
        remedy: &'static str,
    },
    /// A schedule without several stages per rank.
    #[error(
        "`ulysses.pipeline.virtual_stages` is {virtual_stages}, but the schedule \"{}\" has one stage per rank: use \"1f1b\", \
         which is then interleaved, or virtual_stages 1",
        schedule.name()
    )]
    OneStageSchedule {
        /// Stages of each rank.
        virtual_stages: usize,
        /// The schedule.
        schedule: PipelineSchedule,
    },
    /// Micro batches that the interleaved schedule cannot group.
    #[error(
        "`ulysses.pipeline.virtual_stages` needs micro batches in groups of pp {pp}, but there are {accumulation} \
         (`gradient_accumulation_steps`): use a multiple of {pp}, or virtual_stages 1"
    )]
    InterleavedMicroBatches {
        /// Ranks of the pipeline.
        pp: usize,
        /// Micro batches of a step.
        accumulation: usize,
    },
    /// `ulysses.pipeline.layers_per_stage` is for another number of stages.
    #[error(
        "pp is {pp}{}, but `ulysses.pipeline.layers_per_stage` has {entries} entries: expected one for each stage, or remove it",
        stages_of_each(*virtual_stages)
    )]
    LayersPerStage {
        /// Ranks of the pipeline.
        pp: usize,
        /// Stages of each rank.
        virtual_stages: usize,
        /// Entries.
        entries: usize,
    },
}

/// The ranks of one dp rank, in the message of [`MeshShapeError::Indivisible`].
fn groups(others: MeshShape) -> String {
    let axes: Vec<_> = others.axes().into_iter().filter(|axis| axis.name != "dp").collect();
    match &axes[..] {
        [Axis { name, size }] if name == "sp" => format!("sequence-parallel groups of {size}"),
        _ => {
            let axes: Vec<_> = axes.iter().map(|Axis { name, size }| format!("{name} {size}")).collect();
            format!("groups of {} ranks", axes.join(" × "))
        }
    }
}

impl StatedSizes {
    /// Returns the mesh that all settings agree on: sizes default to 1, but that of dp to the ranks of the world that the others
    /// leave.
    ///
    /// # Errors
    /// When two sizes contradict each other, or the mesh size is not the world size.
    pub fn resolve(&self, world_size: Option<usize>) -> Result<MeshShape, MeshShapeError> {
        let agreed = self.clone().try_map(|axis, stated| agreed_size(axis, &stated))?;
        let others = MeshShape { dp: 1, ..agreed.map(|_, size| size.unwrap_or(1)) };
        let dp = match (agreed.dp, world_size) {
            (Some(dp), _) => dp,
            (None, None) => 1,
            (None, Some(ranks)) if ranks > 0 && ranks.is_multiple_of(others.num_ranks()) => {
                ranks / others.num_ranks()
            }
            (None, Some(world_size)) => return Err(MeshShapeError::Indivisible { world_size, others }),
        };
        let mesh = MeshShape { dp, ..others };
        let num_ranks = mesh.checked_num_ranks().filter(|ranks| *ranks <= MAX_RANKS);
        let num_ranks = num_ranks.ok_or(MeshShapeError::Overflow { mesh })?;
        match world_size {
            Some(world_size) if world_size != num_ranks => {
                Err(MeshShapeError::NotTheWorld { mesh, world_size })
            }
            _ => Ok(mesh),
        }
    }
}

/// Returns the shard size of ZeRO that all settings agree on, if there is one.
///
/// # Errors
/// When two sizes contradict each other, or the size does not divide dp.
pub(super) fn shard_size(stated: &[StatedSize], dp: usize) -> Result<Option<usize>, MeshShapeError> {
    let Some(size) = agreed_size("ZeRO's shard size", stated)? else { return Ok(None) };
    if !dp.is_multiple_of(size) {
        return Err(MeshShapeError::ShardSize { dp, shard_size: stated[0] });
    }
    Ok(Some(size))
}

fn agreed_size(axis: &'static str, stated: &[StatedSize]) -> Result<Option<usize>, MeshShapeError> {
    let Some((&first, others)) = stated.split_first() else { return Ok(None) };
    match others.iter().find(|other| other.size != first.size) {
        Some(&second) => Err(MeshShapeError::Contradiction { axis, first, second }),
        None => Ok(Some(first.size)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Resolves sizes that the flag `--mesh` states, 0 for none.
    fn resolve([pp, dp, sp, tp]: [usize; 4], world_size: Option<usize>) -> Result<MeshShape, MeshShapeError> {
        let stated = |_: &str, size| match size {
            0 => Vec::new(),
            size => vec![StatedSize { size, origin: SizeOrigin::Flag }],
        };
        MeshShape { pp, dp, sp, tp }.map(stated).resolve(world_size)
    }

    #[test]
    fn missing_sizes_come_from_the_world() {
        for (stated, world_size, expected) in [
            ([0, 0, 0, 0], None, [1, 1, 1, 1]),
            ([0, 0, 2, 0], None, [1, 1, 2, 1]),
            ([0, 3, 0, 0], None, [1, 3, 1, 1]),
            ([0, 0, 0, 0], Some(4), [1, 4, 1, 1]),
            ([0, 0, 2, 0], Some(8), [1, 4, 2, 1]),
            ([0, 4, 2, 0], Some(8), [1, 4, 2, 1]),
            ([0, 0, 0, 2], None, [1, 1, 1, 2]),
            ([0, 0, 2, 2], Some(12), [1, 3, 2, 2]),
            ([0, 0, 0, 4], Some(8), [1, 2, 1, 4]),
            ([3, 0, 0, 0], None, [3, 1, 1, 1]),
            ([2, 0, 2, 2], Some(16), [2, 2, 2, 2]),
        ] {
            let resolved = resolve(stated, world_size).map(MeshShape::into_array);
            assert_eq!(resolved, Ok(expected), "{stated:?}");
        }
    }

    #[test]
    fn a_mesh_that_does_not_fill_the_world_is_refused() {
        let error = |stated, world_size| resolve(stated, world_size).unwrap_err().to_string();
        assert_eq!(
            error([0, 2, 2, 0], Some(8)),
            "the mesh of dp 2 × sp 2 = 4 ranks does not fill a world of 8 ranks"
        );
        assert_eq!(
            error([0, 2, 2, 2], Some(16)),
            "the mesh of dp 2 × sp 2 × tp 2 = 8 ranks does not fill a world of 16 ranks"
        );
        assert_eq!(
            error([0, 0, 4, 0], Some(6)),
            "a world of 6 ranks does not divide into sequence-parallel groups of 4"
        );
        assert_eq!(
            error([0, 0, 2, 2], Some(6)),
            "a world of 6 ranks does not divide into groups of sp 2 × tp 2 ranks"
        );
        assert_eq!(
            error([2, 0, 2, 1], Some(6)),
            "a world of 6 ranks does not divide into groups of pp 2 × sp 2 ranks"
        );
        assert!(error([0, 0, 0, 0], Some(0)).contains("a world of 0 ranks"));
        assert!(error([0, usize::MAX, 2, 0], None).contains("too large"));
        assert!(error([0, 1, usize::MAX, 2], None).contains("× tp 2 ranks is too large"));
    }
}
