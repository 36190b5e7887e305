//! The launches of `cuda/strided_copy.cu`.

use super::{BlockCopy, StridedBlock};
use crate::device::{Address, Arg, DeviceError, Grid, Kernel, Launcher, sources::STRIDED_COPY};
use crate::tensor::StorageId;
use candle_core::{DType, Tensor};

const MAX_BLOCKS: usize = 48;
/// Units per thread block: 256 threads with 4 units each.
const THREADS: usize = Grid::THREADS as usize;
const TILE: usize = 4 * THREADS;
/// Maximum number of units of one block per launch: the kernel uses 32-bit indices.
const MAX_UNITS: usize = 1 << 31;

/// `struct Block` of the kernel.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Entry {
    from: u64,
    to: u64,
    from_batch: u64,
    from_row: u64,
    to_batch: u64,
    to_row: u64,
    rows: u32,
    run: u32,
    units: u32,
    first_tile: u32,
    step_batch: u32,
    step_row: u32,
    step_unit: u32,
    reserved: u32,
}

/// `struct Table` of the kernel.
#[repr(C)]
struct Table {
    blocks: [Entry; MAX_BLOCKS],
    count: u32,
    reserved: u32,
}

impl Table {
    fn bytes(&self) -> &[u8] {
        // SAFETY: only integers and no padding, so every byte is initialized.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }
}

pub(super) fn copy_blocks(
    launcher: &Launcher,
    dtype: DType,
    sources: &[&Tensor],
    targets: &[&Tensor],
    copies: &[BlockCopy],
) -> Result<(), DeviceError> {
    let copies: Vec<&BlockCopy> = copies.iter().filter(|copy| copy.to.elements() != Some(0)).collect();
    let from = Storages::of(sources, copies.iter().map(|copy| &copy.from));
    let to = Storages::of(targets, copies.iter().map(|copy| &copy.to));
    if copies.is_empty() {
        return Ok(());
    }
    launcher.open_slices(&to.opened, &from.opened, |addresses| {
        let (to_addresses, from_addresses) = addresses.split_at(to.opened.len());
        let views = to.views(to_addresses, targets).chain(from.views(from_addresses, sources));
        launcher.with_ranges(views, || {
            for wave in waves(&copies) {
                let mut pieces = Vec::with_capacity(wave.len());
                for copy in &wave {
                    let (from, to) =
                        (from.address(from_addresses, &copy.from), to.address(to_addresses, &copy.to));
                    pieces.push(Piece::new(copy, from, to));
                }
                launch(launcher, dtype, wave[0].accumulate, pieces)?;
            }
            Ok(())
        })
    })
}

/// The tensors of the blocks, with each storage opened once, since candle's locks must not be taken twice.
struct Storages<'a> {
    opened: Vec<&'a Tensor>,
    /// For every tensor, the index of its storage among the opened ones, and its offset from that in
    /// elements.
    places: Vec<Option<(usize, usize)>>,
}

impl<'a> Storages<'a> {
    fn of<'b>(tensors: &[&'a Tensor], blocks: impl Iterator<Item = &'b StridedBlock>) -> Self {
        let mut is_used = vec![false; tensors.len()];
        blocks.for_each(|block| is_used[block.tensor] = true);
        let begin = |tensor: &Tensor| tensor.layout().start_offset();
        let mut used: Vec<usize> = (0..tensors.len()).filter(|&index| is_used[index]).collect();
        // The first tensor of each storage is the one to open.
        used.sort_by_key(|&index| begin(tensors[index]));
        let mut opened: Vec<&Tensor> = Vec::new();
        let mut places = vec![None; tensors.len()];
        for index in used {
            let tensor = tensors[index];
            let known = opened.iter().position(|other| StorageId::of(other) == StorageId::of(tensor));
            let storage = known.unwrap_or_else(|| {
                opened.push(tensor);
                opened.len() - 1
            });
            places[index] = Some((storage, begin(tensor) - begin(opened[storage])));
        }
        Self { opened, places }
    }

    /// The address and number of elements of every tensor in use.
    fn views(&self, opened: &[Address], tensors: &[&Tensor]) -> impl Iterator<Item = (Address, usize)> {
        self.places.iter().zip(tensors).filter_map(|(place, tensor)| {
            let (storage, elements) = (*place)?;
            Some((opened[storage].offset(elements), tensor.elem_count()))
        })
    }

    /// Address of a block.
    fn address(&self, opened: &[Address], block: &StridedBlock) -> Option<Address> {
        let (storage, elements) = self.places[block.tensor]?;
        Some(opened[storage].offset(elements + block.offset))
    }
}

/// Divides copies into launches. Within a launch, no two copies write the same element, and either all
/// accumulate or none. A copy comes after all earlier ones in the list that it overlaps.
fn waves<'a>(copies: &[&'a BlockCopy]) -> Vec<Vec<&'a BlockCopy>> {
    let mut ranks: Vec<(usize, bool)> = Vec::with_capacity(copies.len());
    for (index, copy) in copies.iter().enumerate() {
        let overlapped =
            copies[..index].iter().zip(&ranks).filter(|(other, _)| copy.to.may_overlap(&other.to));
        let level = overlapped.map(|(_, (level, _))| level + 1).max().unwrap_or(0);
        ranks.push((level, copy.accumulate));
    }
    let mut order = ranks.clone();
    order.sort_unstable();
    order.dedup();
    let of_rank =
        |rank| copies.iter().zip(&ranks).filter(move |(_, other)| **other == rank).map(|(copy, _)| *copy);
    order.into_iter().map(|rank| of_rank(rank).collect()).collect()
}

/// A copy in bytes, with runs as few and long as possible.
#[derive(Debug, Clone, Copy)]
struct Piece {
    from: u64,
    to: u64,
    /// Distance between batches in bytes, of the source and of the target.
    batch_strides: [u64; 2],
    row_strides: [u64; 2],
    batch: usize,
    rows: usize,
    run_bytes: usize,
}

impl Piece {
    fn new(copy: &BlockCopy, from: Option<Address>, to: Option<Address>) -> Self {
        let size = to.map_or(1, |to| to.dtype().size_in_bytes());
        let bytes = |elements: [usize; 2]| elements.map(|elements| (elements * size) as u64);
        let (mut batch, mut rows, mut run_bytes) = (copy.to.batch, copy.to.rows, copy.to.run * size);
        let mut batch_strides = bytes([copy.from.batch_stride, copy.to.batch_stride]);
        let mut row_strides = bytes([copy.from.row_stride, copy.to.row_stride]);
        if rows == 1 || row_strides == [run_bytes as u64; 2] {
            // Contiguous: merged into one run. Then the batches become the rows.
            run_bytes *= rows;
            (rows, row_strides) = (batch, batch_strides);
            (batch, batch_strides) = (1, [0; 2]);
            if rows == 1 || row_strides == [run_bytes as u64; 2] {
                run_bytes *= rows;
                (rows, row_strides) = (1, [0; 2]);
            }
        } else if batch == 1 {
            batch_strides = [0; 2];
        }
        let [from, to] = [from, to].map(|address| address.map_or(0, Address::as_u64));
        Self { from, to, batch_strides, row_strides, batch, rows, run_bytes }
    }

    /// The widest unit that divides all addresses, strides and runs.
    fn unit(&self) -> usize {
        let strides = self.batch_strides.iter().chain(&self.row_strides);
        let all = strides.fold(self.from | self.to | self.run_bytes as u64 | 16, |all, stride| all | stride);
        1 << all.trailing_zeros()
    }

    /// Halves the copy until each piece has fewer than [`MAX_UNITS`] units.
    fn split(self, unit: usize, parts: &mut Vec<Piece>) {
        let runs = self.batch * self.rows;
        if (runs as u128) * (self.run_bytes / unit) as u128 <= MAX_UNITS as u128 - TILE as u128 {
            return parts.push(self);
        }
        let (mut first, mut second) = (self, self);
        let [from, to] = if self.batch > 1 {
            (first.batch, second.batch) = halves(self.batch);
            self.batch_strides.map(|stride| first.batch as u64 * stride)
        } else if self.rows > 1 {
            (first.rows, second.rows) = halves(self.rows);
            self.row_strides.map(|stride| first.rows as u64 * stride)
        } else {
            let (half, rest) = halves(self.run_bytes / unit);
            (first.run_bytes, second.run_bytes) = (half * unit, rest * unit);
            [first.run_bytes as u64; 2]
        };
        (second.from, second.to) = (self.from + from, self.to + to);
        first.split(unit, parts);
        second.split(unit, parts);
    }

    fn entry(&self, unit: usize, first_tile: u32) -> Entry {
        let run = self.run_bytes / unit;
        let (step_runs, step_unit) = (THREADS / run, THREADS % run);
        Entry {
            from: self.from,
            to: self.to,
            from_batch: self.batch_strides[0],
            from_row: self.row_strides[0],
            to_batch: self.batch_strides[1],
            to_row: self.row_strides[1],
            rows: self.rows as u32,
            run: run as u32,
            units: (self.batch * self.rows * run) as u32,
            first_tile,
            step_batch: (step_runs / self.rows) as u32,
            step_row: (step_runs % self.rows) as u32,
            step_unit: step_unit as u32,
            reserved: 0,
        }
    }
}

fn halves(count: usize) -> (usize, usize) {
    (count / 2, count - count / 2)
}

/// One launch per [`MAX_BLOCKS`] pieces, which write to disjoint places.
fn launch(
    launcher: &Launcher,
    dtype: DType,
    accumulate: bool,
    pieces: Vec<Piece>,
) -> Result<(), DeviceError> {
    let unit = pieces.iter().map(Piece::unit).min().unwrap_or(1);
    let (kernel, unit) = kernel(dtype, accumulate, unit);
    let mut parts = Vec::with_capacity(pieces.len());
    pieces.into_iter().for_each(|piece| piece.split(unit, &mut parts));
    for parts in parts.chunks(MAX_BLOCKS) {
        let mut table =
            Table { blocks: [Entry::default(); MAX_BLOCKS], count: parts.len() as u32, reserved: 0 };
        let mut tiles = 0;
        for (entry, part) in table.blocks.iter_mut().zip(parts) {
            *entry = part.entry(unit, tiles as u32);
            tiles += (entry.units as usize).div_ceil(TILE);
        }
        // SAFETY: the op has checked that all blocks lie within the tensors that their addresses were opened
        // from, with the targets opened for writing.
        unsafe { launcher.launch(&kernel, Grid::blocks(tiles), &[Arg::Struct(table.bytes())])? };
    }
    Ok(())
}

/// The kernel and the bytes of its unit, if all blocks allow units of `unit` bytes.
fn kernel(dtype: DType, accumulate: bool, unit: usize) -> (Kernel, usize) {
    let suffix = dtype.as_str();
    if !accumulate {
        return (Kernel::named(&STRIDED_COPY, format!("strided_copy_{unit}")), unit);
    }
    match unit {
        16 => (Kernel::named(&STRIDED_COPY, format!("strided_copy_add_packs_{suffix}")), unit),
        _ => (Kernel::named(&STRIDED_COPY, format!("strided_copy_add_{suffix}")), dtype.size_in_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(batch: usize, rows: usize, run_bytes: usize) -> Piece {
        let (row_strides, batch_strides) = ([run_bytes as u64 * 2, run_bytes as u64 * 3], [1 << 40, 1 << 41]);
        Piece { from: 1 << 50, to: 1 << 51, batch_strides, row_strides, batch, rows, run_bytes }
    }

    /// Offset in bytes of the piece's `index`-th unit, in the source and in the target.
    fn place(piece: &Piece, unit: usize, index: usize) -> [u64; 2] {
        let run = piece.run_bytes / unit;
        let (runs, unit_index) = (index / run, index % run);
        let (b, r) = ((runs / piece.rows) as u64, (runs % piece.rows) as u64);
        [0, 1].map(|side| {
            [piece.from, piece.to][side]
                + b * piece.batch_strides[side]
                + r * piece.row_strides[side]
                + (unit_index * unit) as u64
        })
    }

    #[test]
    fn pieces_too_large_for_32_bits_are_split_at_batches_then_rows_then_within_a_run() {
        for (batch, rows, run_bytes, unit) in
            [(3, 5, 1 << 30, 1), (1, 3, 3 << 30, 2), (1, 1, 7 << 31, 1), (2, 3, 64, 16)]
        {
            let whole = piece(batch, rows, run_bytes);
            let mut parts = Vec::new();
            whole.split(unit, &mut parts);
            let mut index = 0;
            for part in &parts {
                let units = part.batch * part.rows * (part.run_bytes / unit);
                assert!(units < MAX_UNITS - TILE + 1);
                assert_eq!(place(part, unit, 0), place(&whole, unit, index));
                assert_eq!(place(part, unit, units - 1), place(&whole, unit, index + units - 1));
                index += units;
            }
            assert_eq!(index, batch * rows * (run_bytes / unit), "every unit once");
            assert_eq!(parts.len() > 1, batch * rows * run_bytes / unit >= MAX_UNITS);
        }
    }

    #[test]
    fn the_unit_is_the_widest_that_addresses_strides_and_runs_allow() {
        let aligned = Piece { row_strides: [64, 96], ..piece(2, 3, 32) };
        assert_eq!(aligned.unit(), 16);
        assert_eq!(Piece { from: aligned.from + 8, ..aligned }.unit(), 8);
        assert_eq!(Piece { run_bytes: 28, ..aligned }.unit(), 4);
        assert_eq!(Piece { row_strides: [64, 98], ..aligned }.unit(), 2);
        assert_eq!(Piece { batch_strides: [1, 0], ..aligned }.unit(), 1);
    }
}
