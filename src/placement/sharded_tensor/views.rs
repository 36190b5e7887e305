//! Operations that only rename dimensions: no element changes its rank.

use super::ShardedTensor;
use super::rules::propagate;
use crate::mesh::shard_range;
use crate::placement::{Layout, Placement, PlacementError};
use Placement::{Replicate, Shard};

impl ShardedTensor {
    /// Exchanges two dimensions, and the placements that shard them.
    ///
    /// # Errors
    /// A dimension that the shape lacks.
    pub fn transpose(&self, dim1: usize, dim2: usize) -> Result<Self, PlacementError> {
        self.require_dims("a.transpose(dim1, dim2)", &[dim1, dim2])?;
        let mut shape = self.shape().to_vec();
        shape.swap(dim1, dim2);
        let moved = |placement: Placement| match placement {
            Shard(dim) if dim == dim1 => Shard(dim2),
            Shard(dim) if dim == dim2 => Shard(dim1),
            other => other,
        };
        let placements: Vec<_> = self.placements().into_iter().map(moved).collect();
        let layout = Layout::on_mesh(shape, self.groups.mesh(), &placements)?;
        self.with(layout, &self.local.transpose(dim1, dim2)?)
    }

    /// The items `start..start + len` of a dimension that is not sharded.
    ///
    /// # Errors
    /// Items that the dimension lacks, or a sharded dimension.
    pub fn narrow(&self, dim: usize, start: usize, len: usize) -> Result<Self, PlacementError> {
        let call = "a.narrow(dim, start, len)";
        self.require_dims(call, &[dim])?;
        let mut shape = self.shape().to_vec();
        if start.checked_add(len).is_none_or(|end| end > shape[dim]) {
            let expected = format!("at most {} items in dimension {dim}, got {len} from {start}", shape[dim]);
            return Err(PlacementError::Shape { call, shapes: vec![shape], expected });
        }
        shape[dim] = len;
        let rule = |placements: &[Placement]| Some(placements[0]).filter(|own| *own != Shard(dim));
        let layout = propagate(call, &[&self.layout], shape, rule)?;
        self.with(layout, &self.local.narrow(dim, start, len)?)
    }

    /// Inserts a dimension of length 1 before `dim`, or after the last one.
    ///
    /// # Errors
    /// A dimension beyond the shape.
    pub fn unsqueeze(&self, dim: usize) -> Result<Self, PlacementError> {
        let (call, mut shape) = ("a.unsqueeze(dim)", self.shape().to_vec());
        if dim > shape.len() {
            let expected = format!("a dimension up to {}, got {dim}", shape.len());
            return Err(PlacementError::Shape { call, shapes: vec![shape], expected });
        }
        shape.insert(dim, 1);
        let rule = |placements: &[Placement]| match placements[0] {
            Shard(own) if own >= dim => Some(Shard(own + 1)),
            other => Some(other),
        };
        let layout = propagate(call, &[&self.layout], shape, rule)?;
        self.with(layout, &self.local.unsqueeze(dim)?)
    }

    /// Removes a dimension of length 1 that is not sharded.
    ///
    /// # Errors
    /// A dimension that is longer, sharded or beyond the shape.
    pub fn squeeze(&self, dim: usize) -> Result<Self, PlacementError> {
        let call = "a.squeeze(dim)";
        self.require_dims(call, &[dim])?;
        let mut shape = self.shape().to_vec();
        if shape[dim] != 1 {
            let expected = format!("dimension {dim} of length 1");
            return Err(PlacementError::Shape { call, shapes: vec![shape], expected });
        }
        shape.remove(dim);
        let rule = |placements: &[Placement]| match placements[0] {
            Shard(own) if own == dim => None,
            Shard(own) if own > dim => Some(Shard(own - 1)),
            other => Some(other),
        };
        let layout = propagate(call, &[&self.layout], shape, rule)?;
        self.with(layout, &self.local.squeeze(dim)?)
    }

    /// The elements in the same row-major order, in another shape.
    ///
    /// A sharded dimension may stay as it is, be the first of several that become one, or be divided. Its shards must be
    /// those of the new dimension, to the element: of 4 rows of 3 on two ranks are 12 elements in halves, but of 3 rows
    /// are not 9 elements in halves.
    ///
    /// # Errors
    /// Another number of elements, or shards that are none of the new shape.
    pub fn reshape(&self, shape: &[usize]) -> Result<Self, PlacementError> {
        let call = "a.reshape(shape)";
        let elems = shape.iter().try_fold(1_usize, |elems, len| elems.checked_mul(*len));
        if elems != Some(self.shape().iter().product()) {
            let expected = format!("as many elements as {shape:?}");
            return Err(PlacementError::Shape { call, shapes: vec![self.shape().to_vec()], expected });
        }
        let mut new_dims: Vec<Option<usize>> = Vec::new();
        for dim in 0..self.shape().len() {
            let is_sharded = self.placements().contains(&Shard(dim));
            let mut free = (0..shape.len()).filter(|new| is_sharded && !new_dims.contains(&Some(*new)));
            let found = free.find(|new| self.has_same_shards(dim, shape, *new));
            new_dims.push(found);
        }
        let placed = |placement: Placement| match placement {
            Shard(dim) => new_dims[dim].map(Shard),
            other => Some(other),
        };
        let placements = self.placements();
        let Some(axis) = placements.iter().position(|placement| placed(*placement).is_none()) else {
            let placements: Vec<_> = placements.into_iter().filter_map(placed).collect();
            let layout = Layout::on_mesh(shape, self.groups.mesh(), &placements)?;
            let local = self.local.reshape(layout.local_shape(&self.coordinate)?)?;
            return self.with(layout, &local);
        };
        let whole = |placement: &Placement| placed(*placement).map_or(Replicate, |_| *placement);
        Err(PlacementError::NoRule {
            call,
            axis: self.layout.axes()[axis].name.clone(),
            placements: vec![placements[axis]],
            valid: vec![Some(placements.iter().map(whole).collect())],
        })
    }

    /// Whether the shards of a dimension are, on every rank, those of the dimension `new_dim` of another shape with as many
    /// elements. The dimensions before both must have as many items, so that both cut the same blocks.
    fn has_same_shards(&self, dim: usize, new_shape: &[usize], new_dim: usize) -> bool {
        let items = |shape: &[usize]| shape.iter().product::<usize>();
        if items(&self.shape()[..dim]) != items(&new_shape[..new_dim]) {
            return false;
        }
        let elems = |shape: &[usize], sharded: usize, coordinate: &[usize]| {
            let axes = self.layout.axes().iter().zip(coordinate);
            let own = axes.filter(|(axis, _)| axis.placement == Shard(dim));
            let range = own.fold(0..shape[sharded], |range, (axis, index)| {
                let part = shard_range(range.len(), axis.size, *index);
                range.start + part.start..range.start + part.end
            });
            let row = items(&shape[sharded + 1..]);
            range.start * row..range.end * row
        };
        self.layout.coordinates().all(|at| {
            let (own, new) = (elems(self.shape(), dim, &at), elems(new_shape, new_dim, &at));
            own == new || own.is_empty() && new.is_empty()
        })
    }
}
