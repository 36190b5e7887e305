//! Tests of every element-wise rule. A rule's file has its formula, and calls [`rule_tests!`].

use super::elementwise::Rule;
use super::{ElementStep, Step};
use crate::OpError;
use crate::testing::*;
use candle_core::Tensor;
use std::array::from_fn;
use std::fmt::Debug;

/// A rule's formula in f64, as in PyTorch's documentation or the paper.
pub(super) trait Formula<const T: usize>: Rule<T> + ElementStep + Debug + Sync {
    /// Initial values of the state, each of which is tested.
    const INITIAL_STATE: &'static [f32] = &[0.0];
    const NUM_STEPS: u64 = 10;
    const TOLERANCE: f64 = 1e-6;

    /// The rule in each of its modes.
    fn modes(step: Step) -> Vec<Self>;

    /// Updates one element of each tensor, parameters first.
    fn formula(&self, element: &mut [f64; T], grad: f64);
}

pub(super) const STEP: Step = Step { number: 1, lr: 1e-2, grad_scale: 0.5 };

/// The tests of a [`Formula`] with `T` tensors, in a module of their own.
macro_rules! rule_tests {
    ($rule:ty, $T:literal) => {
        #[test]
        fn steps_match_the_formula_in_every_mode_on_every_target() {
            $crate::optimizer::tests::assert_formula::<$rule, $T>();
        }

        #[test]
        fn large_tensors_give_the_same_bits_on_any_number_of_threads() {
            $crate::optimizer::tests::assert_same_on_threads::<$rule, $T>();
        }

        #[test]
        fn a_step_on_the_host_gives_the_bits_of_a_step_on_tensors() {
            $crate::optimizer::tests::assert_same_on_host::<$rule, $T>();
        }

        #[test]
        fn wrong_tensors_are_named() {
            $crate::optimizer::tests::assert_names_tensors::<$rule, $T>();
        }

        #[cfg(feature = "cuda")]
        #[test]
        fn kernels_give_the_same_bits_where_vectors_fit_and_where_they_do_not_on_a_gpu() {
            $crate::optimizer::tests::assert_same_where_vectors_fit::<$rule, $T>();
        }
    };
}

pub(super) use rule_tests;

pub(super) fn assert_formula<R: Formula<T>, const T: usize>() {
    let cases =
        || R::INITIAL_STATE.iter().flat_map(|state| (0..R::modes(STEP).len()).map(move |m| (m, *state)));
    on_every_target(|target| {
        for (mode, state) in cases() {
            for len in [0, 1, 7, 64, 131, 1029, 4099] {
                let (initial, states) = (random(1, len), vec![state; len]);
                let tensors: [Tensor; T] =
                    from_fn(|t| tensor(if t == 0 { &initial } else { &states }, &[len]));
                let element = |param: &f32| from_fn(|t| f64::from(if t == 0 { *param } else { state }));
                let mut expected: Vec<[f64; T]> = initial.iter().map(element).collect();
                for number in 1..=R::NUM_STEPS {
                    let rule = R::modes(Step { number, ..STEP })[mode];
                    let grad = random(number + 10, len);
                    rule.apply(&tensors[0], &tensor(&grad, &[len]), &tensors[1..]).unwrap();
                    for (element, grad) in expected.iter_mut().zip(to_f64(&grad)) {
                        rule.formula(element, grad);
                    }
                }
                for (t, name) in R::TENSORS.iter().enumerate() {
                    let what = format!("{name} {target}, {:?} from {state}, {len}", R::modes(STEP)[mode]);
                    let expected: Vec<f64> = expected.iter().map(|element| element[t]).collect();
                    assert_close(&what, &read(&tensors[t]), &expected, R::TOLERANCE);
                }
            }
        }
    });
}

/// Parameters and state, which is not negative, and gradients.
fn random_tensors<const T: usize>(len: usize) -> ([Vec<f32>; T], Vec<f32>) {
    let random = |t: usize| random(t as u64 + 1, len);
    let absolute = |values: Vec<f32>| values.into_iter().map(f32::abs).collect();
    (from_fn(|t| if t == 0 { random(t) } else { absolute(random(t)) }), random(T))
}

/// Steps after the first, which may ignore the state.
fn later_modes<R: Formula<T>, const T: usize>() -> Vec<R> {
    R::modes(Step { number: 3, ..STEP })
}

pub(super) fn assert_same_on_threads<R: Formula<T>, const T: usize>() {
    let len = 200_003;
    let (data, grad) = random_tensors::<T>(len);
    for rule in later_modes::<R, T>() {
        assert_same_for_any_thread_count(|| {
            let tensors = data.each_ref().map(|data| tensor(data, &[len]));
            rule.apply(&tensors[0], &tensor(&grad, &[len]), &tensors[1..]).unwrap();
            tensors.each_ref().map(read)
        });
    }
}

pub(super) fn assert_same_on_host<R: Formula<T>, const T: usize>() {
    for rule in later_modes::<R, T>() {
        for len in [0, 1, 31, 1003] {
            let (data, grad) = random_tensors::<T>(len);
            let tensors = data.each_ref().map(|data| tensor(data, &[len]));
            rule.apply(&tensors[0], &tensor(&grad, &[len]), &tensors[1..]).unwrap();
            let mut on_host = data.clone();
            let mut slices = on_host.each_mut().map(Vec::as_mut_slice);
            let (param, state) = slices.split_first_mut().unwrap();
            rule.apply_on_host(param, &grad, state).unwrap();
            assert_eq!(on_host, tensors.each_ref().map(read), "{rule:?}, {len} elements");
            assert!(len == 0 || on_host[0] != data[0], "{rule:?} moves parameters");
        }
    }
}

pub(super) fn assert_names_tensors<R: Formula<T>, const T: usize>() {
    let zeros = |len: usize| tensor(&vec![0.0; len], &[len]);
    let rule = R::modes(STEP)[0];
    for (wrong, name) in R::TENSORS.into_iter().enumerate().skip(1) {
        let tensors: [Tensor; T] = from_fn(|t| zeros(if t == wrong { 3 } else { 4 }));
        let error = rule.apply(&tensors[0], &zeros(4), &tensors[1..]).unwrap_err();
        assert!(matches!(error, OpError::Shape { argument, .. } if argument == name), "{error}");
        let mut data: [Vec<f32>; T] = from_fn(|t| vec![0.0; if t == wrong { 3 } else { 4 }]);
        let mut slices = data.each_mut().map(Vec::as_mut_slice);
        let (param, state) = slices.split_first_mut().unwrap();
        let error = rule.apply_on_host(param, &[0.0; 4], state).unwrap_err();
        let expected = format!("{}: `{name}` is 3, expected as many elements as `grad`", R::OP);
        assert_eq!(error.to_string(), expected);
    }
    let tensors: [Tensor; T] = from_fn(|_| zeros(4));
    let error = rule.apply(&tensors[0], &zeros(3), &tensors[1..]).unwrap_err();
    assert!(matches!(error, OpError::Shape { argument: "grad", .. }), "{error}");
    let error = rule.apply(&tensors[0], &tensors[0], &tensors[1..]).unwrap_err();
    assert!(matches!(error, OpError::SharedStorage { output: "param", other: "grad", .. }), "{error}");
}

#[cfg(feature = "cuda")]
pub(super) fn assert_same_where_vectors_fit<R: Formula<T>, const T: usize>() {
    for (rule, len) in
        later_modes::<R, T>().into_iter().flat_map(|rule| (1028..1032).map(move |len| (rule, len)))
    {
        let (data, grad) = random_tensors::<T>(len);
        let all: Vec<_> = data.into_iter().chain([grad]).collect();
        assert_same_at_any_alignment(&all, |tensors| {
            let [param, state @ .., grad] = tensors else { unreachable!("parameters and gradients") };
            rule.apply(param, grad, state).unwrap();
        });
    }
}
