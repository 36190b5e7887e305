use super::*;
use crate::testing::*;
use candle_core::Device;
use std::ops::Range;

const PARAMS: LambParams = LambParams {
    step: Step { number: 1, lr: 1e-2, grad_scale: 0.5 },
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-6,
    weight_decay: 0.1,
    bias_correction: true,
    min_coeff: 0.01,
    max_coeff: 10.0,
};

fn segments(ends: &[(usize, usize)]) -> Segments {
    Segments::new(ends.iter().map(|(start, end)| *start..*end).collect(), &device()).unwrap()
}

/// Parameter tensors at odd offsets, an empty one, gaps between and after them, and one of several chunks.
fn layouts() -> [(usize, Vec<(usize, usize)>); 4] {
    [
        (0, vec![]),
        (3, vec![(0, 3)]),
        (140, vec![(1, 8), (8, 8), (9, 131)]),
        (50_000, vec![(0, 5), (7, 16_390), (16_390, 49_153)]),
    ]
}

#[test]
fn five_steps_match_the_reference_on_every_target() {
    on_every_target(|target| {
        for (len, ends) in layouts() {
            for (bias_correction, weight_decay) in [(true, 0.1), (false, 0.0)] {
                let (initial, zeros) = (random(1, len), vec![0.0; len]);
                let [param, m, v] = [&initial, &zeros, &zeros].map(|data| tensor(data, &[len]));
                let [mut param64, mut m64, mut v64] = [&initial, &zeros, &zeros].map(|data| to_f64(data));
                for t in 1..=5 {
                    let step = Step { number: t, ..PARAMS.step };
                    let params = LambParams { step, bias_correction, weight_decay, ..PARAMS };
                    let grad = random(t + 10, len);
                    let (direction_of, segments) = (tensor(&grad, &[len]), segments(&ends));
                    let norms = direction(&param, &direction_of, &m, &v, &segments, &params).unwrap();
                    apply(&param, &direction_of, &segments, &norms, &params).unwrap();
                    for at in ends.iter().map(|(start, end)| *start..*end) {
                        let grad64 = to_f64(&grad[at.clone()]);
                        let (m64, v64) = (&mut m64[at.clone()], &mut v64[at.clone()]);
                        reference::step(&mut param64[at], &grad64, m64, v64, &params);
                    }
                }
                let what = format!("{target}, corrected {bias_correction}, {len}");
                assert_close(&format!("param {what}"), &read(&param), &param64, 2e-6);
                assert_close(&format!("exp_avg {what}"), &read(&m), &m64, 1e-6);
                assert_close(&format!("exp_avg_sq {what}"), &read(&v), &v64, 1e-6);
            }
        }
    });
}

#[test]
fn partitions_that_add_up_their_norms_take_the_undivided_step() {
    on_every_target(|target| {
        let (len, cut) = (4000, 1501);
        let data = [1, 2].map(|seed| random(seed, len));
        let zeros = vec![0.0; len];
        let part = |at: Range<usize>| {
            [&data[0], &data[1], &zeros, &zeros].map(|whole| tensor(&whole[at.clone()], &[at.len()]))
        };
        // The parameter tensor 100..3000 lies in both partitions.
        let whole = (part(0..len), segments(&[(0, 100), (100, 3000), (3000, len)]));
        let parts = [
            (part(0..cut), segments(&[(0, 100), (100, cut), (cut, cut)])),
            (part(cut..len), segments(&[(0, 0), (0, 3000 - cut), (3000 - cut, len - cut)])),
        ];
        let first_half = |([param, grad, m, v], segments): &([Tensor; 4], Segments)| {
            direction(param, grad, m, v, segments, &PARAMS).unwrap()
        };
        let expected = first_half(&whole);
        let mut norms = first_half(&parts[0]);
        norms.iter_mut().zip(first_half(&parts[1])).for_each(|(sum, other)| *sum += other);
        for (sum, expected) in norms.iter().zip(&expected) {
            assert!((sum.param / expected.param - 1.0).abs() < 1e-6, "{target}: {sum:?} {expected:?}");
            assert!(
                (sum.direction / expected.direction - 1.0).abs() < 1e-6,
                "{target}: {sum:?} {expected:?}"
            );
        }
        let second_half = |([param, direction, ..], segments): &([Tensor; 4], Segments)| {
            apply(param, direction, segments, &norms, &PARAMS).unwrap();
            read(param)
        };
        assert_eq!(
            second_half(&whole),
            [second_half(&parts[0]), second_half(&parts[1])].concat(),
            "{target}"
        );
    });
}

#[test]
fn the_step_is_proportional_to_the_parameters_norm() {
    // Without decay the first direction is the gradient's sign: its norm is 2, so the step is the learning
    // rate times 4/2.
    on_every_target(|_| {
        let (param, grad) = (tensor(&[2.0; 4], &[4]), tensor(&[3.0, -3.0, 1.0, -1.0], &[4]));
        let (m, v) = (tensor(&[0.0; 4], &[4]), tensor(&[0.0; 4], &[4]));
        let (params, segments) = (LambParams { weight_decay: 0.0, ..PARAMS }, segments(&[(0, 4)]));
        let norms = direction(&param, &grad, &m, &v, &segments, &params).unwrap();
        assert_eq!(norms[0].param, 16.0);
        assert!((norms[0].direction - 4.0).abs() < 2e-5, "{norms:?}");
        apply(&param, &grad, &segments, &norms, &params).unwrap();
        assert_close("param", &read(&param), &[1.98, 2.02, 1.98, 2.02], 1e-6);
    });
}

#[test]
fn the_trust_ratio_is_bounded_and_1_without_a_norm() {
    let ratio = |param: f64, direction: f64| PARAMS.trust_ratio(SquaredNorms { param, direction });
    assert_eq!([ratio(9.0, 4.0), ratio(1e6, 1.0), ratio(1e-6, 1.0)], [1.5, 10.0, 0.01]);
    assert_eq!([ratio(0.0, 1.0), ratio(1.0, 0.0), ratio(0.0, 0.0)], [1.0; 3]);
    assert!(ratio(f64::NAN, 1.0).is_nan());
}

#[test]
fn elements_outside_of_the_segments_are_left_alone() {
    on_every_target(|target| {
        let data = [1, 2, 3, 4].map(|seed| random(seed, 40));
        let [param, grad, m, v] = [0, 1, 2, 3].map(|i| tensor(&data[i], &[40]));
        let segments = segments(&[(6, 23)]);
        let norms = direction(&param, &grad, &m, &v, &segments, &PARAMS).unwrap();
        apply(&param, &grad, &segments, &norms, &PARAMS).unwrap();
        for (tensor, old) in [param, grad, m, v].iter().zip(&data) {
            let new = read(tensor);
            assert_eq!((&new[..6], &new[23..]), (&old[..6], &old[23..]), "{target}");
            assert_ne!(new[6..23], old[6..23], "{target}");
        }
    });
}

#[test]
fn large_tensors_give_the_same_bits_on_any_number_of_threads() {
    let len = 200_003;
    let data = [1, 2, 3].map(|seed| random(seed, len));
    assert_same_for_any_thread_count(|| {
        let [param, grad, m] = [0, 1, 2].map(|i| tensor(&data[i], &[len]));
        let v = tensor(&vec![0.5; len], &[len]);
        let segments = segments(&[(0, 70_001), (70_001, len)]);
        let norms = direction(&param, &grad, &m, &v, &segments, &PARAMS).unwrap();
        apply(&param, &grad, &segments, &norms, &PARAMS).unwrap();
        (norms, [read(&param), read(&m), read(&v)])
    });
}

#[test]
fn wrong_arguments_are_named() {
    let of = |len: usize| tensor(&vec![0.0; len], &[len]);
    let whole = segments(&[(0, 4)]);
    let error = direction(&of(4), &of(4), &of(4), &of(3), &whole, &PARAMS).unwrap_err();
    assert!(matches!(error, OpError::Shape { argument: "exp_avg_sq", .. }), "{error}");
    let zeroth = LambParams { step: Step { number: 0, ..PARAMS.step }, ..PARAMS };
    let error = direction(&of(4), &of(4), &of(4), &of(4), &whole, &zeroth).unwrap_err();
    assert_eq!(error.to_string(), "lamb::direction: `step` is 0, expected at least 1");
    let error = direction(&of(3), &of(3), &of(3), &of(3), &whole, &PARAMS).unwrap_err();
    assert!(matches!(error, OpError::InvalidValue { argument: "segments", value: 4.0, .. }), "{error}");
    let error = apply(&of(4), &of(4), &whole, &[], &PARAMS).unwrap_err();
    assert!(matches!(error, OpError::InvalidValue { argument: "norms", .. }), "{error}");
    let crossed = LambParams { min_coeff: 11.0, ..PARAMS };
    let error = apply(&of(4), &of(4), &whole, &[SquaredNorms::default()], &crossed).unwrap_err();
    assert!(matches!(error, OpError::InvalidValue { argument: "min_coeff", .. }), "{error}");
    let error = Segments::new(vec![0..4, 3..5], &Device::Cpu).unwrap_err();
    assert_eq!(
        error.to_string(),
        "lamb::Segments::new: `ranges` is 3, expected at or after the end of the one before"
    );
}

#[cfg(feature = "cuda")]
#[test]
fn kernels_give_the_same_bits_where_vectors_fit_and_where_they_do_not_on_a_gpu() {
    // The norms are compared through the parameters that they change.
    for cut in 16_600..16_604 {
        let data = [1, 2, 3, 4].map(|seed| random(seed, 17_001).iter().map(|v| v.abs()).collect());
        assert_same_at_any_alignment(&data, |tensors| {
            let [param, grad, m, v] = [0, 1, 2, 3].map(|i| &tensors[i]);
            let segments = segments(&[(3, cut), (cut, 17_001)]);
            let norms = direction(param, grad, m, v, &segments, &PARAMS).unwrap();
            apply(param, grad, &segments, &norms, &PARAMS).unwrap();
        });
    }
}
