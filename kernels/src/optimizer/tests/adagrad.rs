use crate::OpError;
use crate::optimizer::adagrad::*;
use crate::optimizer::reference;
use crate::testing::*;

const PARAMS: AdagradParams =
    AdagradParams { lr: 1e-2, lr_decay: 0.0, eps: 1e-10, weight_decay: 0.1, step: 1, grad_scale: 0.5 };

#[test]
fn ten_steps_match_the_reference_in_every_mode_on_every_target() {
    on_every_target(|target| {
        for (lr_decay, weight_decay, initial_sum) in [(0.0, 0.0, 0.0), (0.5, 0.1, 0.0), (0.0, 0.1, 0.25)] {
            for len in [0, 1, 7, 64, 131, 1029, 4099] {
                let (initial, sums) = (random(1, len), vec![initial_sum; len]);
                let [param, sum] = [&initial, &sums].map(|data| tensor(data, &[len]));
                let [mut param64, mut sum64] = [&initial, &sums].map(|data| to_f64(data));
                for t in 1..=10 {
                    let params = AdagradParams { lr_decay, weight_decay, step: t, ..PARAMS };
                    let grad = random(t + 10, len);
                    step(&param, &tensor(&grad, &[len]), &sum, &params).unwrap();
                    reference::adagrad(&mut param64, &to_f64(&grad), &mut sum64, &params);
                }
                let what = format!("{target}, lr_decay {lr_decay}, decay {weight_decay}, {len}");
                assert_close(&format!("param {what}"), &read(&param), &param64, 1e-6);
                assert_close(&format!("state_sum {what}"), &read(&sum), &sum64, 1e-6);
            }
        }
    });
}

#[test]
fn equal_gradients_move_by_the_learning_rate_over_the_root_of_the_step() {
    on_every_target(|_| {
        let (param, grad, sum) =
            (tensor(&[1.0; 2], &[2]), tensor(&[3.0, -3.0], &[2]), tensor(&[0.0; 2], &[2]));
        let mut moved = 0.0;
        for t in 1..=4 {
            step(&param, &grad, &sum, &AdagradParams { weight_decay: 0.0, step: t, ..PARAMS }).unwrap();
            moved += 1e-2 / (t as f64).sqrt();
        }
        assert_close("param", &read(&param), &[1.0 - moved, 1.0 + moved], 2e-7);
    });
}

#[test]
fn large_tensors_give_the_same_bits_on_any_number_of_threads() {
    let len = 200_003;
    let data = [1, 2].map(|seed| random(seed, len));
    assert_same_for_any_thread_count(|| {
        let [param, grad] = [0, 1].map(|i| tensor(&data[i], &[len]));
        let sum = tensor(&vec![0.5; len], &[len]);
        step(&param, &grad, &sum, &PARAMS).unwrap();
        [read(&param), read(&sum)]
    });
}

#[test]
fn wrong_arguments_are_named() {
    let of = |len: usize| tensor(&vec![0.0; len], &[len]);
    let error = step(&of(4), &of(4), &of(3), &PARAMS).unwrap_err();
    assert!(matches!(error, OpError::Shape { argument: "state_sum", .. }), "{error}");
    let error = step(&of(4), &of(4), &of(4), &AdagradParams { step: 0, ..PARAMS }).unwrap_err();
    assert_eq!(error.to_string(), "adagrad::step: `step` is 0, expected at least 1");
    let error = step(&of(4), &of(4), &of(4), &AdagradParams { lr_decay: -1.0, ..PARAMS }).unwrap_err();
    assert!(matches!(error, OpError::InvalidValue { argument: "lr_decay", .. }), "{error}");
}

#[cfg(feature = "cuda")]
#[test]
fn kernels_give_the_same_bits_where_vectors_fit_and_where_they_do_not_on_a_gpu() {
    for len in 1028..1032 {
        let data = [1, 2, 3].map(|seed| random(seed, len).iter().map(|v| v.abs()).collect());
        assert_same_at_any_alignment(&data, |tensors| {
            step(&tensors[0], &tensors[1], &tensors[2], &PARAMS).unwrap();
        });
    }
}
