//! Groups along axes, slices, and reshaping of meshes.
//!
//! Everything builds on [`DeviceMesh::offsets`]: the positions that a set of axes reaches from the origin. A
//! submesh is these offsets, shifted to a position on the remaining axes.

use super::{Axis, DeviceMesh, MeshError, StatedAxis, axis, canonical_axis_name, num_ranks, resolve_axes};

impl DeviceMesh {
    /// Returns all groups along an axis, in row-major order of the other axes. Each group is ordered along the axis.
    ///
    /// # Errors
    /// Fails if the mesh has no such axis.
    pub fn all_groups(&self, axis: &str) -> Result<Vec<Vec<usize>>, MeshError> {
        Ok(self.rank_lists(&[self.axis_index(axis)?]))
    }

    /// Returns the group of a rank along an axis, ordered along the axis.
    ///
    /// # Errors
    /// Fails if the mesh has no such axis or the rank is not in the mesh.
    pub fn group_of(&self, axis: &str, global_rank: usize) -> Result<Vec<usize>, MeshError> {
        let axis = self.axis_index(axis)?;
        Ok(self.ranks_through(&[axis], self.position(global_rank)?))
    }

    /// Returns all submeshes over the given axes, in row-major order of the remaining axes.
    ///
    /// Axes must be in the order of the mesh, as in PyTorch's `DeviceMesh.__getitem__`: another order would create
    /// a group of the same ranks in another order.
    ///
    /// # Errors
    /// Fails if no axis is given, or an axis is unknown, repeated or out of order.
    pub fn slice(&self, axes: &[&str]) -> Result<Vec<Self>, MeshError> {
        let axes = self.ordered_axes(axes)?;
        self.rank_lists(&axes).into_iter().map(|ranks| self.submesh(&axes, ranks)).collect()
    }

    /// Returns the submesh over the given axes that contains a rank.
    ///
    /// # Errors
    /// Fails like [`slice`](Self::slice), or if the rank is not in the mesh.
    pub fn slice_for(&self, axes: &[&str], global_rank: usize) -> Result<Self, MeshError> {
        let axes = self.ordered_axes(axes)?;
        let ranks = self.ranks_through(&axes, self.position(global_rank)?);
        self.submesh(&axes, ranks)
    }

    /// Merges axes, adjacent or not, into one axis at the position of the first.
    ///
    /// The groups along the new axis are the ranks of each submesh over `axes`, row-major, as in PyTorch's
    /// `mesh["dp", "tp"]._flatten()`. PyTorch returns the group of one rank as a 1-D mesh; the equivalent is
    /// `mesh.slice_for(&["dp", "tp"], rank)?.flatten(&["dp", "tp"], name)`.
    ///
    /// # Errors
    /// Fails like [`slice`](Self::slice), or if the new name is invalid or used by a remaining axis.
    pub fn flatten(&self, axes: &[&str], new_name: &str) -> Result<Self, MeshError> {
        let merged = self.ordered_axes(axes)?;
        let merged_size = merged.iter().map(|&axis| self.axes[axis].size).product();
        let (mut new_axes, mut new_order) = (Vec::new(), Vec::new());
        for (index, axis) in self.axes.iter().enumerate() {
            if index == merged[0] {
                new_axes.push(Axis::new(canonical_axis_name(new_name), merged_size));
                new_order.extend(&merged);
            } else if !merged.contains(&index) {
                new_axes.push(axis.clone());
                new_order.push(index);
            }
        }
        let ranks = self.offsets(&new_order).into_iter().map(|position| self.ranks[position]).collect();
        Self::from_parts(new_axes, ranks)
    }

    /// Splits an axis into several axes at its position, the last one fastest.
    ///
    /// One size may be `-1`. This is the inverse of [`flatten`](Self::flatten) of adjacent axes, and PyTorch's
    /// `_unflatten`.
    ///
    /// # Errors
    /// Fails if the mesh has no such axis, the product of the sizes is not its size, or a name is invalid or in use.
    pub fn unflatten<A: Into<StatedAxis>>(
        &self,
        axis: &str,
        into: impl IntoIterator<Item = A>,
    ) -> Result<Self, MeshError> {
        let index = self.axis_index(axis)?;
        let Axis { name, size } = self.axes[index].clone();
        let into = resolve_axes(into, Some(size))?;
        let product = num_ranks(&into)?;
        if product != size {
            return Err(MeshError::UnflattenSize { axis: name, size, into: axis::list(&into), product });
        }
        let mut axes = self.axes.clone();
        axes.splice(index..=index, into);
        Self::from_parts(axes, self.ranks.clone())
    }

    /// Concatenates submeshes of this mesh into one mesh with all their axes, in the given order.
    ///
    /// This is PyTorch's `DeviceMesh._concatenate`. The parts are submeshes (slices, flattened slices) of one rank
    /// along different axes of `self`, and the result spans them. For example, the slices `dp` and `tp` of a rank
    /// give its slice `dp, tp`. Unlike in a slice, the axes may be in any order, renamed or flattened.
    ///
    /// # Errors
    /// Fails if `parts` is empty, a part has ranks outside this mesh, two parts share no rank or run along the same
    /// axis, or two axes have the same name.
    pub fn concatenate(&self, parts: &[Self]) -> Result<Self, MeshError> {
        let anchor = self.coordinate(common_rank(parts)?)?;
        let mut joined_along: Vec<Option<usize>> = vec![None; self.axes.len()];
        let mut coordinates = vec![anchor.clone()];
        for (index, part) in parts.iter().enumerate() {
            let steps =
                part.ranks.iter().map(|&rank| self.coordinate(rank)).collect::<Result<Vec<_>, _>>()?;
            for axis in (0..self.axes.len()).filter(|&axis| steps.iter().any(|at| at[axis] != anchor[axis])) {
                if let Some(earlier) = joined_along[axis].replace(index) {
                    return Err(MeshError::OverlappingAxes {
                        first: parts[earlier].to_string(),
                        other: part.to_string(),
                        axis: self.axes[axis].name.clone(),
                    });
                }
            }
            // Parts run along disjoint axes, so their coordinates can be combined.
            let is_own = |axis: usize| joined_along[axis] == Some(index);
            coordinates = coordinates
                .iter()
                .flat_map(|base| steps.iter().map(|step| compose(base, step, is_own)))
                .collect();
        }
        let ranks = coordinates.iter().map(|at| self.rank_at(at)).collect::<Result<_, _>>()?;
        Self::from_parts(parts.iter().flat_map(|part| part.axes.clone()).collect(), ranks)
    }

    /// Returns the positions reached from position 0 along `axes`, row-major in the order of `axes`.
    fn offsets(&self, axes: &[usize]) -> Vec<usize> {
        let strides = self.strides();
        axes.iter().fold(vec![0], |offsets, &axis| {
            let steps = |offset| (0..self.axes[axis].size).map(move |step| (offset, step));
            offsets.into_iter().flat_map(steps).map(|(offset, step)| offset + step * strides[axis]).collect()
        })
    }

    /// Returns the ranks of every submesh over `axes`, in row-major order of the other axes.
    fn rank_lists(&self, axes: &[usize]) -> Vec<Vec<usize>> {
        let others: Vec<usize> = (0..self.axes.len()).filter(|axis| !axes.contains(axis)).collect();
        let inside = self.offsets(axes);
        let list = |start: usize| inside.iter().map(|offset| self.ranks[start + offset]).collect();
        self.offsets(&others).into_iter().map(list).collect()
    }

    /// Returns the ranks of the submesh over `axes` that contains a position.
    fn ranks_through(&self, axes: &[usize], position: usize) -> Vec<usize> {
        let strides = self.strides();
        let inside: usize =
            axes.iter().map(|&axis| position / strides[axis] % self.axes[axis].size * strides[axis]).sum();
        self.offsets(axes).into_iter().map(|offset| self.ranks[position - inside + offset]).collect()
    }

    fn submesh(&self, axes: &[usize], ranks: Vec<usize>) -> Result<Self, MeshError> {
        Self::from_parts(axes.iter().map(|&axis| self.axes[axis].clone()).collect(), ranks)
    }

    /// Returns the indices of axes, which must be distinct and in the order of the mesh.
    fn ordered_axes(&self, names: &[&str]) -> Result<Vec<usize>, MeshError> {
        let axes = names.iter().map(|name| self.axis_index(name)).collect::<Result<Vec<_>, _>>()?;
        if axes.is_empty() {
            return Err(MeshError::NoAxes);
        }
        if axes.windows(2).any(|pair| pair[0] >= pair[1]) {
            let name = |axis: usize| self.axes[axis].name.clone();
            let valid = (0..self.axes.len()).filter(|axis| axes.contains(axis)).map(name).collect();
            return Err(MeshError::AxisOrder { requested: axes.into_iter().map(name).collect(), valid });
        }
        Ok(axes)
    }
}

/// Returns the first rank that all meshes contain.
fn common_rank(meshes: &[DeviceMesh]) -> Result<usize, MeshError> {
    let (first, others) = meshes.split_first().ok_or(MeshError::NoAxes)?;
    let mut common = first.ranks.clone();
    for other in others {
        common.retain(|rank| other.ranks.contains(rank));
        if common.is_empty() {
            return Err(MeshError::NoCommonRank { first: first.to_string(), other: other.to_string() });
        }
    }
    Ok(common[0])
}

/// Combines two coordinates: `step` on its own axes, `base` on all others.
fn compose(base: &[usize], step: &[usize], is_own: impl Fn(usize) -> bool) -> Vec<usize> {
    (0..base.len()).map(|axis| if is_own(axis) { step[axis] } else { base[axis] }).collect()
}
