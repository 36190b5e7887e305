//! Blocks written with candle ops, alone and mixed with the library's layers: the same on every mesh.

#[path = "../../examples/05_own_candle_block.rs"]
#[allow(dead_code, reason = "the example's main")]
mod example;
#[path = "../../examples/12_hsdp_toy.rs"]
#[allow(dead_code, reason = "the example's main")]
pub(super) mod toy;

use crate::support::compare::{assert_all_close, assert_scalar_close};
use crate::support::device::test_device;
use crate::support::llama_block::autograd_decoder_layer;
use crate::support::mesh_run::{
    Layout, Problem, Rule, assert_matches, by_name, global_batch, layout, llama, llama_config, on_mesh,
};
use crate::support::problems::{CONFIG, main_problem, packed_batch};
use crate::support::reference::{Batch, ReferenceConfig};
use std::sync::Arc;
use ulysses::candle::{Device, Result, Tensor, bail};
use ulysses::comm::TrainingGroups;
use ulysses::comm::thread::LaunchOptions;
use ulysses::data::GlobalBatch;
use ulysses::engine::{BatchOutcome, Engine};
use ulysses::kernels::attention::FlashAttention;
use ulysses::model::{DecoderLayer, Model, ModelConfig, RandomWeights};
use ulysses::nn::{
    AutogradLayer, BlockContext, Features, Init, InputLayer, LayerContext, LayerError, LocalBatch,
    ParameterSpec, Saved,
};
use ulysses::objective::{AutogradObjective, LossTerms};

const TOLERANCE: f64 = 2e-5;

pub(super) fn layouts() -> impl Iterator<Item = Layout> {
    let meshes = [(1, 1), (1, 2), (2, 2), (1, 3)];
    let whole = meshes.into_iter().flat_map(|(dp, sp)| [0, 3].map(|stage| layout(dp, sp, stage)));
    let divided = [layout(1, 1, 0), layout(1, 2, 3), layout(2, 1, 2)].map(|whole| Layout { tp: 2, ..whole });
    whole.chain(divided).chain([Layout { tp: 3, ..layout(1, 1, 1) }])
}

/// Four packed sequences.
fn packed() -> GlobalBatch {
    let rows: [&[usize]; 4] = [&[22], &[9, 13], &[1, 4, 17], &[11, 11]];
    global_batch(&Batch::packed(example::VOCAB_SIZE, &rows, 11)).unwrap()
}

/// Three clipped SGD steps of `model`.
fn run(layout: Layout, model: fn() -> Model, global: &GlobalBatch) -> BatchOutcome {
    run_on(layout, model, global, |groups| groups)
}

/// As [`run`], with groups that `change` has changed.
pub(super) fn run_on(
    layout: Layout,
    model: fn() -> Model,
    global: &GlobalBatch,
    change: impl Fn(TrainingGroups) -> TrainingGroups + Sync,
) -> BatchOutcome {
    let problem = main_problem(Rule::Sgd { lr: 0.1 }, Some(0.5));
    let config = problem.json_config(layout, global.batch_size()).unwrap();
    let outcomes = on_mesh(&config, &LaunchOptions::default(), |_, groups| {
        let (weights, attention) = (RandomWeights { seed: 3 }, Arc::new(FlashAttention::default()));
        let mut engine =
            Engine::with_attention(model(), &weights, &config, change(groups), attention, &test_device())?;
        Ok((engine.run_global_batch(global, 3)?, engine.check_replicas()))
    });
    let (mut outcomes, replicas): (Vec<_>, Vec<_>) = outcomes.unwrap().into_iter().unzip();
    replicas.into_iter().for_each(|replicas| replicas.unwrap());
    outcomes.remove(0)
}

/// Compares every layout with the single rank.
pub(super) fn check(model: fn() -> Model, global: &GlobalBatch) {
    let expected = run(layout(1, 1, 0), model, global);
    assert!(expected.gradients.iter().all(|(_, gradient)| {
        gradient.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap() > 0.0
    }));
    for layout in layouts() {
        compare(&run(layout, model, global), &expected, &format!("{layout:?}"));
    }
}

/// Compares loss, norms, gradients and parameters of all steps.
#[track_caller]
pub(super) fn compare(outcome: &BatchOutcome, expected: &BatchOutcome, label: &str) {
    for (report, expected) in outcome.reports.iter().zip(&expected.reports) {
        assert_scalar_close(&format!("{label}: loss"), report.loss, expected.loss, TOLERANCE);
        let (norm, expected) = (report.grad_norm, expected.grad_norm);
        assert_scalar_close(&format!("{label}: norm"), norm, expected, TOLERANCE);
    }
    for (what, actual, expected) in [
        ("gradient", &outcome.gradients, &expected.gradients),
        ("parameter", &outcome.parameters, &expected.parameters),
    ] {
        assert_all_close(&format!("{label}: {what}"), &by_name(actual), &by_name(expected), TOLERANCE);
    }
}

#[test]
fn the_block_of_the_example_is_the_same_on_every_mesh() {
    check(|| example::model().unwrap(), &packed());
}

#[test]
fn a_model_without_a_vocabulary_and_with_its_own_loss_is_the_same_on_every_mesh() {
    check(toy::toy, &toy::batch(4, 22).unwrap());
}

/// Values that grow with the position of their token.
struct PositionedFeatures;

/// 1 plus a tenth of each token's position.
fn growth(positions: &[u32], x: &Tensor) -> Result<Tensor> {
    let growth = positions.iter().map(|position| 1.0 + *position as f32 / 10.0).collect();
    Tensor::from_vec(growth, (x.dim(0)?, x.dim(1)?, 1), &Device::Cpu)?.to_device(x.device())
}

impl InputLayer for PositionedFeatures {
    fn name(&self) -> &str {
        "features"
    }

    fn parameters(&self) -> &[ParameterSpec] {
        &[]
    }

    fn forward(
        &self,
        params: &[Tensor],
        batch: &LocalBatch<'_>,
        ctx: &LayerContext,
    ) -> std::result::Result<(Tensor, Saved), LayerError> {
        let (x, saved) = Features::new("x").forward(params, batch, ctx)?;
        assert_eq!(ctx.seq_len_local(), batch.seq_len_local);
        Ok((x.broadcast_mul(&growth(ctx.position_ids(), &x)?)?, saved))
    }

    fn backward(
        &self,
        _: Saved,
        _: &Tensor,
        _: &[Option<Tensor>],
        _: &LayerContext,
    ) -> std::result::Result<(), LayerError> {
        Ok(())
    }
}

/// The toy with an input and layers that read positions.
fn with_positions() -> Model {
    let grow =
        |_: &[Tensor], x: &Tensor, ctx: &BlockContext<'_>| x.broadcast_mul(&growth(ctx.position_ids(), x)?);
    let mut model = Model { input: Box::new(PositionedFeatures), ..toy::toy() };
    model.layers.insert(0, Box::new(AutogradLayer::new("own tokens", vec![], grow).token_wise()));
    model.layers.insert(0, Box::new(AutogradLayer::new("all tokens", vec![], grow)));
    model
}

#[test]
fn an_input_and_layers_get_the_positions_of_their_tokens_on_every_mesh() {
    check(with_positions, &toy::batch(4, 22).unwrap());
}

/// The toy with a readout of its objective's own, on labeled tokens.
fn with_readout() -> Model {
    let loss = |params: &[Tensor], x: &Tensor, batch: &LocalBatch<'_>| {
        let [readout] = params else { bail!("the loss has one parameter") };
        let y = x.broadcast_mul(readout)?;
        let error = (y - batch.tensor("target", x.dtype(), x.device())?)?;
        let terms = (error.sqr()?.mean_keepdim(2)? * batch.has_label(x.dtype(), x.device())?)?;
        Ok(LossTerms { sum: terms.sum_all()?, tokens: batch.num_labels() })
    };
    let readout = ParameterSpec::new("readout", [5], Init::Ones);
    Model { objective: Box::new(AutogradObjective::new("readout", vec![readout], loss)), ..toy::toy() }
}

#[test]
fn an_objective_with_parameters_is_the_same_on_every_mesh_also_where_a_rank_has_no_label() {
    let values = toy::batch(4, 22).unwrap();
    // The second half of every sequence has no label, which is the whole shard of the last sp rank.
    let labels = (0..4 * 22).map(|token| if token % 22 < 10 + token / 44 { 0 } else { -100 }).collect();
    let mut batch = GlobalBatch::new(4, 22, vec![0; 4 * 22], None, Some(labels)).unwrap();
    for (name, width) in [("x", 10), ("target", 5)] {
        let elements = values.micro_batch(0..4, 1, 0).unwrap().values[name].clone();
        batch = batch.with_values(name, width, elements).unwrap();
    }
    check(with_readout, &batch);
}

/// A block of the example, a decoder layer of the same width, another block.
fn mixed() -> Model {
    let config = ModelConfig {
        vocab_size: example::VOCAB_SIZE,
        hidden_size: example::HIDDEN,
        ..llama_config(&CONFIG)
    };
    let decoder = Box::new(DecoderLayer::new(&config, 1));
    Model {
        layers: vec![example::layer(0).unwrap(), decoder, example::layer(2).unwrap()],
        ..example::model().unwrap()
    }
}

#[test]
fn autograd_and_fused_layers_mix() {
    check(mixed, &packed());
}

/// A Llama model whose first layer uses candle's autograd.
fn half_autograd(config: &ModelConfig) -> Model {
    let mut model = llama(config);
    model.layers[0] = autograd_decoder_layer(config, 0);
    model
}

#[test]
fn a_llama_with_an_autograd_layer_matches_the_reference_on_every_mesh() {
    for (num_heads, num_kv_heads, checkpointing) in [(8, 4, false), (4, 1, true)] {
        let config = ReferenceConfig { num_heads, num_kv_heads, ..CONFIG };
        let extra = serde_json::json!({ "ulysses": { "activation_checkpointing": checkpointing } });
        let problem = Problem {
            model: half_autograd,
            extra,
            ..crate::support::problems::problem(config, packed_batch())
        };
        let expected = problem.reference().unwrap();
        for layout in layouts() {
            let outcome = problem.run(layout).unwrap();
            assert_matches(&outcome, &expected, TOLERANCE, &format!("{layout:?}"));
        }
    }
}
