//! The sizes of the (dp, sp) mesh, on which a file, or the flags that replace its sizes, and the world size must agree.

use super::reader::Position;
use std::fmt;

/// The most ranks of a mesh. A plan of more would take hours.
const MAX_RANKS: usize = 1 << 17;

/// The sizes of the two mesh axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeshShape {
    /// Data-parallel ranks.
    pub dp: usize,
    /// Sequence-parallel ranks.
    pub sp: usize,
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
        /// The axis, `dp` or `sp`.
        axis: &'static str,
        /// The first size.
        first: StatedSize,
        /// The other size.
        second: StatedSize,
    },
    /// The mesh size is not the world size.
    #[error("the mesh of dp {dp} × sp {sp} = {} ranks does not fill a world of {world_size} ranks", dp * sp)]
    NotTheWorld {
        /// Data-parallel ranks.
        dp: usize,
        /// Sequence-parallel ranks.
        sp: usize,
        /// Ranks that there are.
        world_size: usize,
    },
    /// The world size is not a multiple of sp.
    #[error("a world of {world_size} ranks does not divide into sequence-parallel groups of {sp}")]
    Indivisible {
        /// Ranks that there are.
        world_size: usize,
        /// Sequence-parallel ranks.
        sp: usize,
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
    #[error("the mesh of dp {dp} × sp {sp} ranks is too large: expected at most {MAX_RANKS} ranks")]
    Overflow {
        /// Data-parallel ranks.
        dp: usize,
        /// Sequence-parallel ranks.
        sp: usize,
    },
}

impl MeshShape {
    /// Returns the mesh that all settings agree on: sp defaults to 1, dp to the world size / sp, or 1.
    ///
    /// # Errors
    /// When two sizes contradict each other, or the mesh size is not the world size.
    pub fn resolve(
        dp: &[StatedSize],
        sp: &[StatedSize],
        world_size: Option<usize>,
    ) -> Result<Self, MeshShapeError> {
        let sp = agreed_size("sp", sp)?.unwrap_or(1);
        let dp = match (agreed_size("dp", dp)?, world_size) {
            (Some(dp), _) => dp,
            (None, None) => 1,
            (None, Some(world_size)) if world_size > 0 && world_size.is_multiple_of(sp) => world_size / sp,
            (None, Some(world_size)) => return Err(MeshShapeError::Indivisible { world_size, sp }),
        };
        let num_ranks = dp.checked_mul(sp).filter(|ranks| *ranks <= MAX_RANKS);
        let num_ranks = num_ranks.ok_or(MeshShapeError::Overflow { dp, sp })?;
        match world_size {
            Some(world_size) if world_size != num_ranks => {
                Err(MeshShapeError::NotTheWorld { dp, sp, world_size })
            }
            _ => Ok(Self { dp, sp }),
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

    fn flag(size: usize) -> StatedSize {
        StatedSize { size, origin: SizeOrigin::Flag }
    }

    #[test]
    fn missing_sizes_come_from_the_world() {
        let resolve = |dp: &[StatedSize], sp: &[StatedSize], world_size| {
            MeshShape::resolve(dp, sp, world_size).map(|mesh| (mesh.dp, mesh.sp))
        };
        assert_eq!(resolve(&[], &[], None), Ok((1, 1)));
        assert_eq!(resolve(&[], &[flag(2)], None), Ok((1, 2)));
        assert_eq!(resolve(&[flag(3)], &[], None), Ok((3, 1)));
        assert_eq!(resolve(&[], &[], Some(4)), Ok((4, 1)));
        assert_eq!(resolve(&[], &[flag(2)], Some(8)), Ok((4, 2)));
        assert_eq!(resolve(&[flag(4)], &[flag(2)], Some(8)), Ok((4, 2)));
    }

    #[test]
    fn a_mesh_that_does_not_fill_the_world_is_refused() {
        let error =
            |dp: &[StatedSize], sp: &[StatedSize], world_size| match MeshShape::resolve(dp, sp, world_size) {
                Ok(mesh) => panic!("accepted: {mesh:?}"),
                Err(error) => error.to_string(),
            };
        assert_eq!(
            error(&[flag(2)], &[flag(2)], Some(8)),
            "the mesh of dp 2 × sp 2 = 4 ranks does not fill a world of 8 ranks"
        );
        assert_eq!(
            error(&[], &[flag(4)], Some(6)),
            "a world of 6 ranks does not divide into sequence-parallel groups of 4"
        );
        assert!(error(&[], &[], Some(0)).contains("a world of 0 ranks"));
        assert!(error(&[flag(usize::MAX)], &[flag(2)], None).contains("too large"));
    }
}
