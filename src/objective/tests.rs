//! The head on masked tokens, its logits, and losses of the user's own.

mod masks;

use super::*;
use crate::nn::tests::{context, random};
use candle_core::{DType, Device, Tensor};
use std::collections::BTreeMap;

#[test]
fn logits_recycle_their_workspace_tensors() {
    let (batch, seq_len, hidden, vocab) = (2, 3, 8, 5);
    let head = CausalLm::new("lm_head.weight", vocab, hidden, 1e-6, 0.02);
    let ctx = context(batch, seq_len);
    let x = random(&[batch, seq_len, hidden], 0);
    head.output(&[random(&[hidden], 1), random(&[vocab, hidden], 2)], &x, &ctx).unwrap();
    // The normalized tokens, and a reciprocal root mean square of each.
    assert_eq!(ctx.workspace().free_bytes(), batch * seq_len * (hidden + 1) * size_of::<f32>());
}

fn batch<'a>(values: &'a BTreeMap<String, Vec<f32>>) -> LocalBatch<'a> {
    LocalBatch {
        batch_size: 1,
        seq_len_local: 3,
        input_ids: &[],
        labels: &[0, -100, 0],
        all_input_ids: &[],
        all_labels: &[0, -100, 0],
        values,
    }
}

#[test]
fn a_loss_of_ones_own_gives_the_scaled_gradient_and_its_mistakes_are_named() {
    let values = BTreeMap::from([("target".to_owned(), vec![1.0; 6])]);
    let (x, ctx) = (random(&[1, 3, 2], 1), context(1, 3));
    let squares = |_: &[Tensor], x: &Tensor, batch: &LocalBatch<'_>| {
        let error = (x - batch.tensor("target", x.dtype(), x.device())?)?;
        Ok(LossTerms { sum: error.sqr()?.sum_all()?, tokens: 3 })
    };
    let objective = AutogradObjective::new("mse", vec![], squares);
    let (losses, saved) = objective.forward(&[], &x, &batch(&values), &ctx).unwrap();
    let error = (&x - 1.0).unwrap();
    let expected = error.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap();
    let sum = losses.sum().unwrap();
    assert_eq!((sum.sum as f32, sum.valid_tokens), (expected, 3));
    let dx = objective.backward(&[], saved, 0.25, &[], &ctx).unwrap();
    let difference = (dx - (error * 0.5).unwrap()).unwrap().abs().unwrap().max_all().unwrap();
    assert!(difference.to_scalar::<f32>().unwrap() < 1e-6);

    let nothing = BTreeMap::new();
    let message = objective.forward(&[], &x, &batch(&nothing), &ctx).err().unwrap().to_string();
    assert!(message.contains("no values called \"target\""), "{message}");
    let per_token = |_: &[Tensor], x: &Tensor, _: &LocalBatch<'_>| Ok(LossTerms { sum: x.sqr()?, tokens: 3 });
    let objective = AutogradObjective::new("mse", vec![], per_token);
    let message = objective.forward(&[], &x, &batch(&values), &ctx).err().unwrap().to_string();
    assert!(message.contains("objective mse") && message.contains("[1, 3, 2]"), "{message}");
}

#[test]
fn a_loss_of_ones_own_is_computed_in_f32_and_sees_which_tokens_are_padding() {
    let values = BTreeMap::new();
    // In 16 bits, the sum of 600 squares of 16 overflows (fp16) or stalls (bf16), and so would its scale.
    let squares = |params: &[Tensor], x: &Tensor, batch: &LocalBatch<'_>| {
        let terms = (x.broadcast_mul(&params[0])?.sqr()?
            * batch.has_label(x.dtype(), x.device())?.broadcast_as(x.shape())?)?;
        Ok(LossTerms { sum: terms.sum_all()?, tokens: batch.num_labels() })
    };
    let spec = ParameterSpec::new("factor", [200], crate::nn::Init::Ones);
    let objective = AutogradObjective::new("squares", vec![spec], squares);
    let (ctx, scale) = (context(1, 3), 1e-6);
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let x = Tensor::full(16f32, (1, 3, 200), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        let params = [Tensor::ones(200, dtype, &Device::Cpu).unwrap()];
        let (losses, saved) = objective.forward(&params, &x, &batch(&values), &ctx).unwrap();
        let sum = losses.sum().unwrap();
        assert_eq!((sum.sum, sum.valid_tokens), (2.0 * 200.0 * 256.0, 2), "{dtype:?}");
        let grads = [Some(Tensor::zeros(200, DType::F32, &Device::Cpu).unwrap())];
        let dx = objective.backward(&params, saved, scale, &grads, &ctx).unwrap();
        assert_eq!((dx.dtype(), dx.dims()), (dtype, x.dims()));
        let of_factor = grads[0].as_ref().unwrap().to_vec1::<f32>().unwrap();
        let expected = 2.0 * 2.0 * 256.0 * scale;
        assert!(
            of_factor.iter().all(|gradient| (gradient - expected).abs() < 1e-2 * expected),
            "{dtype:?}: {of_factor:?}"
        );
        let evaluated = objective.evaluate(&params, x, &batch(&values), &ctx).unwrap().sum().unwrap();
        assert_eq!((evaluated.sum, evaluated.valid_tokens), (sum.sum, 2), "{dtype:?}");
    }
}

#[test]
fn a_rank_without_terms_contributes_zeros() {
    let values = BTreeMap::new();
    let nothing = |_: &[Tensor], x: &Tensor, _: &LocalBatch<'_>| {
        Ok(LossTerms { sum: Tensor::zeros((), DType::F32, x.device())?, tokens: 0 })
    };
    let spec = ParameterSpec::new("unused", [2], crate::nn::Init::Ones);
    let (x, ctx) = (random(&[1, 3, 2], 1), context(1, 3));
    let objective = AutogradObjective::new("nothing", vec![spec], nothing);
    let (params, grads) = ([random(&[2], 2)], [Some(random(&[2], 3))]);
    let (_, saved) = objective.forward(&params, &x, &batch(&values), &ctx).unwrap();
    let dx = objective.backward(&params, saved, 0.5, &grads, &ctx).unwrap();
    assert_eq!(dx.flatten_all().unwrap().to_vec1::<f32>().unwrap(), [0.0; 6]);
    let unchanged = random(&[2], 3).to_vec1::<f32>().unwrap();
    assert_eq!(grads[0].as_ref().unwrap().to_vec1::<f32>().unwrap(), unchanged);
}
