use super::*;
use crate::testing::*;
use candle_core::DType;

/// Batch, heads, tokens, elements per head.
type Dims = [usize; 4];

/// The sizes of every path: one row, odd numbers, several blocks of tokens.
const DIMS: [Dims; 4] = [[1, 1, 1, 1], [2, 3, 5, 7], [1, 2, 2100, 4], [3, 5, 9, 70]];

struct Problem {
    dims: Dims,
    /// sinks, o, lse, delta
    inputs: [Vec<f32>; 4],
}

impl Problem {
    fn new(dims: Dims) -> Self {
        let [batch, heads, tokens, head_dim] = dims;
        let rows = batch * heads * tokens;
        let mut seed = 0;
        let inputs = [heads, rows * head_dim, rows, rows].map(|size| {
            seed += 1;
            random(seed, size)
        });
        Self { dims, inputs }
    }

    /// o, lse and dsinks, of which the last is added to ones.
    fn run(&self) -> [Vec<f32>; 3] {
        let [batch, heads, tokens, head_dim] = self.dims;
        let [sinks, o, lse, delta] = &self.inputs;
        let (sinks, o) = (tensor(sinks, &[heads]), tensor(o, &[batch, tokens, heads, head_dim]));
        let [lse, delta] = [lse, delta].map(|rows| tensor(rows, &[batch, heads, tokens]));
        forward(&sinks, &o, &lse).unwrap();
        let dsinks = tensor(&vec![1.0; heads], &[heads]);
        backward(&sinks, &lse, &delta, &dsinks).unwrap();
        [read(&o), read(&lse), read(&dsinks)]
    }

    fn expected(&self) -> [Vec<f64>; 3] {
        let [_, _, tokens, head_dim] = self.dims;
        let [sinks, o, lse, delta] = &self.inputs.each_ref().map(|values| to_f64(values));
        let [o, lse] = reference::forward(sinks, o, lse, tokens, head_dim);
        let dsinks = reference::backward(sinks, &lse, delta, tokens);
        [o, lse, dsinks.iter().map(|sum| sum + 1.0).collect()]
    }
}

#[test]
fn forward_and_backward_match_the_reference_on_every_target() {
    on_every_target(|target| {
        for dims in DIMS {
            let problem = Problem::new(dims);
            for (name, (got, expected)) in
                ["o", "lse", "dsinks"].iter().zip(problem.run().iter().zip(&problem.expected()))
            {
                assert_close(&format!("{name} of {dims:?}, {target}"), got, expected, 2e-6);
            }
        }
    });
}

#[test]
fn the_reference_gradient_is_the_derivative_of_the_forward() {
    let [_, heads, tokens, head_dim] = DIMS[1];
    let [sinks, o, lse, _] = &Problem::new(DIMS[1]).inputs.map(|values| to_f64(&values));
    let dout = to_f64(&random(9, o.len()));
    let [out, lse_with_sinks] = reference::forward(sinks, o, lse, tokens, head_dim);
    let mut delta = vec![0.0; lse.len()];
    for (at, (out, dout)) in out.iter().zip(&dout).enumerate() {
        let (head, row) = (at / head_dim % heads, at / (head_dim * heads));
        delta[(row / tokens * heads + head) * tokens + row % tokens] += out * dout;
    }
    let loss = |sinks: &[f64]| weighted_sum(&reference::forward(sinks, o, lse, tokens, head_dim)[0], &dout);
    let dsinks = reference::backward(sinks, &lse_with_sinks, &delta, tokens);
    assert_gradient("dsinks", loss, sinks, &dsinks);
}

#[test]
fn the_bits_do_not_depend_on_the_number_of_threads() {
    let problem = Problem::new([2, 5, 2500, 3]);
    assert_same_for_any_thread_count(|| problem.run());
}

#[test]
fn masked_rows_and_extreme_sinks_give_no_nan() {
    on_every_target(|_| {
        // A row without keys, and without a sink too; sinks that take all or nothing.
        let infinity = f32::NEG_INFINITY;
        for (sink, lse, expected) in [
            (1.0, infinity, [0.0, 1.0, -2.0]),
            (infinity, infinity, [0.0, infinity, 0.0]),
            (infinity, 3.0, [5.0, 3.0, 0.0]),
            (1e4, 3.0, [0.0, 1e4, -2.0]),
            (-1e4, 3.0, [5.0, 3.0, 0.0]),
        ] {
            let [sinks, dsinks] = [sink, 0.0].map(|value| tensor(&[value], &[1]));
            let (o, [lse, delta]) =
                (tensor(&[5.0], &[1, 1, 1, 1]), [lse, 2.0].map(|value| tensor(&[value], &[1, 1, 1])));
            forward(&sinks, &o, &lse).unwrap();
            backward(&sinks, &lse, &delta, &dsinks).unwrap();
            assert_eq!([read(&o)[0], read(&lse)[0], read(&dsinks)[0]], expected, "sink {sink}");
        }
    });
}

#[test]
fn wrong_shapes_are_refused_by_name_and_an_empty_shard_is_no_error() {
    let [sinks, short] = [tensor(&[0.0; 2], &[2]), tensor(&[0.0], &[1])];
    let (o, lse) = (output(&[1, 3, 2, 4]), output(&[1, 2, 3]));
    let error = forward(&short, &o, &lse).unwrap_err();
    assert!(matches!(error, OpError::Shape { argument: "sinks", .. }), "{error}");
    let error = forward(&sinks, &output(&[1, 2, 3, 4]), &lse).unwrap_err();
    assert!(matches!(error, OpError::Shape { argument: "o", .. }), "{error}");
    let error = backward(&sinks, &lse, &output(&[1, 2, 3]), &short).unwrap_err();
    assert!(matches!(error, OpError::Shape { argument: "dsinks", .. }), "{error}");
    let (o, lse) = (output(&[1, 0, 2, 4]), output(&[1, 2, 0]));
    forward(&sinks, &o, &lse).unwrap();
    backward(&sinks, &lse, &output(&[1, 2, 0]), &tensor(&[0.0; 2], &[2])).unwrap();
}

#[test]
fn elements_of_16_bits_are_rounded_once() {
    on_every_target(|_| {
        let problem = Problem::new([2, 3, 40, 65]);
        let [batch, heads, tokens, head_dim] = problem.dims;
        let [sinks, o, lse, _] = &problem.inputs;
        let (sinks, sinks_read) = rounded(DType::BF16, sinks, &[heads]);
        let (o, o_read) = rounded(DType::BF16, o, &[batch, tokens, heads, head_dim]);
        let [expected, _] = reference::forward(&sinks_read, &o_read, &to_f64(lse), tokens, head_dim);
        forward(&sinks, &o, &tensor(lse, &[batch, heads, tokens])).unwrap();
        // Half of the last of 8 bits.
        assert_close("o", &read(&o), &expected, 1.0 / 256.0);
    });
}
