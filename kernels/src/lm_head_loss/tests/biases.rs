//! A bias is the weight of one more input, which is 1: the reference has it as such.

use super::*;

/// The rows of `x`, `[n, d]`, with one more element each.
pub(super) fn extended(x: &[f64], d: usize, last: impl Fn(usize) -> f64) -> Vec<f64> {
    let row = |(index, row): (usize, &[f64])| [row, &[last(index)]].concat();
    x.chunks_exact(d).enumerate().flat_map(row).collect()
}

/// The rows of `x` without their last element, and these elements.
pub(super) fn divided(x: &[f64], d: usize) -> (Vec<f64>, Vec<f64>) {
    let rows = || x.chunks_exact(d + 1);
    (rows().flat_map(|row| row[..d].to_vec()).collect(), rows().map(|row| row[d]).collect())
}

#[test]
fn a_bias_is_added_to_the_logits_and_has_a_gradient_for_every_tile_size_on_every_target() {
    on_every_target(|target| {
        for (sizes, softcap) in
            SIZES.into_iter().flat_map(|sizes| [None, Some(3.0f32)].map(|cap| (sizes, cap)))
        {
            let Case { x, weight, labels, sizes: [n, d, vocab_size] } = Case::new(sizes);
            let (bias, scale) = (random(7, vocab_size), 0.25);
            let bias64 = to_f64(&bias);
            let (x64, weight64) =
                (extended(&to_f64(&x), d, |_| 1.0), extended(&to_f64(&weight), d, |class| bias64[class]));
            let cap64 = softcap.map(f64::from);
            let (loss64, lse64) = reference::forward_capped(&x64, &weight64, &labels, d + 1, cap64);
            let (dx64, dweight64) = reference::backward_capped(&x64, &weight64, &labels, 0.25, d + 1, cap64);
            let ((dx64, _), (dweight64, dbias64)) = (divided(&dx64, d), divided(&dweight64, d));

            let (x, weight, bias) =
                (tensor(&x, &[n, d]), tensor(&weight, &[vocab_size, d]), tensor(&bias, &[vocab_size]));
            let (projection, labels) =
                (Projection { weight: &weight, bias: Some(&bias) }, Labels::new(labels));
            for tokens in [1, 4, n + 5] {
                let what = format!("{target} {sizes:?} tile {tokens} cap {softcap:?}");
                let tiles = LogitTiles { tokens, softcap, is_slice: false };
                let (lse, dx, ws) = (output(&[n]), output(&[n, d]), Workspace::new());
                let operands = Operands::new(&x, projection, &labels);
                let loss = forward(&operands, tiles, &lse, &ws).unwrap().sum().unwrap();
                let largest_lse = lse64.iter().fold(1.0f64, |max, l| max.max(l.abs()));
                let allowed = 1e-6 * largest_lse * n as f64;
                assert!((loss.sum - loss64.sum).abs() <= allowed, "{what}: {} {}", loss.sum, loss64.sum);
                assert_close(&format!("lse {what}"), &read(&lse), &lse64, 1e-6);

                // Parts of one gradient, which starts at 16.
                let gradient = tensor(&vec![16.0; vocab_size * (d + 1)], &[vocab_size * (d + 1)]);
                let dbias = gradient.narrow(0, 0, vocab_size).unwrap();
                let dweight = gradient.narrow(0, vocab_size, vocab_size * d).unwrap();
                let dweight = dweight.reshape((vocab_size, d)).unwrap();
                let gradients = ProjectionGradients { weight: Some(&dweight), bias: Some(&dbias) };
                let into = Gradients::new(&dx, gradients);
                backward(&operands, &lse, scale, &into, tiles, &ws).unwrap();
                let sum = |gradient: &[f64]| gradient.iter().map(|value| 16.0 + value).collect::<Vec<_>>();
                if vocab_size > 1 {
                    assert_close(&format!("dx {what}"), &read(&dx), &dx64, 5e-6);
                }
                assert_close(&format!("dweight {what}"), &read(&dweight), &sum(&dweight64), 5e-6);
                assert_close(&format!("dbias {what}"), &read(&dbias), &sum(&dbias64), 5e-7);
            }
        }
    });
}

#[test]
fn a_frozen_weight_or_bias_leaves_the_gradient_of_the_other_as_it_is() {
    on_every_target(|target| {
        let Case { x, weight, labels, sizes: [n, d, vocab_size] } = Case::new([11, 64, 100]);
        let (x, weight) = (tensor(&x, &[n, d]), tensor(&weight, &[vocab_size, d]));
        let (bias, labels) = (tensor(&random(7, vocab_size), &[vocab_size]), Labels::new(labels));
        let projection = Projection { weight: &weight, bias: Some(&bias) };
        let (lse, ws) = (output(&[n]), Workspace::new());
        let operands = Operands::new(&x, projection, &labels);
        forward(&operands, 4, &lse, &ws).unwrap();
        let run = |has_weight: bool, has_bias: bool| {
            let [dx, dweight, dbias] = [[n, d], [vocab_size, d], [vocab_size, 1]]
                .map(|shape| tensor(&vec![0.0; shape[0] * shape[1]], &shape));
            let dbias = dbias.flatten_all().unwrap();
            let gradients = ProjectionGradients {
                weight: has_weight.then_some(&dweight),
                bias: has_bias.then_some(&dbias),
            };
            let into = Gradients::new(&dx, gradients);
            backward(&operands, &lse, 0.25, &into, 4, &ws).unwrap();
            [dx, dweight, dbias].map(|tensor| read(&tensor))
        };
        let [dx, dweight, dbias] = run(true, true);
        let zeros = |like: &[f32]| vec![0.0; like.len()];
        assert_eq!(run(true, false), [dx.clone(), dweight.clone(), zeros(&dbias)], "{target}");
        assert_eq!(run(false, true), [dx.clone(), zeros(&dweight), dbias.clone()], "{target}");
        assert_eq!(run(false, false), [dx, zeros(&dweight), zeros(&dbias)], "{target}");
    });
}

#[test]
fn a_bias_has_the_same_gradient_on_any_number_of_threads() {
    let Case { x, weight, labels, sizes: [n, d, vocab_size] } = Case::new([150, 40, 1000]);
    let (x, weight) = (tensor(&x, &[n, d]), tensor(&weight, &[vocab_size, d]));
    let (bias, labels) = (tensor(&random(7, vocab_size), &[vocab_size]), Labels::new(labels));
    let projection = Projection { weight: &weight, bias: Some(&bias) };
    assert_same_for_any_thread_count(|| {
        let (lse, dx, ws) = (output(&[n]), output(&[n, d]), Workspace::new());
        let operands = Operands::new(&x, projection, &labels);
        forward(&operands, 64, &lse, &ws).unwrap();
        let dbias = tensor(&vec![0.0; vocab_size], &[vocab_size]);
        let gradients = ProjectionGradients { weight: None, bias: Some(&dbias) };
        let into = Gradients::new(&dx, gradients);
        backward(&operands, &lse, 1.0, &into, 64, &ws).unwrap();
        (read(&lse), read(&dbias))
    });
}

#[test]
fn a_bias_of_another_size_is_refused_by_name() {
    let (x, weight, bias, lse) = (output(&[2, 3]), output(&[5, 3]), output(&[4]), output(&[2]));
    let projection = Projection { weight: &weight, bias: Some(&bias) };
    let error = forward(&Operands::new(&x, projection, &Labels::new([0, 1])), 2, &lse, &Workspace::new())
        .unwrap_err();
    assert!(matches!(error, OpError::Shape { argument: "bias", .. }), "{error}");
    let (right, dx) = (output(&[5]), output(&[2, 3]));
    let projection = Projection { weight: &weight, bias: Some(&right) };
    let gradients = ProjectionGradients { weight: None, bias: Some(&bias) };
    let labels = Labels::new([0, 1]);
    let (operands, into) = (Operands::new(&x, projection, &labels), Gradients::new(&dx, gradients));
    let error = backward(&operands, &lse, 1.0, &into, 2, &Workspace::new()).unwrap_err();
    assert!(matches!(error, OpError::Shape { argument: "dbias", .. }), "{error}");
}
