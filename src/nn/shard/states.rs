//! States between ranks: matrices that are stored and read as tokens, and affine maps of them.

use super::rows::Rows;
use super::segments::Segment;
use super::{ExtendedTokens, ShardBlocks};
use crate::nn::LayerError;
use crate::nn::columns::copy;
use candle_core::Tensor;
use std::ops::Range;
use ulysses_kernels::strided_copy::{StridedBlock, copy_blocks};
use ulysses_kernels::{Workspace, elementwise, linear};

/// The state after a range of tokens as a function of the state before it, `matrix · state + constant`, per sequence and head; or the
/// gradient of the state before it as a function of that after it, with the transposed matrix.
#[derive(Debug, Default)]
pub(in crate::nn) struct AffineMap {
    /// `[batch, heads, key_dim, value_dim]`; `None` if no range gets the result.
    pub(in crate::nn) constant: Option<Tensor>,
    /// `[batch, heads, key_dim, key_dim]`; `None` if the range gets no state, or no gradient of one.
    pub(in crate::nn) matrix: Option<Tensor>,
}

/// The direction in which states, or their gradients, pass through the sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::nn) enum Direction {
    /// To later tokens.
    Forward,
    /// To earlier ones.
    Backward,
}

/// The map of one range.
struct Link {
    /// The number of ranges before it, in a direction.
    place: usize,
    map: AffineMap,
    /// Its index among this rank's ranges, if it is one of them.
    own: Option<usize>,
}

impl ExtendedTokens {
    /// Sends the maps of this rank's ranges, whose constants it takes, to all ranks that have a range further in this direction. Returns
    /// the state, or the gradient, that comes to each of this rank's ranges; `None` for the first of all in this direction. Collective.
    ///
    /// # Shapes
    /// `dims`: those of constants. Result: as a constant.
    pub(in crate::nn) fn pass_on(
        &self,
        own: &mut [AffineMap],
        dims: [usize; 4],
        direction: Direction,
        ws: &Workspace,
    ) -> Result<Vec<Option<Tensor>>, LayerError> {
        let mut links = self.exchange_maps(own, dims, direction, ws)?;
        links.sort_unstable_by_key(|link| link.place);
        let farthest = links.iter().rposition(|link| link.own.is_some());
        let (mut states, mut state) = (vec![None; own.len()], None);
        for (index, Link { map, own, .. }) in links.into_iter().enumerate() {
            if let Some(own) = own {
                states[own].clone_from(&state);
            }
            if Some(index) == farthest {
                map.constant.into_iter().for_each(|constant| ws.recycle(constant));
                break;
            }
            let next = apply(&map, state.as_ref(), direction)?;
            // The caller keeps the states before its own ranges, and their matrices.
            if own.is_none() {
                state.into_iter().chain(map.matrix).for_each(|tensor| ws.recycle(tensor));
            }
            state = next;
        }
        Ok(states)
    }

    /// The maps of this rank's ranges, and of those before its last one in this direction.
    fn exchange_maps(
        &self,
        own: &mut [AffineMap],
        dims: [usize; 4],
        direction: Direction,
        ws: &Workspace,
    ) -> Result<Vec<Link>, LayerError> {
        let (segments, rank, size) = (&self.segments, self.chain().rank(), self.segments.num_ranks());
        let place = |segment: &Segment| match direction {
            Direction::Forward => segment.place,
            Direction::Backward => segments.len - 1 - segment.place,
        };
        let sent = |sender: usize, receiver: usize| {
            let last = segments.on(receiver).iter().map(place).max().unwrap_or(0);
            segments.on(sender).iter().enumerate().filter(move |(_, segment)| place(segment) < last)
        };
        let whole = |index: usize, tensor: &Tensor| StridedBlock::contiguous(index, 0, tensor.elem_count());
        let mut blocks =
            ShardBlocks { send: vec![Vec::new(); size], receive: vec![Vec::new(); size], adds: false };

        let (mut inputs, mut own_blocks, mut links) = (Vec::new(), Vec::new(), Vec::new());
        for (index, (map, segment)) in own.iter_mut().zip(segments.own()).enumerate() {
            let first = inputs.len();
            let map = AffineMap { constant: map.constant.take(), matrix: map.matrix.clone() };
            inputs.extend(map.constant.iter().chain(&map.matrix).cloned());
            let map_blocks =
                inputs.iter().enumerate().skip(first).map(|(index, tensor)| whole(index, tensor));
            own_blocks.push(map_blocks.collect::<Vec<_>>());
            links.push(Link { place: place(segment), map, own: Some(index) });
        }
        let mut outputs = Vec::new();
        for other in (0..size).filter(|other| *other != rank) {
            blocks.send[other] = sent(rank, other).flat_map(|(index, _)| own_blocks[index].clone()).collect();
            for (_, segment) in sent(other, rank) {
                let place = place(segment);
                let [batch, heads, key_dim, value_dim] = dims;
                let alloc = |columns: usize| ws.alloc_f32((batch, heads, key_dim, columns));
                let matrix = (place > 0).then(|| alloc(key_dim)).transpose()?;
                let map = AffineMap { constant: Some(alloc(value_dim)?), matrix };
                for tensor in map.constant.iter().chain(&map.matrix) {
                    blocks.receive[other].push(whole(outputs.len(), tensor));
                    outputs.push(tensor.clone());
                }
                links.push(Link { place, map, own: None });
            }
        }
        self.chain().exchange(&inputs, &outputs, blocks, direction == Direction::Backward)?;
        Ok(links)
    }

    /// Reads the map of each range from the output of the recurrence, times `scale`: constants from the first `value_dim` columns of each
    /// head, matrices from the others.
    ///
    /// # Shapes
    /// `o`: `[batch, rows, heads, value_dim + key_dim]`, or without the last `key_dim` if no range has a matrix.
    pub(in crate::nn) fn read_maps(
        &self,
        o: &Tensor,
        value_dim: usize,
        scale: f32,
        ws: &Workspace,
    ) -> Result<Vec<AffineMap>, LayerError> {
        let (_, _, heads, width) = o.dims4()?;
        let read = |segment: &Segment, columns: Range<usize>| -> Result<Tensor, LayerError> {
            let states = read(o, self.state_after(o, segment).matrices(heads, columns), ws)?;
            elementwise::scale(&states, scale)?;
            Ok(states)
        };
        let map = |segment: &Segment| -> Result<AffineMap, LayerError> {
            let (is_first, is_last) = (self.segments.is_first(segment), self.segments.is_last(segment));
            let constant = (!is_last).then(|| read(segment, 0..value_dim)).transpose()?;
            let matrix = (!is_first && !is_last).then(|| read(segment, value_dim..width)).transpose()?;
            Ok(AffineMap { constant, matrix })
        };
        self.segments.own().iter().map(map).collect()
    }

    /// Reads the state before each range from its rows, `[batch, rows, heads, dim]`; `None` for the first of all.
    ///
    /// # Shapes
    /// Result: `[batch, heads, key_dim, dim]`.
    pub(in crate::nn) fn read_before(
        &self,
        rows: &Tensor,
        ws: &Workspace,
    ) -> Result<Vec<Option<Tensor>>, LayerError> {
        let (_, _, heads, dim) = rows.dims4()?;
        let read = |segment: &Segment| {
            let has_state = !self.segments.is_first(segment);
            has_state
                .then(|| read(rows, self.state_before(rows, segment).matrices(heads, 0..dim), ws))
                .transpose()
        };
        self.segments.own().iter().map(read).collect()
    }

    /// The inverse of [`read_before`](Self::read_before).
    pub(in crate::nn) fn store_before(
        &self,
        states: &[Option<Tensor>],
        rows: &Tensor,
    ) -> Result<(), LayerError> {
        self.store(states, rows, Self::state_before)
    }

    /// As [`store_before`](Self::store_before), of the states after the ranges.
    pub(in crate::nn) fn store_after(
        &self,
        states: &[Option<Tensor>],
        rows: &Tensor,
    ) -> Result<(), LayerError> {
        self.store(states, rows, Self::state_after)
    }

    fn store(
        &self,
        states: &[Option<Tensor>],
        rows: &Tensor,
        place: impl for<'a> Fn(&Self, &'a Tensor, &Segment) -> Rows<'a>,
    ) -> Result<(), LayerError> {
        let (_, _, heads, dim) = rows.dims4()?;
        for (state, segment) in states.iter().zip(self.segments.own()) {
            let Some(state) = state else { continue };
            let blocks = with_packed(place(self, rows, segment).matrices(heads, 0..dim));
            let copies: Vec<_> = blocks.map(|(block, packed)| copy(packed, block)).collect();
            copy_blocks(&[state], &[rows], &copies)?;
        }
        Ok(())
    }

    /// Writes `value` times the unit matrix to the rows of the states before the tokens, in the columns of each head from `first` on.
    pub(in crate::nn) fn write_units_before(
        &self,
        value: f32,
        rows: &Tensor,
        first: usize,
        ws: &Workspace,
    ) -> Result<(), LayerError> {
        let diagonals = |segment| self.state_before(rows, segment).diagonals(rows.dims()[2], first);
        write_units(value, rows, self.segments.own().iter().flat_map(diagonals).collect(), ws)
    }

    /// As [`write_units_before`](Self::write_units_before), after the tokens.
    pub(in crate::nn) fn write_units_after(
        &self,
        value: f32,
        rows: &Tensor,
        ws: &Workspace,
    ) -> Result<(), LayerError> {
        let diagonals = |segment| self.state_after(rows, segment).diagonals(rows.dims()[2], 0);
        write_units(value, rows, self.segments.own().iter().flat_map(diagonals).collect(), ws)
    }

    /// Sets the rows of the states before the tokens to 1.
    pub(in crate::nn) fn write_ones_before(&self, rows: &Tensor, ws: &Workspace) -> Result<(), LayerError> {
        let mut dims = rows.dims().to_vec();
        dims[1] = self.segments.around[0];
        let ones = ws.alloc_f32(dims)?;
        elementwise::fill(&ones, 1.0)?;
        for segment in self.segments.own() {
            let before = self.state_before(rows, segment);
            Rows::new(&ones, 0, before.len()).copy_to(before)?;
        }
        ws.recycle(ones);
        Ok(())
    }
}

/// The value of a map; `None` of one without a constant. Overwrites the constant.
fn apply(
    map: &AffineMap,
    state: Option<&Tensor>,
    direction: Direction,
) -> Result<Option<Tensor>, LayerError> {
    let Some(constant) = &map.constant else { return Ok(None) };
    if let (Some(state), Some(matrix)) = (state, &map.matrix) {
        let [matrices, states, constants] = [matrix, state, constant].map(|tensor| tensor.flatten_to(1));
        let (matrices, states, constants) = (matrices?, states?, constants?);
        for head in 0..matrices.dims()[0] {
            let [matrix, state, constant] = [&matrices, &states, &constants].map(|tensor| tensor.get(head));
            match direction {
                Direction::Forward => linear::backward_input(&matrix?, &state?, &constant?, true)?,
                Direction::Backward => linear::backward_weight(&matrix?, &state?, &constant?)?,
            }
        }
    }
    Ok(Some(constant.clone()))
}

/// Copies blocks to matrices of every sequence, one after another.
fn read(rows: &Tensor, blocks: Vec<StridedBlock>, ws: &Workspace) -> Result<Tensor, LayerError> {
    let (key_dim, columns) = blocks.first().map_or((0, 0), |block| (block.rows, block.run));
    let matrices = ws.alloc_f32((rows.dims()[0], blocks.len(), key_dim, columns))?;
    let copies: Vec<_> = with_packed(blocks).map(|(block, packed)| copy(block, packed)).collect();
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
    let unit = |to: StridedBlock| copy(StridedBlock { batch_stride: 0, ..to.packed_at(0) }, to);
    copy_blocks(&[&values], &[rows], &blocks.into_iter().map(unit).collect::<Vec<_>>())?;
    ws.recycle(values);
    Ok(())
}
