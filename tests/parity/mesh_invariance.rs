//! The mesh never changes the math: every layout against an independent f64 reference.

use crate::support::mesh_run::{Layout, Problem, Rule, assert_matches, layout};
use crate::support::problems::{ADAMW, CONFIG, SEQ_LEN, main_problem, packed_batch, problem};
use crate::support::reference::{Batch, Family, ReferenceConfig, RopeScaling};
use crate::support::sample::{axes, sampled, sampled_every};

/// dp × sp × stage × accumulation: 1, 2, 4 × 1, 2, 3, 4 × 0..=3 × 1, 2.
fn full_grid() -> impl Iterator<Item = Layout> {
    let meshes = [1, 2, 4].into_iter().flat_map(|dp| (1..=4).map(move |sp| (dp, sp)));
    let stages = meshes.flat_map(|(dp, sp)| (0..=3).map(move |stage| (dp, sp, stage)));
    stages.flat_map(|(dp, sp, stage)| {
        [1, 2].into_iter().map(move |accumulation| Layout { accumulation, ..layout(dp, sp, stage) })
    })
}

/// Meshes with every kind of uneven division, at the two extreme stages.
fn small_grid() -> impl Iterator<Item = Layout> {
    let meshes = [(1, 1), (1, 2), (2, 1), (1, 3), (2, 3), (1, 4), (4, 2)];
    meshes.into_iter().flat_map(|(dp, sp)| [0, 3].map(|stage| layout(dp, sp, stage)))
}

/// Checks a sample of the layouts.
#[track_caller]
fn check(problem: &Problem, layouts: impl Iterator<Item = Layout>, tolerance: f64) {
    let expected = problem.reference().unwrap();
    for layout in sampled(layouts, Layout::axes) {
        let outcome = problem.run(layout).unwrap();
        assert_matches(&outcome, &expected, tolerance, &format!("{layout:?}"));
    }
}

/// Checks a sample of all problems on the small grid.
#[track_caller]
fn check_each(problems: &[Problem]) {
    let expected: Vec<_> = problems.iter().map(|problem| problem.reference().unwrap()).collect();
    let cases = (0..problems.len()).flat_map(|number| small_grid().map(move |layout| (number, layout)));
    for (number, layout) in
        sampled_every(2, cases, |(number, layout)| [axes![number], layout.axes()].concat())
    {
        let outcome = problems[number].run(layout).unwrap();
        assert_matches(&outcome, &expected[number], 2e-5, &format!("problem {number}, {layout:?}"));
    }
}

#[test]
fn sgd_is_the_same_on_every_mesh_stage_and_accumulation() {
    check(&main_problem(Rule::Sgd { lr: 0.1 }, None), full_grid(), 2e-5);
}

#[test]
fn clipped_sgd_is_the_same_on_every_mesh_stage_and_accumulation() {
    let problem = main_problem(Rule::Sgd { lr: 0.1 }, Some(0.25));
    let unclipped = problem.reference().unwrap().steps[0].grad_norm;
    assert!(unclipped > 0.5, "clipping must bite: norm {unclipped}");
    check(&problem, full_grid(), 2e-5);
}

#[test]
fn adamw_is_the_same_on_every_mesh_stage_and_accumulation() {
    check(&main_problem(Rule::AdamW(ADAMW), None), full_grid(), 5e-5);
}

#[test]
fn activation_checkpointing_changes_nothing() {
    let mut problem = main_problem(Rule::Sgd { lr: 0.1 }, None);
    problem.extra = serde_json::json!({ "ulysses": { "activation_checkpointing": true } });
    check(&problem, small_grid(), 2e-5);
}

#[test]
fn loss_tiles_need_not_divide_the_tokens() {
    let mut problem = main_problem(Rule::Sgd { lr: 0.1 }, None);
    problem.extra = serde_json::json!({ "ulysses": { "loss_tile_tokens": 5 } });
    check(&problem, small_grid(), 2e-5);
}

#[test]
fn any_number_of_kv_heads_works() {
    let heads = [(8, 1), (8, 2), (6, 3), (8, 8), (5, 5), (4, 1)];
    check_each(&heads.map(|(num_heads, num_kv_heads)| {
        problem(ReferenceConfig { num_heads, num_kv_heads, ..CONFIG }, packed_batch())
    }));
}

#[test]
fn a_tied_head_is_one_unit_that_is_reduced_once() {
    let config = ReferenceConfig { tie_word_embeddings: true, ..CONFIG };
    let problem = problem(config, packed_batch());
    let accumulated = small_grid().map(|layout| Layout { accumulation: 2, ..layout });
    check(&problem, small_grid().chain(accumulated), 2e-5);
}

#[test]
fn a_shard_whose_labels_are_all_masked_contributes_zero() {
    // With sp 3 the shards are 0..8, 8..15 and 15..22; with sp 2, 0..11 and 11..22.
    check_each(&[0..8, 8..15, 11..22].map(|masked| problem(CONFIG, packed_batch().mask_tokens(masked))));
}

#[test]
fn masked_prompts_are_the_same_on_every_mesh() {
    let every_other =
        (0..SEQ_LEN).step_by(2).fold(packed_batch(), |batch, token| batch.mask_tokens(token..token + 1));
    let config = ReferenceConfig { tie_word_embeddings: true, ..CONFIG };
    let mut tiled_and_tied = problem(config, packed_batch().mask_tokens(2..16));
    tiled_and_tied.extra = serde_json::json!({ "ulysses": { "loss_tile_tokens": 3 } });
    let prompt = problem(CONFIG, packed_batch().mask_tokens(0..17));
    check_each(&[prompt, problem(CONFIG, every_other), tiled_and_tied]);
}

#[test]
fn sequences_that_dp_does_not_divide_are_padded_with_masked_ones() {
    check_each(&[1, 3].map(|rows| problem(CONFIG, packed_batch().rows(0..rows))));
}

#[test]
fn a_dp_rank_with_only_masked_sequences_contributes_zero() {
    check(&problem(CONFIG, packed_batch().mask_rows(4..8)), small_grid(), 2e-5);
}

#[test]
fn unpacked_sequences_of_every_length_down_to_one_token_per_rank_work() {
    let batch = |seq_len| Batch::random(CONFIG.vocab_size, 4, seq_len, 3);
    check_each(&[4, 5, SEQ_LEN + 3].map(|seq_len| problem(CONFIG, batch(seq_len))));
}

#[test]
fn a_batch_without_any_label_is_skipped_and_changes_nothing() {
    let problem = problem(CONFIG, packed_batch().mask_rows(0..8));
    for layout in sampled(small_grid(), Layout::axes) {
        let outcome = problem.run(layout).unwrap();
        assert!(outcome.reports.iter().all(|report| report.skipped && report.loss == 0.0), "{layout:?}");
        let before = crate::support::reference::as_tensors(&problem.weights);
        let after = crate::support::mesh_run::by_name(&outcome.parameters);
        crate::support::compare::assert_all_close("parameter", &after, &before, 0.0);
    }
}

/// Checks model families on packed documents, with and without recomputation.
#[track_caller]
fn check_families(configs: &[ReferenceConfig]) {
    let mut problems: Vec<_> = configs.iter().map(|config| problem(config.clone(), packed_batch())).collect();
    check_each(&problems);
    for problem in &mut problems {
        problem.extra = serde_json::json!({ "ulysses": { "activation_checkpointing": true } });
        check(problem, [layout(2, 3, 3)].into_iter(), 2e-5);
    }
}

#[test]
fn biases_on_queries_keys_and_values_are_the_same_on_every_mesh() {
    check_families(&[ReferenceConfig { qkv_bias: true, ..CONFIG }]);
}

#[test]
fn norms_over_the_heads_of_queries_and_keys_are_the_same_on_every_mesh() {
    check_families(&[ReferenceConfig { qk_norm: true, ..CONFIG }]);
}

/// Families whose blocks differ from Llama's: [`Family`] has their parts.
#[test]
fn the_blocks_of_other_families_are_the_same_on_every_mesh() {
    use Family::{
        Cohere, Cohere2, Exaone4, Gemma, Gemma2, Gemma3, Gemma4, Glm, Glm4, Granite, Llama4, Ministral,
        Ministral3, Olmo2, Olmo3, Phi3, SmolLm3,
    };
    let of_family = |family| ReferenceConfig { family, num_layers: 3, ..CONFIG };
    let gemma = ReferenceConfig {
        sliding_window: Some(5),
        tie_word_embeddings: true,
        num_heads: 5,
        num_kv_heads: 1,
        ..of_family(Gemma3)
    };
    let phi = ReferenceConfig { sliding_window: Some(7), num_heads: 6, num_kv_heads: 3, ..of_family(Phi3) };
    let windowed = |family| ReferenceConfig { sliding_window: Some(6), ..of_family(family) };
    check_families(&[gemma, phi, of_family(Granite), of_family(Olmo2), of_family(SmolLm3)]);
    check_families(&[of_family(Gemma), windowed(Olmo3), windowed(Exaone4), windowed(Ministral)]);
    // Chunks, and queries that grow after every 5 positions.
    check_families(&[windowed(Llama4), ReferenceConfig { sliding_window: Some(1), ..windowed(Llama4) }]);
    check_families(&[windowed(Gemma2), ReferenceConfig { tie_word_embeddings: true, ..windowed(Gemma2) }]);
    // Two sizes of heads; the layers without a window have one or two KV heads.
    let two_layers = ReferenceConfig { num_layers: 2, ..windowed(Gemma4) };
    check_families(&[
        ReferenceConfig { num_layers: 4, tie_word_embeddings: true, ..windowed(Gemma4) },
        ReferenceConfig { num_heads: 5, num_kv_heads: 1, ..two_layers },
    ]);
    let tied = ReferenceConfig { tie_word_embeddings: true, ..windowed(Cohere2) };
    check_families(&[of_family(Cohere), tied]);
    // Parts of heads rotate, in documents of up to 6 tokens with other factors than in longer ones.
    let long = RopeScaling::LongRope {
        short_factor: &[1.0, 1.5, 2.0],
        long_factor: &[2.0, 3.0, 8.0],
        attention_factor: 1.2,
        original: 6,
    };
    let rotating = |partial_rotary_factor, config| ReferenceConfig {
        head_dim: 8,
        rope_theta: 100.0,
        partial_rotary_factor,
        ..config
    };
    let phi = ReferenceConfig { rope_scaling: long, ..rotating(0.75, of_family(Phi3)) };
    let glm = ReferenceConfig { qkv_bias: true, ..rotating(1.0, of_family(Glm)) };
    check_families(&[phi, glm, rotating(0.5, of_family(Glm4))]);
    // Queries grow after every 6 positions.
    let yarn = RopeScaling::Yarn { factor: 4.0, original: 6 };
    check_families(&[ReferenceConfig { rope_scaling: yarn, ..rotating(1.0, of_family(Ministral3)) }]);
}

/// LayerNorm and biases everywhere, MLPs without a gate, learned positions, and weights of other layouts.
#[test]
fn the_blocks_of_gpt_and_its_relatives_are_the_same_on_every_mesh() {
    use Family::{Ernie, Gpt2, GptJ, GptNeoX, Nemotron, Phi, StableLm, StarCoder2};
    let equal_heads = |family| ReferenceConfig { family, num_heads: 6, num_kv_heads: 6, ..CONFIG };
    let of_family = |family| ReferenceConfig { family, head_dim: 8, partial_rotary_factor: 0.5, ..CONFIG };
    check_families(&[
        ReferenceConfig { tie_word_embeddings: true, ..equal_heads(Gpt2) },
        ReferenceConfig { partial_rotary_factor: 0.5, ..equal_heads(GptNeoX) },
        ReferenceConfig { sliding_window: Some(6), tie_word_embeddings: true, family: StarCoder2, ..CONFIG },
    ]);
    check_families(&[
        ReferenceConfig { family: Ernie, qkv_bias: true, tie_word_embeddings: true, ..CONFIG },
        of_family(Nemotron),
        ReferenceConfig { qkv_bias: true, ..of_family(Nemotron) },
        ReferenceConfig { qkv_bias: true, num_heads: 6, num_kv_heads: 3, head_dim: 4, ..of_family(StableLm) },
    ]);
    // The head has a bias.
    let of_one_norm = |family| ReferenceConfig { partial_rotary_factor: 0.5, ..equal_heads(family) };
    check_families(&[
        of_one_norm(GptJ),
        ReferenceConfig { num_kv_heads: 3, ..of_one_norm(Phi) },
        ReferenceConfig { qk_norm: true, tie_word_embeddings: true, ..of_one_norm(Phi) },
    ]);
}

#[test]
fn head_chunks_and_tiles_change_nothing_in_weights_of_other_layouts() {
    let equal_heads = |family| ReferenceConfig { family, num_heads: 6, num_kv_heads: 6, ..CONFIG };
    for family in [Family::Gpt2, Family::GptNeoX] {
        let mut chunked = problem(equal_heads(family), packed_batch());
        for recomputed in [false, true] {
            chunked.extra = serde_json::json!({ "ulysses": {
                "head_chunks": 3, "tile_tokens": 5, "activation_checkpointing": recomputed,
            } });
            check(&chunked, [layout(1, 2, 0), layout(2, 1, 3)].into_iter(), 2e-5);
        }
    }
}

#[test]
fn sliding_windows_are_the_same_on_every_mesh() {
    check_families(&[1, 5, SEQ_LEN].map(|window| ReferenceConfig { sliding_window: Some(window), ..CONFIG }));
}

#[test]
fn scaled_rotary_embeddings_are_the_same_on_every_mesh() {
    let scalings = [
        RopeScaling::Linear { factor: 4.0 },
        // Documents of up to 6 tokens are not scaled, longer ones by their own length.
        RopeScaling::Dynamic { factor: 2.0, max_position_embeddings: 6 },
        RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original: 32 },
        RopeScaling::Yarn { factor: 4.0, original: 200 },
    ];
    // Pairs of every kind: kept, interpolated, divided.
    let scaled = |rope_scaling| ReferenceConfig { head_dim: 8, rope_theta: 100.0, rope_scaling, ..CONFIG };
    check_each(&scalings.map(|scaling| problem(scaled(scaling), packed_batch())));
}
