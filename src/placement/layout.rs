//! Where the elements of a tensor lie on a mesh.

use super::{LayoutAxis, Placement, PlacementError};
use crate::mesh::{DeviceMesh, shard_range};
use std::fmt;
use std::ops::Range;

/// A logical tensor on a mesh: its shape, and its placement along every axis.
///
/// Several axes may shard one dimension: the first divides it, the next one divides each of its shards. Shards differ by
/// at most one item per division, and may be empty.
///
/// ```
/// use ulysses::placement::{Layout, LayoutAxis, Placement::Shard};
///
/// let axes = [LayoutAxis::new("dp", 2, Shard(0)), LayoutAxis::new("sp", 2, Shard(0))];
/// let layout = Layout::new([7, 3], axes)?;
/// assert_eq!(layout.local_slices(&[0, 1])?, [2..4, 0..3]);
/// assert_eq!(layout.local_slices(&[1, 1])?, [6..7, 0..3]);
/// # Ok::<(), ulysses::placement::PlacementError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Layout {
    shape: Vec<usize>,
    axes: Vec<LayoutAxis>,
}

impl Layout {
    /// Creates the layout of a tensor of this `shape`; `axes` in the order of the mesh.
    ///
    /// # Errors
    /// An axis without ranks, two axes with one name, or a sharded dimension that the shape lacks.
    pub fn new(
        shape: impl Into<Vec<usize>>,
        axes: impl IntoIterator<Item = LayoutAxis>,
    ) -> Result<Self, PlacementError> {
        let (shape, axes) = (shape.into(), Vec::from_iter(axes));
        for (index, LayoutAxis { name, size, placement }) in axes.iter().enumerate() {
            let is_repeated = axes[..index].iter().any(|other| other.name == *name);
            if is_repeated || *size == 0 {
                return Err(PlacementError::Axis { axis: name.clone(), size: *size, is_repeated });
            }
            if let Placement::Shard(dim) = *placement
                && dim >= shape.len()
            {
                return Err(PlacementError::Dimension { axis: name.clone(), dim, shape });
            }
        }
        Ok(Self { shape, axes })
    }

    /// The layout of a tensor on a mesh, with one placement per axis.
    ///
    /// ```
    /// use ulysses::mesh::DeviceMesh;
    /// use ulysses::placement::{Layout, Placement::{Replicate, Shard}};
    ///
    /// let layout = Layout::on_mesh([7, 3], &DeviceMesh::parse("2x2", None)?, &[Shard(0), Replicate])?;
    /// assert_eq!(layout.to_string(), "[7, 3] dp=2: Shard(0) sp=2: Replicate");
    /// # Ok::<(), anyhow::Error>(())
    /// ```
    ///
    /// # Errors
    /// Fewer or more placements than axes, and as [`new`](Self::new).
    pub fn on_mesh(
        shape: impl Into<Vec<usize>>,
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> Result<Self, PlacementError> {
        if placements.len() != mesh.axes().len() {
            return Err(PlacementError::Placements {
                mesh: mesh.to_string(),
                placements: placements.to_vec(),
            });
        }
        let axes = mesh.axes().iter().zip(placements);
        Self::new(shape, axes.map(|(axis, &placement)| LayoutAxis::new(&axis.name, axis.size, placement)))
    }

    /// Shape of the logical tensor.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The axes of the mesh, with the tensor's placements.
    pub fn axes(&self) -> &[LayoutAxis] {
        &self.axes
    }

    /// The placements, one per axis.
    pub fn placements(&self) -> Vec<Placement> {
        self.axes.iter().map(|axis| axis.placement).collect()
    }

    /// The coordinates of the mesh in row-major order.
    pub fn coordinates(&self) -> impl Iterator<Item = Vec<usize>> {
        let ranks = self.axes.iter().map(|axis| axis.size).product();
        (0..ranks).map(|mut rank| {
            let mut coordinate = vec![0; self.axes.len()];
            for (index, axis) in coordinate.iter_mut().zip(&self.axes).rev() {
                (*index, rank) = (rank % axis.size, rank / axis.size);
            }
            coordinate
        })
    }

    /// The range of each dimension that the rank at a mesh coordinate has. `coordinate` has one entry per axis.
    ///
    /// # Errors
    /// A coordinate outside of the mesh.
    pub fn local_slices(&self, coordinate: &[usize]) -> Result<Vec<Range<usize>>, PlacementError> {
        let is_inside = coordinate.len() == self.axes.len()
            && self.axes.iter().zip(coordinate).all(|(axis, &index)| index < axis.size);
        if !is_inside {
            let mesh = self.axes.iter().map(|axis| axis.size).collect();
            return Err(PlacementError::Coordinate { coordinate: coordinate.to_vec(), mesh });
        }
        let mut slices: Vec<Range<usize>> = self.shape.iter().map(|&len| 0..len).collect();
        for (axis, &index) in self.axes.iter().zip(coordinate) {
            if let Placement::Shard(dim) = axis.placement {
                let Range { start, end } = slices[dim];
                let own = shard_range(end - start, axis.size, index);
                slices[dim] = start + own.start..start + own.end;
            }
        }
        Ok(slices)
    }

    /// Shape of the tensor of the rank at a mesh coordinate.
    ///
    /// # Errors
    /// As [`local_slices`](Self::local_slices).
    pub fn local_shape(&self, coordinate: &[usize]) -> Result<Vec<usize>, PlacementError> {
        Ok(self.local_slices(coordinate)?.iter().map(ExactSizeIterator::len).collect())
    }

    /// Number of elements of the rank at a mesh coordinate.
    ///
    /// # Errors
    /// As [`local_slices`](Self::local_slices).
    pub fn local_numel(&self, coordinate: &[usize]) -> Result<usize, PlacementError> {
        Ok(self.local_shape(coordinate)?.iter().product())
    }

    /// Placement along the axis with this index.
    pub(super) fn placement(&self, axis: usize) -> Placement {
        self.axes[axis].placement
    }

    /// The layout with these placements, one per axis.
    pub(super) fn with_placements(&self, placements: &[Placement]) -> Result<Self, PlacementError> {
        if placements.len() != self.axes.len() {
            let mesh: Vec<_> = self.axes.iter().map(|axis| format!("{}={}", axis.name, axis.size)).collect();
            return Err(PlacementError::Placements { mesh: mesh.join(","), placements: placements.to_vec() });
        }
        let axes = self.axes.iter().zip(placements);
        Self::new(&*self.shape, axes.map(|(axis, &placement)| LayoutAxis { placement, ..axis.clone() }))
    }

    /// The layout with another placement along an axis. The caller guarantees that its dimension exists.
    pub(super) fn with(&self, axis: usize, placement: Placement) -> Self {
        let mut layout = self.clone();
        layout.axes[axis].placement = placement;
        layout
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.shape)?;
        self.axes.iter().try_for_each(|axis| write!(f, " {}={}: {}", axis.name, axis.size, axis.placement))
    }
}
