//! States between ranks: matrices that are stored and read as tokens, and affine maps of them.

use super::rows::Rows;
use super::{ExtendedTokens, ShardBlocks};
use crate::nn::LayerError;
use candle_core::Tensor;
use std::ops::Range;
use ulysses_kernels::strided_copy::{BlockCopy, StridedBlock, copy_blocks};
use ulysses_kernels::{Workspace, elementwise, linear};

/// The state after a rank's tokens as a function of the state before them, `matrix · state + constant`, per sequence and head; or the
/// gradient of the state before them as a function of that after them, with the transposed matrix.
#[derive(Debug, Default)]
pub(in crate::nn) struct AffineMap {
    /// `[batch, heads, key_dim, value_dim]`
    pub(in crate::nn) constant: Option<Tensor>,
    /// `[batch, heads, key_dim, key_dim]`; `None` if the rank gets no state, or no gradient of one.
    pub(in crate::nn) matrix: Option<Tensor>,
}

/// The direction in which states, or their gradients, pass through the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::nn) enum Direction {
    /// To later tokens.
    Forward,
    /// To earlier ones.
    Backward,
}

impl ExtendedTokens {
    /// Sends a rank's map to all that are further in this direction. Returns the state, or the gradient, that comes to this rank; `None`
    /// on the first one in this direction. Collective.
    ///
    /// # Shapes
    /// `dims`: those of constants and matrices. Result: as a constant.
    pub(in crate::nn) fn pass_on(
        &self,
        own: &AffineMap,
        dims: [[usize; 4]; 2],
        direction: Direction,
        ws: &Workspace,
    ) -> Result<Option<Tensor>, LayerError> {
        let (rank, size) = (self.chain().rank(), self.num_ranks());
        let (senders, receivers): (Vec<usize>, _) = match direction {
            Direction::Forward => ((0..rank).collect(), rank + 1..size),
            Direction::Backward => ((rank + 1..size).rev().collect(), 0..rank),
        };
        let alloc = |dims: [usize; 4]| ws.alloc_f32(dims.to_vec());
        let map = |index: usize| -> Result<Vec<Tensor>, LayerError> {
            let dims = if index == 0 { &dims[..1] } else { &dims };
            Ok(dims.iter().map(|dims| alloc(*dims)).collect::<Result<_, _>>()?)
        };
        let received = (0..senders.len()).map(map).collect::<Result<Vec<_>, _>>()?;
        let whole =
            |(index, tensor): (usize, &Tensor)| StridedBlock::contiguous(index, 0, tensor.elem_count());
        let mut blocks =
            ShardBlocks { send: vec![Vec::new(); size], receive: vec![Vec::new(); size], adds: false };
        let outputs = received.concat();
        let mut of_outputs = outputs.iter().enumerate().map(whole);
        for (sender, map) in senders.into_iter().zip(&received) {
            blocks.receive[sender] = of_outputs.by_ref().take(map.len()).collect();
        }
        let inputs: Vec<Tensor> = own.constant.iter().chain(&own.matrix).cloned().collect();
        receivers.for_each(|receiver| blocks.send[receiver] = inputs.iter().enumerate().map(whole).collect());
        let is_backward = direction == Direction::Backward;
        self.chain().exchange(&inputs, &outputs, blocks, is_backward)?;
        let mut state = None;
        for map in received {
            state = Some(apply(map, state, direction, ws)?);
        }
        Ok(state)
    }

    /// Writes the state before the tokens, `[batch, heads, key_dim, dim]`, to their rows, `[batch, rows, heads, dim]`.
    pub(in crate::nn) fn store_before(&self, state: &Tensor, rows: &Tensor) -> Result<(), LayerError> {
        let (_, _, heads, dim) = rows.dims4()?;
        store(state, rows, self.state_before(rows).matrices(heads, 0..dim))
    }

    /// As [`store_before`](Self::store_before), of the state after the tokens.
    pub(in crate::nn) fn store_after(&self, state: &Tensor, rows: &Tensor) -> Result<(), LayerError> {
        let (_, _, heads, dim) = rows.dims4()?;
        store(state, rows, self.state_after(rows).matrices(heads, 0..dim))
    }

    /// The inverse of [`store_before`](Self::store_before).
    pub(in crate::nn) fn read_before(&self, rows: &Tensor, ws: &Workspace) -> Result<Tensor, LayerError> {
        let (_, _, heads, dim) = rows.dims4()?;
        read(rows, self.state_before(rows).matrices(heads, 0..dim), ws)
    }

    /// The inverse of [`store_after`](Self::store_after), for some of the columns.
    pub(in crate::nn) fn read_after(
        &self,
        rows: &Tensor,
        columns: Range<usize>,
        ws: &Workspace,
    ) -> Result<Tensor, LayerError> {
        read(rows, self.state_after(rows).matrices(rows.dims()[2], columns), ws)
    }

    /// Writes `value` times the unit matrix to the rows of the state before the tokens, in the columns of each head from `first` on.
    pub(in crate::nn) fn write_units_before(
        &self,
        value: f32,
        rows: &Tensor,
        first: usize,
        ws: &Workspace,
    ) -> Result<(), LayerError> {
        write_units(value, rows, self.state_before(rows).diagonals(rows.dims()[2], first), ws)
    }

    /// As [`write_units_before`](Self::write_units_before), after the tokens.
    pub(in crate::nn) fn write_units_after(
        &self,
        value: f32,
        rows: &Tensor,
        ws: &Workspace,
    ) -> Result<(), LayerError> {
        write_units(value, rows, self.state_after(rows).diagonals(rows.dims()[2], 0), ws)
    }

    /// Sets the rows of the state before the tokens to 1.
    pub(in crate::nn) fn write_ones_before(&self, rows: &Tensor, ws: &Workspace) -> Result<(), LayerError> {
        let before = self.state_before(rows);
        let mut dims = rows.dims().to_vec();
        dims[1] = before.len();
        let ones = ws.alloc_f32(dims)?;
        elementwise::fill(&ones, 1.0)?;
        super::rows::copy_rows((&ones, Rows::of_all(&ones)), (rows, before))?;
        ws.recycle(ones);
        Ok(())
    }
}

/// The value of a map, `[constant, matrix]`, or `[constant]` of the first one.
fn apply(
    map: Vec<Tensor>,
    state: Option<Tensor>,
    direction: Direction,
    ws: &Workspace,
) -> Result<Tensor, LayerError> {
    let mut map = map.into_iter();
    let constant = map.next().unwrap_or_else(|| unreachable!("every map has a constant"));
    if let (Some(state), Some(matrix)) = (state, map.next()) {
        let [matrices, states, constants] = [&matrix, &state, &constant].map(|tensor| tensor.flatten_to(1));
        let (matrices, states, constants) = (matrices?, states?, constants?);
        for head in 0..matrices.dims()[0] {
            let [matrix, state, constant] = [&matrices, &states, &constants].map(|tensor| tensor.get(head));
            match direction {
                Direction::Forward => linear::backward_input(&matrix?, &state?, &constant?, true)?,
                Direction::Backward => linear::backward_weight(&matrix?, &state?, &constant?)?,
            }
        }
        ws.recycle(matrix);
        ws.recycle(state);
    }
    Ok(constant)
}

/// Copies the matrices of every sequence, one after another, to blocks.
fn store(matrices: &Tensor, rows: &Tensor, blocks: Vec<StridedBlock>) -> Result<(), LayerError> {
    let copies: Vec<_> = with_packed(blocks)
        .map(|(block, packed)| BlockCopy { from: packed, to: block, accumulate: false })
        .collect();
    Ok(copy_blocks(&[matrices], &[rows], &copies)?)
}

/// The inverse of [`store`].
fn read(rows: &Tensor, blocks: Vec<StridedBlock>, ws: &Workspace) -> Result<Tensor, LayerError> {
    let (key_dim, columns) = blocks.first().map_or((0, 0), |block| (block.rows, block.run));
    let matrices = ws.alloc_f32((rows.dims()[0], blocks.len(), key_dim, columns))?;
    let copies: Vec<_> = with_packed(blocks)
        .map(|(block, packed)| BlockCopy { from: block, to: packed, accumulate: false })
        .collect();
    copy_blocks(&[rows], &[&matrices], &copies)?;
    Ok(matrices)
}

/// Each block with its place among those of its sequence, if they are one after another.
fn with_packed(blocks: Vec<StridedBlock>) -> impl Iterator<Item = (StridedBlock, StridedBlock)> {
    let heads = blocks.len();
    blocks.into_iter().enumerate().map(move |(head, block)| {
        let elems = block.rows * block.run;
        let packed = StridedBlock { batch_stride: heads * elems, ..block.packed_at(head * elems) };
        (block, packed)
    })
}

/// Writes a value to each element of the blocks.
fn write_units(
    value: f32,
    rows: &Tensor,
    blocks: Vec<StridedBlock>,
    ws: &Workspace,
) -> Result<(), LayerError> {
    let values = ws.alloc_f32(blocks.first().map_or(0, |block| block.rows))?;
    elementwise::fill(&values, value)?;
    let copy = |to: StridedBlock| {
        let from = StridedBlock { batch_stride: 0, ..to.packed_at(0) };
        BlockCopy { from, to, accumulate: false }
    };
    copy_blocks(&[&values], &[rows], &blocks.into_iter().map(copy).collect::<Vec<_>>())?;
    ws.recycle(values);
    Ok(())
}
