//! The fused layer against the same block under autograd; weights and descriptions.

mod shards;

use super::*;
use crate::families::tests::config;
use crate::nn::tests::{context, random};
use crate::nn::*;
use candle_core::{D, Result, Tensor};
use serde_json::{Value, json};
use ulysses_kernels::tensor::to_vec;

fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let mean_square = x.sqr()?.mean_keepdim(D::Minus1)?;
    x.broadcast_div(&(mean_square + eps)?.sqrt()?)?.broadcast_mul(weight)
}

fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let (batch, seq, _) = x.dims3()?;
    x.flatten_to(1)?.matmul(&weight.t()?)?.reshape((batch, seq, ()))
}

fn rotate(x: &Tensor, (cos, sin): &(Tensor, Tensor)) -> Result<Tensor> {
    let half = x.dim(D::Minus1)? / 2;
    let (a, b) = (x.narrow(D::Minus1, 0, half)?, x.narrow(D::Minus1, half, half)?);
    let first = (a.broadcast_mul(cos)? - b.broadcast_mul(sin)?)?;
    let second = (b.broadcast_mul(cos)? + a.broadcast_mul(sin)?)?;
    Tensor::cat(&[first, second], D::Minus1)
}

/// The Llama block in plain candle ops, with a gate of the attention's output if the description says so.
fn block(config: &ModelConfig, params: &[Tensor], x: &Tensor, ctx: &BlockContext<'_>) -> Result<Tensor> {
    let [q, k, v, o, gate, up, down, norm_in, norm_mid] = params else {
        candle_core::bail!("nine parameters")
    };
    let layer = *config.attention();
    let heads = |t: Tensor, n: usize| t.reshape((ctx.batch(), ctx.seq_len_local(), n, layer.head_dim));
    let normed = rms_norm(x, norm_in, config.rms_norm_eps)?;
    let tables = ctx.rope_tables(layer.head_dim, layer.rope.unwrap().theta)?;
    let q = linear(&normed, q)?.reshape((ctx.batch(), ctx.seq_len_local(), layer.num_heads, ()))?;
    let output_gate = layer.output_gate.then(|| q.narrow(3, layer.head_dim, layer.head_dim)).transpose()?;
    let q = rotate(&q.narrow(3, 0, layer.head_dim)?, &tables)?;
    let k = rotate(&heads(linear(&normed, k)?, layer.num_kv_heads)?, &tables)?;
    let v = heads(linear(&normed, v)?, layer.num_kv_heads)?;
    let mut out = ctx.attention(&q, &k, &v)?;
    if let Some(gate) = output_gate {
        out = (out / (gate.neg()?.exp()? + 1.0)?)?;
    }
    let mid = (x + linear(&out.flatten_from(2)?, o)?)?;
    let normed = rms_norm(&mid, norm_mid, config.rms_norm_eps)?;
    let (gate, up) = (linear(&normed, gate)?, linear(&normed, up)?);
    let silu = (&gate / (gate.neg()?.exp()? + 1.0)?)?;
    &mid + linear(&(silu * up)?, down)?
}

/// Output, input gradient and parameter gradients of a layer.
fn run(layer: &dyn Layer, params: &[Tensor], x: &Tensor, dy: &Tensor) -> Vec<Tensor> {
    let ctx = context(x.dims()[0], x.dims()[1]);
    let grads: Vec<Tensor> = params.iter().map(|p| p.zeros_like().unwrap()).collect();
    let (y, saved) = layer.forward(params, x, &ctx).unwrap();
    let y = y.copy().unwrap();
    assert!(saved.bytes() > 0);
    let views: Vec<_> = grads.iter().cloned().map(Some).collect();
    let dx = layer.backward(params, saved, dy.copy().unwrap(), &views, &ctx).unwrap();
    [vec![y, dx], grads].concat()
}

#[test]
fn fused_decoder_layer_is_the_block_under_autograd() {
    compare_with_autograd(config());
}

#[test]
fn a_gated_attention_is_the_block_under_autograd() {
    compare_with_autograd(config().with_attention(|layer| layer.output_gate = true));
}

#[track_caller]
fn compare_with_autograd(config: ModelConfig) {
    let fused = DecoderLayer::new(&config, 0);
    let specs = fused.parameters().to_vec();
    let description = config.clone();
    let autograd = AutogradLayer::new(
        "block",
        specs.clone(),
        move |params: &[Tensor], x: &Tensor, ctx: &BlockContext<'_>| block(&description, params, x, ctx),
    );
    let scale = |spec: &ParameterSpec| (1.0 / *spec.shape.last().unwrap() as f64).sqrt();
    let params: Vec<Tensor> = specs
        .iter()
        .zip(0..)
        .map(|(spec, seed)| (random(&spec.shape, seed) * scale(spec)).unwrap())
        .collect();
    let dims = [2, 11, config.hidden_size];
    let (x, dy) = (random(&dims, 100), random(&dims, 101));
    let results = run(&fused, &params, &x, &dy).into_iter().zip(run(&autograd, &params, &x, &dy));
    let names = ["y", "dx"].into_iter().chain(specs.iter().map(|spec| spec.name.as_str()));
    for (name, (got, expected)) in names.zip(results) {
        let largest = expected.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
        let error = (got - expected).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
        assert!(error <= 1e-5 * largest, "{name}: {error} of {largest}");
    }
}

#[test]
fn saved_state_of_another_layer_is_refused() {
    let config = config().with_num_layers(4);
    let layer = DecoderLayer::new(&config, 3);
    let params: Vec<Tensor> = layer.parameters().iter().map(|spec| random(&spec.shape, 0)).collect();
    let dy = random(&[1, 2, config.hidden_size], 1);
    let grads = vec![None; params.len()];
    let result = layer.backward(&params, Saved::new((), 0), dy, &grads, &context(1, 2));
    assert!(result.err().unwrap().to_string().contains("model.layers.3"));
}

#[test]
fn random_weights_are_a_function_of_seed_name_and_index() {
    let spec = ParameterSpec::new("w", [40, 25], Init::Normal { std: 0.5 });
    let source = RandomWeights { seed: 7 };
    let mut whole = vec![0.0; 1000];
    source.read(&spec, 0..1000, &mut whole).unwrap();
    for range in [0..1, 1..2, 333..777, 999..1000] {
        let mut part = vec![0.0; range.len()];
        source.read(&spec, range.clone(), &mut part).unwrap();
        assert_eq!(part, whole[range]);
    }
    let mut other = vec![0.0; 1000];
    source.read(&ParameterSpec::new("v", [1000], spec.init), 0..1000, &mut other).unwrap();
    assert_ne!(other, whole);
    RandomWeights { seed: 8 }.read(&spec, 0..1000, &mut other).unwrap();
    assert_ne!(other, whole);
}

#[test]
fn random_weights_have_the_requested_mean_and_deviation() {
    let n = 200_000;
    let values = to_vec::<f32>(&random(&[n], 3)).unwrap();
    let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / n as f64;
    let deviation = (values.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / n as f64).sqrt();
    // Five standard errors of each estimate.
    assert!(mean.abs() < 0.012 && (deviation - 1.0).abs() < 0.008, "{mean} {deviation}");
    assert!(values.iter().all(|v| v.is_finite()));
}

/// `config.json` of a directory, changed by one key.
fn hf_config(key: &str, value: Value) -> std::result::Result<ModelConfig, ModelError> {
    let dir = tempfile::tempdir().unwrap();
    let mut json = config().to_hf_json();
    json[key] = value;
    std::fs::write(dir.path().join("config.json"), json.to_string()).unwrap();
    ModelConfig::from_hf_dir(dir.path())
}

#[test]
fn hugging_face_descriptions_round_trip() {
    assert_eq!(hf_config("use_cache", true.into()).unwrap(), config());
    let theta = json!({ "rope_type": "default", "rope_theta": 5e5 });
    assert_eq!(hf_config("rope_parameters", theta).unwrap().rope().unwrap().theta, 5e5);
}

#[test]
fn models_that_would_be_computed_wrongly_are_refused_by_key() {
    let cases = [
        ("model_type", json!("bert")),
        ("hidden_act", json!("gelu")),
        ("mlp_bias", json!(true)),
        ("attention_bias", json!(true)),
        ("sliding_window", json!(4096)),
        ("num_key_value_heads", json!(3)),
        ("head_dim", json!(7)),
        ("hidden_size", json!(-4)),
        ("hidden_size", json!(0)),
        ("hidden_size", json!("64")),
        ("num_hidden_layers", json!(0)),
        ("num_hidden_layers", json!(10_u64.pow(12))),
        ("num_attention_heads", json!(u64::MAX)),
        ("vocab_size", json!(10_u64.pow(18))),
        ("rms_norm_eps", json!(-1.0)),
        ("rope_theta", json!(0.0)),
        ("is_causal", json!(false)),
        ("is_causal", json!(null)),
        ("is_encoder_decoder", json!(true)),
        ("quantization_config", json!({ "quant_method": "gptq", "bits": 4 })),
        ("per_layer_config", json!({ "0": { "num_key_value_heads": 2 } })),
        ("attention_dropout", json!("0.1")),
        ("logits_scaling", json!(8.0)),
        ("no_rope_layers", json!([1, 0])),
    ];
    for (key, value) in cases {
        let error = hf_config(key, value).unwrap_err().to_string();
        assert!(error.contains(key), "{key}: {error}");
    }
}

#[test]
fn tied_models_have_one_unit_less() {
    let units = |tied| {
        let model = Model::new(&ModelConfig { tie_word_embeddings: tied, ..config() }).unwrap();
        model.units().into_iter().map(|unit| (unit.name, unit.parameters.len())).collect::<Vec<_>>()
    };
    let layer = |index| (format!("model.layers.{index}"), 9);
    assert_eq!(units(false), [("embedding".into(), 1), layer(0), layer(1), ("head".into(), 2)]);
    assert_eq!(units(true), [("embedding".into(), 2), layer(0), layer(1)]);
}

#[test]
fn an_unknown_preset_lists_the_known_ones() {
    let error = preset("huge").unwrap_err().to_string();
    assert!(error.contains("huge") && error.contains("nano, tiny, small, base"), "{error}");
}

#[test]
fn absurd_descriptions_are_refused() {
    let absurd = [
        config().with_attention(|layer| layer.num_kv_heads = 3),
        config().with_attention(|layer| layer.num_heads = 0),
        config().with_num_layers(0),
        ModelConfig { hidden_size: usize::MAX / 2, ..config() },
        config().with_rope(|rope| rope.theta = f64::NAN),
    ];
    for description in absurd {
        assert!(Model::new(&description).is_err(), "{description:?}");
    }
}

#[test]
fn tensors_of_gpt_2_are_found_without_the_name_of_the_model_before_theirs() {
    let dir = tempfile::tempdir().unwrap();
    let names = ["wte.weight", "h.1.attn.c_attn.bias", "ln_f.bias", "lm_head.weight"];
    let tensors: std::collections::HashMap<_, _> = names.map(|name| (name, random(&[2], 0))).into();
    candle_core::safetensors::save(&tensors, dir.path().join("model.safetensors")).unwrap();
    let weights = HfWeights::open(dir.path()).unwrap();
    let mut found: Vec<_> = weights.names().collect();
    found.sort_unstable();
    let expected = [
        "lm_head.weight",
        "transformer.h.1.attn.c_attn.bias",
        "transformer.ln_f.bias",
        "transformer.wte.weight",
    ];
    assert_eq!(found, expected);
}

#[test]
fn elements_outside_a_stored_tensor_are_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let tensors = std::collections::HashMap::from([("w", random(&[2, 3], 0))]);
    candle_core::safetensors::save(&tensors, dir.path().join("model.safetensors")).unwrap();
    let weights = HfWeights::open(dir.path()).unwrap();
    let spec = ParameterSpec::new("w", [2, 3], Init::Zeros);
    let mut out = [0.0; 2];
    weights.read(&spec, 4..6, &mut out).unwrap();
    assert!(out.iter().all(|value| *value != 0.0));
    for range in [5..7, 6..8, 0..3] {
        assert!(weights.read(&spec, range.clone(), &mut out).is_err(), "{range:?}");
    }
}
