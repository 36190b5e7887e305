//! Dtypes and shapes of the ranks' tensors.

use crate::comm::{CommError, ProcessGroup, ProcessGroupExt};
use crate::mesh::DeviceMesh;
use crate::placement::{Layout, Placement, PlacementError};
use candle_core::Tensor;
use std::fmt;
use std::sync::Arc;
use ulysses_kernels::tensor::DTYPES;

/// Dtype and shape of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Form {
    /// Index in [`DTYPES`], or their number for another dtype.
    dtype: usize,
    pub(super) shape: Vec<usize>,
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dtype = DTYPES.get(self.dtype).map_or("another dtype", |dtype| dtype.as_str());
        write!(f, "{dtype} {:?}", self.shape)
    }
}

impl Form {
    fn of(tensor: &Tensor) -> Self {
        let dtype = DTYPES.iter().position(|dtype| *dtype == tensor.dtype()).unwrap_or(DTYPES.len());
        Self { dtype, shape: tensor.dims().to_vec() }
    }

    /// The forms of all ranks' tensors, in row-major order of the mesh. `along`: this rank's group along every axis.
    pub(super) fn gather(along: &[Arc<dyn ProcessGroup>], local: &Tensor) -> Result<Vec<Self>, CommError> {
        let Self { dtype, shape } = Self::of(local);
        let numbers = [dtype, shape.len()].into_iter().chain(shape);
        let mut records: Vec<i64> = numbers.map(|number| number as i64).collect();
        // The last axis is the fastest.
        for group in along.iter().rev() {
            records = group.all_gather_varied(&records)?.concat();
        }
        let (mut forms, mut rest) = (Vec::new(), records.as_slice());
        while let [dtype, dims, after @ ..] = rest {
            let (shape, after) = after.split_at(*dims as usize);
            let shape = shape.iter().map(|len| *len as usize).collect();
            forms.push(Self { dtype: *dtype as usize, shape });
            rest = after;
        }
        Ok(forms)
    }

    /// Compares the form at every coordinate with the expected one.
    pub(super) fn check(
        layout: &Layout,
        forms: &[Self],
        expected: impl Fn(&[usize]) -> Result<Self, PlacementError>,
    ) -> Result<(), PlacementError> {
        for (coordinate, got) in layout.coordinates().zip(forms) {
            let expected = expected(&coordinate)?;
            if *got != expected {
                let (layout, expected, got) = (layout.to_string(), expected.to_string(), got.to_string());
                return Err(PlacementError::OtherRank { layout, coordinate, expected, got });
            }
        }
        Ok(())
    }
}

/// The layout of which the ranks' tensors are the parts.
pub(super) fn common_layout(
    mesh: &DeviceMesh,
    placements: &[Placement],
    forms: &[Form],
) -> Result<Layout, PlacementError> {
    // All ranks must decide alike, so dimensions are those of the first one.
    let Form { dtype, shape } = &forms[0];
    let first = Layout::on_mesh(&**shape, mesh, placements)?;
    let length = |dim: usize| {
        // Ranks that differ along other axes only have the same part of this dimension.
        let counts = |coordinate: &[usize]| {
            let mut along = placements.iter().zip(coordinate);
            along.all(|(placement, index)| *index == 0 || *placement == Placement::Shard(dim))
        };
        let counted = first.coordinates().zip(forms).filter(|(coordinate, _)| counts(coordinate));
        counted.map(|(_, form)| form.shape.get(dim).copied().unwrap_or(0)).sum()
    };
    let layout = Layout::on_mesh((0..shape.len()).map(length).collect::<Vec<_>>(), mesh, placements)?;
    let expected = |at: &[usize]| Ok(Form { dtype: *dtype, shape: layout.local_shape(at)? });
    Form::check(&layout, forms, expected)?;
    Ok(layout)
}
