use super::*;
use crate::testing::*;

#[test]
fn forward_and_backward_match_the_reference_on_every_target() {
    on_every_target(|target| {
        for (seed, (n, f)) in SHAPES.into_iter().enumerate() {
            let seed = seed as u64;
            // Wider than in the other tests, so that the sigmoid saturates on both sides.
            let gate: Vec<f32> = random(seed, n * f).iter().map(|g| g * 8.0).collect();
            let (up, dy) = (random(seed + 100, n * f), random(seed + 200, n * f));
            let (gate64, up64, dy64) = (to_f64(&gate), to_f64(&up), to_f64(&dy));
            let [gate, up, dy] = [gate, up, dy].map(|data| tensor(&data, &[n, f]));
            let case = format!("{target} {n}x{f}");

            let y = output(&[n, f]);
            forward(&gate, &up, &y).unwrap();
            assert_close(&format!("y {case}"), &read(&y), &reference::forward(&gate64, &up64), 3e-7);

            let (dgate, dup) = (output(&[n, f]), output(&[n, f]));
            backward(&dy, &gate, &up, &dgate, &dup).unwrap();
            let (expected_dgate, expected_dup) = reference::backward(&dy64, &gate64, &up64);
            assert_close(&format!("dgate {case}"), &read(&dgate), &expected_dgate, 5e-7);
            assert_close(&format!("dup {case}"), &read(&dup), &expected_dup, 3e-7);
        }
    });
}

#[test]
fn the_reference_gradients_are_the_derivatives_of_the_forward() {
    let (gate, up, dy) = (to_f64(&random(1, 20)), to_f64(&random(2, 20)), to_f64(&random(3, 20)));
    let (dgate, dup) = reference::backward(&dy, &gate, &up);
    assert_gradient("dgate", |gate| weighted_sum(&reference::forward(gate, &up), &dy), &gate, &dgate);
    assert_gradient("dup", |up| weighted_sum(&reference::forward(&gate, up), &dy), &up, &dup);
}

#[test]
fn extreme_gates_saturate_without_nan() {
    on_every_target(|_| {
        let gate = tensor(&[1e4, -1e4, 100.0, -100.0, 0.0, -0.0, f32::MAX, f32::MIN], &[8]);
        let (up, y) = (tensor(&[2.0; 8], &[8]), output(&[8]));
        forward(&gate, &up, &y).unwrap();
        assert_eq!(read(&y), [2e4, 0.0, 200.0, 0.0, 0.0, 0.0, f32::INFINITY, 0.0]);
        let (dgate, dup) = (output(&[8]), output(&[8]));
        backward(&up, &gate, &up, &dgate, &dup).unwrap();
        assert_eq!(read(&dgate)[..6], [4.0, 0.0, 4.0, 0.0, 2.0, 2.0]);
        assert!(read(&dup).iter().all(|v| !v.is_nan()));
    });
}

#[test]
fn large_tensors_give_the_same_bits_on_any_number_of_threads() {
    let (n, f) = (300, 401);
    let data = [1, 2, 3].map(|seed| random(seed, n * f));
    assert_same_for_any_thread_count(|| {
        let [gate, up, dy] = [0, 1, 2].map(|i| tensor(&data[i], &[n, f]));
        let [y, dgate, dup] = [0; 3].map(|_| output(&[n, f]));
        forward(&gate, &up, &y).unwrap();
        backward(&dy, &gate, &up, &dgate, &dup).unwrap();
        [read(&y), read(&dgate), read(&dup)]
    });
}

#[test]
fn gradients_inside_one_buffer_are_refused() {
    let x = tensor(&[1.0; 6], &[2, 3]);
    let both = output(&[4, 3]);
    let (dgate, dup) = (both.narrow(0, 0, 2).unwrap(), both.narrow(0, 2, 2).unwrap());
    let error = backward(&x, &x, &x, &dgate, &dup).unwrap_err();
    assert!(matches!(error, OpError::SharedStorage { output: "dgate", other: "dup", .. }), "{error}");
    let error = forward(&x, &output(&[3, 2]), &output(&[2, 3])).unwrap_err();
    assert!(matches!(error, OpError::Shape { argument: "up", .. }), "{error}");
}

#[cfg(feature = "cuda")]
#[test]
fn kernels_of_every_element_type_round_once_also_where_a_tile_ends_on_a_gpu() {
    for_every_dtype(|dtype, rounding| {
        for (n, f) in [(3, 13), (1, 4095), (1, 4096), (9, 911)] {
            let (gate, gate64) = rounded(dtype, &random(1, n * f), &[n, f]);
            let (up, up64) = rounded(dtype, &random(2, n * f), &[n, f]);
            let (dy, dy64) = rounded(dtype, &random(3, n * f), &[n, f]);
            let [y, dgate, dup] = [0; 3].map(|_| rounded(dtype, &vec![f32::NAN; n * f], &[n, f]).0);
            forward(&gate, &up, &y).unwrap();
            assert_close("y", &read(&y), &reference::forward(&gate64, &up64), rounding + 3e-7);
            backward(&dy, &gate, &up, &dgate, &dup).unwrap();
            let (dgate64, dup64) = reference::backward(&dy64, &gate64, &up64);
            assert_close("dgate", &read(&dgate), &dgate64, rounding + 5e-7);
            assert_close("dup", &read(&dup), &dup64, rounding + 3e-7);
        }
    });
}

#[test]
fn an_empty_shard_is_no_error() {
    on_every_target(|_| {
        let [gate, up, y, dgate, dup] = [0; 5].map(|_| output(&[0, 3]));
        forward(&gate, &up, &y).unwrap();
        backward(&y, &gate, &up, &dgate, &dup).unwrap();
    });
}
