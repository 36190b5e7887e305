use super::*;
use crate::element::{Arithmetic, Number};
use crate::tensor::{Element, to_vec};
use crate::testing::{device, on_every_target};
use candle_core::{DType, Device, Tensor};
use half::bf16;

/// `elements` in the middle of a larger storage.
fn tensor<T: Element>(before: usize, elements: &[T]) -> Tensor {
    let mut whole = vec![T::from_f64(77.0); before];
    whole.extend_from_slice(elements);
    whole.push(T::from_f64(77.0));
    let len = whole.len();
    Tensor::from_vec(whole, len, &device()).unwrap().narrow(0, before, elements.len()).unwrap()
}

fn reduced<T: Element>(op: ReduceOp, ranks: &[&[T]]) -> Vec<T> {
    let sources: Vec<Tensor> = ranks.iter().map(|rank| tensor(0, rank)).collect();
    let target = tensor(0, &vec![T::from_f64(9.0); ranks[0].len()]);
    reduce(op, &sources.iter().collect::<Vec<_>>(), 0, &target).unwrap();
    to_vec(&target).unwrap()
}

/// Values for which the order of additions matters in every float type.
fn irregular<T: Element>(rank: usize, index: usize) -> T {
    let value = ((index * 2_654_435_761 + rank * 40_503) % 100_003) as f64 * 1.7e-3;
    T::from_f64(if T::DTYPE.is_float() { value - 80.0 } else { value })
}

fn check_definition<T: Arithmetic>(target: &str) {
    for (ranks, len, begin, befores) in [
        (1, 5, 0, [0, 0]),
        (2, 64, 16, [0, 0]),
        (3, 1_003, 32, [16, 0]),
        (8, 700, 5, [3, 1]),
        (5, 0, 2, [0, 0]),
    ] {
        let elements = |rank: usize| (0..begin + len + 4).map(move |i| irregular::<T>(rank, i)).collect();
        let values: Vec<Vec<T>> = (0..ranks).map(elements).collect();
        let sources: Vec<Tensor> = values.iter().map(|values| tensor(befores[0], values)).collect();
        let sources: Vec<&Tensor> = sources.iter().collect();
        let ops = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min, ReduceOp::Product, ReduceOp::Average];
        for op in &ops[..if T::DTYPE.is_float() { 5 } else { 4 }] {
            let combine = |a: T::Wide, b: T::Wide| match op {
                ReduceOp::Sum | ReduceOp::Average => a.plus(b),
                ReduceOp::Product => a.times(b),
                ReduceOp::Max => {
                    if a > b {
                        a
                    } else {
                        b
                    }
                }
                ReduceOp::Min => {
                    if a < b {
                        a
                    } else {
                        b
                    }
                }
            };
            let output = tensor(befores[1], &vec![T::from_f64(9.0); len]);
            reduce(*op, &sources, begin, &output).unwrap();
            let of_index = |i: usize| {
                let first = values[0][begin + i].widen();
                let all = values[1..].iter().fold(first, |all, next| combine(all, next[begin + i].widen()));
                T::narrow(if *op == ReduceOp::Average { all.over(ranks) } else { all })
            };
            let expected: Vec<T> = (0..len).map(of_index).collect();
            assert!(
                to_vec::<T>(&output).unwrap() == expected,
                "{op:?} {:?} {ranks} ranks {target}",
                T::DTYPE
            );
        }
    }
}

#[test]
fn every_type_and_operator_gives_the_definition_to_the_bit_whatever_the_offsets() {
    on_every_target(|target| {
        check_definition::<f32>(target);
        check_definition::<f64>(target);
        check_definition::<bf16>(target);
        check_definition::<half::f16>(target);
        check_definition::<i64>(target);
        check_definition::<u32>(target);
        check_definition::<u8>(target);
    });
}

#[test]
fn sums_run_in_rank_order() {
    on_every_target(|_| {
        // (1e8 + 1) - 1e8 loses the 1 in f32; (1e8 - 1e8) + 1 keeps it.
        assert_eq!(reduced(ReduceOp::Sum, &[&[1e8_f32], &[1.0], &[-1e8]]), [0.0]);
        assert_eq!(reduced(ReduceOp::Sum, &[&[1e8_f32], &[-1e8], &[1.0]]), [1.0]);
    });
}

#[test]
fn sixteen_bit_floats_are_rounded_once() {
    on_every_target(|_| {
        // In bf16 256 + 1 rounds back to 256, so adding step by step would stay there.
        let one = [bf16::ONE];
        let sum = reduced(ReduceOp::Sum, &[&[bf16::from_f32(256.0)], &one, &one, &one, &one]);
        assert_eq!(sum, [bf16::from_f32(260.0)]);
        // The average of five is 53; a sum in bf16 would stay 256, and give 51.25.
        let ranks = [256.0, 1.0, 1.0, 3.0, 4.0].map(|x| [bf16::from_f32(x)]);
        let average = reduced(ReduceOp::Average, &ranks.each_ref().map(|rank| &rank[..]));
        assert_eq!(average, [bf16::from_f32(53.0)]);
    });
}

#[test]
fn averages_of_integers_are_refused() {
    on_every_target(|_| {
        let (source, target) = (tensor(0, &[1_u32, 2]), tensor(0, &[0_u32; 2]));
        let refused = reduce(ReduceOp::Average, &[&source, &source], 0, &target).unwrap_err();
        assert!(matches!(refused, OpError::ElementType { got: DType::U32, .. }), "{refused}");
    });
}

#[test]
fn sixteen_bit_floats_are_summed_into_f32_without_rounding() {
    fn check<T: Arithmetic<Wide = f32>>(target: &str) {
        for (ranks, len, begin) in [(1, 5, 0), (2, 64, 16), (3, 1_003, 32), (8, 700, 5), (4, 0, 2)] {
            let elements = |rank: usize| (0..begin + len + 4).map(move |i| irregular::<T>(rank, i)).collect();
            let values: Vec<Vec<T>> = (0..ranks).map(elements).collect();
            let sources: Vec<Tensor> = values.iter().map(|values| tensor(3, values)).collect();
            let output = tensor(1, &vec![9.0_f32; len]);
            reduce(ReduceOp::Sum, &sources.iter().collect::<Vec<_>>(), begin, &output).unwrap();
            let sum = |i: usize| values.iter().map(|of_rank| of_rank[begin + i].widen()).reduce(|a, b| a + b);
            let expected: Vec<f32> = (0..len).map(|i| sum(i).unwrap()).collect();
            assert_eq!(to_vec::<f32>(&output).unwrap(), expected, "{:?} {ranks} ranks {target}", T::DTYPE);
        }
    }
    on_every_target(|target| {
        check::<bf16>(target);
        check::<half::f16>(target);
    });
    let (short, long) = (tensor(0, &[bf16::ONE; 2]), tensor(0, &[0.0_f32; 2]));
    for (op, sources) in
        [(ReduceOp::Max, [&short, &short]), (ReduceOp::Sum, [&short, &tensor(0, &[1.0_f32; 2])])]
    {
        let refused = reduce(op, &sources, 0, &long).unwrap_err();
        assert!(matches!(refused, OpError::MixedDTypes { .. }), "{refused}");
    }
}

#[test]
fn integers_wrap() {
    on_every_target(|_| {
        assert_eq!(reduced(ReduceOp::Sum, &[&[250_u8], &[10]]), [4]);
        assert_eq!(reduced(ReduceOp::Sum, &[&[i64::MAX, -5], &[1, 3]]), [i64::MIN, -2]);
        assert_eq!(reduced(ReduceOp::Min, &[&[-7_i64], &[3]]), [-7]);
        assert_eq!(reduced(ReduceOp::Product, &[&[20_u8], &[13]]), [4]);
    });
}

#[test]
fn a_nan_survives_max_and_min_from_any_rank() {
    on_every_target(|target| {
        for op in [ReduceOp::Max, ReduceOp::Min] {
            for place in 0..3 {
                let ranks: Vec<[f32; 5]> =
                    (0..3).map(|r| if r == place { [f32::NAN; 5] } else { [r as f32; 5] }).collect();
                let ranks: Vec<&[f32]> = ranks.iter().map(|r| &r[..]).collect();
                let result = reduced(op, &ranks);
                assert!(result.iter().all(|x| x.is_nan()), "{op:?} with NaN on rank {place}, {target}");
            }
        }
    });
}

#[test]
fn parts_and_threads_do_not_change_the_result() {
    let len = 200_017;
    let ranks: Vec<Vec<f32>> =
        (0..3).map(|r| (0..len).map(|i| ((i * 7 + r) as f32).sin()).collect()).collect();
    let slices: Vec<&[f32]> = ranks.iter().map(Vec::as_slice).collect();
    let mut whole = vec![0.0; len];
    cpu::reduce(ReduceOp::Sum, &slices, 0, &mut whole);
    let mut part = vec![0.0; len - 1000];
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    pool.install(|| cpu::reduce(ReduceOp::Sum, &slices, 1000, &mut part));
    assert_eq!(whole[1000..], part);
    assert_eq!(whole[5], (ranks[0][5] + ranks[1][5]) + ranks[2][5]);
}

#[test]
fn sources_may_be_one_tensor_but_not_the_target() {
    on_every_target(|_| {
        let (source, target) = (tensor(0, &[1.5f32, 2.0]), tensor(0, &[0.0f32; 2]));
        reduce(ReduceOp::Sum, &[&source, &source], 0, &target).unwrap();
        assert_eq!(to_vec::<f32>(&target).unwrap(), [3.0, 4.0]);
    });
    let source = tensor(0, &[1.0f32; 4]);
    let refuse = |sources: &[&Tensor], begin, target: &Tensor| {
        reduce(ReduceOp::Sum, sources, begin, target).unwrap_err()
    };
    let shared = refuse(&[&source], 0, &source.narrow(0, 0, 2).unwrap());
    assert!(matches!(shared, OpError::SharedStorage { .. }), "{shared}");
    let none = refuse(&[], 0, &tensor(0, &[0.0f32]));
    assert!(matches!(none, OpError::InvalidValue { argument: "sources", .. }), "{none}");
    let short = refuse(&[&source], 3, &tensor(0, &[0.0f32; 2]));
    assert!(matches!(short, OpError::InvalidValue { argument: "begin", .. }), "{short}");
    let unknown = refuse(&[], 0, &Tensor::zeros(1, DType::I16, &Device::Cpu).unwrap());
    assert!(matches!(unknown, OpError::ElementType { .. }), "{unknown}");
}

#[cfg(feature = "cuda")]
#[test]
fn more_ranks_than_the_kernels_table_holds_are_refused_on_a_gpu() {
    crate::testing::on_a_gpu(|| {
        let (source, target) = (tensor(0, &[1.0f32]), tensor(0, &[0.0f32]));
        let error = reduce(ReduceOp::Sum, &[&source; 257], 0, &target).unwrap_err();
        assert!(matches!(&error, OpError::Device { .. }), "{error}");
    });
}
