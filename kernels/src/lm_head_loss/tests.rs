mod biases;
mod slices;

use super::*;
use crate::testing::*;

/// (n, d, vocab)
const SIZES: [[usize; 3]; 6] = [[1, 1, 1], [1, 7, 5], [5, 1, 33], [11, 64, 100], [13, 20, 131], [3, 4, 2051]];

/// Every vocabulary row is a label of some token; every third token is ignored.
fn labels(n: usize, vocab_size: usize) -> Vec<i64> {
    (0..n).map(|i| if i % 3 == 1 { IGNORED } else { (i * 7 % vocab_size) as i64 }).collect()
}

struct Case {
    x: Vec<f32>,
    weight: Vec<f32>,
    labels: Vec<i64>,
    sizes: [usize; 3],
}

impl Case {
    fn new([n, d, vocab_size]: [usize; 3]) -> Self {
        let (x, weight) = (random(n as u64, n * d), random(d as u64 + 100, vocab_size * d));
        Self { x, weight, labels: labels(n, vocab_size), sizes: [n, d, vocab_size] }
    }

    /// (loss, lse, dx, dweight); dweight starts at `old`.
    fn run(&self, tile_tokens: usize, scale: f32, old: f32) -> (LossSum, Vec<f32>, Vec<f32>, Vec<f32>) {
        let [n, d, vocab_size] = self.sizes;
        let (x, weight) = (tensor(&self.x, &[n, d]), tensor(&self.weight, &[vocab_size, d]));
        let (lse, dx) = (output(&[n]), output(&[n, d]));
        let labels = Labels::new(&*self.labels);
        let operands = Operands::new(&x, &weight, &labels);
        let loss = forward(&operands, tile_tokens, &lse, &Workspace::new()).unwrap().sum().unwrap();
        let dweight = tensor(&vec![old; vocab_size * d], &[vocab_size, d]);
        let into = Gradients::new(&dx, &dweight);
        backward(&operands, &lse, scale, &into, tile_tokens, &Workspace::new()).unwrap();
        (loss, read(&lse), read(&dx), read(&dweight))
    }
}

#[test]
fn loss_and_gradients_match_the_reference_for_every_tile_size_on_every_target() {
    on_every_target(|target| {
        for sizes in SIZES {
            let case = Case::new(sizes);
            let [n, d, _] = sizes;
            let (x, weight) = (to_f64(&case.x), to_f64(&case.weight));
            let (expected, expected_lse) = reference::forward(&x, &weight, &case.labels, d);
            let (expected_dx, expected_dweight) = reference::backward(&x, &weight, &case.labels, 0.25, d);
            for tile_tokens in [1, 2, 4, n, n + 5] {
                let what = format!("{target} {sizes:?} tile {tile_tokens}");
                let (loss, lse, dx, dweight) = case.run(tile_tokens, 0.25, 0.0);
                assert_eq!(loss.valid_tokens, expected.valid_tokens, "{what}");
                let largest_lse = expected_lse.iter().fold(1.0f64, |max, l| max.max(l.abs()));
                let allowed = 1e-6 * largest_lse * n as f64;
                assert!((loss.sum - expected.sum).abs() <= allowed, "{what}: {} {}", loss.sum, expected.sum);
                assert_close(&format!("lse {what}"), &lse, &expected_lse, 5e-7);
                if sizes[2] > 1 {
                    // The logits reach ±60 here: their own rounding, not the softmax, determines the error.
                    assert_close(&format!("dx {what}"), &dx, &expected_dx, 5e-6);
                    assert_close(&format!("dweight {what}"), &dweight, &expected_dweight, 5e-6);
                }
            }
        }
    });
}

#[test]
fn soft_caps_match_the_reference_on_every_target() {
    on_every_target(|target| {
        for (sizes, cap) in [([5, 1, 33], 2.0f32), ([13, 20, 131], 3.0), ([3, 4, 2051], 30.0)] {
            let Case { x, weight, labels, sizes: [n, d, vocab_size] } = Case::new(sizes);
            let (x64, weight64, cap64) = (to_f64(&x), to_f64(&weight), Some(f64::from(cap)));
            let (expected, expected_lse) = reference::forward_capped(&x64, &weight64, &labels, d, cap64);
            let (dx64, dweight64) = reference::backward_capped(&x64, &weight64, &labels, 0.25, d, cap64);
            let tiles = LogitTiles { tokens: 4, softcap: Some(cap), is_slice: false };
            let (x, weight, labels) =
                (tensor(&x, &[n, d]), tensor(&weight, &[vocab_size, d]), Labels::new(labels));
            let (lse, dx, ws) = (output(&[n]), output(&[n, d]), Workspace::new());
            let operands = Operands::new(&x, &weight, &labels);
            let loss = forward(&operands, tiles, &lse, &ws).unwrap().sum().unwrap();
            assert!((loss.sum / expected.sum - 1.0).abs() < 1e-6, "{target}: {} {}", loss.sum, expected.sum);
            assert_close(&format!("lse {target}"), &read(&lse), &expected_lse, 1e-6);
            let dweight = tensor(&vec![0.0; vocab_size * d], &[vocab_size, d]);
            let into = Gradients::new(&dx, &dweight);
            backward(&operands, &lse, 0.25, &into, tiles, &ws).unwrap();
            assert_close(&format!("dx {target}"), &read(&dx), &dx64, 5e-6);
            assert_close(&format!("dweight {target}"), &read(&dweight), &dweight64, 5e-6);
        }
    });
}

#[test]
fn the_reference_gradients_are_the_derivatives_of_the_loss() {
    let (n, d, vocab_size) = (4, 3, 6);
    let labels = labels(n, vocab_size);
    let (x, weight) = (to_f64(&random(1, n * d)), to_f64(&random(2, vocab_size * d)));
    for softcap in [None, Some(1.5)] {
        let (dx, dweight) = reference::backward_capped(&x, &weight, &labels, 0.5, d, softcap);
        let loss =
            |x: &[f64], weight: &[f64]| 0.5 * reference::forward_capped(x, weight, &labels, d, softcap).0.sum;
        assert_gradient("dx", |x| loss(x, &weight), &x, &dx);
        assert_gradient("dweight", |weight| loss(&x, weight), &weight, &dweight);
    }
}

#[test]
fn the_kernels_gradient_predicts_the_change_of_its_loss() {
    on_every_target(|_| {
        let case = Case::new([9, 16, 40]);
        let (_, _, dx, dweight) = case.run(4, 1.0, 0.0);
        let loss_at = |step: f32| {
            let mut moved = Case::new(case.sizes);
            moved.x.iter_mut().zip(&dx).for_each(|(x, g)| *x += step * g);
            moved.weight.iter_mut().zip(&dweight).for_each(|(w, g)| *w += step * g);
            moved.run(4, 1.0, 0.0).0.sum
        };
        let predicted: f64 = dx.iter().chain(&dweight).map(|g| f64::from(*g).powi(2)).sum();
        let step = 1e-4;
        let measured = (loss_at(step) - loss_at(-step)) / (2.0 * f64::from(step));
        assert!((measured / predicted - 1.0).abs() < 1e-3, "measured {measured}, predicted {predicted}");
    });
}

#[test]
fn the_weight_gradient_is_added_and_scales_with_the_upstream_gradient() {
    on_every_target(|_| {
        let case = Case::new([7, 5, 9]);
        let (_, _, dx, dweight) = case.run(3, 1.0, 0.0);
        let (_, _, dx_half, dweight_half) = case.run(3, 0.5, 16.0);
        for (full, half) in dx.iter().zip(dx_half) {
            assert!((full * 0.5 - half).abs() <= 1e-6, "{full} {half}");
        }
        for (full, half) in dweight.iter().zip(dweight_half) {
            assert!((16.0 + full * 0.5 - half).abs() <= 4e-6, "{full} {half}");
        }
    });
}

#[test]
fn ignored_tokens_have_exactly_zero_gradient_rows() {
    on_every_target(|_| {
        let case = Case::new([8, 4, 6]);
        let (_, lse, dx, _) = case.run(3, 1.0, 0.0);
        for (i, label) in case.labels.iter().enumerate() {
            let row = &dx[i * 4..][..4];
            assert_eq!(*label == IGNORED, row.iter().all(|g| *g == 0.0), "token {i}: {row:?}");
            assert_eq!(*label == IGNORED, lse[i] == 0.0, "token {i}");
        }
    });
}

#[test]
fn a_fully_masked_shard_gives_exactly_zero_and_touches_no_weight_gradient() {
    on_every_target(|_| {
        let mut case = Case::new([6, 4, 5]);
        case.labels.fill(IGNORED);
        // Even NaN activations of masked tokens must not affect the loss.
        case.x.fill(f32::NAN);
        let (loss, lse, dx, dweight) = case.run(4, 1.0, 2.0);
        assert_eq!(loss, LossSum { sum: 0.0, valid_tokens: 0 });
        assert_eq!((lse, dx, dweight), (vec![0.0; 6], vec![0.0; 24], vec![2.0; 20]));
    });
}

#[test]
fn an_empty_shard_gives_zero() {
    on_every_target(|_| {
        let (loss, lse, dx, dweight) = Case::new([0, 4, 5]).run(16, 1.0, 1.0);
        assert_eq!(loss, LossSum::default());
        assert_eq!((lse.len(), dx.len(), dweight), (0, 0, vec![1.0; 20]));
    });
}

#[test]
fn batches_of_any_number_of_tokens_recycle_one_buffer_of_logits() {
    let workspace = Workspace::new();
    for n in [5, 2, 4, 9] {
        let case = Case::new([n, 4, 6]);
        let (x, weight) = (tensor(&case.x, &[n, 4]), tensor(&case.weight, &[6, 4]));
        let labels = Labels::new(&*case.labels);
        forward(&Operands::new(&x, &weight, &labels), 4, &output(&[n]), &workspace).unwrap();
        assert_eq!(workspace.free_bytes(), 4 * 6 * size_of::<f32>(), "{n} tokens");
    }
}

#[test]
fn huge_logits_neither_overflow_nor_lose_the_loss() {
    on_every_target(|_| {
        let (x, weight) = (tensor(&[1000.0, -1000.0], &[2, 1]), tensor(&[1.0, 0.0, -1.0], &[3, 1]));
        let lse = output(&[2]);
        let labels = Labels::new([0, 0]);
        let loss =
            forward(&Operands::new(&x, &weight, &labels), 2, &lse, &Workspace::new()).unwrap().sum().unwrap();
        assert_eq!((loss.sum, read(&lse)), (2000.0, vec![1000.0, 1000.0]));
    });
}

#[test]
fn a_uniform_large_vocabulary_costs_its_logarithm() {
    on_every_target(|_| {
        let vocab_size = 50_257;
        let (x, weight) = (tensor(&[0.0; 6], &[3, 2]), tensor(&random(1, vocab_size * 2), &[vocab_size, 2]));
        let labels = Labels::new([0, 7, 50_256]);
        let loss = forward(&Operands::new(&x, &weight, &labels), 2, &output(&[3]), &Workspace::new())
            .unwrap()
            .sum()
            .unwrap();
        assert!((loss.sum / 3.0 - (vocab_size as f64).ln()).abs() < 1e-6, "{}", loss.sum / 3.0);
    });
}

#[test]
fn large_inputs_give_the_same_bits_on_any_number_of_threads() {
    let case = Case::new([150, 40, 1000]);
    assert_same_for_any_thread_count(|| case.run(64, 1.0, 0.0));
}

#[test]
fn all_logits_at_once_equal_the_matmul() {
    on_every_target(|_| {
        let case = Case::new([5, 7, 9]);
        let out = output(&[5, 9]);
        logits(&tensor(&case.x, &[5, 7]), &tensor(&case.weight, &[9, 7]), &out).unwrap();
        let expected = linear::reference::forward(&to_f64(&case.x), &to_f64(&case.weight), 7);
        assert_close("logits", &read(&out), &expected, 5e-7);
    });
}

#[test]
fn a_gpu_has_the_largest_tile_whose_logits_take_a_gibibyte_at_most() {
    on_every_target(|target| {
        let tiles =
            [32_000, 128_256, 151_936, 1 << 20].map(|vocab| default_tile_tokens(vocab, &device()).unwrap());
        let is_gpu = target.starts_with("cuda");
        let expected = if is_gpu { [8192, 2048, 1024, 1024] } else { [1024; 4] };
        assert_eq!(tiles, expected, "{target}");
    });
}

#[test]
fn wrong_labels_and_tiles_are_named() {
    let (x, weight, lse) = (output(&[2, 3]), output(&[5, 3]), output(&[2]));
    let error_of = |labels: &[i64], tile_tokens: usize| {
        let labels = Labels::new(labels);
        forward(&Operands::new(&x, &weight, &labels), tile_tokens, &lse, &Workspace::new()).unwrap_err()
    };
    let error = error_of(&[0, 5], 2);
    assert_eq!(
        error.to_string(),
        "lm_head_loss::forward: `labels[1]` is 5, valid are 0..5 and -100 (ignored)"
    );
    let error = error_of(&[-1, 0], 2);
    assert!(matches!(error, OpError::IdOutOfRange { position: 0, value: -1, .. }), "{error}");
    let error = error_of(&[0], 2);
    assert!(matches!(error, OpError::TokenCount { argument: "labels", .. }), "{error}");
    let error = error_of(&[0, 1], 0);
    assert!(matches!(error, OpError::InvalidValue { argument: "tile_tokens", .. }), "{error}");
}

#[test]
fn logits_of_minus_infinity_have_no_probability() {
    // All columns that a block reads first are −∞; the only finite logit comes in the next ones.
    let vocab_size = 9000;
    let mut weight = vec![f32::NEG_INFINITY; vocab_size];
    weight[vocab_size - 1] = 3.0;
    on_every_target(|target| {
        let (x, weight, lse) = (tensor(&[1.0], &[1, 1]), tensor(&weight, &[vocab_size, 1]), output(&[1]));
        let labels = Labels::new([vocab_size as i64 - 1]);
        let loss =
            forward(&Operands::new(&x, &weight, &labels), 1, &lse, &Workspace::new()).unwrap().sum().unwrap();
        assert_eq!((loss.sum, read(&lse)), (0.0, vec![3.0]), "{target}");
    });
}

#[cfg(feature = "cuda")]
#[test]
fn kernels_of_every_element_type_keep_the_loss_in_f32_and_round_gradients_once_on_a_gpu() {
    for_every_dtype(|dtype, rounding| {
        for [n, d, vocab_size] in [[1, 7, 5], [13, 20, 131], [3, 4, 20_011]] {
            let (x, x64) = rounded(dtype, &random(1, n * d), &[n, d]);
            let (weight, weight64) = rounded(dtype, &random(2, vocab_size * d), &[vocab_size, d]);
            let labels = Labels::new(labels(n, vocab_size));
            let (lse, dx) = (output(&[n]), rounded(dtype, &vec![f32::NAN; n * d], &[n, d]).0);
            let operands = Operands::new(&x, &weight, &labels);
            let loss = forward(&operands, 4, &lse, &Workspace::new()).unwrap().sum().unwrap();
            let (expected, expected_lse) = reference::forward(&x64, &weight64, &labels, d);
            assert!((loss.sum / expected.sum - 1.0).abs() < 1e-6, "{} {}", loss.sum, expected.sum);
            assert_close("lse", &read(&lse), &expected_lse, 1e-6);

            let dweight = tensor(&vec![0.0; vocab_size * d], &[vocab_size, d]);
            // An upstream gradient so small that it is 0 in f16: only the matmuls' f32 arithmetic may use it.
            let scale = 2f32.powi(-30);
            let into = Gradients::new(&dx, &dweight);
            backward(&operands, &lse, scale, &into, 4, &Workspace::new()).unwrap();
            let (dx64, dweight64) = reference::backward(&x64, &weight64, &labels, f64::from(scale), d);
            // The softmax is rounded once more than the results.
            assert_close("dweight", &read(&dweight), &dweight64, rounding + 5e-6);
            if dtype != candle_core::DType::F16 {
                assert_close("dx", &read(&dx), &dx64, 2.0 * rounding + 5e-6);
            }
        }
    });
}
