use crate::OpError;
use crate::optimizer::adamw::*;
use crate::optimizer::reference;
use crate::testing::*;

const PARAMS: AdamParams = AdamParams {
    lr: 1e-2,
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    weight_decay: 0.1,
    decoupled: true,
    bias_correction: true,
    step: 1,
    grad_scale: 0.5,
};

#[test]
fn ten_steps_match_the_reference_in_every_mode_on_every_target() {
    on_every_target(|target| {
        for (decoupled, bias_correction) in [(true, true), (true, false), (false, true), (false, false)] {
            for len in [0, 1, 7, 64, 131, 1029, 4099] {
                let initial = random(1, len);
                let zeros = vec![0.0; len];
                let [param, m, v] = [&initial, &zeros, &zeros].map(|data| tensor(data, &[len]));
                let [mut param64, mut m64, mut v64] = [&initial, &zeros, &zeros].map(|data| to_f64(data));
                for t in 1..=10 {
                    let params = AdamParams { decoupled, bias_correction, step: t, ..PARAMS };
                    let grad = random(t + 10, len);
                    step(&param, &tensor(&grad, &[len]), &m, &v, &params).unwrap();
                    reference::adamw(&mut param64, &to_f64(&grad), &mut m64, &mut v64, &params);
                }
                let what = format!("{target}, decoupled {decoupled}, corrected {bias_correction}, {len}");
                assert_close(&format!("param {what}"), &read(&param), &param64, 1e-6);
                assert_close(&format!("exp_avg {what}"), &read(&m), &m64, 1e-6);
                assert_close(&format!("exp_avg_sq {what}"), &read(&v), &v64, 1e-6);
            }
        }
    });
}

#[test]
fn the_first_corrected_step_moves_by_the_learning_rate_after_decay() {
    on_every_target(|_| {
        // m/(1−β₁) = g and √(v/(1−β₂)) = |g|, so the update is lr · sign(g).
        let (param, grad) = (tensor(&[2.0, 2.0], &[2]), tensor(&[3.0, -3.0], &[2]));
        let (m, v) = (tensor(&[0.0; 2], &[2]), tensor(&[0.0; 2], &[2]));
        step(&param, &grad, &m, &v, &PARAMS).unwrap();
        let decayed = 2.0 * (1.0 - 1e-2 * 0.1);
        assert_close("param", &read(&param), &[decayed - 1e-2, decayed + 1e-2], 1e-7);
        assert_close("exp_avg", &read(&m), &[0.15, -0.15], 1e-7);
        assert_close("exp_avg_sq", &read(&v), &[0.1125, 0.1125], 1e-7);
    });
}

#[test]
fn a_small_decay_keeps_its_strength() {
    on_every_target(|_| {
        // 1 − 1e-6 in f32 is off by 1 % of the 1e-6, so the decay must not go through that difference.
        let params = AdamParams { lr: 1e-5, weight_decay: 0.1, ..PARAMS };
        let initial: Vec<f32> = (0..4096).map(|i| 1.0 + i as f32 / 4096.0).collect();
        let (param, zeros) = (tensor(&initial, &[4096]), || tensor(&[0.0; 4096], &[4096]));
        step(&param, &zeros(), &zeros(), &zeros(), &params).unwrap();
        let sum = |values: &[f32]| values.iter().map(|v| f64::from(*v)).sum::<f64>();
        let decay = 1.0 - sum(&read(&param)) / sum(&initial);
        assert!((decay / 1e-6 - 1.0).abs() < 3e-3, "{decay:e}");
    });
}

#[test]
fn zero_gradients_leave_parameters_without_decay_alone() {
    on_every_target(|_| {
        let params = AdamParams { weight_decay: 0.0, ..PARAMS };
        let initial = random(1, 40);
        let (param, zeros) = (tensor(&initial, &[40]), || tensor(&[0.0; 40], &[40]));
        step(&param, &zeros(), &zeros(), &zeros(), &params).unwrap();
        assert_eq!(read(&param), initial);
    });
}

#[test]
fn large_tensors_give_the_same_bits_on_any_number_of_threads() {
    let len = 200_003;
    let data = [1, 2, 3].map(|seed| random(seed, len));
    assert_same_for_any_thread_count(|| {
        let [param, grad, m] = [0, 1, 2].map(|i| tensor(&data[i], &[len]));
        let v = tensor(&data[2].iter().map(|v| v * v).collect::<Vec<f32>>(), &[len]);
        step(&param, &grad, &m, &v, &PARAMS).unwrap();
        [read(&param), read(&m), read(&v)]
    });
}

#[test]
fn wrong_arguments_are_named() {
    let of = |len: usize| tensor(&vec![0.0; len], &[len]);
    let error = step(&of(4), &of(4), &of(3), &of(4), &PARAMS).unwrap_err();
    assert!(matches!(error, OpError::Shape { argument: "exp_avg", .. }), "{error}");
    let error = step(&of(4), &of(4), &of(4), &of(4), &AdamParams { step: 0, ..PARAMS }).unwrap_err();
    assert_eq!(error.to_string(), "adamw::step: `step` is 0, expected at least 1");
    let error = step(&of(4), &of(4), &of(4), &of(4), &AdamParams { beta2: 1.0, ..PARAMS }).unwrap_err();
    assert!(matches!(error, OpError::InvalidValue { argument: "beta2", .. }), "{error}");
    let grad = of(4);
    let error = step(&grad, &grad, &of(4), &of(4), &PARAMS).unwrap_err();
    assert!(matches!(error, OpError::SharedStorage { output: "param", other: "grad", .. }), "{error}");
}

#[cfg(feature = "cuda")]
#[test]
fn kernels_give_the_same_bits_where_vectors_fit_and_where_they_do_not_on_a_gpu() {
    for len in 1028..1032 {
        let data = [1, 2, 3, 4].map(|seed| random(seed, len).iter().map(|v| v.abs()).collect());
        assert_same_at_any_alignment(&data, |tensors| {
            let [param, grad, m, v] = [0, 1, 2, 3].map(|i| &tensors[i]);
            step(param, grad, m, v, &PARAMS).unwrap();
        });
    }
}

#[cfg(feature = "cuda")]
#[test]
fn optimizer_state_of_16_bits_is_refused_on_a_gpu() {
    crate::testing::on_a_gpu(|| {
        let of = |len: usize| tensor(&vec![0.0; len], &[len]);
        let narrow = of(4).to_dtype(candle_core::DType::BF16).unwrap();
        let error = step(&of(4), &of(4), &narrow, &of(4), &PARAMS).unwrap_err();
        assert!(matches!(error, OpError::MixedDTypes { argument: "exp_avg", .. }), "{error}");
    });
}
