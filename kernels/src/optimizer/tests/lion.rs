use crate::OpError;
use crate::optimizer::lion::*;
use crate::optimizer::reference;
use crate::testing::*;

const PARAMS: LionParams =
    LionParams { lr: 1e-2, beta1: 0.9, beta2: 0.99, weight_decay: 0.1, grad_scale: 0.5 };

#[test]
fn ten_steps_match_the_reference_on_every_target() {
    on_every_target(|target| {
        for weight_decay in [0.0, 0.1] {
            for len in [0, 1, 7, 64, 131, 1029, 4099] {
                let (initial, zeros) = (random(1, len), vec![0.0; len]);
                let [param, m] = [&initial, &zeros].map(|data| tensor(data, &[len]));
                let [mut param64, mut m64] = [&initial, &zeros].map(|data| to_f64(data));
                for t in 1..=10 {
                    let params = LionParams { weight_decay, ..PARAMS };
                    let grad = random(t + 10, len);
                    step(&param, &tensor(&grad, &[len]), &m, &params).unwrap();
                    reference::lion(&mut param64, &to_f64(&grad), &mut m64, &params);
                }
                let what = format!("{target}, decay {weight_decay}, {len}");
                assert_close(&format!("param {what}"), &read(&param), &param64, 1e-6);
                assert_close(&format!("exp_avg {what}"), &read(&m), &m64, 1e-6);
            }
        }
    });
}

#[test]
fn the_momentum_outvotes_a_small_gradient_and_a_zero_direction_stays() {
    on_every_target(|_| {
        let (param, grad, m) =
            (tensor(&[2.0; 3], &[3]), tensor(&[-0.5, -2.0, 0.0], &[3]), tensor(&[0.1, 0.1, 0.0], &[3]));
        step(&param, &grad, &m, &LionParams { weight_decay: 0.0, grad_scale: 1.0, ..PARAMS }).unwrap();
        assert_close("param", &read(&param), &[2.0 - 1e-2, 2.0 + 1e-2, 2.0], 1e-7);
        assert_close("exp_avg", &read(&m), &[0.094, 0.079, 0.0], 1e-6);
    });
}

#[test]
fn a_gradient_that_is_not_a_number_shows_in_the_parameter() {
    on_every_target(|target| {
        let (param, grad, m) = (tensor(&[2.0], &[1]), tensor(&[f32::NAN], &[1]), tensor(&[0.0], &[1]));
        step(&param, &grad, &m, &PARAMS).unwrap();
        assert!(param.to_vec1::<f32>().unwrap()[0].is_nan(), "{target}");
    });
}

#[test]
fn large_tensors_give_the_same_bits_on_any_number_of_threads() {
    let len = 200_003;
    let data = [1, 2, 3].map(|seed| random(seed, len));
    assert_same_for_any_thread_count(|| {
        let [param, grad, m] = [0, 1, 2].map(|i| tensor(&data[i], &[len]));
        step(&param, &grad, &m, &PARAMS).unwrap();
        [read(&param), read(&m)]
    });
}

#[test]
fn wrong_arguments_are_named() {
    let of = |len: usize| tensor(&vec![0.0; len], &[len]);
    let error = step(&of(4), &of(4), &of(3), &PARAMS).unwrap_err();
    assert!(matches!(error, OpError::Shape { argument: "exp_avg", .. }), "{error}");
    let error = step(&of(4), &of(4), &of(4), &LionParams { beta1: 1.0, ..PARAMS }).unwrap_err();
    assert_eq!(error.to_string(), "lion::step: `beta1` is 1, expected at least 0 and below 1");
    let grad = of(4);
    let error = step(&grad, &grad, &of(4), &PARAMS).unwrap_err();
    assert!(matches!(error, OpError::SharedStorage { output: "param", other: "grad", .. }), "{error}");
}

#[cfg(feature = "cuda")]
#[test]
fn kernels_give_the_same_bits_where_vectors_fit_and_where_they_do_not_on_a_gpu() {
    for len in 1028..1032 {
        assert_same_at_any_alignment(&[1, 2, 3].map(|seed| random(seed, len)), |tensors| {
            step(&tensors[0], &tensors[1], &tensors[2], &PARAMS).unwrap();
        });
    }
}
