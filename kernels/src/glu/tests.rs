use super::*;
use crate::testing::*;
use Activation::{Gelu, GeluTanh, Identity, Sigmoid, Silu, SquaredRelu};

const ACTIVATIONS: [Activation; 6] = [Silu, GeluTanh, Gelu, SquaredRelu, Sigmoid, Identity];

/// Errors of y and dup. The argument of GELU's sigmoid is a cubic, and its rounding an error of the exponent.
fn tolerance(activation: Activation) -> f64 {
    if activation == GeluTanh { 2e-6 } else { 3e-7 }
}

#[test]
fn forward_and_backward_match_the_reference_on_every_target() {
    on_every_target(|target| {
        for (index, (n, f)) in SHAPES.repeat(ACTIVATIONS.len()).into_iter().enumerate() {
            let (seed, activation) = (index as u64, ACTIVATIONS[index / SHAPES.len()]);
            // Wider than in the other tests, so that the sigmoid saturates on both sides.
            let width = if activation == GeluTanh { 3.0 } else { 8.0 };
            let gate: Vec<f32> = random(seed, n * f).iter().map(|g| g * width).collect();
            let tolerance = tolerance(activation);
            let (up, dy) = (random(seed + 100, n * f), random(seed + 200, n * f));
            let (gate64, up64, dy64) = (to_f64(&gate), to_f64(&up), to_f64(&dy));
            let [gate, up, dy] = [gate, up, dy].map(|data| tensor(&data, &[n, f]));
            let case = format!("{activation:?} {target} {n}x{f}");

            let y = output(&[n, f]);
            forward(activation, &gate, &up, &y).unwrap();
            assert_close(
                &format!("y {case}"),
                &read(&y),
                &reference::forward(activation, &gate64, &up64),
                tolerance,
            );

            let (dgate, dup) = (output(&[n, f]), output(&[n, f]));
            backward(activation, &dy, &gate, &up, &dgate, &dup).unwrap();
            let (expected_dgate, expected_dup) = reference::backward(activation, &dy64, &gate64, &up64);
            assert_close(&format!("dgate {case}"), &read(&dgate), &expected_dgate, tolerance + 2e-7);
            assert_close(&format!("dup {case}"), &read(&dup), &expected_dup, tolerance);
        }
    });
}

#[test]
fn the_reference_gradients_are_the_derivatives_of_the_forward() {
    let (gate, up, dy) = (to_f64(&random(1, 20)), to_f64(&random(2, 20)), to_f64(&random(3, 20)));
    for a in ACTIVATIONS {
        let (dgate, dup) = reference::backward(a, &dy, &gate, &up);
        assert_gradient("dgate", |gate| weighted_sum(&reference::forward(a, gate, &up), &dy), &gate, &dgate);
        assert_gradient("dup", |up| weighted_sum(&reference::forward(a, &gate, up), &dy), &up, &dup);
    }
}

#[test]
fn extreme_gates_saturate_without_nan() {
    on_every_target(|_| {
        let gate = tensor(&[1e4, -1e4, 100.0, -100.0, 0.0, -0.0, f32::MAX, f32::MIN], &[8]);
        for activation in [Silu, GeluTanh, Gelu] {
            let (up, y) = (tensor(&[2.0; 8], &[8]), output(&[8]));
            forward(activation, &gate, &up, &y).unwrap();
            assert_eq!(read(&y), [2e4, 0.0, 200.0, 0.0, 0.0, 0.0, f32::INFINITY, 0.0]);
            let (dgate, dup) = (output(&[8]), output(&[8]));
            backward(activation, &up, &gate, &up, &dgate, &dup).unwrap();
            assert_eq!(read(&dgate)[..6], [4.0, 0.0, 4.0, 0.0, 2.0, 2.0]);
            assert!(read(&dup).iter().all(|v| !v.is_nan()));
        }
        let (up, y) = (tensor(&[2.0; 8], &[8]), output(&[8]));
        forward(Sigmoid, &gate, &up, &y).unwrap();
        assert_eq!(read(&y), [2.0, 0.0, 2.0, 0.0, 1.0, 1.0, 2.0, 0.0]);
        let (dgate, dup) = (output(&[8]), output(&[8]));
        backward(Sigmoid, &up, &gate, &up, &dgate, &dup).unwrap();
        assert_eq!(read(&dgate), [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]);
        assert_eq!(read(&dup), read(&y));
    });
}

#[test]
fn large_tensors_give_the_same_bits_on_any_number_of_threads() {
    let (n, f) = (300, 401);
    let data = [1, 2, 3].map(|seed| random(seed, n * f));
    assert_same_for_any_thread_count(|| {
        let [gate, up, dy] = [0, 1, 2].map(|i| tensor(&data[i], &[n, f]));
        let [y, dgate, dup] = [0; 3].map(|_| output(&[n, f]));
        forward(Silu, &gate, &up, &y).unwrap();
        backward(Silu, &dy, &gate, &up, &dgate, &dup).unwrap();
        [read(&y), read(&dgate), read(&dup)]
    });
}

#[test]
fn gradients_inside_one_buffer_are_refused() {
    let x = tensor(&[1.0; 6], &[2, 3]);
    let both = output(&[4, 3]);
    let (dgate, dup) = (both.narrow(0, 0, 2).unwrap(), both.narrow(0, 2, 2).unwrap());
    let error = backward(Silu, &x, &x, &x, &dgate, &dup).unwrap_err();
    assert!(matches!(error, OpError::SharedStorage { output: "dgate", other: "dup", .. }), "{error}");
    let error = forward(Silu, &x, &output(&[3, 2]), &output(&[2, 3])).unwrap_err();
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
            for activation in ACTIVATIONS {
                let [y, dgate, dup] = [0; 3].map(|_| rounded(dtype, &vec![f32::NAN; n * f], &[n, f]).0);
                forward(activation, &gate, &up, &y).unwrap();
                let y64 = reference::forward(activation, &gate64, &up64);
                let rounding = rounding + tolerance(activation);
                assert_close("y", &read(&y), &y64, rounding);
                backward(activation, &dy, &gate, &up, &dgate, &dup).unwrap();
                let (dgate64, dup64) = reference::backward(activation, &dy64, &gate64, &up64);
                assert_close("dgate", &read(&dgate), &dgate64, rounding + 2e-7);
                assert_close("dup", &read(&dup), &dup64, rounding);
            }
        }
    });
}

#[test]
fn an_empty_shard_is_no_error() {
    on_every_target(|_| {
        let [gate, up, y, dgate, dup] = [0; 5].map(|_| output(&[0, 3]));
        forward(Silu, &gate, &up, &y).unwrap();
        backward(Silu, &y, &gate, &up, &dgate, &dup).unwrap();
    });
}
