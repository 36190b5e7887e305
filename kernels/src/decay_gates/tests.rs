use super::*;
use crate::testing::*;
use candle_core::DType;

struct Problem {
    inputs: [Vec<f32>; 6],
    tokens: usize,
    heads: usize,
    /// Decays of each head.
    channels: usize,
}

impl Problem {
    /// a, b, a_log, dt_bias, dg, dbeta.
    fn new(tokens: usize, heads: usize) -> Self {
        Self::of_channels(tokens, heads, 1)
    }

    fn of_channels(tokens: usize, heads: usize, channels: usize) -> Self {
        let columns = heads * channels;
        let sizes = [tokens * columns, tokens * heads, heads, columns, tokens * columns, tokens * heads];
        let mut seed = 0;
        let inputs = sizes.map(|size| {
            seed += 1;
            random(seed, size).iter().map(|value| value * 3.0).collect()
        });
        Self { inputs, tokens, heads, channels }
    }

    /// The inputs, rounded to `dtype` but for the gradients.
    fn tensors(&self, dtype: DType) -> [Tensor; 6] {
        let columns = self.heads * self.channels;
        let (decays, rates) = ([self.tokens, columns], [self.tokens, self.heads]);
        let dims: [&[usize]; 6] = [&decays, &rates, &[self.heads], &[columns], &decays, &rates];
        std::array::from_fn(|i| rounded(if i < 4 { dtype } else { DType::F32 }, &self.inputs[i], dims[i]).0)
    }

    fn f64s(&self, dtype: DType) -> [Vec<f64>; 6] {
        self.tensors(dtype).map(|tensor| to_f64(&read(&tensor)))
    }

    /// g, beta, da, da_log, ddt_bias, and db if the rate is a projection. The sums are added to ones.
    fn run(&self, dtype: DType, limits: Option<[f64; 2]>) -> Vec<Vec<f32>> {
        let [a, b, a_log, dt_bias, dg, dbeta] = &self.tensors(dtype);
        let rate = limits.map_or(Rate::Projection(b), |limits| Rate::TimeStep { limits });
        let operands = Operands { a, rate, a_log, dt_bias };
        let dirty = |like: &Tensor, dtype| rounded(dtype, &vec![f32::NAN; like.elem_count()], like.dims()).0;
        let [g, beta] = [a, b].map(|like| dirty(like, DType::F32));
        let [da, db] = [a, b].map(|like| dirty(like, dtype));
        forward(&operands, &g, &beta).unwrap();
        let ones = |like: &Tensor| tensor(&vec![1.0; like.elem_count()], like.dims());
        let [da_log, ddt_bias] = [a_log, dt_bias].map(ones);
        let db = operands.b().map(|_| &db);
        let gradients = Gradients { da: &da, db, da_log: Some(&da_log), ddt_bias: Some(&ddt_bias) };
        backward(&operands, dg, dbeta, &gradients).unwrap();
        [&g, &beta, &da, &da_log, &ddt_bias].into_iter().chain(db).map(read).collect()
    }

    /// The same of the reference.
    fn expected(&self, dtype: DType, limits: Option<[f64; 2]>) -> Vec<Vec<f64>> {
        let [a, b, a_log, dt_bias, dg, dbeta] = &self.f64s(dtype);
        let (gates, [da, da_log, ddt_bias], db) = match limits {
            None => {
                let [da, db, da_log, ddt_bias] = reference::backward(a, b, a_log, dt_bias, dg, dbeta);
                (reference::forward(a, b, a_log, dt_bias), [da, da_log, ddt_bias], Some(db))
            }
            Some(limits) => {
                let steps = reference::time_steps(a, dt_bias, limits);
                let decay = |(i, step): (usize, &f64)| -a_log[i % self.heads].exp() * step;
                let gradients = reference::time_steps_backward(a, a_log, dt_bias, limits, dg, dbeta);
                ([steps.iter().enumerate().map(decay).collect(), steps], gradients, None)
            }
        };
        let added = |sums: Vec<f64>| sums.into_iter().map(|sum| sum + 1.0).collect();
        gates.into_iter().chain([da, added(da_log), added(ddt_bias)]).chain(db).collect()
    }
}

/// Of the time steps within these, few are clamped.
const LIMITS: [f64; 2] = [0.1, 2.5];

#[test]
fn both_directions_match_the_reference_on_every_target() {
    // The CPU computes in f64.
    let tolerance = if is_for_a_gpu() { 2e-6 } else { 3e-7 };
    on_every_target(|target| {
        let sizes = [(1, 1, 1), (7, 3, 1), (513, 9, 1), (1100, 2, 1), (1, 2, 2), (520, 3, 5), (9, 2, 35)];
        for (tokens, heads, channels) in sizes {
            let problem = Problem::of_channels(tokens, heads, channels);
            for limits in [None, Some(LIMITS)].into_iter().take(if channels == 1 { 2 } else { 1 }) {
                for (dtype, rounding) in
                    [(DType::F32, 0.0), (DType::BF16, 2f64.powi(-8)), (DType::F16, 2f64.powi(-11))]
                {
                    let expected = problem.expected(dtype, limits);
                    for (index, got) in problem.run(dtype, limits).iter().enumerate() {
                        // da and db have the type of the elements.
                        let tolerance = tolerance + if index == 2 || index == 5 { rounding } else { 0.0 };
                        let what = format!(
                            "result {index} of {tokens}x{heads}x{channels}, {limits:?}, {dtype:?}, {target}"
                        );
                        assert_close(&what, got, &expected[index], tolerance);
                    }
                }
            }
        }
    });
}

#[test]
fn the_reference_gradients_of_time_steps_are_the_derivatives() {
    let [a, _, a_log, dt_bias, dg, dbeta] = &Problem::new(4, 3).f64s(DType::F32);
    let loss = |a: &[f64], a_log: &[f64], dt_bias: &[f64]| {
        let steps = reference::time_steps(a, dt_bias, LIMITS);
        let decays: Vec<_> = steps.iter().enumerate().map(|(i, step)| -a_log[i % 3].exp() * step).collect();
        weighted_sum(&decays, dg) + weighted_sum(&steps, dbeta)
    };
    let [da, da_log, ddt_bias] = reference::time_steps_backward(a, a_log, dt_bias, LIMITS, dg, dbeta);
    assert_gradient("da", |a| loss(a, a_log, dt_bias), a, &da);
    assert_gradient("da_log", |a_log| loss(a, a_log, dt_bias), a_log, &da_log);
    assert_gradient("ddt_bias", |dt_bias| loss(a, a_log, dt_bias), dt_bias, &ddt_bias);
}

#[test]
fn the_reference_gradients_are_the_derivatives_of_the_forward() {
    let [a, b, a_log, dt_bias, dg, dbeta] = &Problem::of_channels(4, 3, 2).f64s(DType::F32);
    let [da, db, da_log, ddt_bias] = reference::backward(a, b, a_log, dt_bias, dg, dbeta);
    let loss = |a: &[f64], b: &[f64], a_log: &[f64], dt_bias: &[f64]| {
        let [g, beta] = reference::forward(a, b, a_log, dt_bias);
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
    assert_same_for_any_thread_count(|| problem.run(DType::F32, None));
}

#[test]
fn extreme_projections_saturate_without_nan_and_nan_stays_nan() {
    on_every_target(|_| {
        let [a, b] = [(); 2].map(|()| tensor(&[1e4, -1e4, f32::NAN], &[3, 1]));
        let [a_log, dt_bias] = [tensor(&[0.0], &[1]), tensor(&[0.0], &[1])];
        for rate in [Rate::Projection(&b), Rate::TimeStep { limits: LIMITS }] {
            let [g, beta] = [output(&[3, 1]), output(&[3, 1])];
            forward(&Operands { a: &a, rate, a_log: &a_log, dt_bias: &dt_bias }, &g, &beta).unwrap();
            let ([g, beta], [least, most]) = ([read(&g), read(&beta)], LIMITS.map(|limit| limit as f32));
            let expected = match rate {
                Rate::Projection(_) => [-1e4, 0.0, 1.0, 0.0],
                Rate::TimeStep { .. } => [-most, -least, most, least],
            };
            assert_eq!([g[0], g[1], beta[0], beta[1]], expected);
            assert!(g[2].is_nan() && beta[2].is_nan(), "{g:?} {beta:?}");
        }
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
