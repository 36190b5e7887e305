//! The outputs of a layer within a parameter that other layers share.

use super::WeightLayout;
use crate::nn::LayerError;
use candle_core::Tensor;
use std::ops::Range;
use ulysses_kernels::strided_copy::{BlockCopy, StridedBlock, copy_blocks};
use ulysses_kernels::{Workspace, elementwise, tensor};

/// Where a layer's outputs are among those of a parameter: runs of adjacent ones, each `stride` after the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Outputs {
    // A model keeps those of every layer.
    start: u32,
    len: u32,
    run: u32,
    stride: u32,
}

impl Outputs {
    /// All in one run.
    pub(super) fn adjacent(range: Range<usize>) -> Self {
        let len = range.len();
        Self::runs(range.start, len, [len; 2])
    }

    /// `len` outputs in runs from `start` on.
    pub(super) fn runs(start: usize, len: usize, [run, stride]: [usize; 2]) -> Self {
        let [start, len, run, stride] = [start, len, run, stride].map(|size| size as u32);
        Self { start, len, run, stride }
    }

    pub(super) fn len(self) -> usize {
        self.len as usize
    }

    /// As many as `len`, from the first on.
    pub(super) fn with_len(self, len: usize) -> Self {
        Self { len: len as u32, ..self }
    }

    /// Those of other layers are between its runs.
    pub(super) fn is_interleaved(self) -> bool {
        self.stride > self.run
    }

    /// Whether one end of a range is within a run that has other layers around it.
    pub(super) fn cuts_run(self, range: &Range<usize>) -> bool {
        let run = self.run.max(1) as usize;
        self.is_interleaved() && !(range.start.is_multiple_of(run) && range.end.is_multiple_of(run))
    }

    /// Some of the outputs: whole runs, or any in one run.
    pub(super) fn part(self, range: &Range<usize>) -> Self {
        Self { start: self.place(range.start) as u32, len: range.len() as u32, ..self }
    }

    /// The places of some outputs, with those of other layers between them.
    pub(super) fn span(self, range: &Range<usize>) -> Range<usize> {
        match self.is_interleaved() {
            true => {
                let first = |output: usize| output / self.run as usize * self.stride as usize;
                first(range.start)..first(range.end)
            }
            false => self.place(range.start)..self.place(range.start) + range.len(),
        }
    }

    fn place(self, output: usize) -> usize {
        let [start, run, stride] = [self.start, self.run.max(1), self.stride].map(|size| size as usize);
        start + output / run * stride + output % run
    }

    /// The number of runs, and the length of each.
    fn shape(self) -> (usize, usize) {
        match self.len > self.run {
            true => ((self.len / self.run.max(1)) as usize, self.run as usize),
            false => (1, self.len()),
        }
    }
}

/// The weights of some outputs in a parameter or its gradient.
pub(super) struct Part {
    whole: Tensor,
    layout: WeightLayout,
    outputs: Outputs,
}

impl Part {
    pub(super) fn new(whole: &Tensor, layout: WeightLayout, outputs: Outputs) -> Self {
        Self { whole: whole.clone(), layout, outputs }
    }

    pub(super) fn for_bias(whole: &Tensor, outputs: Outputs) -> Self {
        Self::new(whole, WeightLayout::OutIn, outputs)
    }

    /// The part, sharing the storage, if its elements are adjacent there.
    fn view(&self) -> Result<Option<Tensor>, LayerError> {
        let (runs, _) = self.outputs.shape();
        let dim = self.layout.output_dim();
        let is_whole = self.outputs.len() == self.whole.dims()[dim];
        match runs == 1 && (dim == 0 || is_whole) {
            true => Ok(Some(self.whole.narrow(dim, self.outputs.start as usize, self.outputs.len())?)),
            false => Ok(None),
        }
    }

    /// The part, or a copy of it.
    pub(super) fn read(&self) -> Result<Tensor, LayerError> {
        if let Some(view) = self.view()? {
            return Ok(view);
        }
        let packed = tensor::empty(self.dims(), self.whole.dtype(), self.whole.device())?;
        let (from, to) = self.blocks();
        // candle would load its kernel for such a copy at the first use, while an exchange may be under way, and loading
        // may wait for it.
        copy_blocks(&[&self.whole], &[&packed], &[BlockCopy { from, to, accumulate: false }])?;
        Ok(packed)
    }

    /// Calls `add` with a tensor to add the part's gradient to.
    pub(super) fn add(
        &self,
        add: impl FnOnce(&Tensor) -> Result<(), LayerError>,
        ws: &Workspace,
    ) -> Result<(), LayerError> {
        if let Some(view) = self.view()? {
            return add(&view);
        }
        let packed = ws.alloc_f32(self.dims())?;
        elementwise::fill(&packed, 0.0)?;
        add(&packed)?;
        let (to, from) = self.blocks();
        copy_blocks(&[&packed], &[&self.whole], &[BlockCopy { from, to, accumulate: true }])?;
        ws.recycle(packed);
        Ok(())
    }

    fn dims(&self) -> Vec<usize> {
        let mut dims = self.whole.dims().to_vec();
        dims[self.layout.output_dim()] = self.outputs.len();
        dims
    }

    /// The part within the whole, and as a tensor of its own.
    fn blocks(&self) -> (StridedBlock, StridedBlock) {
        let (rows, run) = self.outputs.shape();
        let [start, row_stride] = [self.outputs.start, self.outputs.stride].map(|place| place as usize);
        let width = self.whole.elem_count() / self.whole.dims()[0].max(1);
        let within = match self.layout {
            WeightLayout::OutIn => StridedBlock {
                tensor: 0,
                offset: start * width,
                batch: 1,
                batch_stride: 0,
                rows,
                row_stride: row_stride * width,
                run: run * width,
            },
            WeightLayout::InOut => StridedBlock {
                tensor: 0,
                offset: start,
                batch: self.whole.dims()[0],
                batch_stride: width,
                rows,
                row_stride,
                run,
            },
        };
        let packed = within.packed_at(0);
        (within, packed)
    }
}
