use super::reference::Problem;
use super::*;
use crate::testing::*;
use candle_core::DType;

/// A convolution of random numbers.
struct Case {
    problem: Problem,
    x: Vec<f32>,
    dy: Vec<f32>,
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
}

impl Case {
    fn new(cu_seqlens: &[&[u32]], channels: usize, width: usize, [silu, biased]: [bool; 2]) -> Self {
        let lists = cu_seqlens.iter().map(|list| list.to_vec()).collect::<Vec<_>>();
        let documents = Documents::new(lists).unwrap();
        let elems = documents.batch() * documents.seq_len() * channels;
        let (x, dy, weight) = (random(1, elems), random(2, elems), random(3, channels * width));
        let bias = biased.then(|| random(4, channels));
        Self { problem: Problem { documents, channels, width, silu }, x, dy, weight, bias }
    }

    /// All widths and options on packed documents.
    fn all() -> Vec<Self> {
        let packed: &[&[u32]] = &[&[0, 1, 3, 3, 20, 150], &[0, 149, 150]];
        let mut cases = vec![
            Self::new(&[&[0, 1]], 1, 1, [true, false]),
            Self::new(&[&[0, 3]], 5, 8, [true, true]),
            Self::new(&[&[0, 70]], 300, 4, [true, false]),
            Self::new(packed, 131, 4, [true, false]),
        ];
        cases.extend(
            (1..=MAX_WIDTH).map(|width| Self::new(packed, 19, width, [width % 2 == 0, width % 3 == 0])),
        );
        cases
    }

    fn name(&self) -> String {
        let Problem { documents, channels, width, silu } = &self.problem;
        let bias = self.bias.is_some();
        format!("{} tokens, {channels} channels, {width} taps, SiLU {silu}, bias {bias}", documents.seq_len())
    }

    fn bias64(&self) -> Vec<f64> {
        self.bias.as_ref().map_or(vec![0.0; self.problem.channels], |bias| to_f64(bias))
    }

    /// [y, dx, dweight, dbias] of the op, and of the reference for the inputs rounded to `dtype`.
    fn run(&self, dtype: DType) -> [[Vec<f64>; 4]; 2] {
        let Problem { documents, channels, width, silu } = &self.problem;
        let (batch, seq_len) = (documents.batch(), documents.seq_len());
        let shape = [batch, seq_len, *channels];
        let [(x, x64), (dy, dy64)] = [&self.x, &self.dy].map(|data| rounded(dtype, data, &shape));
        let (weight, weight64) = rounded(dtype, &self.weight, &[*channels, 1, *width]);
        let bias = self.bias.as_ref().map(|bias| rounded(dtype, bias, &[*channels]));
        let filter =
            Filter { weight: &weight, bias: bias.as_ref().map(|(bias, _)| bias), silu: *silu, documents };
        let [y, dx] = [0, 1].map(|_| rounded(dtype, &vec![f32::NAN; x64.len()], &shape).0);
        forward(&x, &filter, &y).unwrap();
        // Parts of one flat gradient.
        let flat = tensor(&vec![1.0; channels * (width + 1)], &[channels * (width + 1)]);
        let dweight = flat.narrow(0, 0, channels * width).unwrap().reshape((*channels, *width)).unwrap();
        let dbias = flat.narrow(0, channels * width, *channels).unwrap();
        backward(&dy, &x, &filter, &dx, &dweight, &dbias).unwrap();
        let bias64 = bias.map_or(self.bias64(), |(_, bias)| bias);
        let [dx64, mut dweight64, mut dbias64] = self.problem.backward(&dy64, &x64, &weight64, &bias64);
        dweight64.iter_mut().chain(&mut dbias64).for_each(|sum| *sum += 1.0);
        let got = [&y, &dx, &dweight, &dbias].map(|tensor| to_f64(&read(tensor)));
        [got, [self.problem.forward(&x64, &weight64, &bias64), dx64, dweight64, dbias64]]
    }

    #[track_caller]
    fn check(&self, dtype: DType, target: &str, rounding: f64) {
        let [got, expected] = self.run(dtype);
        for (name, (got, expected)) in ["y", "dx", "dweight", "dbias"].iter().zip(got.iter().zip(&expected)) {
            let got: Vec<f32> = got.iter().map(|value| *value as f32).collect();
            let is_element = ["y", "dx"].contains(name);
            let tolerance = 2e-6 + if is_element { rounding } else { 0.0 };
            assert_close(&format!("{name} {dtype:?} {target}, {}", self.name()), &got, expected, tolerance);
        }
    }
}

#[test]
fn both_directions_match_the_reference_on_every_target() {
    on_every_target_in_one_thread(|target| {
        Case::all().iter().for_each(|case| case.check(DType::F32, target, 0.0));
    });
}

#[test]
fn elements_of_16_bits_are_rounded_once() {
    on_every_target_in_one_thread(|target| {
        for case in [&Case::all()[1], &Case::all()[3]] {
            case.check(DType::BF16, target, 2f64.powi(-8));
            case.check(DType::F16, target, 2f64.powi(-11));
        }
    });
}

#[test]
fn the_reference_gradients_are_the_derivatives_of_the_forward() {
    for width in [1, 2, 4] {
        for silu in [false, true] {
            let case = Case::new(&[&[0, 2, 7], &[0, 7, 7]], 3, width, [silu, true]);
            let [x, dy, weight] = [&case.x, &case.dy, &case.weight].map(|values| to_f64(values));
            let (bias, problem) = (case.bias64(), &case.problem);
            let [dx, dweight, dbias] = problem.backward(&dy, &x, &weight, &bias);
            let loss = |x: &[f64], weight: &[f64], bias: &[f64]| {
                weighted_sum(&problem.forward(x, weight, bias), &dy)
            };
            assert_gradient("dx", |x| loss(x, &weight, &bias), &x, &dx);
            assert_gradient("dweight", |weight| loss(&x, weight, &bias), &weight, &dweight);
            assert_gradient("dbias", |bias| loss(&x, &weight, bias), &bias, &dbias);
        }
    }
}

#[test]
fn a_slice_of_the_channels_is_the_slice_of_the_result() {
    let case = Case::new(&[&[0, 4, 9]], 7, 4, [true, false]);
    let channels = 2..5;
    let slice = |values: &[f32]| -> Vec<f32> {
        values.chunks(7).flat_map(|row| row[channels.clone()].to_vec()).collect()
    };
    let weight = tensor(&case.weight, &[7, 4]);
    let documents = &case.problem.documents;
    let whole = Filter { weight: &weight, bias: None, silu: true, documents };
    let part = Filter { weight: &weight.narrow(0, 2, 3).unwrap(), ..whole };
    let (y, y_part) = (output(&[9, 7]), output(&[9, 3]));
    forward(&tensor(&case.x, &[9, 7]), &whole, &y).unwrap();
    forward(&tensor(&slice(&case.x), &[9, 3]), &part, &y_part).unwrap();
    assert_eq!(crate::tensor::to_vec::<f32>(&y_part).unwrap(), slice(&read(&y)));
}

#[test]
fn the_number_of_threads_does_not_change_a_bit() {
    let case = Case::new(&[&[0, 100, 2999]], 67, 4, [true, true]);
    assert_same_for_any_thread_count(|| case.run(DType::F32)[0].clone());
}

#[test]
fn an_empty_shard_leaves_the_weight_gradient_alone() {
    let (documents, weight) = (Documents::new(vec![vec![0]]).unwrap(), tensor(&[1.0; 8], &[4, 2]));
    let filter = Filter { weight: &weight, bias: None, silu: true, documents: &documents };
    let (x, dweight) = (output(&[1, 0, 4]), tensor(&[3.0; 8], &[4, 2]));
    forward(&x, &filter, &output(&[1, 0, 4])).unwrap();
    backward(&x, &x, &filter, &output(&[1, 0, 4]), &dweight, None).unwrap();
    assert_eq!(read(&dweight), [3.0; 8]);
}

#[test]
fn wrong_arguments_are_named() {
    let documents = Documents::new(vec![vec![0, 3]]).unwrap();
    let weight = tensor(&[1.0; 8], &[4, 2]);
    let filter = Filter { weight: &weight, bias: None, silu: true, documents: &documents };
    let x = tensor(&[1.0; 12], &[3, 4]);
    let error = forward(&tensor(&[1.0; 16], &[4, 4]), &filter, &output(&[4, 4])).unwrap_err();
    assert!(matches!(error, OpError::TokenCount { argument: "documents", got: 3, .. }), "{error}");
    let error = forward(&tensor(&[1.0; 15], &[3, 5]), &filter, &output(&[3, 5])).unwrap_err();
    assert!(matches!(error, OpError::Shape { argument: "weight", .. }), "{error}");
    let wide = tensor(&[1.0; 36], &[4, 9]);
    let error = forward(&x, &Filter { weight: &wide, ..filter }, &output(&[3, 4])).unwrap_err();
    assert!(matches!(error, OpError::InvalidValue { argument: "weight", .. }), "{error}");
    let bias = tensor(&[1.0; 3], &[3]);
    let error = forward(&x, &Filter { bias: Some(&bias), ..filter }, &output(&[3, 4])).unwrap_err();
    assert!(matches!(error, OpError::Shape { argument: "bias", .. }), "{error}");
    let [dx, dweight] = [output(&[3, 4]), output(&[4, 3])];
    let error = backward(&x, &x, &filter, &dx, &dweight, None).unwrap_err();
    assert!(matches!(error, OpError::Shape { argument: "dweight", .. }), "{error}");
    let dbias = dx.narrow(0, 0, 1).unwrap().flatten_all().unwrap();
    let error = backward(&x, &x, &filter, &dx, None, &dbias).unwrap_err();
    assert!(matches!(error, OpError::SharedStorage { output: "dbias", other: "dx", .. }), "{error}");
}
