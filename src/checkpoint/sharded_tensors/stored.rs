//! [`StoredTensors`]: reads slices of tensors from files that have whole tensors, or ranks' slices of them.

use super::table::{TABLE, TensorTable};
use crate::checkpoint::CheckpointError;
use crate::model::{HfWeights, TensorFile};
use crate::placement::{Layout, LayoutAxis, Placement, PlacementError, transfers};
use candle_core::{DType, Device, Tensor};
use safetensors::Dtype;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use ulysses_kernels::tensor::{self, DTYPE_NAMES, DTYPES};

/// The tensors of a directory or a file. Files are opened when they are needed, and only their headers are in memory.
pub(super) struct StoredTensors {
    /// The directory of tensors with its table, if it is one.
    table: Option<(PathBuf, TensorTable)>,
    files: Vec<Option<TensorFile>>,
    pub(super) tensors: BTreeMap<String, StoredTensor>,
}

/// A tensor, and where its slices are.
#[derive(Clone)]
pub(super) struct StoredTensor {
    dtype: Dtype,
    /// Of the ranks that saved it. A whole tensor has a layout on a mesh without axes.
    layout: Layout,
    /// The ranks that wrote slices, by index in `files`.
    files: Vec<usize>,
}

impl StoredTensor {
    /// Shape of the logical tensor.
    pub(super) fn shape(&self) -> &[usize] {
        self.layout.shape()
    }
}

impl StoredTensors {
    /// Opens a directory of tensors, a model directory, or a safetensors file. Of a directory of tensors it verifies every
    /// `ranks`-th file, from file `rank` on.
    pub(super) fn open(path: &Path, rank: usize, ranks: usize) -> Result<Self, CheckpointError> {
        if path.join(TABLE).exists() {
            let table = TensorTable::read(path)?;
            let num_files = table.files.len();
            (rank..num_files).step_by(ranks).try_for_each(|file| table.verify(path, file))?;
            let all = table.tensors().map_err(CheckpointError::of_tensor(TABLE))?;
            let stored = all.into_iter().map(|(name, dtype, layout)| {
                (name.to_owned(), StoredTensor { dtype, layout, files: table.writers(name).to_vec() })
            });
            let tensors = stored.collect();
            let files = (0..num_files).map(|_| None).collect();
            return Ok(Self { table: Some((path.to_owned(), table)), files, tensors });
        }
        let weights = if path.is_dir() { HfWeights::open(path)? } else { HfWeights::open_file(path)? };
        let (files, places) = weights.into_files();
        let mut tensors = BTreeMap::new();
        for (name, file) in places {
            let Some(info) = files[file].info(&name) else { continue };
            let layout = Layout::new(&*info.shape, []).map_err(CheckpointError::of_tensor(&name))?;
            tensors.insert(name, StoredTensor { dtype: info.dtype, layout, files: vec![file] });
        }
        Ok(Self { table: None, files: files.into_iter().map(Some).collect(), tensors })
    }

    /// Reads the part that the rank at a coordinate has of a tensor in another layout. Along a `Partial` axis, only the first
    /// rank has elements that are not zero.
    pub(super) fn read(
        &mut self,
        name: &str,
        to: &Layout,
        coordinate: &[usize],
        device: &Device,
    ) -> Result<Tensor, CheckpointError> {
        let in_tensor = CheckpointError::of_tensor::<PlacementError>;
        let StoredTensor { dtype, layout, files } = self.tensors[name].clone();
        let known = DType::try_from(dtype).ok().filter(|dtype| DTYPES.contains(dtype));
        let Some(dtype) = known else {
            let path = match (files.first(), &self.table) {
                (None, Some((dir, _))) => dir.join(TABLE),
                (file, _) => self.file(file.copied().unwrap_or(0))?.path().to_owned(),
            };
            let reason = format!("dtype is {dtype:?}; {DTYPE_NAMES} can be loaded");
            return Err(CheckpointError::Tensor { path, tensor: name.to_owned(), reason });
        };
        let needed = to.local_slices(coordinate).map_err(in_tensor(name))?;
        let shape: Vec<usize> = needed.iter().map(ExactSizeIterator::len).collect();
        let is_zero =
            |(axis, index): (&LayoutAxis, &usize)| axis.placement == Placement::Partial && *index > 0;
        let numel: usize = shape.iter().product();
        if numel == 0 || to.axes().iter().zip(coordinate).any(is_zero) {
            return tensor::zeros(shape, dtype, device).map_err(|error| in_tensor(name)(error.into()));
        }
        let mut bytes = vec![0; numel * dtype.size_in_bytes()];
        let holders: Vec<_> = layout.coordinates().collect();
        for file in files {
            // A whole tensor has one holder, in whatever file it is.
            let holder = holders.get(file).unwrap_or(&holders[0]);
            let held = layout.local_slices(holder).map_err(in_tensor(name))?;
            self.copy(name, file, &held, &needed, dtype.size_in_bytes(), &mut bytes)?;
        }
        Tensor::from_raw_buffer(&bytes, dtype, &shape, device).map_err(|error| in_tensor(name)(error.into()))
    }

    /// Copies the elements that both slices have from a file to `out`. An element has `elem_bytes`.
    fn copy(
        &mut self,
        name: &str,
        file: usize,
        held: &[Range<usize>],
        needed: &[Range<usize>],
        elem_bytes: usize,
        out: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let copies = transfers(held, needed);
        if copies.is_empty() {
            return Ok(());
        }
        let file = self.file(file)?;
        for copy in copies {
            let len = copy.to.run * elem_bytes;
            for (from, to) in copy.from.runs().zip(copy.to.runs()) {
                let (from, to) = (from * elem_bytes, to * elem_bytes);
                file.read_bytes(name, from..from + len, &mut out[to..to + len])?;
            }
        }
        Ok(())
    }

    fn file(&mut self, index: usize) -> Result<&TensorFile, CheckpointError> {
        let opened = match (self.files[index].take(), &self.table) {
            (None, Some((dir, table))) => table.open(dir, index)?,
            (Some(open), _) => open,
            (None, None) => unreachable!("the files of a model are open"),
        };
        Ok(self.files[index].insert(opened))
    }
}
