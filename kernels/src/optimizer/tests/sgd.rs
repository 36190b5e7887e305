use crate::OpError;
use crate::optimizer::reference;
use crate::optimizer::sgd::*;
use crate::testing::*;

const PARAMS: SgdParams =
    SgdParams { lr: 0.1, momentum: 0.0, nesterov: false, weight_decay: 0.0, step: 1, grad_scale: 1.0 };

#[test]
fn five_steps_match_the_reference_in_every_mode_on_every_target() {
    on_every_target(|target| {
        for (momentum, nesterov, weight_decay) in
            [(0.0, false, 0.0), (0.0, false, 0.1), (0.9, false, 0.1), (0.9, true, 0.0), (0.9, true, 0.1)]
        {
            for len in [0, 1, 7, 64, 131, 1029, 4099] {
                let initial = random(1, len);
                // The buffer's first content must not matter.
                let (param, buffer) = (tensor(&initial, &[len]), output(&[len]));
                let (mut param64, mut buffer64) = (to_f64(&initial), vec![f64::NAN; len]);
                for t in 1..=5 {
                    let params =
                        SgdParams { momentum, nesterov, weight_decay, step: t, grad_scale: 0.5, ..PARAMS };
                    let grad = random(t + 10, len);
                    let buffer = (momentum > 0.0).then_some(&buffer);
                    step(&param, &tensor(&grad, &[len]), buffer, &params).unwrap();
                    reference::sgd(&mut param64, &to_f64(&grad), &mut buffer64, &params);
                }
                let what = format!("{target}, momentum {momentum}, nesterov {nesterov}, {len}");
                assert_close(&format!("param {what}"), &read(&param), &param64, 5e-7);
                if momentum > 0.0 {
                    assert_close(&format!("buffer {what}"), &read(&buffer), &buffer64, 5e-7);
                }
            }
        }
    });
}

#[test]
fn momentum_remembers_the_gradient_of_the_step_before() {
    on_every_target(|_| {
        let (param, buffer) = (tensor(&[0.0], &[1]), output(&[1]));
        let params = SgdParams { momentum: 0.5, ..PARAMS };
        step(&param, &tensor(&[1.0], &[1]), Some(&buffer), &params).unwrap();
        step(&param, &tensor(&[0.0], &[1]), Some(&buffer), &SgdParams { step: 2, ..params }).unwrap();
        assert_close("param", &read(&param), &[-0.1 - 0.05], 1e-7);
    });
}

#[test]
fn large_tensors_give_the_same_bits_on_any_number_of_threads() {
    let len = 200_003;
    let data = [1, 2, 3].map(|seed| random(seed, len));
    assert_same_for_any_thread_count(|| {
        let [param, grad, buffer] = [0, 1, 2].map(|i| tensor(&data[i], &[len]));
        let params = SgdParams { momentum: 0.9, nesterov: true, step: 2, ..PARAMS };
        step(&param, &grad, Some(&buffer), &params).unwrap();
        [read(&param), read(&buffer)]
    });
}

#[test]
fn wrong_arguments_are_named() {
    let of = |len: usize| tensor(&vec![0.0; len], &[len]);
    let error = step(&of(4), &of(4), None, &SgdParams { momentum: 0.9, ..PARAMS }).unwrap_err();
    assert_eq!(error.to_string(), "sgd::step: `momentum` is 0.9, expected 0 (there is no momentum buffer)");
    let error = step(&of(4), &of(4), Some(&of(4)), &SgdParams { nesterov: true, ..PARAMS }).unwrap_err();
    assert!(matches!(error, OpError::InvalidValue { argument: "momentum", .. }), "{error}");
    let params = SgdParams { momentum: 0.9, ..PARAMS };
    let error = step(&of(4), &of(4), Some(&of(5)), &params).unwrap_err();
    assert!(matches!(error, OpError::Shape { argument: "momentum_buffer", .. }), "{error}");
    let error = step(&of(4), &of(3), None, &PARAMS).unwrap_err();
    assert!(matches!(error, OpError::Shape { argument: "grad", .. }), "{error}");
}

#[cfg(feature = "cuda")]
#[test]
fn kernels_give_the_same_bits_where_vectors_fit_and_where_they_do_not_on_a_gpu() {
    for (len, momentum) in (1028..1032).flat_map(|len| [(len, 0.0), (len, 0.9)]) {
        assert_same_at_any_alignment(&[1, 2, 3].map(|seed| random(seed, len)), |tensors| {
            let params = SgdParams { momentum, nesterov: momentum > 0.0, step: 2, ..PARAMS };
            step(&tensors[0], &tensors[1], Some(&tensors[2]), &params).unwrap();
        });
    }
}
