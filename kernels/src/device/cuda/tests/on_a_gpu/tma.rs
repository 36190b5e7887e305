//! TMA and mbarriers, against the places of elements in the PTX ISA, and faults in their use.

use super::super::launcher;
use crate::device::cuda::fake_driver::{failure, in_order, with_failure};
use crate::device::{DeviceError, Grid, Kernel, sources};
use crate::tensor::to_vec;
use crate::testing::{device, on_a_gpu};
use candle_core::{DType, Device, Tensor};

/// `[sequence, row, head, head_dim]`.
const DIMS: [usize; 4] = [2, 75, 3, 128];

/// Rows of a tile, and bytes of two of them: `kRows` and `kStages` of `cuda/tests/tma.cu`.
const ROWS: usize = 16;
const SHARED: usize = 2 * ROWS * 128;

/// The first head, column and row, and tiles. The last tile ends after the last row.
const HEAD: usize = 1;
const COLUMN: usize = 64;
const FIRST_ROW: usize = 5;
const TILES: usize = 5;

/// A tensor of integers that bf16 stores exactly.
fn tensor(value_at: impl Fn(usize) -> usize) -> Tensor {
    let values: Vec<f32> = (0..DIMS.iter().product()).map(|i| value_at(i) as f32).collect();
    bf16_tensor(values, DIMS)
}

fn bf16_tensor(values: Vec<f32>, dims: [usize; 4]) -> Tensor {
    let on_the_host = Tensor::from_vec(values, &dims, &Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap();
    on_the_host.to_device(&device()).unwrap()
}

/// Copies the tiles, from a map of so many rows.
fn copy(x: &Tensor, map_rows: usize, fault: u32) -> Result<Tensor, DeviceError> {
    let y = bf16_tensor(vec![-1.0; DIMS[0] * TILES * ROWS * 64], [DIMS[0], TILES, ROWS, 64]);
    let launcher = launcher();
    launcher.open([&y], [x], |[to], [from]| {
        let map = launcher.tensor_map(from, [DIMS[0], map_rows, DIMS[2], DIMS[3]], ROWS)?;
        let grid = Grid { shared_bytes: SHARED, ..Grid::blocks(DIMS[0]).of_threads(96) };
        let scalars = [HEAD as u32, COLUMN as u32, FIRST_ROW as u32, TILES as u32, fault];
        let args = [&[to.into(), map.arg()], &scalars.map(Into::into)[..]].concat();
        // SAFETY: the parameters are those of the kernel. Faults run on the fake driver only, which checks accesses.
        unsafe { launcher.launch(&Kernel::new(&sources::tests::TMA, "test_tma_copy"), grid, &args) }
    })?;
    Ok(y)
}

#[test]
fn tiles_have_the_elements_of_their_places_and_zeros_after_the_last_row() {
    on_a_gpu(|| {
        for value_at in [|i| i % 256, |i| i / 256] {
            let [sequences, rows, heads, head_dim] = DIMS;
            let mut expected = Vec::new();
            for sequence in 0..sequences {
                for row in FIRST_ROW..FIRST_ROW + TILES * ROWS {
                    let first = ((sequence * rows + row) * heads + HEAD) * head_dim + COLUMN;
                    let value = |i| if row < rows { value_at(first + i) as f32 } else { 0.0 };
                    expected.extend((0..64).map(value));
                }
            }
            for seed in 0..4 {
                let copied = in_order(seed, || copy(&tensor(value_at), rows, 0)).unwrap();
                let copied = copied.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
                assert_eq!(to_vec::<f32>(&copied).unwrap(), expected, "seed {seed}");
            }
        }
    });
}

/// The faults of `cuda/tests/tma.cu` by number.
#[test]
fn faults_in_the_use_of_copies_are_found_on_the_fake_driver() {
    on_a_gpu(|| {
        // In other orders, some are found by another check.
        for (fault, expected) in [
            (1, "TMA with an mbarrier that was initialized without a fence for it"),
            (2, "which no thread of this block has written"),
            (3, "which no thread of this block has written"),
            (4, "a phase of an mbarrier never ends"),
            (5, "a phase of an mbarrier never ends"),
            (6, "waits for phase 0 of an mbarrier that is in phase 2"),
            (7, "a phase of an mbarrier never ends"),
            (8, "without a barrier after a read by the warp of thread"),
            (9, "waits for phase 1 of an mbarrier that is in phase 0"),
            (10, "more arrivals at an mbarrier than its 1"),
            (11, "TMA to an address that is not a multiple of 1024"),
            (12, "which no thread of this block has written"),
            (13, "a block ended before its copies by TMA"),
        ] {
            let message = failure(|| in_order(0, || copy(&tensor(|i| i % 256), DIMS[1], fault)).map(|_| ()));
            assert!(message.contains(expected), "fault {fault}: {message}");
        }
    });
}

#[test]
fn maps_of_other_tensors_are_found_on_the_fake_driver() {
    on_a_gpu(|| {
        let x = tensor(|i| i % 256);
        let message = failure(|| in_order(0, || copy(&x, DIMS[1] + 1, 0)).map(|_| ()));
        assert!(message.contains("reads 16 bytes outside of the tensors"), "{message}");
        let opened = launcher().open([], [&x], |[], [address]| {
            let map = |elements, dims| launcher().tensor_map(address.offset(elements), dims, ROWS);
            for (elements, dims, expected) in [
                (1, DIMS, "the tensor's address is not a multiple of 16"),
                (0, [1, 4, 1, 65], "a stride is not a multiple of 16 below 2^40"),
            ] {
                let (refused, message) = with_failure(|| map(elements, dims));
                assert!(matches!(refused, Err(DeviceError::TensorMap { .. })), "{refused:?}");
                assert_eq!(message.as_deref(), Some(expected));
            }
            // Nothing to copy from.
            map(0, [1, 0, 2, 64]).map(|_| ())
        });
        opened.unwrap();
    });
}
