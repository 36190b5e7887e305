//! Agreement on the sizes of the (dp, sp) mesh between file, flags and world size.

use super::reader::Position;
use std::fmt;

/// The sizes of the two mesh axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeshShape {
    /// Data-parallel ranks.
    pub dp: usize,
    /// Sequence-parallel ranks.
    pub sp: usize,
}

/// The size of an axis, and who says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatedSize {
    /// The size.
    pub size: usize,
    /// Who says so.
    pub origin: SizeOrigin,
}

/// Where the size of a mesh axis comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SizeOrigin {
    /// A key of the config file.
    Key {
        /// The key.
        key: &'static str,
        /// Where its value stands.
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

/// Why there is no one mesh.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MeshShapeError {
    /// Two places give one axis different sizes.
    #[error(
        "the mesh is contradictory: {axis} is {first}, but {second}; the world size is the product of the \
         mesh, so neither can be taken for right: make them equal or leave one out"
    )]
    Contradiction {
        /// The axis, `dp` or `sp`.
        axis: &'static str,
        /// One size.
        first: StatedSize,
        /// The other.
        second: StatedSize,
    },
    /// The ranks of the mesh are not the ranks of the world.
    #[error("the mesh of dp {dp} × sp {sp} = {} ranks does not fill a world of {world_size} ranks", dp * sp)]
    NotTheWorld {
        /// Data-parallel ranks.
        dp: usize,
        /// Sequence-parallel ranks.
        sp: usize,
        /// Ranks that there are.
        world_size: usize,
    },
    /// The data-parallel size cannot be inferred.
    #[error("a world of {world_size} ranks does not divide into sequence-parallel groups of {sp}")]
    Indivisible {
        /// Ranks that there are.
        world_size: usize,
        /// Sequence-parallel ranks.
        sp: usize,
    },
    /// ZeRO's partitions do not fill the data-parallel ranks.
    #[error(
        "dp is {dp}, which does not divide into groups of as many ranks as share ZeRO's partitions, {shard_size}"
    )]
    ShardSize {
        /// Data-parallel ranks.
        dp: usize,
        /// Ranks that share the partitions.
        shard_size: StatedSize,
    },
    /// The product exceeds the integers.
    #[error("the mesh of dp {dp} × sp {sp} ranks is too large")]
    Overflow {
        /// Data-parallel ranks.
        dp: usize,
        /// Sequence-parallel ranks.
        sp: usize,
    },
}

impl MeshShape {
    /// The one mesh that everybody agrees on: sp defaults to 1, dp to what fills the world (or 1).
    ///
    /// # Errors
    /// When two sizes contradict each other, or the mesh and the world.
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
        let num_ranks = dp.checked_mul(sp).ok_or(MeshShapeError::Overflow { dp, sp })?;
        match world_size {
            Some(world_size) if world_size != num_ranks => {
                Err(MeshShapeError::NotTheWorld { dp, sp, world_size })
            }
            _ => Ok(Self { dp, sp }),
        }
    }
}

impl MeshShape {
    /// The one number of ranks that share ZeRO's partitions, if somebody says it.
    ///
    /// # Errors
    /// When two sizes contradict each other, or the size does not divide dp.
    pub(super) fn shard_size(stated: &[StatedSize], dp: usize) -> Result<Option<usize>, MeshShapeError> {
        let Some(size) = agreed_size("the number of ZeRO's partitions", stated)? else { return Ok(None) };
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
