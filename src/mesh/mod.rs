//! Device meshes: the coordinate of each rank, and the process groups along each axis.
//!
//! A [`DeviceMesh`] holds only integers: named axes, their sizes, and the global rank at each coordinate. It
//! creates no communicators; `comm` turns its ordered lists of ranks into process groups.
//!
//! Ranks are row-major, the last axis fastest, unless the caller gives another order. With axes `dp, sp`, the
//! ranks that exchange attention heads are therefore adjacent, if possible on the same node. A
//! [`HybridMeshShape`] splits each axis into a part within a node and a part between nodes. A [`Preset`] derives
//! a mesh from its purpose, such as `fsdp`. [`MeshRules`] select a mesh by machine. A [`MeshSpec`] is any of these as
//! text; [`PlacedMesh`] is the mesh of a training run on its hosts.
//!
//! ```
//! use ulysses::mesh::DeviceMesh;
//!
//! let mesh = DeviceMesh::parse("2x4", None)?;
//! assert_eq!(mesh.axis_names(), ["dp", "sp"]);
//! assert_eq!(mesh.group_of("sp", 6)?, [4, 5, 6, 7]);
//! assert_eq!(mesh.group_of("dp", 6)?, [2, 6]);
//! # Ok::<(), ulysses::mesh::MeshError>(())
//! ```

mod axes;
mod axis;
mod axis_names;
mod draw;
mod error;
mod hosts;
mod hsdp;
mod hybrid;
mod node_layout;
mod notation;
mod placement;
mod preset;
mod rules;
mod seq_sharding;
mod shard_range;
mod slice;
mod spec;
mod stated_sizes;
mod svg;
mod tensor_shard;
#[cfg(test)]
mod tests;

pub use axes::{MeshShape, PerAxis};
pub use axis::{Axis, StatedAxis};
pub use axis_names::{
    PP_AXIS, REPLICAS_AXIS, RING_AXIS, SHARD_AXIS, TOKENS_AXIS, TP_AXIS, ULYSSES_AXIS, canonical_axis_name,
};
pub use draw::draw;
pub use error::MeshError;
pub use hosts::RankHosts;
pub use hsdp::{ShardShape, TrainingShape};
pub use hybrid::{Cluster, Device, HybridMeshShape};
pub use node_layout::{AxisPlacement, draw_nodes};
pub use placement::{PlacedMesh, SpGroups};
pub use preset::{Preset, PresetOnCluster};
pub use rules::{InvalidPattern, MeshRules};
pub use seq_sharding::{SeqSharding, TokenRanges, UlyssesLimits};
pub use shard_range::shard_range;
pub use spec::{MeshSpec, SpecMesh};
pub use svg::svg;
pub use tensor_shard::{ShardRun, TensorShard};

use crate::fnv1a::Fnv1a;
use std::collections::HashSet;

/// Maximum number of ranks in a mesh. A larger size is a typing error, which must not exhaust memory.
pub const MAX_RANKS: usize = 1 << 20;

/// An n-dimensional arrangement of ranks on named axes.
///
/// Two meshes are equal if their axis names, shapes and rank maps are equal.
///
/// # Examples
///
/// ```
/// use ulysses::mesh::DeviceMesh;
///
/// let mesh = DeviceMesh::new(&[("dp", -1), ("sp", 4)], Some(8))?; // dp is inferred
/// assert_eq!(mesh.shape(), [2, 4]);
/// assert_eq!(mesh.coordinate(6)?, [1, 2]);
/// assert_eq!(mesh.all_groups("dp")?, [[0, 4], [1, 5], [2, 6], [3, 7]]);
/// # Ok::<(), ulysses::mesh::MeshError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct DeviceMesh {
    axes: Vec<Axis>,
    /// The global rank at each coordinate, coordinates in row-major order.
    ranks: Vec<usize>,
}

impl DeviceMesh {
    /// Arranges ranks `0..world_size` row-major on `axes`, the last one fastest.
    ///
    /// One size may be `-1`, which is inferred from `world_size`. If `world_size` is `None`, the product of the
    /// sizes is the world size. `data_parallel` and `sequence_parallel` are aliases of `dp` and `sp`.
    ///
    /// # Errors
    /// Fails if a name is invalid or repeated, a size is invalid, or the product of the sizes is not `world_size`.
    pub fn new<A: Into<StatedAxis>>(
        axes: impl IntoIterator<Item = A>,
        world_size: Option<usize>,
    ) -> Result<Self, MeshError> {
        let axes = resolve_axes(axes, world_size)?;
        let num_ranks = num_ranks(&axes)?;
        if let Some(world_size) = world_size.filter(|&world_size| world_size != num_ranks) {
            let mesh = axis::list(&axes);
            return Err(MeshError::WorldSizeMismatch { mesh, product: num_ranks, world_size });
        }
        Ok(Self { axes, ranks: (0..num_ranks).collect() })
    }

    /// Arranges the given ranks on `axes`, in row-major order of their coordinates.
    ///
    /// The ranks need not be `0..n`: a mesh may cover a part of the world. One size may be `-1`.
    ///
    /// # Errors
    /// Fails like [`new`](Self::new) with `world_size = ranks.len()`, or if a rank is listed twice.
    pub fn with_ranks<A: Into<StatedAxis>>(
        axes: impl IntoIterator<Item = A>,
        ranks: Vec<usize>,
    ) -> Result<Self, MeshError> {
        let row_major = Self::new(axes, Some(ranks.len()))?;
        let mut seen = HashSet::with_capacity(ranks.len());
        if let Some(&rank) = ranks.iter().find(|&&rank| !seen.insert(rank)) {
            return Err(MeshError::DuplicateRank { rank });
        }
        Ok(Self { ranks, ..row_major })
    }

    /// Returns the standard training mesh: axes `dp` (data parallel) and `sp` (sequence parallel).
    ///
    /// # Errors
    /// Fails if a size is zero or the mesh has more than [`MAX_RANKS`] ranks.
    pub fn dp_sp(dp: usize, sp: usize) -> Result<Self, MeshError> {
        MeshShape::dp_sp(dp, sp).row_major()
    }

    /// Returns the axes, with aliases of names resolved.
    pub fn axes(&self) -> &[Axis] {
        &self.axes
    }

    /// Returns the sizes of the axes.
    pub fn shape(&self) -> Vec<usize> {
        self.axes.iter().map(|axis| axis.size).collect()
    }

    /// Returns the names of the axes, aliases resolved.
    pub fn axis_names(&self) -> Vec<&str> {
        self.axes.iter().map(|axis| axis.name.as_str()).collect()
    }

    /// Returns whether the mesh has the axis.
    pub fn has_axis(&self, name: &str) -> bool {
        self.axis_index(name).is_ok()
    }

    /// Returns the size of an axis.
    ///
    /// # Errors
    /// Fails if the mesh has no such axis.
    pub fn axis_size(&self, name: &str) -> Result<usize, MeshError> {
        Ok(self.axes[self.axis_index(name)?].size)
    }

    /// Returns the number of ranks in this mesh. For a slice, this is the size of the slice.
    pub fn world_size(&self) -> usize {
        self.ranks.len()
    }

    /// Returns the global ranks in row-major order of their coordinates.
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// Returns the coordinate of a rank, one entry per axis.
    ///
    /// # Errors
    /// Fails if the rank is not in the mesh.
    pub fn coordinate(&self, global_rank: usize) -> Result<Vec<usize>, MeshError> {
        let position = self.position(global_rank)?;
        let strides = self.strides();
        Ok(self.axes.iter().zip(strides).map(|(axis, stride)| position / stride % axis.size).collect())
    }

    /// Returns the coordinate of a rank along one axis.
    ///
    /// # Errors
    /// Fails if the rank is not in the mesh or the mesh has no such axis.
    pub fn coordinate_on(&self, axis: &str, global_rank: usize) -> Result<usize, MeshError> {
        let axis = self.axis_index(axis)?;
        Ok(self.coordinate(global_rank)?[axis])
    }

    /// Returns the global rank at a coordinate: the inverse of [`coordinate`](Self::coordinate).
    ///
    /// # Errors
    /// Fails if the coordinate does not have one entry per axis, or an entry is outside its axis.
    pub fn rank_at(&self, coordinate: &[usize]) -> Result<usize, MeshError> {
        if coordinate.len() != self.axes.len() {
            let axes = self.owned_names();
            return Err(MeshError::CoordinateLength { given: coordinate.len(), axes });
        }
        let mut position = 0;
        for (&coordinate, Axis { name, size }) in coordinate.iter().zip(&self.axes) {
            if coordinate >= *size {
                let (axis, size) = (name.clone(), *size);
                return Err(MeshError::CoordinateOutOfRange { axis, coordinate, size });
            }
            position = position * size + coordinate;
        }
        Ok(self.ranks[position])
    }

    /// Returns a hash of names, shape and rank map, stable across platforms and runs.
    ///
    /// All ranks compare it at startup. Ranks with different meshes would otherwise deadlock in different groups.
    pub fn fingerprint(&self) -> u64 {
        let mut hash = Fnv1a::default();
        hash.write_len(self.axes.len());
        for Axis { name, size } in &self.axes {
            hash.write_len(name.len());
            hash.write(name.as_bytes());
            hash.write_len(*size);
        }
        self.ranks.iter().for_each(|&rank| hash.write_len(rank));
        hash.finish()
    }

    fn axis_index(&self, name: &str) -> Result<usize, MeshError> {
        let wanted = canonical_axis_name(name);
        let index = self.axes.iter().position(|axis| axis.name == wanted);
        index.ok_or_else(|| MeshError::UnknownAxis { axis: name.to_owned(), axes: self.owned_names() })
    }

    fn owned_names(&self) -> Vec<String> {
        self.axes.iter().map(|axis| axis.name.clone()).collect()
    }

    /// Returns the index of a rank in `ranks`. The identity rank map needs no search.
    fn position(&self, global_rank: usize) -> Result<usize, MeshError> {
        if self.ranks.get(global_rank) == Some(&global_rank) {
            return Ok(global_rank);
        }
        self.ranks
            .iter()
            .position(|&rank| rank == global_rank)
            .ok_or_else(|| MeshError::NotAMember { rank: global_rank, members: notation::ranks(&self.ranks) })
    }

    /// Returns the stride of each axis in `ranks`.
    fn strides(&self) -> Vec<usize> {
        let mut strides = vec![1; self.axes.len()];
        for axis in (1..self.axes.len()).rev() {
            strides[axis - 1] = strides[axis] * self.axes[axis].size;
        }
        strides
    }

    /// Builds a mesh from its parts. The caller guarantees that `ranks` has the right length and no duplicates.
    fn from_parts(axes: Vec<Axis>, ranks: Vec<usize>) -> Result<Self, MeshError> {
        check_names(&axes)?;
        debug_assert_eq!(axes.iter().map(|axis| axis.size).product::<usize>(), ranks.len());
        Ok(Self { axes, ranks })
    }
}

/// Checks names and sizes, and infers a size of `-1` such that the product of the sizes is `total`.
fn resolve_axes<A: Into<StatedAxis>>(
    axes: impl IntoIterator<Item = A>,
    total: Option<usize>,
) -> Result<Vec<Axis>, MeshError> {
    let canonical = |axis: A| {
        let StatedAxis { name, size } = axis.into();
        Axis::new(canonical_axis_name(&name), size)
    };
    let stated: Vec<StatedAxis> = axes.into_iter().map(canonical).collect();
    check_names(&stated)?;
    let mut inferred = Vec::new();
    let mut axes = Vec::with_capacity(stated.len());
    for (index, Axis { name, size }) in stated.into_iter().enumerate() {
        let known = match size {
            -1 => {
                inferred.push(index);
                1
            }
            size => usize::try_from(size).unwrap_or(0),
        };
        if known == 0 {
            return Err(MeshError::InvalidSize { axis: name, size });
        }
        axes.push(Axis::new(name, known));
    }
    match inferred[..] {
        [] => {}
        [index] => {
            let axis = || axes[index].name.clone();
            let total = total.ok_or_else(|| MeshError::InferWithoutWorldSize { axis: axis() })?;
            let known = num_ranks(&axes)?;
            if total == 0 || !total.is_multiple_of(known) {
                return Err(MeshError::CannotInfer { axis: axis(), known, total });
            }
            axes[index].size = total / known;
        }
        _ => {
            let axes = inferred.iter().map(|&index| axes[index].name.clone()).collect();
            return Err(MeshError::SeveralInferred { axes });
        }
    }
    Ok(axes)
}

fn check_names<S>(axes: &[Axis<S>]) -> Result<(), MeshError> {
    if axes.is_empty() {
        return Err(MeshError::NoAxes);
    }
    let is_plain = |c: char| c.is_alphanumeric() || "_-.".contains(c);
    for (index, Axis { name, .. }) in axes.iter().enumerate() {
        if name.is_empty() || !name.chars().all(is_plain) {
            return Err(MeshError::InvalidName { name: name.clone() });
        }
        if axes[..index].iter().any(|earlier| earlier.name == *name) {
            return Err(MeshError::DuplicateName { name: name.clone() });
        }
    }
    Ok(())
}

/// Returns the product of the sizes, at most [`MAX_RANKS`].
fn num_ranks(axes: &[Axis]) -> Result<usize, MeshError> {
    let product = axes.iter().try_fold(1_usize, |product, axis| product.checked_mul(axis.size));
    product
        .filter(|&product| product <= MAX_RANKS)
        .ok_or_else(|| MeshError::TooManyRanks { mesh: axis::list(axes), limit: MAX_RANKS })
}
