//! The options of a data loader, and the rank that it loads for.

use super::DataError;
use crate::mesh::{DeviceMesh, SeqSharding};

/// The coordinates of a rank on the axes that split the data: sequences over dp, the tokens of each sequence over sp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataRank {
    /// Number of ranks with different sequences.
    pub dp_size: usize,
    /// The rank along dp.
    pub dp_rank: usize,
    /// How the ranks along sp share each sequence.
    pub sharding: SeqSharding,
    /// The rank along sp.
    pub sp_rank: usize,
}

impl DataRank {
    /// Returns a single rank: all sequences, unsharded.
    pub fn single() -> Self {
        Self { dp_size: 1, dp_rank: 0, sharding: SeqSharding::from(1), sp_rank: 0 }
    }

    /// Returns the coordinates of a rank on the axes `dp` and `sp`, without a ring; a missing axis has size 1.
    ///
    /// Ranks that differ only on other axes get the same data.
    ///
    /// # Errors
    /// When the rank is not in the mesh.
    pub fn on_mesh(mesh: &DeviceMesh, global_rank: usize) -> Result<Self, DataError> {
        // A rank outside the mesh is an error even if the mesh has neither axis.
        mesh.coordinate(global_rank)?;
        let on = |axis| match mesh.has_axis(axis) {
            true => Ok::<_, DataError>((mesh.axis_size(axis)?, mesh.coordinate_on(axis, global_rank)?)),
            false => Ok((1, 0)),
        };
        let ((dp_size, dp_rank), (sp_size, sp_rank)) = (on("dp")?, on("sp")?);
        Ok(Self { dp_size, dp_rank, sharding: SeqSharding::from(sp_size), sp_rank })
    }

    /// Checks that the rank exists.
    pub(super) fn check(&self) -> Result<(), DataError> {
        let axes = [("dp", self.dp_rank, self.dp_size), ("sp", self.sp_rank, self.sharding.sp_size())];
        match axes.into_iter().find(|(_, rank, size)| rank >= size) {
            Some((axis, rank, size)) => Err(DataError::RankOutOfRange { axis, rank, size }),
            None => Ok(()),
        }
    }
}

/// Options of a data loader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoaderOptions {
    /// Seed of the data order.
    pub seed: u64,
    /// Sequences per rank and micro step.
    pub micro_batch: usize,
    /// Micro steps per step.
    pub accumulation: usize,
    /// The coordinates of the rank.
    pub rank: DataRank,
}
