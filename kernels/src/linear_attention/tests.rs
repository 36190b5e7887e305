use super::reference::{Inputs, Problem};
use super::*;
use crate::Documents;
use crate::device::DeviceKind;
use crate::device::dry::DryDevice;
use crate::tensor::TensorOptions;
use crate::testing::*;
use candle_core::{DType, Device};
use std::convert::Infallible;

/// Random inputs of a call, and a gradient of its output.
struct Case {
    problem: Problem,
    /// q, k, v, dout, skip, g and beta.
    data: [Vec<f32>; 7],
}

const SUM: Rule = Rule::Sum { skip: () };

fn with_skip(rule: Rule, skip: &Tensor) -> Rule<&Tensor> {
    let Ok(rule) = rule.try_map_skip(|()| Ok::<_, Infallible>(skip));
    rule
}

/// The names of the outputs that [`Case::run`] returns: elements first, then sums in f32.
const NAMES: [&str; 7] = ["o", "dq", "dk", "dv", "dg", "dbeta", "dskip"];

impl Case {
    fn new(
        cu_seqlens: &[&[u32]],
        v_to_k: &[usize],
        key_heads: usize,
        [key_dim, value_dim]: [usize; 2],
    ) -> Self {
        let lists = cu_seqlens.iter().map(|list| list.to_vec()).collect::<Vec<_>>();
        let layout = LinearAttentionLayout::new(Documents::new(lists).unwrap(), v_to_k);
        let tokens = layout.documents().batch() * layout.documents().seq_len();
        let [keys, values] = [key_heads * key_dim, v_to_k.len() * value_dim].map(|row| tokens * row);
        let (gates, g) = (tokens * v_to_k.len(), Self::decays(tokens * v_to_k.len()));
        let beta = random(6, gates).into_iter().map(|x| (x + 2.0) / 4.0).collect();
        let skip = random(7, v_to_k.len());
        let data = [random(1, keys), random(2, keys), random(3, values), random(4, values), skip, g, beta];
        let problem = Problem { layout, key_heads, key_dim, value_dim, rule: Rule::Delta };
        Self { problem, data }
    }

    /// Decays so weak that states of earlier chunks count, and now and then an almost complete one; rates between 0 and 1.
    fn decays(len: usize) -> Vec<f32> {
        let g = random(5, len).into_iter().enumerate();
        g.map(|(i, x)| if i % 397 == 5 { -20.0 } else { (x - 2.0) / 200.0 }).collect()
    }

    /// By [`Rule::ChannelDelta`].
    fn of_channels(mut self) -> Self {
        self.problem.rule = Rule::ChannelDelta;
        self.data[5] = Self::decays(self.data[1].len());
        self
    }

    /// Writes a sine wave to each input.
    fn fill_with_waves(&mut self) {
        let waves = [(0.7, 0.1), (0.9, 0.4), (1.1, 0.2), (0.3, 0.5), (0.5, 0.7), (1.3, 0.3), (1.7, 0.6)];
        for (data, (frequency, phase)) in self.data.iter_mut().zip(waves) {
            let wave = |i: usize| (frequency * i as f64 + phase).sin() as f32;
            data.iter_mut().enumerate().for_each(|(i, x)| *x = wave(i));
        }
    }

    /// By [`Rule::Sum`], with keys so short that sums over a long document are of order 1.
    fn of_sums(mut self) -> Self {
        self.problem.rule = SUM;
        self.data[1].iter_mut().for_each(|x| *x *= 0.3);
        self
    }

    /// Chunks that are whole, partial, of one token and empty; heads that share key heads unevenly, and a key head that no
    /// value head uses.
    fn all() -> Vec<Self> {
        vec![
            Self::new(&[&[0, 130]], &[0, 2, 2, 2, 3], 4, [8, 40]),
            Self::new(&[&[0, 1, 1, 3, 66, 66, 193, 200], &[0, 200]], &[1, 0, 1], 3, [33, 7]),
            Self::new(&[&[0, 1]], &[0], 1, [2, 1]),
            Self::new(&[&[0, 3]], &[0], 1, [3, 5]),
            Self::new(&[&[0, 64], &[0, 64]], &[0, 0, 1], 2, [16, 16]),
            Self::new(&[&[0, 64, 128, 129, 193]], &[0], 1, [17, 100]),
            Self::new(&[&[0, 70]], &[0], 1, [8, 8]).with_short_keys(),
        ]
    }

    /// With queries and keys so short that the ε of their norms counts.
    fn with_short_keys(mut self) -> Self {
        self.data[..2].iter_mut().flatten().for_each(|x| *x *= 1e-3);
        self
    }

    /// As [`all`](Self::all), with documents that end before, at and behind the tokens whose states are saved.
    fn long() -> Vec<Self> {
        let cu_seqlens: &[&[u32]] = &[&[0, 2100, 2200], &[0, 1024, 1025, 2199, 2200], &[0, 30, 1055, 2200]];
        vec![Self::new(cu_seqlens, &[0, 1, 1], 2, [8, 36])]
    }

    /// [`all`](Self::all) and [`long`](Self::long) by every rule; for kernels, which may be emulated, fewer and smaller ones, with heads
    /// of several tiles.
    fn of_every_length() -> Vec<Self> {
        let by_every_rule = |cases: fn() -> Vec<Self>| {
            let cases = cases().into_iter().zip(cases()).zip(cases());
            // A single token has gradients of decays of 0, which a sum over channels only rounds to.
            let of_channels = |case: Self| (case.sizes().seq_len > 1).then(|| case.of_channels());
            cases.flat_map(move |((a, b), c)| [a, b.of_sums()].into_iter().chain(of_channels(c)))
        };
        if !is_for_a_gpu() {
            return by_every_rule(Self::all).chain(by_every_rule(Self::long)).collect();
        }
        let short = by_every_rule(|| {
            vec![
                Self::new(&[&[0, 1, 1, 3, 67], &[0, 67]], &[1, 0, 1], 3, [17, 7]),
                Self::new(&[&[0, 70]], &[0], 1, [68, 70]),
            ]
        });
        // Documents of several chunks in a segment, whose states must not meet, and documents of several segments.
        let long = [
            Self::new(&[&[0, 2060], &[0, 70, 140, 2060]], &[0], 1, [2, 2]),
            Self::new(&[&[0, 70, 140, 1200]], &[0, 0], 1, [2, 2]).of_sums(),
            Self::new(&[&[0, 70, 140, 1200]], &[0, 0], 1, [2, 2]).of_channels(),
        ];
        short.chain(long).collect()
    }

    fn name(&self) -> String {
        let Problem { layout, key_heads, key_dim, value_dim, rule } = &self.problem;
        let (seq_len, v_to_k) = (layout.documents().seq_len(), layout.v_to_k());
        format!("{rule:?}, {seq_len} tokens, {key_heads} key heads of {key_dim}, {v_to_k:?} of {value_dim}")
    }

    fn sizes(&self) -> Sizes {
        let Problem { ref layout, key_heads, key_dim, value_dim, rule } = self.problem;
        let documents = layout.documents();
        Sizes {
            batch: documents.batch(),
            seq_len: documents.seq_len(),
            key_heads,
            value_heads: layout.v_to_k().len(),
            key_dim,
            value_dim,
            rule,
        }
    }

    /// The shapes of q, k, v, dout, skip, g and beta.
    fn shapes(&self) -> [Vec<usize>; 7] {
        let sizes = self.sizes();
        let [key, value] = [sizes.key_shape(), sizes.value_shape()].map(|shape| shape.to_vec());
        let (decay, gate) = (sizes.decay_shape(), sizes.gate_shape().to_vec());
        [key.clone(), key, value.clone(), value, vec![sizes.value_heads], decay, gate]
    }

    /// The tensors of q, k, v, dout, skip, g and beta, rounded to `dtype` but for the gates.
    fn tensors(&self, dtype: DType) -> [Tensor; 7] {
        let shapes = self.shapes();
        std::array::from_fn(|i| {
            let dtype = if i < 5 { dtype } else { DType::F32 };
            rounded(dtype, &self.data[i], &shapes[i]).0
        })
    }

    /// The outputs of both directions, on tensors that contain NaN, and the bytes of scratch left in the workspace.
    fn run(&self, dtype: DType) -> ([Vec<f32>; 7], usize) {
        let Problem { ref layout, key_dim, value_dim, .. } = self.problem;
        let [q, k, v, dout, skip, g, beta] = &self.tensors(dtype);
        let workspace = Workspace::with_options(TensorOptions { device: device(), dtype });
        let operands = Operands { q, k, v, g, beta, rule: with_skip(self.problem.rule, skip), layout };
        let dirty = |like: &Tensor| rounded(like.dtype(), &vec![f32::NAN; like.elem_count()], like.dims()).0;
        let (o, states) = (dirty(v), output(&layout.states_shape(key_dim, value_dim)));
        forward(&operands, &o, &states, &workspace).unwrap();
        let o_without_states = dirty(v);
        forward(&operands, &o_without_states, None, &workspace).unwrap();
        assert_eq!(read(&o), read(&o_without_states), "saved states change the output");
        let [dq, dk, dv, dg, dbeta] = [q, k, v, g, beta].map(dirty);
        let dskip = if self.problem.rule.is_delta() {
            tensor(&vec![0.0; beta.elem_count()], beta.dims())
        } else {
            dirty(g)
        };
        let gradients = Gradients { dq: &dq, dk: &dk, dv: &dv, dg: &dg, dbeta: &dbeta, dskip: Some(&dskip) };
        backward(&operands, &states, dout, &gradients, &workspace).unwrap();
        ([&o, &dq, &dk, &dv, &dg, &dbeta, &dskip].map(read), workspace.free_bytes())
    }

    /// The same of the reference.
    fn expected(&self, dtype: DType) -> [Vec<f64>; 7] {
        let [q, k, v, dout, skip, g, beta] = self.tensors(dtype).map(|tensor| to_f64(&read(&tensor)));
        let inputs = Inputs { q, k, v, g, beta, skip };
        let o = self.problem.forward(&inputs);
        let Inputs { q, k, v, g, beta, skip } = self.problem.backward(&inputs, &dout);
        [o, q, k, v, g, beta, skip]
    }

    #[track_caller]
    fn check(&self, dtype: DType, target: &str, rounding: f64) {
        let (got, expected) = (self.run(dtype).0, self.expected(dtype));
        for (i, name) in NAMES.iter().enumerate() {
            let tolerance = 2e-5 + if i < 4 { rounding } else { 0.0 };
            let what = format!("{name} {dtype:?} {target}, {}", self.name());
            assert_close(&what, &got[i], &expected[i], tolerance);
        }
    }
}

#[test]
fn both_directions_match_the_reference_on_every_target() {
    on_every_target_in_one_thread(|target| {
        Case::of_every_length().iter().for_each(|case| case.check(DType::F32, target, 0.0));
    });
}

#[test]
fn both_directions_agree_with_transformers() {
    /// Σ xᵢ cos(0.37 i) of the output and the gradients of `torch_chunk_gated_delta_rule` (transformers 5.24.0) and PyTorch's
    /// autograd in f32, on the inputs below.
    const EXPECTED: [f64; 6] =
        [1.620_366_7, -0.474_985_6, 0.421_775_0, -0.004_163_3, 0.007_523_8, 0.151_703_8];
    /// The same of `chunk_kimi_delta_attention`.
    const EXPECTED_OF_CHANNELS: [f64; 6] =
        [0.055_280_9, 1.122_563_4, -0.677_686_3, 0.221_603_5, 0.239_130_9, -0.964_582_6];
    let delta = Case::new(&[&[0, 70]], &[0, 0, 1, 1], 2, [5, 3]);
    let by_channel = Case::new(&[&[0, 70]], &[0, 1], 2, [5, 3]).of_channels();
    for (mut case, expected) in [(delta, EXPECTED), (by_channel, EXPECTED_OF_CHANNELS)] {
        case.fill_with_waves();
        let [.., g, beta] = &mut case.data;
        g.iter_mut().for_each(|g| *g = -0.05 * (1.0 + *g));
        beta.iter_mut().for_each(|beta| *beta = 0.5 + 0.4 * *beta);
        for ((name, values), expected) in NAMES.iter().zip(case.run(DType::F32).0).zip(expected) {
            let sum = weighted_by_a_wave(&values);
            assert!((sum - expected).abs() < 1e-5, "{name}, {}: {sum}, expected {expected}", case.name());
        }
    }
}

fn weighted_by_a_wave(values: &[f32]) -> f64 {
    values.iter().enumerate().map(|(i, x)| f64::from(*x) * (0.37 * i as f64).cos()).sum()
}

#[test]
fn sums_agree_with_mamba_2_of_transformers() {
    /// As above, of `mamba2_chunk_scan` in chunks of 16; the last one is the gradient of the time step.
    const EXPECTED: [f64; 5] = [9.808_452, -6.966_099, -0.381_923, -9.724_098, 1.601_482];
    const DSKIP: [f32; 4] = [-0.388_755, -0.080_317, 0.508_565, -0.501_934];
    const A: [f32; 4] = [-0.05, -0.1, -0.15, -0.2];
    let mut case = Case::new(&[&[0, 70]], &[0, 0, 1, 1], 2, [5, 3]);
    case.problem.rule = SUM;
    case.fill_with_waves();
    let [.., g, beta] = &mut case.data;
    beta.iter_mut().for_each(|beta| *beta = 0.5 + 0.4 * *beta);
    g.iter_mut().zip(beta).enumerate().for_each(|(i, (g, beta))| *g = A[i % 4] * *beta);
    let ([o, dq, dk, dv, dg, dbeta, dskip], _) = case.run(DType::F32);
    let dtime: Vec<f32> =
        dbeta.iter().zip(dg).enumerate().map(|(i, (dbeta, dg))| dbeta + A[i % 4] * dg).collect();
    for (index, (values, expected)) in [o, dq, dk, dv, dtime].iter().zip(EXPECTED).enumerate() {
        let sum = weighted_by_a_wave(values);
        assert!((sum - expected).abs() < 3e-5, "result {index}: {sum}, expected {expected}");
    }
    for (head, expected) in DSKIP.iter().enumerate() {
        let sum: f32 = dskip.iter().skip(head).step_by(4).sum();
        assert!((sum - expected).abs() < 3e-5, "head {head}: {sum}, expected {expected}");
    }
}

#[test]
fn elements_of_16_bits_are_rounded_once() {
    on_every_target_in_one_thread(|target| {
        for case in Case::of_every_length().iter().take(3) {
            case.check(DType::BF16, target, 2f64.powi(-8));
            case.check(DType::F16, target, 2f64.powi(-11));
        }
    });
}

#[test]
fn the_reference_gradients_are_the_derivatives_of_the_forward() {
    let delta = || Case::new(&[&[0, 2, 6], &[0, 6, 6]], &[1, 0, 1], 3, [3, 2]);
    assert_reference_gradients(&delta());
    assert_reference_gradients(&delta().of_sums());
    assert_reference_gradients(&delta().of_channels());
}

fn assert_reference_gradients(case: &Case) {
    let [q, k, v, dout, skip, g, beta] = case.tensors(DType::F32).map(|tensor| to_f64(&read(&tensor)));
    let inputs = Inputs { q, k, v, g, beta, skip };
    let mut gradients = case.problem.backward(&inputs, &dout);
    let heads = inputs.skip.len();
    gradients.skip = (0..heads).map(|head| gradients.skip.iter().skip(head).step_by(heads).sum()).collect();
    let loss = |inputs: &Inputs| weighted_sum(&case.problem.forward(inputs), &dout);
    let with = |change: &dyn Fn(&mut Inputs)| {
        let mut changed = inputs.clone();
        change(&mut changed);
        loss(&changed)
    };
    assert_gradient("dq", |q| with(&|inputs| inputs.q = q.to_vec()), &inputs.q, &gradients.q);
    assert_gradient("dk", |k| with(&|inputs| inputs.k = k.to_vec()), &inputs.k, &gradients.k);
    assert_gradient("dv", |v| with(&|inputs| inputs.v = v.to_vec()), &inputs.v, &gradients.v);
    assert_gradient("dg", |g| with(&|inputs| inputs.g = g.to_vec()), &inputs.g, &gradients.g);
    assert_gradient(
        "dbeta",
        |beta| with(&|inputs| inputs.beta = beta.to_vec()),
        &inputs.beta,
        &gradients.beta,
    );
    assert_gradient(
        "dskip",
        |skip| with(&|inputs| inputs.skip = skip.to_vec()),
        &inputs.skip,
        &gradients.skip,
    );
}

#[test]
fn the_number_of_threads_does_not_change_a_bit() {
    let long = || Case::long().remove(0);
    for case in [&Case::all()[0], &long(), &long().of_sums(), &long().of_channels()] {
        assert_same_for_any_thread_count(|| case.run(DType::F32).0);
    }
}

#[test]
fn a_document_has_the_same_results_wherever_it_is_packed() {
    let rules: [fn(Case) -> Case; 2] = [|case| case, Case::of_channels];
    for of_rule in rules {
        let alone = of_rule(Case::new(&[&[0, 100]], &[0, 0], 1, [8, 8]));
        let [expected, ..] = alone.run(DType::F32).0;
        for start in [1, 64, 93] {
            let mut packed = of_rule(Case::new(&[&[0, start, start + 100, 300]], &[0, 0], 1, [8, 8]));
            for (packed, alone) in packed.data.iter_mut().zip(&alone.data) {
                let row = alone.len() / 100;
                packed[start as usize * row..][..alone.len()].copy_from_slice(alone);
            }
            let [o, ..] = packed.run(DType::F32).0;
            assert_eq!(o[start as usize * 16..][..1600], expected, "after {start} tokens, {}", alone.name());
        }
    }
}

#[test]
fn the_shape_of_the_states_does_not_depend_on_the_documents() {
    for cu_seqlens in [vec![vec![0, 3000]], vec![vec![0, 1, 5, 2000, 3000]]] {
        let layout = LinearAttentionLayout::new(Documents::new(cu_seqlens).unwrap(), [0, 0]);
        assert_eq!(layout.states_shape(3, 4), [1, 2, 2, 3, 4]);
    }
}

#[test]
fn an_empty_shard_has_no_results() {
    for (cu_seqlens, v_to_k) in [(vec![vec![0]], &[0][..]), (vec![vec![0, 3]], &[])] {
        let tokens = *cu_seqlens[0].last().unwrap() as usize;
        let layout = LinearAttentionLayout::new(Documents::new(cu_seqlens).unwrap(), v_to_k);
        let key = tensor(&vec![1.0; tokens * 4], &[1, tokens, 1, 4]);
        let [value, gate] = [output(&[1, tokens, v_to_k.len(), 2]), output(&[1, tokens, v_to_k.len()])];
        let layout = &layout;
        for (rule, g) in [(Rule::Delta, &gate), (Rule::ChannelDelta, &key)] {
            let operands = Operands { q: &key, k: &key, v: &value, g, beta: &gate, rule, layout };
            let states = output(&layout.states_shape(4, 2));
            let like = |tensor: &Tensor| output(tensor.dims());
            forward(&operands, &like(&value), &states, &Workspace::new()).unwrap();
            let [dq, dk, dv, dg, dbeta] = [&key, &key, &value, g, &gate].map(like);
            let gradients = Gradients { dq: &dq, dk: &dk, dv: &dv, dg: &dg, dbeta: &dbeta, dskip: None };
            backward(&operands, &states, &value, &gradients, &Workspace::new()).unwrap();
            assert_eq!([read(&dq), read(&dk)], [vec![0.0; tokens * 4], vec![0.0; tokens * 4]]);
            assert_eq!(read(&dg), vec![0.0; g.elem_count()]);
        }
    }
}

#[test]
fn wrong_arguments_are_named() {
    let case = Case::new(&[&[0, 6]], &[0, 1], 2, [4, 3]);
    let [q, k, v, dout, _, g, beta] = &case.tensors(DType::F32);
    let layout = &case.problem.layout;
    let operands = Operands { q, k, v, g, beta, rule: Rule::Delta, layout };
    let states = output(&layout.states_shape(4, 3));
    let name = |result: Result<(), OpError>| match result.unwrap_err() {
        OpError::Shape { argument, .. }
        | OpError::Dimensions { argument, .. }
        | OpError::MixedDTypes { argument, .. }
        | OpError::InvalidValue { argument, .. }
        | OpError::SharedStorage { output: argument, .. } => argument,
        error => panic!("{error}"),
    };
    let run = |operands: &Operands<'_>, o: &Tensor| name(forward(operands, o, &states, &Workspace::new()));
    let (o, half) = (output(&[1, 6, 2, 3]), rounded(DType::BF16, &[1.0; 48], &[1, 6, 2, 4]).0);
    assert_eq!(run(&Operands { q: v, ..operands }, &o), "q");
    assert_eq!(run(&Operands { k: &k.narrow(2, 0, 1).unwrap().contiguous().unwrap(), ..operands }, &o), "q");
    assert_eq!(run(&Operands { v: k, ..operands }, &o), "o");
    assert_eq!(run(&Operands { v: g, ..operands }, &o), "v");
    assert_eq!(run(&Operands { g: v, ..operands }, &o), "g");
    assert_eq!(run(&Operands { beta: v, ..operands }, &o), "beta");
    assert_eq!(run(&Operands { k: &half, ..operands }, &o), "k");
    assert_eq!(run(&operands, v), "o");
    let wrong = LinearAttentionLayout::new(layout.documents().clone(), [0, 2]);
    assert_eq!(run(&Operands { layout: &wrong, ..operands }, &o), "v_to_k");
    let longer = LinearAttentionLayout::new(Documents::new(vec![vec![0, 7]]).unwrap(), [0, 1]);
    assert_eq!(run(&Operands { layout: &longer, ..operands }, &o), "q");
    assert_eq!(name(forward(&operands, &o, g, &Workspace::new())), "states");
    let rule = Rule::Sum { skip: g };
    assert_eq!(run(&Operands { rule, ..operands }, &o), "skip");
    assert_eq!(run(&Operands { rule: Rule::ChannelDelta, ..operands }, &o), "g");

    let [dq, dk, dv, dg, dbeta] = &[q, k, v, g, beta].map(|tensor| output(tensor.dims()));
    let gradients = Gradients { dq, dk, dv, dg, dbeta, dskip: None };
    let run = |states: &Tensor, gradients: &Gradients<'_>| {
        name(backward(&operands, states, dout, gradients, &Workspace::new()))
    };
    assert_eq!(run(g, &gradients), "states");
    assert_eq!(run(&states, &Gradients { dq: dv, ..gradients }), "dq");
    assert_eq!(run(&states, &Gradients { dv: dk, ..gradients }), "dv");
    assert_eq!(run(&states, &Gradients { dg: dk, ..gradients }), "dg");
    assert_eq!(run(&states, &Gradients { dbeta: dk, ..gradients }), "dbeta");
    assert_eq!(run(&states, &Gradients { dk: dq, ..gradients }), "dq");
}

/// The results of both directions in a dry run, and the bytes of scratch that they leave in the workspace.
fn run_dry(case: &Case, kind: DeviceKind, threads: usize) -> ([Result<(), OpError>; 2], usize) {
    let (shapes, layout) = (case.shapes(), case.problem.layout.clone());
    let states = layout.states_shape(case.problem.key_dim, case.problem.value_dim);
    let problem = case.problem.clone();
    dry::run(
        DryDevice { kind, threads },
        |_| {},
        move || {
            let zeros = |shape: &[usize]| crate::tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
            let [q, k, v, dout, skip, g, beta] = &shapes.clone().map(|shape| zeros(&shape));
            let [dq, dk, dv, o, _, dg, dbeta] = &shapes.map(|shape| zeros(&shape));
            let (states, workspace) = (zeros(&states), Workspace::new());
            let rule = with_skip(problem.rule, skip);
            let operands = Operands { q, k, v, g, beta, rule, layout: &layout };
            let gradients = Gradients { dq, dk, dv, dg, dbeta, dskip: None };
            let results = [
                forward(&operands, o, &states, &workspace),
                backward(&operands, &states, dout, &gradients, &workspace),
            ];
            (results, workspace.free_bytes())
        },
    )
    .unwrap()
}

#[test]
fn a_dry_run_takes_the_scratch_of_a_real_one() {
    let long = || Case::long().remove(0);
    for case in [&Case::all()[0], &long(), &long().of_sums(), &long().of_channels()] {
        for threads in [1, 3] {
            let ([forward, backward], bytes) = run_dry(case, DeviceKind::Cpu, threads);
            forward.and(backward).unwrap();
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            assert_eq!(pool.install(|| case.run(DType::F32).1), bytes, "{threads} threads, {}", case.name());
        }
    }
}

#[cfg(feature = "cuda")]
#[test]
fn a_dry_run_takes_the_scratch_of_a_real_one_on_a_gpu() {
    let case = || Case::all().remove(3);
    for case in [case(), case().of_sums(), case().of_channels()] {
        let ([forward, backward], bytes) = run_dry(&case, DeviceKind::Cuda, 1);
        forward.and(backward).unwrap();
        on_a_gpu(|| assert_eq!(case.run(DType::F32).1, bytes, "{}", case.name()));
    }
}
