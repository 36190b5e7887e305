use super::*;
use crate::testing::*;

/// (n, inputs, outputs), including the matrix-vector shapes that `gemm` treats specially.
const SIZES: [[usize; 3]; 7] =
    [[1, 1, 1], [1, 7, 5], [5, 1, 3], [3, 2, 1], [2, 64, 100], [9, 100, 33], [65, 48, 131]];

#[test]
fn all_three_matmuls_match_the_reference() {
    on_every_target(|_| {
        for (seed, [n, inputs, outputs]) in SIZES.into_iter().enumerate() {
            let seed = seed as u64;
            let (x, weight, dy) = (
                random(seed, n * inputs),
                random(seed + 100, outputs * inputs),
                random(seed + 200, n * outputs),
            );
            let (x64, weight64, dy64) = (to_f64(&x), to_f64(&weight), to_f64(&dy));
            let (x, weight) = (tensor(&x, &[n, inputs]), tensor(&weight, &[outputs, inputs]));
            let dy = tensor(&dy, &[n, outputs]);

            let y = output(&[n, outputs]);
            forward(&x, &weight, &y, false).unwrap();
            assert_close("y", &read(&y), &reference::forward(&x64, &weight64, inputs), 1e-6);

            let dx = output(&[n, inputs]);
            backward_input(&dy, &weight, &dx, false).unwrap();
            assert_close("dx", &read(&dx), &reference::backward_input(&dy64, &weight64, inputs), 1e-6);

            let dweight = tensor(&vec![0.0; outputs * inputs], &[outputs, inputs]);
            backward_weight(&dy, &x, &dweight).unwrap();
            let expected = reference::backward_weight(&dy64, &x64, inputs, outputs);
            assert_close("dweight", &read(&dweight), &expected, 1e-6);
        }
    });
}

#[test]
fn accumulation_adds_to_what_is_there() {
    on_every_target(|_| {
        let (n, inputs, outputs) = (3, 5, 4);
        let (x, weight) = (tensor(&random(1, 15), &[n, inputs]), tensor(&random(2, 20), &[outputs, inputs]));
        let dy = tensor(&random(3, 12), &[n, outputs]);
        let run = |old: f32| {
            let y = tensor(&[old; 12], &[n, outputs]);
            forward(&x, &weight, &y, true).unwrap();
            let dx = tensor(&[old; 15], &[n, inputs]);
            backward_input(&dy, &weight, &dx, true).unwrap();
            let dweight = tensor(&[old; 20], &[outputs, inputs]);
            backward_weight(&dy, &x, &dweight).unwrap();
            [read(&y), read(&dx), read(&dweight)].concat()
        };
        for (plain, added) in run(0.0).iter().zip(run(8.0)) {
            assert!((plain + 8.0 - added).abs() < 4e-6, "{plain} + 8 is not {added}");
        }
    });
}

#[test]
fn the_reference_gradients_are_the_derivatives_of_the_forward() {
    let (n, inputs, outputs) = (3, 4, 5);
    let (x, weight, dy) = (
        to_f64(&random(1, n * inputs)),
        to_f64(&random(2, outputs * inputs)),
        to_f64(&random(3, n * outputs)),
    );
    let dx = reference::backward_input(&dy, &weight, inputs);
    assert_gradient("dx", |x| weighted_sum(&reference::forward(x, &weight, inputs), &dy), &x, &dx);
    let dweight = reference::backward_weight(&dy, &x, inputs, outputs);
    let loss = |weight: &[f64]| weighted_sum(&reference::forward(&x, weight, inputs), &dy);
    assert_gradient("dweight", loss, &weight, &dweight);
}

#[test]
fn leading_dimensions_may_be_split() {
    let (x, weight) = (random(1, 2 * 3 * 4), random(2, 5 * 4));
    let run = |leading: &[usize]| {
        let x = tensor(&x, &[leading, &[4]].concat());
        let y = output(&[leading, &[5]].concat());
        forward(&x, &tensor(&weight, &[5, 4]), &y, false).unwrap();
        read(&y)
    };
    assert_eq!(run(&[2, 3]), run(&[6]));
}

#[test]
fn matmuls_have_the_same_bits_for_any_number_of_threads() {
    let (n, inputs, outputs) = (200, 300, 257);
    let (x, weight) = (random(1, n * inputs), random(2, outputs * inputs));
    assert_same_for_any_thread_count(|| {
        let (x, weight) = (tensor(&x, &[n, inputs]), tensor(&weight, &[outputs, inputs]));
        let (y, dx) = (output(&[n, outputs]), output(&[n, inputs]));
        let dweight = tensor(&vec![1.0; outputs * inputs], &[outputs, inputs]);
        forward(&x, &weight, &y, false).unwrap();
        backward_input(&y, &weight, &dx, false).unwrap();
        backward_weight(&y, &x, &dweight).unwrap();
        [read(&y), read(&dx), read(&dweight)]
    });
}

#[test]
fn wrong_arguments_are_named_before_anything_is_written() {
    let (x, weight, y) =
        (tensor(&[1.0; 6], &[2, 3]), tensor(&[1.0; 12], &[4, 3]), tensor(&[5.0; 8], &[2, 4]));
    let narrow = tensor(&[1.0; 8], &[4, 2]);
    let error = forward(&x, &narrow, &y, false).unwrap_err();
    assert!(matches!(error, OpError::Shape { argument: "weight", .. }), "{error}");
    assert_eq!(
        error.to_string(),
        "linear::forward: `weight` has shape [4, 2], expected [4, 3] (leading dimensions may be split)"
    );
    let error = forward(&x, &weight, &tensor(&[5.0; 6], &[2, 3]), false).unwrap_err();
    assert!(matches!(error, OpError::Shape { argument: "y", .. }), "{error}");
    let error = forward(&x, &wrong_dtype(&[4, 3]), &y, false).unwrap_err();
    assert!(matches!(error, OpError::DType { argument: "weight", .. }), "{error}");
    let error = forward(&tensor(&[1.0; 6], &[3, 2]).t().unwrap(), &weight, &y, false).unwrap_err();
    assert!(matches!(error, OpError::NotContiguous { argument: "x", .. }), "{error}");
    assert_eq!(read(&y), [5.0; 8]);
}

#[test]
fn an_output_that_shares_storage_with_an_input_is_an_error_not_a_deadlock() {
    let flat = tensor(&random(1, 40), &[40]);
    let part = |start: usize, rows: usize, cols: usize| {
        flat.narrow(0, start, rows * cols).unwrap().reshape((rows, cols)).unwrap()
    };
    let error = forward(&part(0, 2, 3), &part(6, 4, 3), &part(18, 2, 4), false).unwrap_err();
    assert!(matches!(error, OpError::SharedStorage { output: "y", other: "x", .. }), "{error}");
}

#[test]
fn inputs_may_share_storage_and_no_tokens_give_no_output() {
    on_every_target(|_| {
        let flat = tensor(&random(1, 40), &[40]);
        let (x, weight) = (flat.narrow(0, 0, 6).unwrap(), flat.narrow(0, 6, 12).unwrap());
        let y = output(&[2, 4]);
        forward(&x.reshape((2, 3)).unwrap(), &weight.reshape((4, 3)).unwrap(), &y, false).unwrap();
        assert!(read(&y).iter().all(|y| y.is_finite()));

        let (x, y, weight) = (output(&[0, 3]), output(&[0, 4]), tensor(&[1.0; 12], &[4, 3]));
        forward(&x, &weight, &y, false).unwrap();
        backward_weight(&y, &x, &weight).unwrap();
        assert_eq!(read(&weight), [1.0; 12]);
    });
}

#[cfg(feature = "cuda")]
#[test]
fn matmuls_of_every_element_type_round_once_and_weight_gradients_stay_f32_on_a_gpu() {
    for_every_dtype(|dtype, rounding| {
        let (n, inputs, outputs) = (9, 100, 33);
        let (x, x64) = rounded(dtype, &random(1, n * inputs), &[n, inputs]);
        let (weight, weight64) = rounded(dtype, &random(2, outputs * inputs), &[outputs, inputs]);
        let (dy, dy64) = rounded(dtype, &random(3, n * outputs), &[n, outputs]);
        let empty = |rows: usize, cols: usize| rounded(dtype, &vec![f32::NAN; rows * cols], &[rows, cols]).0;
        let (y, dx) = (empty(n, outputs), empty(n, inputs));
        forward(&x, &weight, &y, false).unwrap();
        assert_close("y", &read(&y), &reference::forward(&x64, &weight64, inputs), rounding + 1e-6);
        backward_input(&dy, &weight, &dx, false).unwrap();
        assert_close("dx", &read(&dx), &reference::backward_input(&dy64, &weight64, inputs), rounding + 1e-6);
        let dweight = tensor(&vec![0.0; outputs * inputs], &[outputs, inputs]);
        backward_weight(&dy, &x, &dweight).unwrap();
        let expected = reference::backward_weight(&dy64, &x64, inputs, outputs);
        assert_close("dweight", &read(&dweight), &expected, 1e-6);
    });
}
