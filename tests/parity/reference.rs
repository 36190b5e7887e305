//! The f64 reference decoder against PyTorch, against finite differences, and against itself.

use crate::support::compare::{assert_all_close, assert_close, assert_scalar_close, max_rel_error, values};
use crate::support::golden::Fixture;
use crate::support::reference::batch::document_ids;
use crate::support::reference::{
    AdamW, Batch, Family, IGNORED, Optimizer, ReferenceConfig, RopeScaling, Sgd, Tensors, Training, Weights,
    as_tensors, clip_by_global_norm, forward, global_norm, loss_and_grads, micro_batch_loss_and_grads,
    random_weights, train,
};
use anyhow::Result;
use candle_core::{DType, Device, Tensor, Var};

/// Grouped KV heads, and sizes that all differ, so that a swapped dimension fails.
fn small_config(tie_word_embeddings: bool) -> ReferenceConfig {
    ReferenceConfig {
        family: Family::Llama,
        vocab_size: 29,
        hidden_size: 20,
        intermediate_size: 28,
        num_layers: 2,
        num_heads: 6,
        num_kv_heads: 3,
        head_dim: 4,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::Default,
        rms_norm_eps: 1e-5,
        tie_word_embeddings,
        partial_rotary_factor: 1.0,
        qkv_bias: false,
        qk_norm: false,
        sliding_window: None,
    }
}

fn concat(rows: &[Tensor]) -> Vec<f64> {
    rows.iter().flat_map(values).collect()
}

// ---- against PyTorch ----

/// transformers computes the rotary tables, RMSNorm and the loss partly in f32 even in an f64 model, which
/// would leave errors of about 1e-7. This fixture was evaluated entirely in f64, and the two agree within
/// 3e-15.
#[test]
fn loss_logits_and_gradients_equal_pytorch_in_f64() -> Result<()> {
    let fixture = Fixture::load("tiny_strong")?;
    let output = forward(&fixture.config, &fixture.weights, &fixture.batch)?;
    let (loss, grads) = loss_and_grads(&fixture.config, &fixture.weights, &fixture.batch)?;

    assert_close("loss", &[loss], &fixture.f64_outputs["loss"], 1e-13);
    assert_close("logits", &concat(&output.logits), &fixture.f64_outputs["logits"], 1e-13);
    assert_all_close("gradient", &grads, &fixture.f64_grads(), 1e-13);
    Ok(())
}

#[test]
fn loss_logits_and_gradients_are_close_to_pytorch_in_f32() -> Result<()> {
    for name in ["tiny_strong", "packed_strong", "wide_heads"] {
        let fixture = Fixture::load(name)?;
        let output = forward(&fixture.config, &fixture.weights, &fixture.batch)?;
        let (loss, grads) = loss_and_grads(&fixture.config, &fixture.weights, &fixture.batch)?;

        assert_close(&format!("{name} loss"), &[loss], &fixture.outputs["loss"], 1e-6);
        assert_close(&format!("{name} logits"), &concat(&output.logits), &fixture.outputs["logits"], 1e-5);
        assert_all_close(&format!("{name} gradient"), &grads, &fixture.grads, 1e-5);
    }
    Ok(())
}

#[test]
fn token_losses_are_close_to_pytorch_in_f32() -> Result<()> {
    let fixture = Fixture::load("tiny_strong")?;
    let output = forward(&fixture.config, &fixture.weights, &fixture.batch)?;
    assert_close("token_nll", &concat(&output.token_losses), &fixture.outputs["token_nll"], 1e-5);
    Ok(())
}

/// Parameters are compared with a tolerance of 3e-5: AdamW divides by the gradient's own magnitude, so where
/// a gradient is near zero, PyTorch's f32 noise is amplified. The next test shows that there is no other
/// difference.
#[test]
fn adamw_steps_follow_pytorch() -> Result<()> {
    for name in ["adamw", "adamw_clip0.5"] {
        let fixture = Fixture::load("tiny_strong")?;
        let golden = fixture.trajectory(name)?;
        for (num_steps, expected) in (1..).zip(&golden.steps) {
            let training = train_fixture(&fixture, golden.clip, num_steps)?;
            let step = &training.steps[num_steps - 1];
            let label = format!("{name} step {num_steps}");
            assert_scalar_close(&format!("{label} loss"), step.loss, expected.loss, 1e-6);
            assert_scalar_close(&format!("{label} norm"), step.grad_norm, expected.grad_norm, 1e-6);
            assert_all_close(
                &format!("{label} parameter"),
                &as_tensors(&training.weights),
                &expected.params,
                3e-5,
            );
        }
    }
    Ok(())
}

/// The manifest has the largest distance between PyTorch's f32 and f64 parameters. The reference is equally
/// far from the f32 ones, so it agrees with PyTorch's f64 run.
#[test]
fn adamw_differs_from_pytorch_in_f32_by_pytorchs_own_rounding() -> Result<()> {
    for name in ["adamw", "adamw_clip0.5"] {
        let fixture = Fixture::load("tiny_strong")?;
        let golden = fixture.trajectory(name)?;
        let training = train_fixture(&fixture, golden.clip, 3)?;

        let mut largest = 0.0_f64;
        for (name, expected) in &golden.steps[2].params {
            let difference = (training.weights[name].as_tensor() - expected.to_dtype(DType::F64)?)?;
            largest = largest.max(difference.abs()?.max_all()?.to_scalar()?);
        }
        let recorded = fixture.f32_errors[&format!("max_abs_param_err_step3_{name}_f32_vs_f64")];
        assert_scalar_close(&format!("{name}: largest difference"), largest, recorded, 1e-6);
    }
    Ok(())
}

fn train_fixture(fixture: &Fixture, clip: Option<f64>, num_steps: usize) -> Result<Training> {
    let mut adamw = AdamW::new(fixture.adamw);
    let batches = std::slice::from_ref(&fixture.batch);
    train(&fixture.config, &fixture.weights, batches, &mut adamw, clip, num_steps)
}

// ---- the model ----

#[test]
fn gradients_match_central_differences() -> Result<()> {
    for tied in [false, true] {
        let config = small_config(tied);
        let weights = random_weights(&config, 1)?;
        let directions = random_weights(&config, 2)?;
        let batch = Batch::packed(config.vocab_size, &[&[5, 9, 1], &[12]], 3);
        let (_, grads) = loss_and_grads(&config, &weights, &batch)?;
        for (name, direction) in &directions {
            const H: f64 = 1e-5;
            let loss_at = |step: f64| -> Result<f64> {
                let mut moved = weights.clone();
                let weight = (weights[name].as_tensor() + (direction.as_tensor() * step)?)?;
                moved.insert(name.clone(), Var::from_tensor(&weight)?);
                Ok(forward(&config, &moved, &batch)?.loss.to_scalar()?)
            };
            let numeric = (loss_at(H)? - loss_at(-H)?) / (2.0 * H);
            let analytic = (&grads[name] * direction.as_tensor())?.sum_all()?.to_scalar()?;
            assert_scalar_close(&format!("slope of {name}, tied {tied}"), analytic, numeric, 1e-6);
        }
    }
    Ok(())
}

#[test]
fn packed_documents_do_not_see_each_other() -> Result<()> {
    let config = small_config(false);
    let weights = random_weights(&config, 4)?;
    let packed = Batch::packed(config.vocab_size, &[&[7, 4]], 5);
    let split = |row: &[u32]| vec![row[..7].to_vec(), row[7..].to_vec()];
    let separate = Batch {
        input_ids: split(&packed.input_ids[0]),
        position_ids: split(&packed.position_ids[0]),
        labels: vec![packed.labels[0][..7].to_vec(), packed.labels[0][7..].to_vec()],
    };
    let leaking = Batch { position_ids: vec![(0..11).collect()], ..packed.clone() };

    let logits = |batch: &Batch| Ok::<_, anyhow::Error>(concat(&forward(&config, &weights, batch)?.logits));
    let expected = Tensor::new(logits(&separate)?, &Device::Cpu)?;
    assert_close("logits", &logits(&packed)?, &expected, 1e-13);
    assert!(max_rel_error(&logits(&leaking)?, &expected) > 0.1, "one document where there are two");
    Ok(())
}

#[test]
fn only_relative_positions_matter() -> Result<()> {
    let config = small_config(false);
    let weights = random_weights(&config, 6)?;
    let batch = Batch::random(config.vocab_size, 2, 9, 7);
    let mut shifted = batch.clone();
    shifted.position_ids[1] = (40..49).collect();
    let expected = loss_and_grads(&config, &weights, &batch)?.0;
    assert_scalar_close("loss", loss_and_grads(&config, &weights, &shifted)?.0, expected, 1e-13);
    Ok(())
}

#[test]
fn tied_gradient_is_that_of_embedding_plus_head() -> Result<()> {
    let (tied, untied) = (small_config(true), small_config(false));
    let weights = random_weights(&tied, 8)?;
    let mut copies: Weights = weights.clone();
    let head = weights["model.embed_tokens.weight"].as_detached_tensor().copy()?;
    copies.insert("lm_head.weight".to_owned(), Var::from_tensor(&head)?);
    let batch = Batch::random(tied.vocab_size, 2, 9, 9);

    let (_, grads) = loss_and_grads(&tied, &weights, &batch)?;
    let (_, mut expected) = loss_and_grads(&untied, &copies, &batch)?;
    let head_grad = expected.remove("lm_head.weight").expect("the head is a parameter");
    let sum = (&expected["model.embed_tokens.weight"] + head_grad)?;
    expected.insert("model.embed_tokens.weight".to_owned(), sum);
    assert_all_close("gradient", &grads, &expected, 1e-13);
    Ok(())
}

#[test]
fn random_weights_are_f32_numbers_that_give_every_parameter_a_gradient() -> Result<()> {
    for tied in [false, true] {
        let config = small_config(tied);
        let weights = random_weights(&config, 10)?;
        let batch = Batch::random(config.vocab_size, 2, 16, 11);
        for (name, grad) in loss_and_grads(&config, &weights, &batch)?.1 {
            let elements = values(&weights[&name]);
            assert!(elements.iter().all(|&element| element == f64::from(element as f32)), "{name}");
            let largest = values(&grad).iter().fold(0.0_f64, |largest, g| largest.max(g.abs()));
            assert!((0.02..5.0).contains(&largest), "{name}: largest gradient {largest}");
        }
    }
    Ok(())
}

// ---- normalization and masking ----

#[test]
fn masked_tokens_count_neither_in_the_numerator_nor_the_denominator() -> Result<()> {
    let config = small_config(false);
    let weights = random_weights(&config, 12)?;
    let batch = Batch::random(config.vocab_size, 3, 8, 13);
    let all = forward(&config, &weights, &batch)?;
    let counted: Vec<f64> =
        [0, 2].iter().flat_map(|&row| values(&all.token_losses[row])[..4].to_vec()).collect();

    let masked = batch.mask_tokens(4..8).mask_rows(1..2);
    assert_eq!(masked.num_valid_tokens(), counted.len());
    let (loss, _) = loss_and_grads(&config, &weights, &masked)?;
    assert_scalar_close("loss", loss, counted.iter().sum::<f64>() / counted.len() as f64, 1e-13);
    Ok(())
}

#[test]
fn a_batch_without_labels_has_zero_loss_and_updates_nothing() -> Result<()> {
    let config = small_config(false);
    let weights = random_weights(&config, 14)?;
    let batch = Batch::random(config.vocab_size, 2, 6, 15).mask_rows(0..2);
    let mut adamw = AdamW::new(Fixture::load("tiny_strong")?.adamw);
    let training = train(&config, &weights, &[batch], &mut adamw, Some(1.0), 1)?;

    assert_eq!((training.steps[0].loss, training.steps[0].grad_norm), (0.0, 0.0));
    assert_all_close("parameter", &as_tensors(&training.weights), &as_tensors(&weights), 0.0);
    Ok(())
}

#[test]
fn micro_batch_normalization_is_the_mean_of_means() -> Result<()> {
    let config = small_config(false);
    let weights = random_weights(&config, 16)?;
    let batch = Batch::random(config.vocab_size, 2, 8, 17);
    let uneven = [batch.rows(0..1).mask_tokens(2..8), batch.rows(1..2)];
    let (first, _) = loss_and_grads(&config, &weights, &uneven[0])?;
    let (second, _) = loss_and_grads(&config, &weights, &uneven[1])?;
    let (loss, _) = micro_batch_loss_and_grads(&config, &weights, &uneven)?;
    assert_scalar_close("uneven loss", loss, (first + second) / 2.0, 1e-13);

    // With equal numbers of labels it is the mean over all tokens.
    let even = [batch.rows(0..1), batch.rows(1..2)];
    let (loss, grads) = micro_batch_loss_and_grads(&config, &weights, &even)?;
    let (expected_loss, expected_grads) = loss_and_grads(&config, &weights, &batch)?;
    assert_scalar_close("even loss", loss, expected_loss, 1e-13);
    assert_all_close("even gradient", &grads, &expected_grads, 1e-13);
    Ok(())
}

// ---- optimizers, batches and comparisons ----

fn one_tensor(elements: &[f64]) -> Result<Tensors> {
    Ok([("w".to_owned(), Tensor::new(elements, &Device::Cpu)?)].into())
}

#[test]
fn sgd_adds_decay_to_the_gradient_and_keeps_momentum() -> Result<()> {
    let mut weights: Weights = [("w".to_owned(), Var::new(&[2.0_f64], &Device::Cpu)?)].into();
    let mut sgd = Sgd::new(0.5, 0.8, 0.1);
    sgd.step(&mut weights, &one_tensor(&[1.0])?)?;
    // velocity 1 + 0.1 · 2 = 1.2; w = 2 − 0.6
    assert_all_close("step 1", &as_tensors(&weights), &one_tensor(&[1.4])?, 1e-15);
    sgd.step(&mut weights, &one_tensor(&[-1.0])?)?;
    // velocity 0.8 · 1.2 + (−1 + 0.14) = 0.1; w = 1.4 − 0.05
    assert_all_close("step 2", &as_tensors(&weights), &one_tensor(&[1.35])?, 1e-15);
    Ok(())
}

#[test]
fn clipping_shortens_long_gradients_and_leaves_short_ones() -> Result<()> {
    let grads = one_tensor(&[3.0, -4.0])?;
    assert_eq!(global_norm(&grads)?, 5.0);
    let coefficient = 2.0 / (5.0 + 1e-6);
    let expected = one_tensor(&[3.0 * coefficient, -4.0 * coefficient])?;
    assert_all_close("clipped", &clip_by_global_norm(&grads, 2.0)?, &expected, 1e-15);
    assert_all_close("unclipped", &clip_by_global_norm(&grads, 6.0)?, &grads, 0.0);
    Ok(())
}

#[test]
fn batches_have_shifted_labels_that_stop_at_document_ends() {
    let packed = Batch::packed(1000, &[&[3, 1, 2]], 18);
    let ids: Vec<i64> = packed.input_ids[0].iter().map(|&id| i64::from(id)).collect();
    assert_eq!(packed.position_ids, [[0, 1, 2, 0, 0, 1]]);
    assert_eq!(packed.labels, [[ids[1], ids[2], IGNORED, IGNORED, ids[5], IGNORED]]);
    assert_eq!(document_ids(&packed.position_ids[0]), [0, 0, 0, 1, 2, 2]);

    let cut = Batch::random(1000, 2, 5, 19);
    assert_eq!(cut.num_valid_tokens(), 10, "a document cut at a row's end keeps its label");
    for (ids, labels) in cut.input_ids.iter().zip(&cut.labels) {
        assert!(ids[1..].iter().zip(labels).all(|(&id, &label)| i64::from(id) == label));
    }
}

#[test]
fn errors_are_relative_to_the_largest_expected_entry_and_nan_is_never_close() -> Result<()> {
    let expected = Tensor::new(&[0.0_f64, -4.0, 1.0], &Device::Cpu)?;
    assert_eq!(max_rel_error(&[0.0_f32, -4.0, 2.0], &expected), 0.25);
    assert_eq!(max_rel_error(&[f32::NAN, -4.0, 1.0], &expected), f64::INFINITY);
    assert_eq!(max_rel_error(&[0.5_f32, 0.0], &Tensor::new(&[0.0_f64, 0.0], &Device::Cpu)?), 0.5);
    Ok(())
}

#[test]
#[should_panic(
    expected = "q_proj [2, 2]: relative error 1.250e-1 > 1.0e-1; worst at [1, 0]: actual 3e0, expected 2e0"
)]
fn a_failed_comparison_names_the_tensor_the_entry_and_both_values() {
    let expected = Tensor::new(&[[1.0_f64, 1.0], [2.0, 8.0]], &Device::Cpu).expect("a tensor");
    assert_close("q_proj", &[1.0_f32, 1.0, 3.0, 8.0], &expected, 0.1);
}
