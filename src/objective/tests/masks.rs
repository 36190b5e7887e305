//! The head on masked tokens: results of the f64 reference over all tokens, work and memory.

use super::*;
use crate::nn::{Tiling, TokenLayout};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::num::NonZero;
use std::rc::Rc;
use std::slice::from_ref;
use std::sync::Arc;
use ulysses_kernels::Workspace;
use ulysses_kernels::attention::FlashAttention;
use ulysses_kernels::device::DeviceKind;
use ulysses_kernels::device::dry::{self, DryDevice, Event, MatmulOp};
use ulysses_kernels::lm_head_loss::{self, IGNORED, LossSum};
use ulysses_kernels::rms_norm;
use ulysses_kernels::tensor::{TensorOptions, to_vec, zeros};

const HIDDEN: usize = 6;
const VOCAB: usize = 11;
const EPS: f64 = 1e-6;
const SCALE: f32 = 0.25;

/// Whether each of `n` tokens has a label, by name.
fn masks(n: usize) -> Vec<(&'static str, Vec<bool>)> {
    let of = |name, has_label: &dyn Fn(usize) -> bool| (name, (0..n).map(has_label).collect());
    vec![
        of("no token masked", &|_| true),
        of("all masked", &|_| false),
        of("every other masked", &|token| token % 2 == 1),
        of("a masked prompt", &|token| token >= n * 4 / 5),
        of("a masked prompt in each half", &|token| token % n.div_ceil(2) > n / 3),
        of("a masked end", &|token| token < n / 2),
        of("only the first masked", &|token| token > 0),
        of("only the last masked", &|token| token + 1 < n),
        of("only the middle masked", &|token| token != n / 2),
        of("all but the first masked", &|token| token == 0),
        of("all but the last masked", &|token| token + 1 == n),
    ]
}

fn labels(mask: &[bool]) -> Vec<i64> {
    let label = |token: usize| (token * 7 % VOCAB) as i64;
    mask.iter()
        .enumerate()
        .map(|(token, has_label)| if *has_label { label(token) } else { IGNORED })
        .collect()
}

fn head() -> CausalLm {
    CausalLm::new("lm_head.weight", VOCAB, HIDDEN, EPS, 0.02)
}

/// A batch with these labels.
fn labeled<'a>(labels: &'a [i64], ctx: &LayerContext) -> LocalBatch<'a> {
    static NO_VALUES: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    let (batch_size, seq_len_local) = (ctx.batch(), ctx.seq_len_local());
    LocalBatch {
        batch_size,
        seq_len_local,
        input_ids: &[],
        labels,
        all_input_ids: &[],
        all_labels: labels,
        values: &NO_VALUES,
    }
}

fn tiles(tile_tokens: usize) -> Tiling {
    Tiling { loss_tile_tokens: NonZero::new(tile_tokens), ..Tiling::default() }
}

/// Inputs of a head in one element type: norm, projection, hidden states.
struct Inputs {
    params: [Tensor; 2],
    x: Tensor,
    workspace: Arc<Workspace>,
}

/// Sum of the losses; the gradients of hidden states, norm and projection.
struct Outputs {
    loss: LossSum,
    gradients: [Vec<f64>; 3],
}

impl Inputs {
    fn new(batch: usize, seq_len: usize, dtype: DType) -> Self {
        Self::on(&Device::Cpu, batch, seq_len, dtype)
    }

    fn on(device: &Device, batch: usize, seq_len: usize, dtype: DType) -> Self {
        let [norm, projection, x] = [&[HIDDEN][..], &[VOCAB, HIDDEN], &[batch, seq_len, HIDDEN]]
            .map(|dims| random(dims, dims.len() as u64).to_dtype(dtype).unwrap().to_device(device).unwrap());
        let workspace = Workspace::with_options(TensorOptions { dtype, device: device.clone() });
        Self { params: [norm, projection], x, workspace: Arc::new(workspace) }
    }

    fn ctx(&self, tile_tokens: usize) -> LayerContext {
        let (batch, seq_len, _) = self.x.dims3().unwrap();
        let position_ids = (0..batch).flat_map(|_| 0..seq_len as u32).collect();
        let cu_seqlens = Arc::new(vec![vec![0, seq_len as u32]; batch]);
        let tokens = TokenLayout::new(from_ref(&(0..seq_len)), position_ids, cu_seqlens).unwrap();
        let attention = Arc::new(FlashAttention::default());
        LayerContext::new(Arc::new(tokens), attention, self.workspace.clone()).with_tiling(tiles(tile_tokens))
    }

    /// Runs head and loss, without gradients of norm and projection if they are frozen.
    fn run(&self, labels: &[i64], tile_tokens: usize, is_frozen: bool) -> Outputs {
        let Self { params, x, .. } = self;
        let (head, ctx) = (head(), self.ctx(tile_tokens));
        let [dnorm, dprojection] =
            params.each_ref().map(|weight| Tensor::zeros(weight.dims(), DType::F32, x.device()).unwrap());
        let gradients = [&dnorm, &dprojection].map(|gradient| (!is_frozen).then(|| gradient.clone()));
        let (losses, saved) = head.forward(params, x, &labeled(labels, &ctx), &ctx).unwrap();
        let dx = head.backward(params, saved, SCALE, &gradients, &ctx).unwrap();
        assert_eq!(dx.dims(), x.dims());
        let gradients = [&dx, &dnorm, &dprojection].map(to_f64);
        self.workspace.recycle(dx);
        Outputs { loss: losses.sum().unwrap(), gradients }
    }

    /// The same over all tokens, in f64.
    fn reference(&self, labels: &[i64]) -> Outputs {
        let [norm, projection] = self.params.each_ref().map(to_f64);
        let x = to_f64(&self.x);
        let (normed, _) = rms_norm::reference::forward(&x, &norm, EPS);
        let (loss, _) = lm_head_loss::reference::forward(&normed, &projection, labels, HIDDEN);
        let (dnormed, dprojection) =
            lm_head_loss::reference::backward(&normed, &projection, labels, f64::from(SCALE), HIDDEN);
        let (dx, dnorm) = rms_norm::reference::backward(&dnormed, &x, &norm, EPS);
        Outputs { loss, gradients: [dx, dnorm, dprojection] }
    }
}

fn to_f64(tensor: &Tensor) -> Vec<f64> {
    let on_the_host = tensor.to_device(&Device::Cpu).unwrap();
    let wide = on_the_host.flatten_all().unwrap().to_dtype(DType::F32).unwrap();
    to_vec::<f32>(&wide).unwrap().into_iter().map(f64::from).collect()
}

#[track_caller]
fn assert_close(what: &str, got: &[f64], expected: &[f64], tolerance: f64) {
    let largest = expected.iter().fold(0.0f64, |largest, value| largest.max(value.abs()));
    for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!(
            (got - expected).abs() <= tolerance * largest,
            "{what} [{index}]: {got}, expected {expected}"
        );
    }
}

/// Compares every mask, for one and two sequences, with every relation of tiles, chunks and tokens.
fn check_all_masks(device: &Device, dtype: DType, tolerance: f64) {
    for (batch, seq_len) in [(1, 1), (1, 2), (1, 13), (2, 7), (2, 10)] {
        let inputs = Inputs::on(device, batch, seq_len, dtype);
        let num_tokens = batch * seq_len;
        for (name, mask) in masks(num_tokens) {
            let labels = labels(&mask);
            let expected = inputs.reference(&labels);
            for tile_tokens in [1, 3, 5, num_tokens, 1024] {
                let what = format!("{dtype:?} {batch} x {seq_len} tile {tile_tokens}, {name}");
                let got = inputs.run(&labels, tile_tokens, false);
                assert_eq!(got.loss.valid_tokens, expected.loss.valid_tokens, "{what}");
                assert_close(&what, &[got.loss.sum], &[expected.loss.sum], tolerance);
                for (got, expected) in got.gradients.iter().zip(&expected.gradients) {
                    assert_close(&what, got, expected, tolerance);
                }
                let rows = got.gradients[0].chunks_exact(HIDDEN).zip(&mask);
                let masked = rows.filter(|(_, has_label)| !**has_label).flat_map(|(row, _)| row);
                assert!(masked.into_iter().all(|gradient| gradient.to_bits() == 0), "{what}: not exactly 0");
            }
        }
    }
}

#[test]
fn masked_tokens_change_no_loss_and_no_gradient_of_the_others() {
    check_all_masks(&Device::Cpu, DType::F32, 5e-6);
}

#[test]
fn masks_work_in_16_bits() {
    check_all_masks(&Device::Cpu, DType::BF16, 3e-2);
    check_all_masks(&Device::Cpu, DType::F16, 4e-3);
}

#[cfg(feature = "cuda")]
#[test]
fn masks_work_on_a_gpu() {
    let device = DeviceKind::Cuda.open().expect("a GPU; without, leave this test out with `--skip on_a_gpu`");
    check_all_masks(&device, DType::F32, 5e-6);
    check_all_masks(&device, DType::BF16, 3e-2);
}

#[test]
fn hidden_states_of_masked_tokens_have_no_effect() {
    let mut inputs = Inputs::new(1, 12, DType::F32);
    let mask: Vec<bool> = (0..12).map(|token| token >= 8).collect();
    let expected = inputs.run(&labels(&mask), 4, false);
    let masked = Tensor::full(f32::NAN, (1, 8, HIDDEN), &Device::Cpu).unwrap();
    inputs.x = Tensor::cat(&[&masked, &inputs.x.narrow(1, 8, 4).unwrap()], 1).unwrap();
    let got = inputs.run(&labels(&mask), 4, false);
    assert_eq!((got.loss, got.gradients), (expected.loss, expected.gradients));
}

#[test]
fn frozen_weights_do_not_change_the_gradient_of_the_hidden_states() {
    let inputs = Inputs::new(2, 9, DType::F32);
    for (name, mask) in masks(18) {
        let [trained, frozen] = [false, true].map(|is_frozen| inputs.run(&labels(&mask), 4, is_frozen));
        assert_eq!(trained.gradients[0], frozen.gradients[0], "{name}");
        assert!(frozen.gradients[1..].iter().flatten().all(|gradient| *gradient == 0.0), "{name}");
    }
}

#[test]
fn masks_need_no_more_memory_than_labels_everywhere() {
    for (num_tokens, tile_tokens) in [(24, 1024), (25, 24), (25, 4)] {
        let inputs = Inputs::new(1, num_tokens, DType::F32);
        inputs.run(&labels(&vec![true; num_tokens]), tile_tokens, false);
        let unmasked = inputs.workspace.free_bytes();
        assert!(unmasked > 0);
        for (name, mask) in masks(num_tokens) {
            inputs.run(&labels(&mask), tile_tokens, false);
            let bytes = inputs.workspace.free_bytes();
            assert_eq!(bytes, unmasked, "{num_tokens} tokens, tiles of {tile_tokens}, {name}");
        }
    }
}

/// FLOPs of the head's matmuls, forward and backward, and bytes of its element-wise operations.
fn work(labels: &[i64]) -> (f64, u64) {
    let counted = Rc::new(Cell::new((0.0, 0)));
    let sink = {
        let counted = counted.clone();
        move |event| {
            let (flops, bytes) = counted.get();
            counted.set(match event {
                Event::Compute { op: MatmulOp::LmHead, flops: more, .. } => (flops + more, bytes),
                Event::Elementwise { bytes: more } => (flops, bytes + more),
                other => panic!("{other:?}"),
            });
        }
    };
    let device = DryDevice { kind: DeviceKind::Cpu, threads: 1 };
    dry::run(device, sink, || {
        let ctx = context(1, labels.len()).with_tiling(tiles(16));
        let zeros = |dims: &[usize]| zeros(dims, DType::F32, &Device::Cpu).unwrap();
        let (params, x) = ([zeros(&[HIDDEN]), zeros(&[VOCAB, HIDDEN])], zeros(&[1, labels.len(), HIDDEN]));
        let gradients = [zeros(&[HIDDEN]), zeros(&[VOCAB, HIDDEN])].map(Some);
        let tokens = LabeledTokens::new(labels, VOCAB).unwrap();
        let (_, saved) = head().losses(&params, &x, tokens, &ctx).unwrap();
        let saved = Saved::new(saved, 0);
        head().backward(&params, saved, SCALE, &gradients, &ctx).unwrap();
    })
    .unwrap();
    counted.get()
}

#[test]
fn the_work_of_the_head_is_proportional_to_the_labels() {
    let per_token = (6 * HIDDEN * VOCAB) as f64;
    for (name, mask) in masks(100) {
        let labeled = mask.iter().filter(|has_label| **has_label).count();
        assert_eq!(work(&labels(&mask)).0, labeled as f64 * per_token, "{name}");
    }
    let [all, some, none] =
        [100, 20, 0].map(|n| work(&labels(&[vec![true; n], vec![false; 100 - n]].concat())));
    // One pass over the gradient of the hidden states.
    assert_eq!(none, (0.0, (100 * HIDDEN * size_of::<f32>()) as u64));
    assert!(some.1 < all.1 / 2, "{} of {} bytes", some.1, all.1);
}

#[test]
fn a_label_outside_the_vocabulary_is_named_with_its_place_among_all_tokens() {
    let error = LabeledTokens::new(&[IGNORED, 1, IGNORED, VOCAB as i64], VOCAB).unwrap_err();
    let expected = "lm_head_loss::forward: `labels[3]` is 11, valid are 0..11 and -100 (ignored)";
    assert_eq!(error.to_string(), expected);
    let inputs = Inputs::new(1, 3, DType::F32);
    let ctx = inputs.ctx(4);
    let error = head().forward(&inputs.params, &inputs.x, &labeled(&[1, 2], &ctx), &ctx).err().unwrap();
    assert!(error.to_string().contains("labels"), "{error}");
}
