//! Models with linear attention and attention with a gate, with Mamba 2, with layers of one branch, with short convolutions, with a bias
//! in the head, with latent attention, and with decays per channel.

use super::case;
use crate::support::run_case::RunCase;
use ulysses::model::{ModelConfig, Multipliers, family, shape};
use ulysses::nn::{
    Init, LatentConfig, LinearAttentionConfig, LinearAttentionKind, MixerConfig, ShortConvConfig,
};

/// Three layers with linear attention of two key and four value heads, one with a gate.
fn hybrid() -> ModelConfig {
    let mut model = shape("Qwen3.5-9B").unwrap().with_num_layers(4).with_attention(|layer| {
        (layer.num_heads, layer.num_kv_heads, layer.head_dim) = (8, 2, 8);
    });
    for layer in &mut model.layers {
        if let MixerConfig::LinearAttention(linear) = layer {
            (linear.num_key_heads, linear.num_value_heads) = (2, 4);
            (linear.key_head_dim, linear.value_head_dim) = (4, 6);
        }
    }
    ModelConfig { hidden_size: 64, intermediate_size: 40, vocab_size: 96, ..model }
}

/// The same with projections by key head.
fn by_key_head() -> ModelConfig {
    ModelConfig { family: family("qwen3_next").unwrap(), ..hybrid() }
}

/// Three layers with Mamba 2 of two groups and four heads, one with attention.
fn mamba() -> ModelConfig {
    let mut model = shape("granite-4.0-h-350m").unwrap().with_num_layers(11).with_attention(|layer| {
        (layer.num_heads, layer.num_kv_heads, layer.head_dim) = (8, 2, 8);
    });
    model.layers.drain(..7);
    for layer in &mut model.layers {
        if let MixerConfig::LinearAttention(linear) = layer {
            (linear.num_key_heads, linear.num_value_heads) = (2, 4);
            (linear.key_head_dim, linear.value_head_dim) = (8, 32);
        }
    }
    ModelConfig { hidden_size: 64, intermediate_size: 40, vocab_size: 96, ..model }
}

/// Layers of one branch: the Mamba 2 and the attention of [`mamba`], and MLPs.
fn single_branches() -> ModelConfig {
    let model = ModelConfig { family: family("nemotron_h").unwrap(), ..mamba() }
        .with_attention(|layer| layer.scale = None);
    let mut model = ModelConfig { multipliers: Multipliers::default(), tie_word_embeddings: false, ..model };
    for layer in &mut model.layers {
        if let MixerConfig::LinearAttention(linear) = layer {
            let LinearAttentionKind::Mamba2(mamba) = &mut linear.kind else { continue };
            mamba.time_step_limits[0] = 0.001;
            mamba.time_step_bias = Init::TimeSteps { bounds: [0.001, 0.1], floor: 1e-4 };
        }
    }
    model.layers = model.layers.into_iter().flat_map(|layer| [layer, MixerConfig::Mlp]).collect();
    model
}

/// Short convolutions of 64 channels in four of five layers.
fn convolutions() -> ModelConfig {
    let model = shape("LFM2-350M").unwrap().with_num_layers(5).with_attention(|layer| {
        (layer.num_heads, layer.num_kv_heads, layer.head_dim) = (8, 2, 8);
    });
    let conv = ShortConvConfig { channels: 64, taps: 3, bias: true };
    let model = model.with_mixer([true, true, false, true, true], conv);
    ModelConfig { hidden_size: 64, intermediate_size: 40, vocab_size: 96, ..model }
}

/// Attention and MLP side by side, and a bias in the head.
fn head_bias(tie_word_embeddings: bool) -> ModelConfig {
    let model = shape("phi-2").unwrap().with_num_layers(2).with_attention(|layer| {
        (layer.num_heads, layer.num_kv_heads, layer.head_dim) = (8, 8, 8);
    });
    let model = model.with_rope(|rope| rope.partial_rotary_factor = 0.5);
    ModelConfig { hidden_size: 64, intermediate_size: 40, vocab_size: 96, tie_word_embeddings, ..model }
}

/// Latent attention of eight heads, whose values are narrower than their keys.
fn latent() -> ModelConfig {
    let latent = LatentConfig {
        q_rank: Some(12),
        kv_rank: 10,
        rope_head_dim: 4,
        value_head_dim: 6,
        mscale_all_dim: 0.0,
    };
    let model = shape("Youtu-LLM-2B").unwrap().with_num_layers(3).with_attention(|layer| {
        (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.latent) = (8, 8, 10, Some(latent));
    });
    ModelConfig { hidden_size: 64, intermediate_size: 40, vocab_size: 96, ..model }
}

/// Two layers of linear attention with decays per channel, of four heads, and [`latent`] attention without positions.
fn kimi() -> ModelConfig {
    let model = ModelConfig { family: family("kimi_linear").unwrap(), ..latent() };
    let linear = LinearAttentionConfig {
        num_key_heads: 4,
        num_value_heads: 4,
        key_head_dim: 6,
        value_head_dim: 6,
        conv_width: 4,
        kind: LinearAttentionKind::KimiDelta,
    };
    let model = ModelConfig { tie_word_embeddings: false, ..model }.with_attention(|layer| layer.rope = None);
    model.with_mixer([true, false, true], linear)
}

/// Linear attention and attention with a gate; with sp 5 a rank has no head of the former. Mamba 2. Layers of one branch. Convolutions. States and
/// tokens that are passed on. A bias in the head. Latent attention. Decays per channel.
pub(super) fn cases() -> Vec<RunCase> {
    let case = |label, model, seq_len| case(label, model, seq_len).stage(2);
    let divided = |label, model, tp: usize| {
        let case = case(label, model, 24).sp(2).stage(3).pp(2).tp(tp);
        case.checkpointed()
    };
    let cases = vec![
        case("linear attention", hybrid(), 24),
        case("linear attention, 1 x 5", hybrid(), 23).sp(5),
        case("linear attention, 2 x 2, recomputed", hybrid(), 22).dp(2).sp(2).saves_output(false),
        case("linear attention, 1 x 3, outputs kept", hybrid(), 22).sp(3).saves_output(true),
        case("linear attention, 1 x 4, chunks", hybrid(), 25).sp(4).overlapped(2).tiles(5),
        case("linear attention, a ring of 2 x 2", hybrid(), 25).sp(4).ring(2).checkpointed(),
        case("linear attention, a ring of 3, 2 x 3", hybrid(), 23).dp(2).sp(3).ring(3).checkpointed(),
        divided("linear attention, pp 2, a ring of 2, tp 3", hybrid(), 3).ring(2),
        case("projections by key head, 1 x 5", by_key_head(), 23).sp(5).saves_output(false),
        divided("projections by key head, pp 2, a ring of 2, tp 2", by_key_head(), 2).ring(2),
        divided("projections by key head, pp 2, a ring of 2, tp 3", by_key_head(), 3).ring(2),
        case("Mamba 2, 1 x 5", mamba(), 23).sp(5),
        case("Mamba 2, 2 x 2, recomputed", mamba(), 22).dp(2).sp(2).saves_output(false),
        case("Mamba 2, 1 x 4, chunks", mamba(), 25).sp(4).overlapped(2).tiles(5),
        divided("Mamba 2, pp 2, a ring of 2, tp 2", mamba(), 2).ring(2),
        case("one branch, 2 x 3", single_branches(), 23).dp(2).sp(3),
        case("one branch, 1 x 2, recomputed", single_branches(), 22).sp(2).saves_output(false),
        case("one branch, 1 x 4, chunks", single_branches(), 25).sp(4).overlapped(2).tiles(5),
        divided("one branch, pp 2, a ring of 2, tp 2", single_branches(), 2).ring(2),
        case("convolutions, 2 x 3", convolutions(), 23).dp(2).sp(3),
        case("convolutions, 1 x 2, recomputed", convolutions(), 22).sp(2).saves_output(false),
        case("convolutions, 1 x 4, chunks", convolutions(), 25).sp(4).overlapped(2).tiles(5),
        case("convolutions, a ring of 2 x 2", convolutions(), 25).sp(4).ring(2).checkpointed(),
        case("a head with a bias, 2 x 3", head_bias(false), 23).dp(2).sp(3),
        case("a tied head with a bias, tiles", head_bias(true), 24)
            .dp(2)
            .sp(2)
            .ulysses("loss_tile_tokens", 5),
        divided("a head with a bias, pp 2, a ring of 2, tp 2", head_bias(false), 2).ring(2),
        case("a head with a bias in bf16", head_bias(false), 24).sp(2).bf16().stage(0),
        case("latent attention, 2 x 3", latent(), 23).dp(2).sp(3),
        case("latent attention, 1 x 2, recomputed", latent(), 22).sp(2).saves_output(false),
        case("latent attention, 1 x 5, outputs kept", latent(), 22).sp(5).saves_output(true),
        case("latent attention, a ring of 2 x 2", latent(), 25).sp(4).ring(2).checkpointed(),
        divided("latent attention, pp 2, a ring of 2, tp 3", latent(), 3).ring(2),
        case("decays per channel, 1 x 5", kimi(), 23).sp(5),
        case("decays per channel, 2 x 2, recomputed", kimi(), 22).dp(2).sp(2).saves_output(false),
        divided("decays per channel, pp 2, a ring of 2, tp 3", kimi(), 3).ring(2),
    ];
    let passed = [
        case("linear attention, 1 x 5, states passed", hybrid(), 23).sp(5),
        case("linear attention, 2 x 2, states passed", hybrid(), 22).dp(2).sp(2).checkpointed(),
        divided("linear attention, pp 2, tp 3, states passed", hybrid(), 3),
        case("Mamba 2, 1 x 4, states passed", mamba(), 25).sp(4).checkpointed(),
        case("convolutions, 2 x 3, tokens passed", convolutions(), 23).dp(2).sp(3),
        case("linear attention, a ring of 3, states passed", hybrid(), 23).dp(2).sp(3).ring(3),
        case("Mamba 2, a ring of 2 x 2, states passed", mamba(), 25).sp(4).ring(2),
        case("convolutions, a ring of 2, tokens passed", convolutions(), 23).sp(2).ring(2),
        case("decays per channel, a ring of 3, states passed", kimi(), 23).dp(2).sp(3).ring(3),
    ];
    cases.into_iter().chain(passed.map(|case| case.ulysses("state_passing", true))).collect()
}
