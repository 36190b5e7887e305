//! Slices of the vocabulary against the whole one.

use super::biases::{divided, extended};
use super::*;
use std::ops::Range;

const CLASSES: usize = 131;

/// Three slices of different sizes; the last has one class.
const SLICES: [Range<usize>; 3] = [0..70, 70..130, 130..CLASSES];

/// Tokens that all have a label; the first and the last class of each slice are labels.
fn labeled(n: usize) -> Vec<i64> {
    [0, 69, 70, 129, 130, 7].into_iter().cycle().take(n).collect()
}

fn narrowed(tensor: &Tensor, classes: &Range<usize>) -> Tensor {
    tensor.narrow(0, classes.start, classes.len()).unwrap()
}

#[test]
fn slices_have_the_losses_and_gradients_of_the_whole_vocabulary_on_every_target() {
    on_every_target(|target| {
        for softcap in [None, Some(3.0f32)] {
            let (n, d) = (13, 20);
            let Case { x, weight, .. } = Case::new([n, d, CLASSES]);
            let bias = random(7, CLASSES);
            let (bias64, cap64) = (to_f64(&bias), softcap.map(f64::from));
            let (x64, weight64) =
                (extended(&to_f64(&x), d, |_| 1.0), extended(&to_f64(&weight), d, |class| bias64[class]));
            let (expected, expected_lse) =
                reference::forward_capped(&x64, &weight64, &labeled(n), d + 1, cap64);
            let (dx64, dweight64) =
                reference::backward_capped(&x64, &weight64, &labeled(n), 0.25, d + 1, cap64);
            let ((dx64, _), (dweight64, dbias64)) = (divided(&dx64, d), divided(&dweight64, d));

            let (x, weight) = (tensor(&x, &[n, d]), tensor(&weight, &[CLASSES, d]));
            let bias = tensor(&bias, &[CLASSES]);
            let (all, ws) = (output(&[SLICES.len(), 2, n]), Workspace::new());
            let tiles = LogitTiles { tokens: 4, softcap, is_slice: true };
            for (index, classes) in SLICES.iter().enumerate() {
                let labels = slice::labels(&labeled(n), classes);
                let statistics = narrowed(&all, &(index..index + 1)).reshape((2, n)).unwrap();
                let (weight, bias) = (narrowed(&weight, classes), narrowed(&bias, classes));
                let projection = Projection { weight: &weight, bias: Some(&bias) };
                slice::forward(&Operands::new(&x, projection, &labels), tiles, &statistics, &ws).unwrap();
            }
            let lse = output(&[n]);
            let loss = slice::combine(&all, &lse, 0..n).unwrap().sum().unwrap();
            assert_eq!(loss.valid_tokens, n as u64);
            assert!((loss.sum / expected.sum - 1.0).abs() < 1e-6, "{target}: {} {}", loss.sum, expected.sum);
            assert_close(&format!("lse {target}"), &read(&lse), &expected_lse, 1e-6);
            let parts = [0..5, 5..5, 5..n].map(|own| slice::combine(&all, &lse, own).unwrap().sum().unwrap());
            let sum: f64 = parts.iter().map(|part| part.sum).sum();
            assert_eq!(parts.map(|part| part.valid_tokens), [5, 0, n as u64 - 5]);
            assert!((sum / loss.sum - 1.0).abs() < 1e-12, "{target}: {sum} {}", loss.sum);

            let (mut dx_sum, dweight) = (vec![0.0; n * d], tensor(&vec![0.0; CLASSES * d], &[CLASSES, d]));
            let dbias = tensor(&vec![0.0; CLASSES], &[CLASSES]);
            for classes in SLICES {
                let labels = slice::labels(&labeled(n), &classes);
                let [weight, dweight, bias, dbias] =
                    [&weight, &dweight, &bias, &dbias].map(|tensor| narrowed(tensor, &classes));
                let projection = Projection { weight: &weight, bias: Some(&bias) };
                let gradients = ProjectionGradients { weight: Some(&dweight), bias: Some(&dbias) };
                let dx = output(&[n, d]);
                let (operands, into) =
                    (Operands::new(&x, projection, &labels), Gradients::new(&dx, gradients));
                backward(&operands, &lse, 0.25, &into, tiles, &ws).unwrap();
                dx_sum.iter_mut().zip(read(&dx)).for_each(|(sum, dx)| *sum += dx);
            }
            assert_close(&format!("dx {target}"), &dx_sum, &dx64, 5e-6);
            assert_close(&format!("dweight {target}"), &read(&dweight), &dweight64, 5e-6);
            assert_close(&format!("dbias {target}"), &read(&dbias), &dbias64, 5e-6);
        }
    });
}

#[test]
fn a_slice_whose_logits_are_all_minus_infinity_changes_nothing() {
    on_every_target(|target| {
        let none = f32::NEG_INFINITY;
        let all = tensor(&[none, none, 2.0, 2.0], &[2, 2, 1]);
        let lse = output(&[1]);
        let loss = slice::combine(&all, &lse, 0..1).unwrap().sum().unwrap();
        assert_eq!((loss.sum, read(&lse)), (0.0, vec![2.0]), "{target}");
    });
}

#[test]
fn labels_of_a_slice_are_its_own_or_elsewhere() {
    assert_eq!(
        slice::labels(&[69, 70, 129, 130, 0], &SLICES[1])[..],
        [ELSEWHERE, 0, 59, ELSEWHERE, ELSEWHERE]
    );
    let (x, weight, statistics) = (output(&[2, 3]), output(&[5, 3]), output(&[2, 2]));
    for (label, valid) in [(5, false), (IGNORED, false), (ELSEWHERE, true)] {
        let labels = Labels::new([4, label]);
        let result = slice::forward(&Operands::new(&x, &weight, &labels), 2, &statistics, &Workspace::new());
        let error = result.err().map(|error| error.to_string());
        let expected = format!(
            "lm_head_loss::slice::forward: `labels[1]` is {label}, valid are 0..5 and -1 (in another slice)"
        );
        assert_eq!(error, (!valid).then_some(expected));
    }
}
