use super::*;
use crate::strided_copy;
use crate::testing::*;

/// The longest ones need several blocks of a kernel.
const LENGTHS: [usize; 9] = [0, 1, 7, 32, 100, 131, 4096, 5000, 20_001];

#[test]
fn the_sum_of_squares_is_exact_to_f64_on_every_target() {
    on_every_target(|target| {
        for len in LENGTHS {
            let data = random(len as u64, len);
            let expected = reference::sum_of_squares(&to_f64(&data));
            let got = sum_of_squares(&tensor(&data, &[len])).unwrap();
            assert!((got - expected).abs() <= 1e-12 * expected, "{target}, {len}: {got} {expected}");
        }
    });
}

#[test]
fn sums_of_several_tensors_have_the_bits_of_each_alone() {
    on_every_target(|target| {
        let tensors = LENGTHS.map(|len| tensor(&random(len as u64, len), &[len]));
        let alone = tensors.each_ref().map(|x| sum_of_squares(x).unwrap());
        let together = sums_of_squares(&tensors.each_ref()).unwrap();
        assert_eq!(together, alone, "{target}");
        let distinct: std::collections::BTreeSet<_> = together.iter().map(|sum| sum.to_bits()).collect();
        assert_eq!(distinct.len(), LENGTHS.len(), "{target}: so none is taken for another");
    });
    assert!(sums_of_squares(&[]).unwrap().is_empty());
}

#[test]
fn the_sum_of_squares_neither_overflows_nor_underflows_f32() {
    on_every_target(|_| {
        let x = tensor(&[1e30, 1e30], &[2]);
        assert!((sum_of_squares(&x).unwrap() / 2e60 - 1.0).abs() < 1e-7);
        let x = tensor(&[1e-30, 1e-30], &[2]);
        assert!((sum_of_squares(&x).unwrap() / 2e-60 - 1.0).abs() < 1e-7);
    });
}

#[test]
fn the_sum_of_squares_has_the_same_bits_on_any_number_of_threads() {
    let data = random(1, 300_007);
    assert_same_for_any_thread_count(|| sum_of_squares(&tensor(&data, &[300_007])).unwrap().to_bits());
}

#[test]
fn one_bad_element_anywhere_is_found() {
    on_every_target(|target| {
        for len in LENGTHS {
            let mut data = random(1, len);
            assert!(all_finite(&tensor(&data, &[len])).unwrap(), "{target}, {len}");
            if len == 0 {
                continue;
            }
            for place in [0, len / 2, len - 1] {
                for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let good = std::mem::replace(&mut data[place], bad);
                    assert!(
                        !all_finite(&tensor(&data, &[len])).unwrap(),
                        "{target}, {len}: {bad} at {place}"
                    );
                    data[place] = good;
                }
            }
        }
        let extremes = [f32::MAX, f32::MIN, 0.0, -0.0, f32::MIN_POSITIVE, f32::from_bits(1)];
        assert!(all_finite(&tensor(&extremes, &[6])).unwrap());
    });
}

#[test]
fn a_bad_element_is_found_in_the_last_block_of_a_large_tensor() {
    let mut data = vec![1.0; 100_000];
    data[99_999] = f32::INFINITY;
    assert_same_for_any_thread_count(|| {
        let found = all_finite(&tensor(&data, &[100_000])).unwrap();
        assert!(!found);
        found
    });
}

#[test]
fn buffer_arithmetic_touches_every_element_and_nothing_around_it() {
    on_every_target(|_| {
        for len in [1, 7, 100, 131, 20_001] {
            let (a, b) = (random(1, len), random(2, len));
            // One buffer with a margin on both sides; the ops get the middle.
            let flat = tensor(&vec![9.0; len + 4], &[len + 4]);
            let dst = flat.narrow(0, 2, len).unwrap();
            strided_copy::copy(&tensor(&a, &[len]), &dst).unwrap();
            assert_eq!(read(&dst), a);
            accumulate(&dst, &tensor(&b, &[len])).unwrap();
            assert!(read(&dst).iter().zip(a.iter().zip(&b)).all(|(got, (a, b))| *got == a + b));
            scale(&dst, 0.5).unwrap();
            assert!(read(&dst).iter().zip(a.iter().zip(&b)).all(|(got, (a, b))| *got == (a + b) * 0.5));
            scale_by(&dst, &tensor(&[-4.0], &[1])).unwrap();
            assert!(read(&dst).iter().zip(a.iter().zip(&b)).all(|(got, (a, b))| *got == (a + b) * -2.0));
            scale(&dst, -0.25).unwrap();
            softcap(&dst, 0.3).unwrap();
            let capped = a.iter().zip(&b).map(|(a, b)| 0.3 * (f64::from((a + b) * 0.5) / 0.3).tanh());
            assert_close("capped", &read(&dst), &capped.collect::<Vec<f64>>(), 5e-7);
            fill(&dst, -3.0).unwrap();
            assert!(read(&dst).iter().all(|got| *got == -3.0));
            let flat = read(&flat);
            assert_eq!((&flat[..2], &flat[len + 2..]), (&[9.0, 9.0][..], &[9.0, 9.0][..]));
        }
    });
}

#[test]
fn lengths_and_storage_are_checked() {
    let flat = tensor(&[1.0; 8], &[8]);
    let error = accumulate(&flat, &output(&[7])).unwrap_err();
    assert!(matches!(error, OpError::Shape { argument: "src", .. }), "{error}");
    let error = accumulate(&flat.narrow(0, 0, 4).unwrap(), &flat.narrow(0, 4, 4).unwrap()).unwrap_err();
    assert!(matches!(error, OpError::SharedStorage { output: "dst", other: "src", .. }), "{error}");
    let error = scale_by(&flat, &output(&[2])).unwrap_err();
    assert!(matches!(error, OpError::Shape { argument: "factor", .. }), "{error}");
    let error = sum_of_squares(&wrong_dtype(&[3])).unwrap_err();
    assert!(matches!(error, OpError::DType { argument: "x", .. }), "{error}");
}

#[cfg(feature = "cuda")]
#[test]
fn kernels_sum_in_the_same_order_wherever_a_tensor_lies_on_a_gpu() {
    let data = random(1, 20_001);
    let bits = std::cell::RefCell::new(Vec::new());
    for_every_dtype(|dtype, _| {
        let (x, x64) = rounded(dtype, &data, &[data.len()]);
        let got = sum_of_squares(&x).unwrap();
        let expected = reference::sum_of_squares(&x64);
        assert!((got - expected).abs() <= 1e-12 * expected, "{dtype:?}: {got} {expected}");
        bits.borrow_mut().push(got.to_bits());
    });
    let bits = bits.into_inner();
    // Aligned and not aligned, alternately.
    assert_eq!(bits.len(), 6);
    assert!(bits.chunks(2).all(|pair| pair[0] == pair[1]), "{bits:?}");
}

#[cfg(feature = "cuda")]
#[test]
fn kernels_of_every_element_type_find_one_bad_element_on_a_gpu() {
    for_every_dtype(|dtype, _| {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for place in [0, 4095, 4096, 9000] {
                let mut data = random(1, 9001);
                assert!(all_finite(&rounded(dtype, &data, &[9001]).0).unwrap());
                data[place] = bad;
                assert!(!all_finite(&rounded(dtype, &data, &[9001]).0).unwrap(), "{bad} at {place}");
            }
        }
    });
}

#[cfg(feature = "cuda")]
#[test]
fn buffer_arithmetic_of_every_element_type_rounds_once_on_a_gpu() {
    for_every_dtype(|dtype, rounding| {
        for len in [1, 7, 100, 4096, 9001] {
            let ((a, a64), (b, b64)) =
                (rounded(dtype, &random(1, len), &[len]), rounded(dtype, &random(2, len), &[len]));
            let dst = rounded(dtype, &vec![f32::NAN; len], &[len]).0;
            strided_copy::copy(&a, &dst).unwrap();
            assert_eq!(to_f64(&read(&dst)), a64);
            accumulate(&dst, &b).unwrap();
            let sum: Vec<f64> = a64.iter().zip(&b64).map(|(a, b)| a + b).collect();
            assert_close("sum", &read(&dst), &sum, rounding);
            let in_f32 = tensor(&vec![1.0; len], &[len]);
            accumulate(&in_f32, &b).unwrap();
            let sum: Vec<f64> = b64.iter().map(|b| b + 1.0).collect();
            assert_close("sum in f32", &read(&in_f32), &sum, 6e-8);
            fill(&dst, -1.5).unwrap();
            scale(&dst, 0.25).unwrap();
            assert!(read(&dst).iter().all(|got| *got == -0.375));
            softcap(&dst, 0.5).unwrap();
            assert_close("capped", &read(&dst), &vec![0.5 * (-0.75f64).tanh(); len], rounding + 5e-7);
        }
    });
}

#[cfg(feature = "cuda")]
#[test]
fn a_sum_of_other_elements_goes_into_f32_only_on_a_gpu() {
    for_every_dtype(|dtype, _| {
        let (narrow, wide) = (rounded(dtype, &[1.0; 3], &[3]).0, tensor(&[1.0; 3], &[3]));
        let is_mixed = |result| matches!(result, Err(OpError::MixedDTypes { argument: "src", .. }));
        assert_eq!(is_mixed(accumulate(&narrow, &wide)), dtype != DType::F32);
        assert!(!is_mixed(accumulate(&wide, &narrow)));
    });
}
