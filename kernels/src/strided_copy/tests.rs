use super::*;
use crate::element::Arithmetic;
use crate::tensor::{Element, to_vec};
use crate::testing::{device, on_every_target};
#[cfg(feature = "cuda")]
use candle_core::backend::BackendStorage;
use candle_core::{DType, Storage, Tensor};

/// A tensor of `len` elements that begins `before` elements into its storage.
fn tensor<T: Element>(before: usize, len: usize, element: impl Fn(usize) -> T) -> Tensor {
    let elements: Vec<T> = (0..before + len + 3).map(|i| element(i.wrapping_sub(before))).collect();
    let flat = Tensor::from_vec(elements, before + len + 3, &device()).unwrap();
    flat.narrow(0, before, len).unwrap()
}

/// The whole storage behind a view of [`tensor`], as bytes.
fn whole_storage<T: Element>(view: &Tensor) -> Vec<T> {
    let (storage, _) = view.storage_and_layout();
    let on_the_host = match &*storage {
        Storage::Cpu(storage) => storage.clone(),
        #[cfg(feature = "cuda")]
        Storage::Cuda(storage) => storage.to_cpu_storage().unwrap(),
        _ => panic!("a tensor on the CPU or a GPU"),
    };
    T::cpu_storage_as_slice(&on_the_host).unwrap().to_vec()
}

fn small<T: Element>(value: usize) -> T {
    T::from_f64((value % 61) as f64)
}

fn block(
    tensor: usize,
    offset: usize,
    batch: (usize, usize),
    rows: (usize, usize),
    run: usize,
) -> StridedBlock {
    let ((batch, batch_stride), (rows, row_stride)) = (batch, rows);
    StridedBlock { tensor, offset, batch, batch_stride, rows, row_stride, run }
}

/// Compares with the definition, including the surroundings of the targets.
fn check<T: Arithmetic>(what: &str, befores: [usize; 2], lens: [usize; 2], copies: &[BlockCopy]) {
    let sources: Vec<Tensor> =
        (0..2).map(|k| tensor(befores[0], lens[0], |i| small::<T>(i.wrapping_add(17 * k)))).collect();
    let targets: Vec<Tensor> =
        (0..2).map(|k| tensor(befores[1], lens[1], |i| small::<T>(i.wrapping_add(29 * k)))).collect();
    let mut expected: Vec<Vec<T>> = targets.iter().map(whole_storage::<T>).collect();
    for BlockCopy { from, to, accumulate } in copies {
        let source: Vec<T> = to_vec(&sources[from.tensor]).unwrap();
        reference::for_each_element(from, to, |from_at, to_at| {
            let target = &mut expected[to.tensor][befores[1] + to_at];
            let old = if *accumulate { target.to_f64() } else { 0.0 };
            *target = T::from_f64(old + source[from_at].to_f64());
        });
    }
    copy_blocks(&sources.iter().collect::<Vec<_>>(), &targets.iter().collect::<Vec<_>>(), copies).unwrap();
    for (k, (target, expected)) in targets.iter().zip(&expected).enumerate() {
        assert!(
            whole_storage::<T>(target) == *expected,
            "{what} {:?} target {k} {befores:?} {copies:?}",
            T::DTYPE
        );
    }
}

fn check_every_dtype(what: &str, befores: [usize; 2], lens: [usize; 2], copies: &[BlockCopy]) {
    check::<f32>(what, befores, lens, copies);
    check::<f64>(what, befores, lens, copies);
    check::<half::bf16>(what, befores, lens, copies);
    check::<half::f16>(what, befores, lens, copies);
    check::<i64>(what, befores, lens, copies);
    check::<u32>(what, befores, lens, copies);
    check::<u8>(what, befores, lens, copies);
}

#[test]
fn blocks_of_any_layout_and_offset_are_copied_and_added_as_defined() {
    let layouts = [
        ((3, 120), (4, 16)),
        ((3, 100), (4, 24)),
        ((2, 160), (7, 17)),
        ((2, 16), (3, 40)),
        ((1, 0), (5, 16)),
        ((4, 64), (1, 0)),
    ];
    on_every_target(|target| {
        for (batch, rows) in layouts {
            for (to_batch, to_rows) in layouts.into_iter().filter(|to| (to.0.0, to.1.0) == (batch.0, rows.0))
            {
                for (offsets, run) in
                    [([0, 0], 16), ([16, 8], 8), ([8, 4], 4), ([2, 6], 6), ([1, 5], 7), ([3, 3], 1)]
                {
                    let (from, to) = (
                        block(1, offsets[0], batch, rows, run),
                        block(0, offsets[1], to_batch, to_rows, run),
                    );
                    for (accumulate, befores) in
                        [(false, [0, 0]), (true, [0, 0]), (false, [1, 3]), (true, [8, 4])]
                    {
                        let copies = [BlockCopy { from: from.clone(), to: to.clone(), accumulate }];
                        check_every_dtype(target, befores, [400; 2], &copies);
                    }
                }
            }
        }
    });
}

#[test]
fn copies_of_a_list_happen_in_order_where_they_meet() {
    let run = |tensor, offset, run| StridedBlock::contiguous(tensor, offset, run);
    let copies: Vec<BlockCopy> = [
        (run(0, 0, 50), run(0, 10, 50), false),
        (run(1, 3, 30), run(0, 20, 30), true),
        (run(0, 70, 30), run(0, 40, 30), false),
        (run(1, 9, 64), run(1, 0, 64), true),
        (run(0, 9, 64), run(1, 16, 64), true),
        (run(1, 0, 16), run(0, 32, 16), true),
    ]
    .into_iter()
    .map(|(from, to, accumulate)| BlockCopy { from, to, accumulate })
    .collect();
    on_every_target(|target| check_every_dtype(target, [0, 0], [128; 2], &copies));
}

#[test]
fn lists_longer_than_a_launch_and_blocks_longer_than_a_tile_arrive_whole() {
    let copies: Vec<BlockCopy> = (0..131)
        .map(|i| {
            let (rows, run) = (1 + i % 3, [16, 12, 7][i % 3]);
            let from = block(i % 2, (i * 37) % 5_000, (1, 0), (rows, 64), run);
            let to = block(0, i * 64, (1, 0), (rows, run), run);
            BlockCopy { from, to, accumulate: i % 7 == 3 }
        })
        .chain([BlockCopy {
            from: block(0, 5, (2, 5_000), (100, 37), 33),
            to: block(1, 1, (2, 6_000), (100, 45), 33),
            accumulate: false,
        }])
        .collect();
    on_every_target(|target| {
        check::<half::bf16>(target, [0, 0], [12_000; 2], &copies);
        check::<u8>(target, [0, 0], [12_000; 2], &copies);
        check::<f32>(target, [1, 2], [12_000; 2], &copies);
    });
}

#[test]
fn empty_blocks_and_empty_lists_move_nothing() {
    on_every_target(|target| {
        let empty = block(0, 1_000, (3, 5), (0, 9), 4);
        check::<f32>(
            target,
            [0, 0],
            [8; 2],
            &[BlockCopy { from: empty.clone(), to: empty, accumulate: true }],
        );
        check::<f32>(target, [0, 0], [8; 2], &[]);
        let nothing = Tensor::zeros(0, DType::F32, &device()).unwrap();
        copy(&nothing, &Tensor::zeros(0, DType::F32, &device()).unwrap()).unwrap();
    });
}

#[test]
fn sources_and_targets_may_be_views_of_one_storage_each() {
    on_every_target(|target| {
        let flat_source = tensor(0, 96, |i| i as f32);
        let flat_target = tensor(0, 96, |_| -1.0f32);
        let part = |flat: &Tensor, begin| flat.narrow(0, begin, 32).unwrap();
        let sources = [64, 0, 32].map(|begin| part(&flat_source, begin));
        let targets = [32, 64, 0].map(|begin| part(&flat_target, begin));
        let copies: Vec<BlockCopy> = (0..3)
            .map(|k| {
                let whole = StridedBlock::contiguous(k, 0, 32);
                BlockCopy { from: whole.clone(), to: whole, accumulate: false }
            })
            .collect();
        copy_blocks(&sources.each_ref(), &targets.each_ref(), &copies).unwrap();
        let expected: Vec<f32> = (32..64).chain(64..96).chain(0..32).map(|i| i as f32).collect();
        assert_eq!(to_vec::<f32>(&flat_target).unwrap(), expected, "{target}");
    });
}

#[cfg(feature = "cuda")]
#[test]
fn sixteen_bit_sums_round_once_per_block_on_a_gpu() {
    crate::testing::on_a_gpu(|| {
        // 256 + 1 is a tie in bf16 and goes to 256; 256 + 3 goes to 260.
        for (added, expected) in [(1.0, 256.0), (3.0, 260.0)] {
            let source = tensor(0, 24, |_| half::bf16::from_f32(added));
            let target = tensor(0, 24, |_| half::bf16::from_f32(256.0));
            let whole = StridedBlock::contiguous(0, 0, 24);
            let sum = BlockCopy { from: whole.clone(), to: whole, accumulate: true };
            copy_blocks(&[&source], &[&target], &[sum]).unwrap();
            let sums: Vec<half::bf16> = to_vec(&target).unwrap();
            assert!(sums.iter().all(|sum| sum.to_f32() == expected));
        }
    });
}

#[test]
fn blocks_that_do_not_fit_are_refused_with_their_index() {
    let (source, target) = (tensor(0, 12, |i| i as f32), tensor(0, 12, |i| i as f32));
    let good = StridedBlock::contiguous(0, 0, 4);
    let refuse = |from: &StridedBlock, to: &StridedBlock, expected: &str| {
        let copy = |from: &StridedBlock, to: &StridedBlock| BlockCopy {
            from: from.clone(),
            to: to.clone(),
            accumulate: false,
        };
        let error = copy_blocks(&[&source], &[&target], &[copy(&good, &good), copy(from, to)]).unwrap_err();
        assert!(matches!(error, OpError::Block { index: 1, .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    };
    refuse(&StridedBlock::contiguous(1, 0, 4), &good, "names tensor 1 of 1 sources");
    refuse(&good, &StridedBlock::contiguous(0, 9, 4), "ends at element 13 of 12");
    refuse(&good, &StridedBlock::contiguous(0, usize::MAX, 4), "overflows");
    refuse(&block(0, 0, (1, 0), (2, 1), 2), &block(0, 0, (1, 0), (2, 1), 2), "more than once");
    refuse(&good, &StridedBlock::contiguous(0, 0, 5), "shape");

    let view = |begin| source.narrow(0, begin, 4).unwrap();
    assert!(matches!(copy(&view(0), &view(4)).unwrap_err(), OpError::SharedStorage { .. }));
    let other = tensor(0, 12, |i| i as u32);
    assert!(matches!(copy(&source, &other).unwrap_err(), OpError::MixedDTypes { .. }));
    let transposed = target.reshape((3, 4)).unwrap().t().unwrap();
    assert!(matches!(copy(&source, &transposed).unwrap_err(), OpError::NotContiguous { .. }));
}
