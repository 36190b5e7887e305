//! Each sanitizer finds a seeded fault, and accepts the same kernel without it.

use super::{floats, words};
use crate::device::cuda::fake_driver::{failure, in_order};
use crate::device::{DeviceError, sources};
use crate::testing::{device, on_a_gpu};
use candle_core::Tensor;

fn launch(
    name: &'static str,
    grid: [usize; 3],
    output: &Tensor,
    inputs: &[&Tensor],
    scalars: &[u32],
) -> Result<(), DeviceError> {
    super::launch((&sources::tests::FAULTS, name), grid, output, inputs, scalars)
}

/// One block of a warp, on 64 inputs and outputs.
fn run(name: &'static str, scalars: &[u32]) -> Result<(), DeviceError> {
    launch(name, [1, 32, 0], &floats(64), &[&floats(64)], scalars)
}

#[test]
fn misaligned_vector_accesses_are_found() {
    on_a_gpu(|| {
        run("fault_misaligned", &[4]).unwrap();
        let message = failure(|| run("fault_misaligned", &[5]));
        assert!(message.contains("common.cuh:") && message.contains("not a multiple of 16"), "{message}");
    });
}

#[test]
fn other_parameters_than_a_kernel_declares_are_refused() {
    on_a_gpu(|| {
        for scalars in [&[][..], &[1, 2]] {
            let refused = run("fault_reads_at", scalars).unwrap_err().to_string();
            assert!(refused.contains("expected the parameters W4 R4 u4, got W4 R4"), "{refused}");
        }
    });
}

#[test]
fn accesses_outside_of_the_tensors_are_found() {
    on_a_gpu(|| {
        run("fault_reads_at", &[63]).unwrap();
        let message = failure(|| run("fault_reads_at", &[64]));
        assert!(message.contains("reads 4 bytes at byte 256 of a tensor of 256 bytes"), "{message}");
        let message = failure(|| run("fault_writes_at", &[64]));
        assert!(message.contains("writes 4 bytes at byte 256 of a tensor of 256 bytes"), "{message}");
        assert!(message.contains("thread 0 of block (0, 0, 0)"), "{message}");
        let message = failure(|| run("fault_reads_at", &[1 << 30]));
        assert!(message.contains("outside of the tensors"), "{message}");
    });
}

#[test]
fn accesses_beside_a_view_are_found_though_its_storage_goes_on() {
    on_a_gpu(|| {
        let (whole, out) = (floats(64), floats(32));
        let view = whole.narrow(0, 0, 32).unwrap();
        let message = failure(|| launch("fault_reads_at", [1, 32, 0], &out, &[&view], &[32]));
        assert!(message.contains("of a tensor of 128 bytes"), "{message}");
    });
}

#[test]
fn writes_to_inputs_are_found() {
    on_a_gpu(|| {
        let message = failure(|| run("fault_writes_input", &[]));
        assert!(message.contains("that is read-only"), "{message}");
    });
}

#[test]
fn indices_out_of_bounds_are_found() {
    on_a_gpu(|| {
        run("fault_array_index", &[31]).unwrap();
        let message = failure(|| run("fault_array_index", &[32]));
        assert!(message.contains("faults.cu:") && message.contains("index out of the bounds"), "{message}");
        run("fault_shared_overrun", &[31]).unwrap();
        let message = failure(|| run("fault_shared_overrun", &[32]));
        assert!(message.contains("outside of the arrays in shared memory"), "{message}");
    });
}

#[test]
fn reads_of_unwritten_shared_memory_are_found_in_every_block() {
    on_a_gpu(|| {
        let blocks = |blocks, written| {
            let input = floats(64);
            launch("fault_shared_unwritten", [blocks, 64, 0], &floats(64), &[&input], &[written])
        };
        blocks(2, 64).unwrap();
        let message = failure(|| blocks(2, 63));
        assert!(
            message.contains("thread 63 ") && message.contains("which no thread of this block"),
            "{message}"
        );
    });
}

#[test]
fn more_shared_memory_than_a_block_has_is_refused() {
    on_a_gpu(|| {
        const MOST: usize = 227 * 1024;
        // The kernel has a static array of 128 bytes.
        let with_dynamic =
            |bytes| launch("fault_shared_overrun", [1, 32, bytes], &floats(32), &[&floats(32)], &[0]);
        with_dynamic(MOST - 128).unwrap();
        let message = failure(|| with_dynamic(MOST - 127));
        assert!(message.contains("48 KiB of static arrays, and 227 KiB with its dynamic ones"), "{message}");
        let refused = with_dynamic(MOST + 1).unwrap_err().to_string();
        assert!(refused.contains("232449 bytes of shared memory"), "{refused}");
    });
}

/// Barriers of `fault_shared_race`.
const SHUFFLE: u32 = 1;
const SYNCWARP: u32 = 2;
const SYNCTHREADS: u32 = 3;

#[test]
fn races_in_shared_memory_are_found() {
    on_a_gpu(|| {
        let race = |threads: usize, barrier, order| {
            let shared_bytes = 4 * threads;
            launch(
                "fault_shared_race",
                [1, threads, shared_bytes],
                &floats(threads),
                &[&floats(threads)],
                &[barrier, order],
            )
        };
        for order in [0, 1] {
            race(64, SYNCTHREADS, order).unwrap();
            race(32, SYNCTHREADS, order).unwrap();
            race(32, SYNCWARP, order).unwrap();
            // Shuffles order no memory accesses, and `__syncwarp` only those of one warp.
            for (threads, barrier) in [(32, 0), (64, 0), (32, SHUFFLE), (64, SHUFFLE), (64, SYNCWARP)] {
                for seed in 0..4 {
                    let message = failure(|| in_order(seed, || race(threads, barrier, order)));
                    let is_race = message.contains("without a barrier after the ");
                    // In some orders a thread reads before the write.
                    let is_unwritten =
                        order == 0 && message.contains("which no thread of this block has written");
                    assert!(
                        is_race || is_unwritten,
                        "{threads} threads, barrier {barrier}, seed {seed}: {message}"
                    );
                }
            }
        }
    });
}

#[test]
fn results_that_depend_on_the_order_of_blocks_or_threads_differ_by_seed() {
    on_a_gpu(|| {
        for (name, grid) in [("fault_order_of_blocks", [64, 32, 0]), ("fault_order_of_threads", [1, 64, 0])] {
            let sums = |seed| {
                let sums = floats(64);
                in_order(seed, || launch(name, grid, &sums, &[&floats(64)], &[])).unwrap();
                sums.to_vec1::<f32>().unwrap()
            };
            let ascending: Vec<f32> = (0..64).map(|i| (i * (i + 1) / 2) as f32).collect();
            assert_eq!(sums(0), ascending);
            for seed in 1..4 {
                assert_ne!(sums(seed), ascending, "{name}, seed {seed}");
                assert_eq!(sums(seed), sums(seed), "{name}: a seed repeats its order");
            }
        }
    });
}

#[test]
fn lanes_at_different_instructions_are_found() {
    on_a_gpu(|| {
        let message = failure(|| run("fault_diverged_warp", &[]));
        assert!(message.contains("the lanes of a warp are at different instructions"), "{message}");
    });
}

#[test]
fn a_failed_launch_leaves_the_next_one_intact() {
    on_a_gpu(|| {
        for _ in 0..3 {
            failure(|| run("fault_diverged_warp", &[]));
            run("fault_array_index", &[0]).unwrap();
        }
    });
}

#[test]
#[cfg(target_arch = "x86_64")]
fn products_and_sums_are_contracted_as_on_a_gpu() {
    on_a_gpu(|| {
        let x: Vec<f32> = (0..32).map(|i| 1.0 + i as f32 * 1e-4).collect();
        let y: Vec<f32> = x.iter().map(|x| x * x).collect();
        let tensor = |values: &[f32]| Tensor::from_slice(values, 32, &device()).unwrap();
        let out = floats(32);
        launch("test_contraction", [1, 32, 0], &out, &[&tensor(&x), &tensor(&y)], &[]).unwrap();
        let contracted =
            |(x, y): (&f32, &f32)| if std::is_x86_feature_detected!("fma") { x.mul_add(*x, -y) } else { 0.0 };
        let expected: Vec<f32> = x.iter().zip(&y).map(contracted).collect();
        assert_eq!(out.to_vec1::<f32>().unwrap(), expected);
    });
}

#[test]
fn uses_of_cp_async_before_its_completion_are_found() {
    on_a_gpu(|| {
        // In ascending order, lane 0 has waited when lane 1 reads its word.
        let copy = |fault| {
            let input = words((0..32).collect());
            launch("fault_cp_async_early", [1, 32, 128], &words(vec![0; 32]), &[&input], &[fault])
        };
        for (fault, expected) in [
            (0, "before the wait for the copy that writes it"),
            (1, "without a barrier after the write by"),
            (2, "before the wait for the copy that writes it"),
            (3, "before the wait for the copy that writes it"),
            (4, "before the wait for the copy that writes it"),
        ] {
            let message = failure(|| in_order(0, || copy(fault)));
            assert!(message.contains(expected), "{fault}: {message}");
        }
    });
}

#[test]
fn misaligned_addresses_of_tensor_core_instructions_are_found() {
    on_a_gpu(|| {
        let input = words((0..256).collect());
        let run = |name| launch(name, [1, 32, 1024], &words(vec![0; 32]), &[&input], &[]);
        let message = failure(|| run("fault_cp_async_misaligned"));
        assert!(message.contains("cp.async of 16 bytes at an address that is not a multiple"), "{message}");
        let message = failure(|| run("fault_ldmatrix_misaligned"));
        assert!(message.contains("a row of ldmatrix is not aligned to 16 bytes"), "{message}");
    });
}
