//! The sizes of the (dp, sp, tp) mesh, on which a file, or the flags that replace its sizes, and the world size must agree.

use super::reader::Position;
use crate::mesh::TrainingShape;
use std::fmt;

/// The most ranks of a mesh. A plan of more would take hours.
const MAX_RANKS: usize = 1 << 17;

/// The sizes of the mesh axes. Written as `dp 2 × sp 4`, with tp if it is larger than 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeshShape {
    /// Data-parallel ranks.
    pub dp: usize,
    /// Sequence-parallel ranks.
    pub sp: usize,
    /// Tensor-parallel ranks.
    pub tp: usize,
}

impl fmt::Display for MeshShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { dp, sp, tp } = self;
        write!(f, "dp {dp} × sp {sp}")?;
        if *tp > 1 { write!(f, " × tp {tp}") } else { Ok(()) }
    }
}

impl MeshShape {
    /// Returns the sizes as the flag `--mesh` takes them: `2x4`, with tp if it is larger than 1.
    pub fn notation(self) -> String {
        let Self { dp, sp, tp } = self;
        if tp > 1 { format!("{dp}x{sp}x{tp}") } else { format!("{dp}x{sp}") }
    }
}

impl From<TrainingShape> for MeshShape {
    fn from(TrainingShape { dp, sp, tp, .. }: TrainingShape) -> Self {
        Self { dp, sp, tp }
    }
}

/// Every size that a config states, by axis.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StatedSizes {
    /// Those of dp.
    pub dp: Vec<StatedSize>,
    /// Those of sp.
    pub sp: Vec<StatedSize>,
    /// Those of tp.
    pub tp: Vec<StatedSize>,
}

impl StatedSizes {
    /// Adds the sizes of a mesh.
    pub(super) fn add(&mut self, MeshShape { dp, sp, tp }: MeshShape, origin: SizeOrigin) {
        for (sizes, size) in [(&mut self.dp, dp), (&mut self.sp, sp), (&mut self.tp, tp)] {
            sizes.push(StatedSize { size, origin });
        }
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
        /// The axis: `dp`, `sp` or `tp`.
        axis: &'static str,
        /// The first size.
        first: StatedSize,
        /// The other size.
        second: StatedSize,
    },
    /// The mesh size is not the world size.
    #[error("the mesh of {mesh} = {num_ranks} ranks does not fill a world of {world_size} ranks")]
    NotTheWorld {
        /// The mesh.
        mesh: MeshShape,
        /// Its ranks.
        num_ranks: usize,
        /// Ranks that there are.
        world_size: usize,
    },
    /// The world size is not a multiple of sp × tp.
    #[error("a world of {world_size} ranks does not divide into {}", dp_row(*sp, *tp))]
    Indivisible {
        /// Ranks that there are.
        world_size: usize,
        /// Sequence-parallel ranks.
        sp: usize,
        /// Tensor-parallel ranks.
        tp: usize,
    },
    /// The data-parallel size is not a multiple of ZeRO's shard size.
    #[error("dp {dp} is not a multiple of ZeRO's shard size, {shard_size}")]
    ShardSize {
        /// Data-parallel ranks.
        dp: usize,
        /// Ranks that share the partitions.
        shard_size: StatedSize,
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
    /// More ranks than are supported.
    #[error("the mesh of {mesh} ranks is too large: expected at most {MAX_RANKS} ranks")]
    Overflow {
        /// The mesh.
        mesh: MeshShape,
    },
    /// A feature that does not support tensor parallelism.
    #[error("tp is {tp}, but {feature} does not support tensor parallelism: {remedy}, or use tp 1")]
    WithTensorParallelism {
        /// Tensor-parallel ranks.
        tp: usize,
        /// The feature, by its key.
        feature: String,
        /// The change that makes the config valid.
        remedy: &'static str,
    },
}

/// The ranks with the same sequences, in the message of [`MeshShapeError::Indivisible`].
fn dp_row(sp: usize, tp: usize) -> String {
    match tp {
        1 => format!("sequence-parallel groups of {sp}"),
        _ => format!("groups of sp {sp} × tp {tp} ranks"),
    }
}

impl MeshShape {
    /// Returns the mesh that all settings agree on: sp and tp default to 1, dp to the world size / (sp × tp), or 1.
    ///
    /// # Errors
    /// When two sizes contradict each other, or the mesh size is not the world size.
    pub fn resolve(stated: &StatedSizes, world_size: Option<usize>) -> Result<Self, MeshShapeError> {
        let [sp, tp] =
            [agreed_size("sp", &stated.sp)?, agreed_size("tp", &stated.tp)?].map(|size| size.unwrap_or(1));
        let dp_row = sp.saturating_mul(tp);
        let dp = match (agreed_size("dp", &stated.dp)?, world_size) {
            (Some(dp), _) => dp,
            (None, None) => 1,
            (None, Some(ranks)) if ranks > 0 && ranks.is_multiple_of(dp_row) => ranks / dp_row,
            (None, Some(world_size)) => return Err(MeshShapeError::Indivisible { world_size, sp, tp }),
        };
        let mesh = Self { dp, sp, tp };
        let num_ranks = dp.checked_mul(dp_row).filter(|ranks| *ranks <= MAX_RANKS);
        let num_ranks = num_ranks.ok_or(MeshShapeError::Overflow { mesh })?;
        match world_size {
            Some(world_size) if world_size != num_ranks => {
                Err(MeshShapeError::NotTheWorld { mesh, num_ranks, world_size })
            }
            _ => Ok(mesh),
        }
    }
}

impl MeshShape {
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
    fn resolve([dp, sp, tp]: [usize; 3], world_size: Option<usize>) -> Result<MeshShape, MeshShapeError> {
        let stated = |size| match size {
            0 => Vec::new(),
            size => vec![StatedSize { size, origin: SizeOrigin::Flag }],
        };
        let stated = StatedSizes { dp: stated(dp), sp: stated(sp), tp: stated(tp) };
        MeshShape::resolve(&stated, world_size)
    }

    #[test]
    fn missing_sizes_come_from_the_world() {
        for (stated, world_size, [dp, sp, tp]) in [
            ([0, 0, 0], None, [1, 1, 1]),
            ([0, 2, 0], None, [1, 2, 1]),
            ([3, 0, 0], None, [3, 1, 1]),
            ([0, 0, 0], Some(4), [4, 1, 1]),
            ([0, 2, 0], Some(8), [4, 2, 1]),
            ([4, 2, 0], Some(8), [4, 2, 1]),
            ([0, 0, 2], None, [1, 1, 2]),
            ([0, 2, 2], Some(12), [3, 2, 2]),
            ([0, 0, 4], Some(8), [2, 1, 4]),
        ] {
            assert_eq!(resolve(stated, world_size), Ok(MeshShape { dp, sp, tp }), "{stated:?}");
        }
    }

    #[test]
    fn a_mesh_that_does_not_fill_the_world_is_refused() {
        let error = |stated, world_size| resolve(stated, world_size).unwrap_err().to_string();
        assert_eq!(
            error([2, 2, 0], Some(8)),
            "the mesh of dp 2 × sp 2 = 4 ranks does not fill a world of 8 ranks"
        );
        assert_eq!(
            error([2, 2, 2], Some(16)),
            "the mesh of dp 2 × sp 2 × tp 2 = 8 ranks does not fill a world of 16 ranks"
        );
        assert_eq!(
            error([0, 4, 0], Some(6)),
            "a world of 6 ranks does not divide into sequence-parallel groups of 4"
        );
        assert_eq!(
            error([0, 2, 2], Some(6)),
            "a world of 6 ranks does not divide into groups of sp 2 × tp 2 ranks"
        );
        assert!(error([0, 0, 0], Some(0)).contains("a world of 0 ranks"));
        assert!(error([usize::MAX, 2, 0], None).contains("too large"));
        assert!(error([1, usize::MAX, 2], None).contains("× tp 2 ranks is too large"));
    }
}
