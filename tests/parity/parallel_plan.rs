//! Plans of tensor parallelism: layers in candle ops that they divide, and families that they describe.

use super::custom_block::{check, compare, run_on, toy};
use crate::support::compare::assert_all_close;
use crate::support::device::{launch, test_device};
use crate::support::mesh_run::{Layout, Rule, by_name, layout, on_mesh};
use crate::support::problems::{ADAMW, main_problem};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use ulysses::candle::{DType, Result, Tensor};
use ulysses::checkpoint::{DataCursor, SaveOptions, newest};
use ulysses::comm::thread::LaunchOptions;
use ulysses::comm::{Call, CallSignature, CommError, GroupWrapper, Pending, ProcessGroup, ReduceOp};
use ulysses::config::{Config, LayerSpec, TensorParallelConfig};
use ulysses::engine::{BatchOutcome, Engine, RunRecord, divide_model, initialize};
use ulysses::kernels::attention::FlashAttention;
use ulysses::model::{Model, RandomWeights, preset};
use ulysses::nn::ParallelStyle::{Colwise, Rowwise};
use ulysses::nn::{AutogradLayer, BlockContext, Init, ParameterSpec, TensorRank};

type Block = fn(&[Tensor], &Tensor, &BlockContext<'_>) -> Result<Tensor>;

fn net(_: &[Tensor], x: &Tensor, ctx: &BlockContext<'_>) -> Result<Tensor> {
    ctx.linear("net2", &ctx.linear("net1", x)?.relu()?)
}

/// The toy's layer of 10 features and 5 outputs, without a plan. tp divides its 10 hidden features unevenly over three ranks.
fn unplanned(block: Block) -> AutogradLayer<Block> {
    let parameters = toy::toy().layers[0].parameters().to_vec();
    AutogradLayer::new("net", parameters, block).with_output_width(5).token_wise()
}

fn with_block(block: Block) -> Model {
    let layer = unplanned(block).parallelize([("net1", Colwise), ("net2", Rowwise)]).unwrap();
    Model { layers: vec![Box::new(layer)], ..toy::toy() }
}

fn planned() -> Model {
    with_block(net)
}

#[test]
fn a_planned_layer_is_the_same_on_every_mesh() {
    check(planned, &toy::batch(4, 22).unwrap());
}

/// A mistake in the sums over tp.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Mistake {
    NoneForward,
    NoneBackward,
    TwiceForward,
    TwiceBackward,
}

/// The group of tp with a mistake. A layer with one `Rowwise` weight sums once forward, then once backward.
#[derive(Debug)]
struct Mistaken {
    inner: Arc<dyn ProcessGroup>,
    mistake: Mistake,
    num_sums: AtomicUsize,
}

impl GroupWrapper for Mistaken {
    fn inner(&self) -> &Arc<dyn ProcessGroup> {
        &self.inner
    }

    fn start(&self, call: Call<'_>) -> std::result::Result<Pending, CommError> {
        let is_sum = matches!(call.signature(), CallSignature::AllReduce { elements, .. } if elements.dtype == DType::F32);
        if !is_sum {
            return self.inner.start(call);
        }
        let is_backward = self.num_sums.fetch_add(1, Ordering::Relaxed) % 2 == 1;
        match (self.mistake, is_backward) {
            (Mistake::NoneForward, false) | (Mistake::NoneBackward, true) => Ok(Pending::ready()),
            (Mistake::TwiceForward, false) | (Mistake::TwiceBackward, true) => {
                let sum = call.outputs()[0].clone();
                self.inner.start(call)?.wait()?;
                self.inner.start_all_reduce(&sum, ReduceOp::Sum)
            }
            _ => self.inner.start(call),
        }
    }
}

/// Whether the comparison with one rank finds a mistake.
fn is_found(layout: Layout, model: fn() -> Model, mistake: Option<Mistake>) -> bool {
    let batch = toy::batch(4, 22).unwrap();
    let expected = run_on(self::layout(1, 1, 0), planned, &batch, |groups| groups);
    let run = || {
        run_on(layout, model, &batch, |groups| {
            groups.map(|axis, inner| match mistake.filter(|_| axis == "tp") {
                Some(mistake) => Arc::new(Mistaken { inner, mistake, num_sums: AtomicUsize::new(0) }),
                None => inner,
            })
        })
    };
    catch_unwind(AssertUnwindSafe(|| compare(&run(), &expected, "a mistake"))).is_err()
}

#[test]
fn sums_that_are_missing_or_done_twice_and_biases_of_every_rank_are_found() {
    /// As if every rank added the bias before the sum.
    fn biases_twice(params: &[Tensor], x: &Tensor, ctx: &BlockContext<'_>) -> Result<Tensor> {
        net(params, x, ctx)?.broadcast_add(&params[3])
    }
    for layout in [layout(1, 1, 0), layout(2, 1, 2), layout(1, 2, 3)] {
        let layout = Layout { tp: 2, ..layout };
        assert!(!is_found(layout, planned, None));
        for mistake in
            [Mistake::NoneForward, Mistake::NoneBackward, Mistake::TwiceForward, Mistake::TwiceBackward]
        {
            assert!(is_found(layout, planned, Some(mistake)), "{mistake:?} on {layout:?}");
        }
        assert!(is_found(layout, || with_block(biases_twice), None), "biases on {layout:?}");
    }
}

/// Trains the toy with a plan by the words of transformers, from the checkpoint in a directory if there is one, and saves it there.
/// Returns the first rank's outcome, and the shapes of every rank's parameters.
fn train_and_save(layout: Layout, steps: usize, dir: &Path) -> (BatchOutcome, Vec<Vec<Vec<usize>>>) {
    let plan = TensorParallelConfig::from_tp_plan([("net1", "colwise"), ("net2", "rowwise")]).unwrap();
    let config = main_problem(Rule::AdamW(ADAMW), None).json_config(layout, 4).unwrap();
    let config = Config { tensor_parallel: plan, ..config };
    let batch = toy::batch(4, 22).unwrap();
    let mesh = config.placed_mesh(None).unwrap().mesh;
    let data = DataCursor { samples_consumed: 0, seed: 3, seq_len: 22, num_sequences: 4, data_hash: None };
    let ranks = launch(&mesh, &LaunchOptions::default(), |_, groups| {
        let all = groups.whole()?;
        let model = Model { layers: vec![Box::new(unplanned(net))], ..toy::toy() };
        let mut engine = initialize(model, &RandomWeights { seed: 3 }, &config, &groups)?;
        if let Some(checkpoint) = newest(dir, &*all)?.checkpoint {
            engine.load_checkpoint(&checkpoint)?;
        }
        let outcome = engine.run_global_batch(&batch, steps)?;
        let run = RunRecord {
            run_id: "toy".into(),
            model: serde_json::Value::Null,
            source: None,
            data,
            evaluations: Default::default(),
        };
        let mut saver = engine.saver(all, dir, SaveOptions::default())?;
        engine.save_checkpoint(&mut saver, run)?;
        saver.finish()?;
        let parameters = engine.zero().layouts().flat_map(|layout| layout.parameters());
        Ok((outcome, parameters.map(|parameter| parameter.shape.clone()).collect()))
    });
    let (mut outcomes, shapes): (Vec<_>, _) = ranks.unwrap().into_iter().unzip();
    (outcomes.swap_remove(0), shapes)
}

#[test]
fn a_checkpoint_of_a_planned_layer_is_read_on_any_mesh() {
    let on_tp = |dp, sp, tp, stage| Layout { tp, ..layout(dp, sp, stage) };
    let [moving, whole] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let (_, shapes) = train_and_save(on_tp(1, 1, 3, 1), 1, moving.path());
    let with_hidden = |hidden| vec![vec![hidden, 10], vec![hidden], vec![5, hidden], vec![5]];
    assert_eq!(shapes, [with_hidden(4), with_hidden(3), with_hidden(3)]);
    train_and_save(on_tp(2, 1, 2, 2), 1, moving.path());
    let (resumed, _) = train_and_save(on_tp(1, 2, 1, 3), 1, moving.path());
    let (uninterrupted, _) = train_and_save(on_tp(1, 1, 1, 0), 3, whole.path());
    let [resumed, uninterrupted] = [resumed, uninterrupted].map(|outcome| by_name(&outcome.parameters));
    assert_all_close("tp 3, then dp 2 × tp 2, then sp 2", &resumed, &uninterrupted, 5e-5);
}

/// The error of dividing a layer over two ranks, or of its pass.
fn refusal(layer: std::result::Result<AutogradLayer<Block>, impl ToString>, size: usize) -> String {
    let divide = |layer| {
        let model = Model { layers: vec![Box::new(layer)], ..toy::toy() };
        divide_model(model, &[], TensorRank { size, rank: 0 }).map(|_| ())
    };
    layer.map_or_else(|error| error.to_string(), |layer| divide(layer).unwrap_err().to_string())
}

#[test]
fn plans_that_a_layer_cannot_have_are_refused_by_name() {
    let plan = [("net1", Colwise), ("net2", Rowwise)];
    let refused = refusal(unplanned(net).parallelize([("net3", Colwise)]), 2);
    assert!(
        refused.contains("`net3.weight` or `net.net3.weight`") && refused.contains("net2.weight"),
        "{refused}"
    );
    let refused = refusal(unplanned(net).parallelize(plan), 11);
    assert!(refused.contains("`net1.weight` has 10 parts") && refused.contains("tp of 1 to 10"), "{refused}");
    let heads = |parts: [usize; 2]| {
        let weight =
            |name, parts| ParameterSpec::new(name, [10, 10], Init::Normal { std: 0.3 }).in_parts(parts);
        let parameters = vec![weight("net1.weight", parts[0]), weight("net2.weight", parts[1])];
        let layer = AutogradLayer::new("net", parameters, net as Block).parallelize(plan);
        layer.map_err(|error| error.to_string())
    };
    let refused = refusal(heads([3, 3]), 2);
    assert!(
        refused.contains("`net1.weight` is in 3 parts") && refused.contains("a divisor of 10"),
        "{refused}"
    );
    let refused = refusal(heads([5, 2]), 2);
    assert!(
        refused.contains("`net2.weight` is in 2 parts") && refused.contains("is in 5: expected the same"),
        "{refused}"
    );
    // Of passes: a weight that the block multiplies itself, and an input that is not divided.
    fn own_product(params: &[Tensor], x: &Tensor, ctx: &BlockContext<'_>) -> Result<Tensor> {
        let hidden = ctx.linear("net1", x)?;
        let product = hidden.flatten_to(1)?.matmul(&params[2].t()?)?;
        product.reshape((x.dim(0)?, x.dim(1)?, 5))
    }
    fn whole_input(_: &[Tensor], x: &Tensor, ctx: &BlockContext<'_>) -> Result<Tensor> {
        ctx.linear("net1", x)?;
        ctx.linear("net2", x)
    }
    let passes: [(Block, &str); 2] = [
        (
            own_product,
            "divides `net2.weight` over tp, so the block must compute it by `BlockContext::linear`",
        ),
        (whole_input, "`net2.weight` takes inputs of width 5, got 10; tp divides its inputs"),
    ];
    for (block, expected) in passes {
        let problem = main_problem(Rule::Sgd { lr: 0.1 }, None);
        let config = problem.json_config(Layout { tp: 2, ..layout(1, 1, 0) }, 4).unwrap();
        let error = on_mesh(&config, &LaunchOptions::default(), |_, groups| {
            let (weights, attention) = (RandomWeights { seed: 3 }, Arc::new(FlashAttention::default()));
            let model = with_block(block);
            let mut engine =
                Engine::with_attention(model, &weights, &config, groups, attention, &test_device())?;
            Ok(engine.run_global_batch(&toy::batch(4, 22)?, 1)?)
        });
        let error = format!("{:#}", error.unwrap_err());
        assert!(error.contains(expected), "{error}");
    }
}

/// DeepSpeed's specs from a config file.
fn specs(patterns: &[(&str, &str)]) -> Vec<LayerSpec> {
    let spec = |(pattern, partition_type): &(&str, &str)| serde_json::json!({ "patterns": [pattern], "partition_type": partition_type });
    let specs: Vec<_> = patterns.iter().map(spec).collect();
    let text = serde_json::json!({
        "train_batch_size": 1,
        "tensor_parallel": { "autotp_size": 2, "partition_config": { "use_default_specs": false, "layer_specs": specs } },
    });
    let config = Config::from_json_str(&text.to_string(), "c.json").unwrap();
    let written = serde_json::to_string(&config).unwrap();
    assert_eq!(Config::from_json_str(&written, "c.json").unwrap().tensor_parallel, config.tensor_parallel);
    config.tensor_parallel.partition_config.layer_specs
}

fn llama_on(plan: &[LayerSpec], size: usize) -> std::result::Result<(), String> {
    let model = Model::new(&preset("nano").unwrap()).unwrap();
    divide_model(model, plan, TensorRank { size, rank: size - 1 })
        .map(|_| ())
        .map_err(|error| error.to_string())
}

#[test]
fn plans_of_a_family_agree_with_its_own_division_or_are_refused_by_name() {
    // DeepSpeed's preset, and transformers' `base_model_tp_plan`; with more ranks than KV heads, these have whole weights.
    let of_deepspeed = specs(&[
        (r".*\.self_attn\.o_proj\.weight$", "row"),
        (r".*\.self_attn\.[qkv]_proj\.weight$", "column"),
        (r".*\.mlp\.down_proj\.weight$", "row"),
        (r".*\.mlp\.(up|gate)_proj\.weight$", "Column"),
        (r".*norm.*|model\.embed_tokens.*", "row"),
        (r"lm_head", "column"),
    ]);
    let of_transformers = [
        ("layers.*.self_attn.q_proj", "colwise"),
        ("layers.*.self_attn.k_proj", "colwise"),
        ("layers.*.self_attn.v_proj", "colwise"),
        ("layers.*.self_attn.o_proj", "rowwise"),
        ("layers.*.mlp.gate_proj", "colwise"),
        ("layers.*.mlp.up_proj", "colwise"),
        ("layers.*.mlp.down_proj", "rowwise"),
    ];
    let of_transformers = TensorParallelConfig::from_tp_plan(of_transformers).unwrap();
    for plan in [of_deepspeed, of_transformers.partition_config.layer_specs] {
        for size in 1..=4 {
            assert_eq!(llama_on(&plan, size), Ok(()), "tp {size}");
        }
    }
    let refused =
        llama_on(&specs(&[(r".*o_proj", "row"), (r".*\.(up|down)_proj", "column")]), 2).unwrap_err();
    for part in [
        "layer_specs[1]`",
        r#"".*\\.(up|down)_proj""#,
        "`model.layers.0.mlp.down_proj.weight`",
        r#"divides as "column", but its layer as "row": write "row""#,
    ] {
        assert!(refused.contains(part), "{part}: {refused}");
    }
    let refused = llama_on(&specs(&[(r".*q_proj", "skip")]), 2).unwrap_err();
    assert!(refused.contains(r#"divides as "skip", but its layer as "column""#), "{refused}");
    for (pattern, size) in [("q_proj.weight", 1), (r".*\.q_proj$", 2)] {
        let refused = llama_on(&specs(&[(pattern, "column")]), size).unwrap_err();
        let pattern = format!("{pattern:?} matches from its start on");
        assert!(refused.contains(&pattern) && refused.contains("for example, there is "), "{refused}");
    }
    let refused = TensorParallelConfig::from_tp_plan([("layers.*.mlp.experts", "packed_colwise")]);
    let refused = refused.unwrap_err().to_string();
    assert!(
        refused.contains(r#""layers.*.mlp.experts" is "packed_colwise": "colwise" and "rowwise" are valid"#),
        "{refused}"
    );
}
