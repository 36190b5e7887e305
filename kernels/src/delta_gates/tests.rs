use super::*;
use crate::testing::*;

struct Problem {
    inputs: [Vec<f32>; 6],
    tokens: usize,
    heads: usize,
}

impl Problem {
    /// a, b, a_log, dt_bias, dg, dbeta.
    fn new(tokens: usize, heads: usize) -> Self {
        let sizes = [tokens * heads, tokens * heads, heads, heads, tokens * heads, tokens * heads];
        let mut seed = 0;
        let inputs = sizes.map(|size| {
            seed += 1;
            random(seed, size).iter().map(|value| value * 3.0).collect()
        });
        Self { inputs, tokens, heads }
    }

    fn f64s(&self) -> [Vec<f64>; 6] {
        self.inputs.each_ref().map(|values| to_f64(values))
    }

    fn tensors(&self) -> [Tensor; 6] {
        let rows = [self.tokens, self.heads];
        let dims: [&[usize]; 6] = [&rows, &rows, &[self.heads], &[self.heads], &rows, &rows];
        std::array::from_fn(|i| tensor(&self.inputs[i], dims[i]))
    }

    /// g, beta, da, db, da_log and ddt_bias; the last two are added to ones.
    fn run(&self) -> [Vec<f32>; 6] {
        let [a, b, a_log, dt_bias, dg, dbeta] = &self.tensors();
        let operands = Operands { a, rate: Rate::Projection(b), a_log, dt_bias };
        let rows = || output(&[self.tokens, self.heads]);
        let [g, beta, da, db] = [rows(), rows(), rows(), rows()];
        forward(&operands, &g, &beta).unwrap();
        let sums =
            [tensor(&vec![1.0; self.heads], &[self.heads]), tensor(&vec![1.0; self.heads], &[self.heads])];
        let gradients =
            Gradients { da: &da, db: Some(&db), da_log: Some(&sums[0]), ddt_bias: Some(&sums[1]) };
        backward(&operands, [dg, dbeta], &gradients).unwrap();
        [read(&g), read(&beta), read(&da), read(&db), read(&sums[0]), read(&sums[1])]
    }
}

#[test]
fn forward_and_backward_match_the_reference_on_every_target() {
    // The CPU computes in f64.
    let tolerance = if is_for_a_gpu() { 2e-6 } else { 3e-7 };
    on_every_target(|target| {
        for (tokens, heads) in [(1, 1), (7, 3), (513, 9), (1100, 2)] {
            let problem = Problem::new(tokens, heads);
            let [a, b, a_log, dt_bias, dg, dbeta] = &problem.f64s();
            let [g, beta] = reference::forward([a, b], [a_log, dt_bias]);
            let [da, db, da_log, ddt_bias] = reference::backward([a, b], [a_log, dt_bias], [dg, dbeta]);
            let [da_log, ddt_bias] =
                [da_log, ddt_bias].map(|sums| sums.iter().map(|sum| sum + 1.0).collect::<Vec<_>>());
            let expected = [g, beta, da, db, da_log, ddt_bias];
            for (index, (got, expected)) in problem.run().iter().zip(&expected).enumerate() {
                assert_close(
                    &format!("result {index} of {tokens}x{heads}, {target}"),
                    got,
                    expected,
                    tolerance,
                );
            }
        }
    });
}

/// Of the time steps within these, few are clamped.
const LIMITS: [f64; 2] = [0.1, 2.5];

#[test]
fn time_steps_match_the_reference_on_every_target_but_a_gpu_which_refuses_them() {
    let tolerance = 3e-7;
    on_every_target(|target| {
        for (tokens, heads) in [(1, 1), (7, 3), (513, 9)] {
            let problem = Problem::new(tokens, heads);
            let [a, _, a_log, dt_bias, dg, dbeta] = &problem.tensors();
            let operands = Operands { a, rate: Rate::TimeStep { limits: LIMITS }, a_log, dt_bias };
            let rows = || output(&[tokens, heads]);
            let [g, beta, da] = [rows(), rows(), rows()];
            let result = forward(&operands, &g, &beta);
            if is_for_a_gpu() {
                assert!(matches!(result, Err(OpError::CpuOnly { .. })), "{result:?}");
                continue;
            }
            result.unwrap();
            let zeros = || tensor(&vec![0.0; heads], &[heads]);
            let (da_log, ddt_bias) = (zeros(), zeros());
            let gradients = Gradients { da: &da, db: None, da_log: Some(&da_log), ddt_bias: Some(&ddt_bias) };
            backward(&operands, [dg, dbeta], &gradients).unwrap();

            let [a, _, a_log, dt_bias, dg, dbeta] = &problem.f64s();
            let steps = reference::time_steps(a, dt_bias, LIMITS);
            let decays = steps.iter().enumerate().map(|(i, step)| -a_log[i % heads].exp() * step).collect();
            let [of_a, of_a_log, of_dt_bias] =
                reference::time_steps_backward(a, [a_log, dt_bias], LIMITS, [dg, dbeta]);
            let expected = [decays, steps, of_a, of_a_log, of_dt_bias];
            for (index, (got, expected)) in [g, beta, da, da_log, ddt_bias].iter().zip(&expected).enumerate()
            {
                let what = format!("result {index} of {tokens}x{heads}, {target}");
                assert_close(&what, &read(got), expected, tolerance);
            }
        }
    });
}

#[test]
fn the_reference_gradients_of_time_steps_are_the_derivatives() {
    let [a, _, a_log, dt_bias, dg, dbeta] = &Problem::new(4, 3).f64s();
    let loss = |a: &[f64], a_log: &[f64], dt_bias: &[f64]| {
        let steps = reference::time_steps(a, dt_bias, LIMITS);
        let decays: Vec<_> = steps.iter().enumerate().map(|(i, step)| -a_log[i % 3].exp() * step).collect();
        weighted_sum(&decays, dg) + weighted_sum(&steps, dbeta)
    };
    let [da, da_log, ddt_bias] = reference::time_steps_backward(a, [a_log, dt_bias], LIMITS, [dg, dbeta]);
    assert_gradient("da", |a| loss(a, a_log, dt_bias), a, &da);
    assert_gradient("da_log", |a_log| loss(a, a_log, dt_bias), a_log, &da_log);
    assert_gradient("ddt_bias", |dt_bias| loss(a, a_log, dt_bias), dt_bias, &ddt_bias);
}

#[test]
fn the_reference_gradients_are_the_derivatives_of_the_forward() {
    let [a, b, a_log, dt_bias, dg, dbeta] = &Problem::new(4, 3).f64s();
    let [da, db, da_log, ddt_bias] = reference::backward([a, b], [a_log, dt_bias], [dg, dbeta]);
    let loss = |a: &[f64], b: &[f64], a_log: &[f64], dt_bias: &[f64]| {
        let [g, beta] = reference::forward([a, b], [a_log, dt_bias]);
        weighted_sum(&g, dg) + weighted_sum(&beta, dbeta)
    };
    assert_gradient("da", |a| loss(a, b, a_log, dt_bias), a, &da);
    assert_gradient("db", |b| loss(a, b, a_log, dt_bias), b, &db);
    assert_gradient("da_log", |a_log| loss(a, b, a_log, dt_bias), a_log, &da_log);
    assert_gradient("ddt_bias", |dt_bias| loss(a, b, a_log, dt_bias), dt_bias, &ddt_bias);
}

#[test]
fn the_bits_do_not_depend_on_the_number_of_threads() {
    let problem = Problem::new(3000, 5);
    assert_same_for_any_thread_count(|| problem.run());
}

#[test]
fn extreme_projections_saturate_without_nan() {
    on_every_target(|_| {
        let [a, b] = [tensor(&[1e4, -1e4], &[2, 1]), tensor(&[1e4, -1e4], &[2, 1])];
        let [a_log, dt_bias] = [tensor(&[0.0], &[1]), tensor(&[0.0], &[1])];
        let [g, beta] = [output(&[2, 1]), output(&[2, 1])];
        let rate = Rate::Projection(&b);
        forward(&Operands { a: &a, rate, a_log: &a_log, dt_bias: &dt_bias }, &g, &beta).unwrap();
        assert_eq!((read(&g), read(&beta)), (vec![-1e4, 0.0], vec![1.0, 0.0]));
    });
}

#[test]
fn wrong_shapes_are_refused_by_name_and_an_empty_shard_is_no_error() {
    let [a, short] = [tensor(&[0.0; 6], &[3, 2]), tensor(&[0.0; 3], &[3])];
    let [two, empty] = [tensor(&[0.0; 2], &[2]), output(&[0, 2])];
    let operands = Operands { a: &a, rate: Rate::Projection(&a), a_log: &short, dt_bias: &two };
    let error = forward(&operands, &output(&[3, 2]), &output(&[3, 2])).unwrap_err();
    assert!(matches!(error, OpError::Shape { argument: "a_log", .. }), "{error}");
    let operands = Operands { a: &empty, rate: Rate::Projection(&empty), a_log: &two, dt_bias: &two };
    forward(&operands, &output(&[0, 2]), &output(&[0, 2])).unwrap();
}
