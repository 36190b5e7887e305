use super::*;
use crate::testing::*;
use std::ops::Range;

const EPS: f64 = 1e-5;

#[test]
fn forward_and_backward_match_the_reference_on_every_target() {
    on_every_target(|target| {
        for (seed, (n, d)) in SHAPES.into_iter().enumerate() {
            let seed = seed as u64;
            let (x, weight, dy) = (random(seed, n * d), random(seed + 100, d), random(seed + 200, n * d));
            let (x64, weight64, dy64) = (to_f64(&x), to_f64(&weight), to_f64(&dy));
            let (x, weight, dy) = (tensor(&x, &[n, d]), tensor(&weight, &[d]), tensor(&dy, &[n, d]));

            let (y, rstd) = (output(&[n, d]), output(&[n]));
            forward(&x, &weight, EPS, &y, &rstd).unwrap();
            let (expected_y, expected_rstd) = reference::forward(&x64, &weight64, EPS);
            let case = format!("{target} {n}x{d}");
            assert_close(&format!("y {case}"), &read(&y), &expected_y, 3e-7);
            assert_close(&format!("rstd {case}"), &read(&rstd), &expected_rstd, 2e-7);

            let (dx, dweight) = (output(&[n, d]), tensor(&vec![0.0; d], &[d]));
            backward(&dy, &x, &weight, &rstd, &dx, false, &dweight).unwrap();
            let (expected_dx, expected_dweight) = reference::backward(&dy64, &x64, &weight64, EPS);
            if d == 1 {
                // The exact gradient is almost 0, because x has only one direction: compare with the terms
                // that cancel.
                let scale: f64 = expected_rstd.iter().fold(0.0, |max, r| r.max(max)) * 4.0;
                for (got, expected) in read(&dx).iter().zip(&expected_dx) {
                    assert!((f64::from(*got) - expected).abs() < 2e-7 * scale, "dx {case}");
                }
            } else {
                assert_close(&format!("dx {case}"), &read(&dx), &expected_dx, 1e-6);
            }
            assert_close(&format!("dweight {case}"), &read(&dweight), &expected_dweight, 1e-6);
        }
    });
}

#[test]
fn centered_rows_match_the_reference_on_every_target() {
    on_every_target(|target| {
        for (seed, (n, d)) in SHAPES.into_iter().enumerate().filter(|(_, (_, d))| *d > 2) {
            let seed = seed as u64;
            // The mean is no small part of the elements.
            let x: Vec<f32> = random(seed, n * d).into_iter().map(|x| x + 0.75).collect();
            let (weight, dy) = (random(seed + 100, d), random(seed + 200, n * d));
            let (x64, weight64, dy64) = (reference::centered(&to_f64(&x), d), to_f64(&weight), to_f64(&dy));
            let (x, weight, dy) = (tensor(&x, &[n, d]), tensor(&weight, &[d]), tensor(&dy, &[n, d]));
            let gain = Gain { centered: true, ..Gain::from(&weight) };
            let (y, rstd, case) = (output(&[n, d]), output(&[n]), format!("{target} {n}x{d}"));
            forward(&x, gain, EPS, &y, &rstd).unwrap();
            let (expected_y, expected_rstd) = reference::forward(&x64, &weight64, EPS);
            assert_close(&format!("y {case}"), &read(&y), &expected_y, 1e-6);
            assert_close(&format!("rstd {case}"), &read(&rstd), &expected_rstd, 1e-6);

            let (expected_dx, expected_dweight) = reference::backward(&dy64, &x64, &weight64, EPS);
            let expected_dx = reference::centered(&expected_dx, d);
            for old in [0.0, 0.5] {
                let (dx, dweight) = (tensor(&vec![old; n * d], &[n, d]), tensor(&vec![0.0; d], &[d]));
                backward(&dy, &x, gain, &rstd, &dx, old != 0.0, &dweight).unwrap();
                let expected_dx: Vec<f64> = expected_dx.iter().map(|dx| dx + f64::from(old)).collect();
                assert_close(&format!("dx {case}"), &read(&dx), &expected_dx, 3e-6);
                assert_close(&format!("dweight {case}"), &read(&dweight), &expected_dweight, 3e-6);
            }
        }
    });
}

/// Rows of 5, 2 and 3 elements, which are one of 10; some of other widths.
#[test]
fn parts_of_rows_are_normalized_as_whole_rows_on_every_target() {
    on_every_target(|target| {
        for (n, widths) in [(1, vec![1, 2]), (7, vec![5, 2, 3]), (33, vec![40, 67]), (130, vec![300, 8])] {
            let d: usize = widths.iter().sum();
            let (x, weight, dy) = (random(1, n * d), random(2, d), random(3, n * d));
            let gain: Vec<f64> = weight.iter().map(|weight| f64::from(*weight) + 1.0).collect();
            let (y64, _) = reference::forward(&to_f64(&x), &gain, EPS);
            let (dx64, dweight64) = reference::backward(&to_f64(&dy), &to_f64(&x), &gain, EPS);
            let starts = widths.iter().scan(0, |end, width| Some(std::mem::replace(end, *end + width)));
            let parts: Vec<_> = starts.zip(&widths).map(|(start, width)| start..start + width).collect();
            let columns = |all: &[f32], part: &Range<usize>| -> Vec<f32> {
                all.chunks_exact(d).flat_map(|row| row[part.clone()].to_vec()).collect()
            };
            let of_part = |all: &[f32], part: &Range<usize>| tensor(&columns(all, part), &[n, part.len()]);
            let operands = |part: &Range<usize>| {
                let weight = tensor(&weight[part.clone()], &[part.len()]);
                (of_part(&x, part), of_part(&dy, part), weight)
            };
            let added = |sums: Vec<Tensor>| {
                let sums: Vec<_> = sums.iter().map(read).collect();
                let of_row = |row: usize| sums.iter().map(|sums| sums[row]).sum::<f32>();
                tensor(&(0..n).map(of_row).collect::<Vec<_>>(), &[n])
            };
            let of_parts = |write: &dyn Fn(&Range<usize>, &Tensor)| {
                let of_part = |part| {
                    let sums = output(&[n]);
                    write(part, &sums);
                    sums
                };
                added(parts.iter().map(of_part).collect())
            };
            let squared = of_parts(&|part, sums| squares(&operands(part).0, sums).unwrap());
            let multiplied = of_parts(&|part, sums| {
                let (x, dy, weight) = operands(part);
                products(&dy, &x, Gain { offset: 1.0, ..Gain::from(&weight) }, sums).unwrap();
            });
            let case = format!("{target} {n}x{widths:?}");
            for part in &parts {
                let (x, dy, weight) = operands(part);
                let gain = Gain { offset: 1.0, ..Gain::from(&weight) };
                let (y, rstd) = (output(&[n, part.len()]), output(&[n]));
                let whole = WholeRows { width: d, sums: &squared };
                forward_part(&x, gain, EPS, whole, &y, &rstd).unwrap();
                let expected = |all: &[f64]| -> Vec<f64> {
                    all.chunks_exact(d).flat_map(|row| row[part.clone()].to_vec()).collect()
                };
                assert_close(&format!("y {case} {part:?}"), &read(&y), &expected(&y64), 1e-6);
                for old in [0.0, 0.5] {
                    let dx = tensor(&vec![old; n * part.len()], &[n, part.len()]);
                    let dweight = tensor(&vec![0.0; part.len()], &[part.len()]);
                    let whole = WholeRows { width: d, sums: &multiplied };
                    let gradients = Gradients { dx: &dx, accumulate_dx: old != 0.0, dweight: Some(&dweight) };
                    backward_part(&dy, &x, gain, &rstd, whole, &gradients).unwrap();
                    let dx64: Vec<f64> = expected(&dx64).iter().map(|dx| dx + f64::from(old)).collect();
                    assert_close(&format!("dx {case} {part:?}"), &read(&dx), &dx64, 3e-6);
                    let dweight64 = &dweight64[part.clone()];
                    assert_close(&format!("dweight {case} {part:?}"), &read(&dweight), dweight64, 3e-6);
                }
            }
        }
    });
}

#[test]
fn parts_of_centered_rows_and_too_few_sums_are_refused() {
    let (x, weight, y, rstd) = (tensor(&[1.0; 6], &[2, 3]), output(&[3]), output(&[2, 3]), output(&[2]));
    let run = |gain, sums: &Tensor| forward_part(&x, gain, EPS, WholeRows { width: 6, sums }, &y, &rstd);
    let centered = run(Gain { centered: true, ..Gain::from(&weight) }, &output(&[2])).unwrap_err();
    assert!(matches!(centered, OpError::InvalidValue { argument: "gain.centered", .. }), "{centered}");
    let error = run(Gain::from(&weight), &output(&[3])).unwrap_err();
    assert!(matches!(error, OpError::Shape { argument: "sums", .. }), "{error}");
}

#[test]
fn the_reference_gradients_are_the_derivatives_of_the_forward() {
    for (n, d) in [(1, 1), (2, 3), (3, 7)] {
        let (x, weight, dy) = (to_f64(&random(1, n * d)), to_f64(&random(2, d)), to_f64(&random(3, n * d)));
        let (dx, dweight) = reference::backward(&dy, &x, &weight, EPS);
        assert_gradient("dx", |x| weighted_sum(&reference::forward(x, &weight, EPS).0, &dy), &x, &dx);
        let loss = |weight: &[f64]| weighted_sum(&reference::forward(&x, weight, EPS).0, &dy);
        assert_gradient("dweight", loss, &weight, &dweight);

        let centered = reference::centered(&x, d);
        let (dx, _) = reference::backward(&dy, &centered, &weight, EPS);
        let loss =
            |x: &[f64]| weighted_sum(&reference::forward(&reference::centered(x, d), &weight, EPS).0, &dy);
        assert_gradient("dx", loss, &x, &reference::centered(&dx, d));
    }
}

#[test]
fn gradients_accumulate_where_asked() {
    on_every_target(|_| {
        let (n, d) = (5, 37);
        let (x, weight, dy) = (
            tensor(&random(1, n * d), &[n, d]),
            tensor(&random(2, d), &[d]),
            tensor(&random(3, n * d), &[n, d]),
        );
        let (y, rstd) = (output(&[n, d]), output(&[n]));
        forward(&x, &weight, EPS, &y, &rstd).unwrap();
        let run = |old: f32, accumulate_dx: bool| {
            let (dx, dweight) = (tensor(&vec![old; n * d], &[n, d]), tensor(&vec![old; d], &[d]));
            backward(&dy, &x, &weight, &rstd, &dx, accumulate_dx, &dweight).unwrap();
            (read(&dx), read(&dweight))
        };
        let (dx, dweight) = run(0.0, false);
        let (dx_overwritten, dweight_added) = run(4.0, false);
        let (dx_added, _) = run(4.0, true);
        assert_eq!(dx, dx_overwritten);
        // Kernels may round the last product and the sum once.
        let is_sum = |(plain, added): (&f32, f32)| {
            (plain + 4.0 - added).abs() <= 2.0 * f32::EPSILON * (plain.abs() + 4.0)
        };
        assert!(dx.iter().zip(dx_added).all(is_sum));
        assert!(dweight.iter().zip(dweight_added).all(|(plain, added)| plain + 4.0 == added));
    });
}

#[test]
fn an_offset_adds_to_the_weight_and_not_to_its_gradient() {
    on_every_target(|target| {
        let (n, d) = (5, 37);
        let (x, weight, dy) = (random(1, n * d), random(2, d), random(3, n * d));
        let gain: Vec<f64> = weight.iter().map(|weight| f64::from(*weight) + 1.0).collect();
        let (x64, dy64) = (to_f64(&x), to_f64(&dy));
        let (x, weight, dy) = (tensor(&x, &[n, d]), tensor(&weight, &[d]), tensor(&dy, &[n, d]));
        let one_plus = Gain { weight: &weight, offset: 1.0, centered: false };
        let (y, rstd) = (output(&[n, d]), output(&[n]));
        forward(&x, one_plus, EPS, &y, &rstd).unwrap();
        assert_close(&format!("y {target}"), &read(&y), &reference::forward(&x64, &gain, EPS).0, 3e-7);
        let (dx, dweight) = (output(&[n, d]), tensor(&vec![0.0; d], &[d]));
        backward(&dy, &x, one_plus, &rstd, &dx, false, &dweight).unwrap();
        let (expected_dx, expected_dweight) = reference::backward(&dy64, &x64, &gain, EPS);
        assert_close(&format!("dx {target}"), &read(&dx), &expected_dx, 1e-6);
        assert_close(&format!("dweight {target}"), &read(&dweight), &expected_dweight, 1e-6);
    });
}

#[test]
fn many_rows_give_an_exact_weight_gradient_with_the_same_bits_on_any_number_of_threads() {
    let (n, d) = (3001, 67);
    let (x, weight, dy) = (random(1, n * d), random(2, d), random(3, n * d));
    let (_, expected) = reference::backward(&to_f64(&dy), &to_f64(&x), &to_f64(&weight), EPS);
    let run = || {
        let (x, weight, dy) = (tensor(&x, &[n, d]), tensor(&weight, &[d]), tensor(&dy, &[n, d]));
        let (y, rstd, dx) = (output(&[n, d]), output(&[n]), output(&[n, d]));
        let dweight = tensor(&vec![0.0; d], &[d]);
        forward(&x, &weight, EPS, &y, &rstd).unwrap();
        backward(&dy, &x, &weight, &rstd, &dx, false, &dweight).unwrap();
        [read(&y), read(&dx), read(&dweight)]
    };
    assert_close("dweight", &run()[2], &expected, 1e-6);
    assert_same_for_any_thread_count(run);
}

#[test]
fn an_empty_shard_leaves_the_weight_gradient_alone() {
    on_every_target(|_| {
        let (x, weight, rstd) = (output(&[0, 4]), tensor(&[1.0; 4], &[4]), output(&[0]));
        forward(&x, &weight, EPS, &output(&[0, 4]), &rstd).unwrap();
        let dweight = tensor(&[3.0; 4], &[4]);
        backward(&x, &x, &weight, &rstd, &output(&[0, 4]), false, &dweight).unwrap();
        assert_eq!(read(&dweight), [3.0; 4]);
    });
}

#[test]
fn wrong_shapes_are_named() {
    let x = tensor(&[1.0; 6], &[2, 3]);
    let error = forward(&x, &output(&[2]), EPS, &output(&[2, 3]), &output(&[2])).unwrap_err();
    assert!(matches!(error, OpError::Shape { argument: "weight", .. }), "{error}");
    let error = forward(&x, &output(&[3]), EPS, &output(&[2, 3]), &output(&[3])).unwrap_err();
    assert!(matches!(error, OpError::Shape { argument: "rstd", .. }), "{error}");
    let error = forward(&output(&[2, 0]), &output(&[0]), EPS, &output(&[2, 0]), &output(&[2])).unwrap_err();
    assert!(matches!(error, OpError::Dimensions { argument: "x", .. }), "{error}");
}

#[cfg(feature = "cuda")]
#[test]
fn kernels_of_every_element_type_round_once_on_a_gpu() {
    for_every_dtype(|dtype, rounding| {
        for (seed, (n, d)) in
            [(1, 7), (5, 100), (130, 257), (137, 264), (2, 2056), (2, 2051)].into_iter().enumerate()
        {
            let seed = seed as u64;
            let (x, x64) = rounded(dtype, &random(seed, n * d), &[n, d]);
            let (weight, weight64) = rounded(dtype, &random(seed + 100, d), &[d]);
            let (dy, dy64) = rounded(dtype, &random(seed + 200, n * d), &[n, d]);
            let (y, rstd) = (rounded(dtype, &vec![f32::NAN; n * d], &[n, d]).0, output(&[n]));
            forward(&x, &weight, EPS, &y, &rstd).unwrap();
            assert_close("y", &read(&y), &reference::forward(&x64, &weight64, EPS).0, rounding + 1e-6);
            let (dx, dweight) =
                (rounded(dtype, &vec![f32::NAN; n * d], &[n, d]).0, tensor(&vec![0.0; d], &[d]));
            backward(&dy, &x, &weight, &rstd, &dx, false, &dweight).unwrap();
            let (dx64, dweight64) = reference::backward(&dy64, &x64, &weight64, EPS);
            assert_close("dx", &read(&dx), &dx64, rounding + 1e-6);
            assert_close("dweight", &read(&dweight), &dweight64, 2e-6);
        }
    });
}

#[cfg(feature = "cuda")]
#[test]
fn kernels_give_the_same_bits_wherever_a_tensor_lies_on_a_gpu() {
    let results = std::cell::RefCell::new(Vec::new());
    for_every_dtype(|dtype, _| {
        let (n, d) = (9, 264);
        let [x, dy, y, dx] = [1, 2, 3, 4].map(|seed| rounded(dtype, &random(seed, n * d), &[n, d]).0);
        let (weight, rstd, dweight) =
            (rounded(dtype, &random(5, d), &[d]).0, output(&[n]), tensor(&vec![0.0; d], &[d]));
        forward(&x, &weight, EPS, &y, &rstd).unwrap();
        backward(&dy, &x, &weight, &rstd, &dx, false, &dweight).unwrap();
        results.borrow_mut().push([read(&y), read(&rstd), read(&dx), read(&dweight)]);
    });
    // Aligned and not aligned, alternately.
    let results = results.into_inner();
    assert_eq!(results.len(), 6);
    assert!(results.chunks(2).all(|pair| pair[0] == pair[1]));
}
