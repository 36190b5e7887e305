//! Tensor parallelism never changes the math: layouts with divided layers against the independent f64 reference.

use crate::support::mesh_run::{
    Layout, Problem, Rule, assert_matches, global_batch, layout, llama_config, micro_batches, on_mesh,
};
use crate::support::problems::{ADAMW, CONFIG, LAMB, SEQ_LEN, main_problem, packed_batch, problem};
use crate::support::reference::{Batch, Family, IGNORED, ReferenceConfig};
use crate::support::sample::{axes, sampled_every};
use std::sync::Arc;
use ulysses::comm::LaunchOptions;
use ulysses::kernels::attention::FlashAttention;

const fn on_tp(dp: usize, sp: usize, tp: usize, stage: u8) -> Layout {
    Layout { tp, ..layout(dp, sp, stage) }
}

/// dp × sp × tp on up to 8 ranks, at every stage; tokens and heads that the ranks do not divide evenly.
fn grid() -> impl Iterator<Item = Layout> {
    let meshes =
        [(1, 1, 2), (1, 1, 3), (2, 1, 2), (1, 2, 2), (1, 2, 3), (2, 2, 2), (1, 1, 4), (4, 1, 2), (1, 3, 2)];
    meshes.into_iter().flat_map(|(dp, sp, tp)| {
        (0..=3).flat_map(move |stage| {
            [1, 2].map(|accumulation| Layout { accumulation, ..on_tp(dp, sp, tp, stage) })
        })
    })
}

/// Every sp rank of every tp rank has a query head.
fn has_heads(problem: &Problem, layout: &Layout) -> bool {
    let attention = *llama_config(&problem.config).attention();
    let divided = attention.heads().over_tp(layout.tp);
    divided.is_some_and(|heads| heads.q.iter().all(|heads| heads.len() >= layout.sp))
}

/// Checks every second case of a sample of all problems on the grid.
#[track_caller]
fn check_each(problems: &[Problem], tolerance: f64) {
    check_every(2, problems, tolerance);
}

/// Checks every `stride`-th case of a sample of all problems on the grid.
#[track_caller]
fn check_every(stride: usize, problems: &[Problem], tolerance: f64) {
    let expected: Vec<_> = problems.iter().map(|problem| problem.reference().unwrap()).collect();
    let cases = (0..problems.len()).flat_map(|number| grid().map(move |layout| (number, layout)));
    let cases = cases.filter(|(number, layout)| has_heads(&problems[*number], layout));
    for (number, layout) in
        sampled_every(stride, cases, |(number, layout)| [axes![number], layout.axes()].concat())
    {
        let outcome = problems[number].run(layout).unwrap();
        assert_matches(&outcome, &expected[number], tolerance, &format!("problem {number}, {layout:?}"));
    }
}

#[test]
fn divided_layers_train_as_whole_ones_on_every_mesh_stage_and_accumulation() {
    let clipped = main_problem(Rule::Sgd { lr: 0.1 }, Some(0.25));
    check_each(&[clipped, main_problem(Rule::AdamW(ADAMW), None)], 5e-5);
}

#[test]
fn norms_of_whole_tensors_are_summed_over_tp() {
    check_each(&[main_problem(Rule::Lamb(LAMB), None)], 2e-4);
}

#[test]
fn ranks_may_share_kv_heads_and_have_different_numbers_of_heads() {
    let heads = [(8, 1), (8, 2), (6, 3), (8, 8), (5, 5), (4, 4)];
    let problems = heads.map(|(num_heads, num_kv_heads)| {
        problem(ReferenceConfig { num_heads, num_kv_heads, intermediate_size: 41, ..CONFIG }, packed_batch())
    });
    check_each(&problems, 2e-5);
}

#[test]
fn biases_fused_projections_and_norms_of_heads_are_divided_or_summed() {
    let family = |family, change: fn(&mut ReferenceConfig)| {
        let mut config = ReferenceConfig { family, ..CONFIG };
        change(&mut config);
        problem(config, packed_batch())
    };
    let problems = [
        family(Family::Llama, |config| config.qkv_bias = true),
        family(Family::Llama, |config| (config.qkv_bias, config.num_kv_heads) = (true, 1)),
        family(Family::Llama, |config| config.qk_norm = true),
        family(Family::Llama, |config| config.tie_word_embeddings = true),
        family(Family::Phi3, |_| ()),
        family(Family::Phi3, |config| config.num_kv_heads = 1),
        family(Family::Gemma2, |config| config.sliding_window = Some(5)),
        family(Family::Gemma3, |config| config.sliding_window = Some(5)),
        family(Family::Gemma4, |config| config.sliding_window = Some(5)),
        family(Family::Gemma4, |config| (config.sliding_window, config.num_kv_heads) = (Some(5), 1)),
        family(Family::Granite, |_| ()),
        family(Family::Olmo2, |_| ()),
        family(Family::Olmo2, |config| (config.num_heads, config.num_kv_heads) = (6, 3)),
        family(Family::Olmo2, |config| config.num_kv_heads = 2),
        family(Family::Olmo3, |config| (config.sliding_window, config.num_kv_heads) = (Some(5), 1)),
        family(Family::Cohere, |_| ()),
        family(Family::Cohere2, |config| {
            (config.sliding_window, config.tie_word_embeddings) = (Some(5), true);
        }),
        family(Family::Ernie, |config| config.qkv_bias = true),
        family(Family::Ernie, |config| (config.qkv_bias, config.num_kv_heads) = (true, 1)),
        family(Family::Gpt2, |config| (config.num_heads, config.num_kv_heads) = (6, 6)),
        family(Family::Gpt2, |config| {
            (config.num_heads, config.num_kv_heads, config.tie_word_embeddings) = (6, 6, true);
        }),
        family(Family::GptNeoX, |config| {
            (config.num_heads, config.num_kv_heads, config.partial_rotary_factor) = (6, 6, 0.5);
        }),
        family(Family::StarCoder2, |_| ()),
        family(Family::Nemotron, |config| (config.head_dim, config.partial_rotary_factor) = (8, 0.5)),
        family(Family::Glm4, |config| (config.qkv_bias, config.partial_rotary_factor) = (true, 0.5)),
    ];
    check_every(6, &problems, 2e-5);
}

#[test]
fn recomputation_tiles_and_head_chunks_change_nothing() {
    let recomputed = serde_json::json!({ "activation_checkpointing": true, "save_attention_output": false });
    let mut recomputed_by_chunks = recomputed.clone();
    recomputed_by_chunks["head_chunks"] = 2.into();
    let options = [
        (Family::Llama, serde_json::json!({ "activation_checkpointing": true })),
        (Family::Olmo2, serde_json::json!({ "activation_checkpointing": true })),
        (Family::Olmo2, recomputed.clone()),
        (Family::Llama, recomputed_by_chunks.clone()),
        (Family::Gemma3, recomputed),
        (Family::Cohere, recomputed_by_chunks),
        (Family::GptNeoX, serde_json::json!({ "activation_checkpointing": true })),
        (Family::Gemma3, serde_json::json!({ "activation_checkpointing": true, "head_chunks": 2 })),
        (Family::Gemma4, serde_json::json!({ "activation_checkpointing": true, "tile_tokens": 3 })),
        (Family::Llama, serde_json::json!({ "tile_tokens": 3, "loss_tile_tokens": 5 })),
        (Family::Llama, serde_json::json!({ "head_chunks": 2, "overlap_exchange": true })),
    ];
    let problems = options.map(|(family, options)| {
        let sliding_window = matches!(family, Family::Gemma3 | Family::Gemma4).then_some(5);
        // The heads of GPT-NeoX make up its hidden size.
        let heads = if family == Family::GptNeoX { 6 } else { 12 };
        let config =
            ReferenceConfig { family, num_heads: heads, num_kv_heads: heads, sliding_window, ..CONFIG };
        let mut problem = problem(config, packed_batch());
        problem.extra = serde_json::json!({ "ulysses": options });
        problem
    });
    check_each(&problems, 2e-5);
}

/// The batch with only the labels of tokens that `keeps` accepts.
fn masked(keeps: fn(usize) -> bool) -> Batch {
    let mut batch = packed_batch();
    for row in &mut batch.labels {
        row.iter_mut()
            .enumerate()
            .filter(|(token, _)| !keeps(*token))
            .for_each(|(_, label)| *label = IGNORED);
    }
    batch
}

#[test]
fn ranks_may_have_different_numbers_of_labels_or_none() {
    /// Labeled tokens, and tokens in a tile.
    type Case = (fn(usize) -> bool, usize);
    let cases: [Case; 4] = [
        (|token| token < 5, 1),
        (|token| token == SEQ_LEN - 2, 64),
        (|token| token > 6, 4),
        (|token| token % 5 == 1, 9),
    ];
    let problems = cases.map(|(keeps, tile)| {
        let extra = serde_json::json!({ "ulysses": { "loss_tile_tokens": tile } });
        let config = ReferenceConfig { tie_word_embeddings: tile == 4, ..CONFIG };
        Problem { extra, clip: Some(0.25), ..problem(config, masked(keeps)) }
    });
    check_each(&problems, 2e-5);
}

#[test]
fn vocabularies_may_have_as_many_tokens_as_ranks_or_fewer() {
    for vocab_size in [2, 3, 5] {
        let config = ReferenceConfig { vocab_size, ..CONFIG };
        let problem = problem(config, Batch::random(vocab_size, 4, SEQ_LEN, 3));
        let expected = problem.reference().unwrap();
        let layout = on_tp(1, 1, 3, 1);
        assert_matches(&problem.run(layout).unwrap(), &expected, 2e-5, &format!("{vocab_size} tokens"));
    }
}

#[test]
fn a_ring_within_divided_layers_matches() {
    let problem = problem(CONFIG, packed_batch());
    let expected = problem.reference().unwrap();
    for layout in [on_tp(1, 2, 2, 0), on_tp(1, 4, 2, 3), on_tp(2, 2, 2, 1)] {
        let ring = Layout { ring: 2, ..layout };
        assert_matches(&problem.run(ring).unwrap(), &expected, 2e-5, &format!("{ring:?}"));
    }
}

#[test]
fn sequences_with_one_token_per_rank_work_and_shorter_ones_are_refused() {
    let batch = |seq_len| problem(CONFIG, Batch::random(CONFIG.vocab_size, 4, seq_len, 3));
    let four = batch(4);
    let on_four = on_tp(1, 2, 2, 2);
    assert_matches(&four.run(on_four).unwrap(), &four.reference().unwrap(), 2e-5, "four tokens");
    let error = format!("{:#}", batch(3).run(on_four).unwrap_err());
    assert!(error.contains("1 tokens per sequence and sp rank cannot be shared by tp = 2 ranks"), "{error}");
}

#[test]
fn layers_embedding_and_head_send_the_bytes_of_the_formula_over_tp() {
    // Sums of squares of queries and of keys, and backward sums of products.
    for (family, of_norms) in [(Family::Llama, 0), (Family::Olmo2, 4)] {
        check_bytes(problem(ReferenceConfig { family, ..CONFIG }, packed_batch()), of_norms);
    }
}

/// `sums_of_layer`: numbers per token that a layer sums over tp.
#[track_caller]
fn check_bytes(problem: Problem, sums_of_layer: usize) {
    // Forward, per module: tokens gathered, outputs scattered. Backward: tokens and gradients gathered, gradients scattered.
    const OF_LAYER: usize = 2 * 2 + 2 * 3;
    // Rows scattered, gradients gathered.
    const OF_EMBEDDING: usize = 2;
    let layout = Layout { accumulation: 2, ..on_tp(1, 1, 2, 0) };
    let config = problem.json_config(layout, 8).unwrap();
    let global = global_batch(&problem.batch).unwrap();
    let sent = on_mesh(&config, &LaunchOptions::default(), |_, groups| {
        let tp = groups.tensor.clone().unwrap().tp;
        let mut engine = problem.engine(&config, groups, Arc::new(FlashAttention::default()))?;
        let batch = &micro_batches(&global, &engine)?[0];
        let before = tp.stats().total().bytes_sent;
        let loss = engine.forward(batch)?;
        engine.backward(loss)?;
        let rows = batch.labels.chunks_exact(SEQ_LEN);
        let [first, second] = [0..SEQ_LEN / 2, SEQ_LEN / 2..SEQ_LEN].map(|own| {
            let labels = rows.clone().flat_map(|row| &row[own.clone()]);
            labels.filter(|label| **label != IGNORED).count()
        });
        Ok((tp.stats().total().bytes_sent - before, [first, second]))
    });
    let (rows, tokens) = (8 / layout.accumulation, SEQ_LEN / layout.tp);
    let transfer = rows * tokens * CONFIG.hidden_size;
    let of_sums = CONFIG.num_layers * sums_of_layer * rows * SEQ_LEN;
    let of_tokens = (CONFIG.num_layers * OF_LAYER + OF_EMBEDDING) * transfer + of_sums;
    for (rank, (sent, labeled)) in sent.unwrap().into_iter().enumerate() {
        let [own, other] = [labeled[rank], labeled[1 - rank]];
        assert_ne!(own, other, "ranks with different numbers of labels");
        // In both passes the own hidden states; then the gradients of the other's. Two statistics of every token.
        let of_head = (2 * own + other) * CONFIG.hidden_size + 2 * (own + other);
        assert_eq!(sent, ((of_tokens + of_head) * size_of::<f32>()) as u64, "rank {rank}");
    }
}

#[test]
fn a_rank_has_its_rows_of_embedding_and_head() {
    for (tie_word_embeddings, matrices) in [(false, 2), (true, 1)] {
        let problem = problem(ReferenceConfig { tie_word_embeddings, ..CONFIG }, packed_batch());
        let config = problem.json_config(on_tp(1, 1, 3, 0), 8).unwrap();
        let rows = on_mesh(&config, &LaunchOptions::default(), |_, groups| {
            let engine = problem.engine(&config, groups, Arc::new(FlashAttention::default()))?;
            let parameters = engine.zero().layouts().flat_map(|layout| layout.parameters());
            let of_vocabulary =
                parameters.filter(|parameter| parameter.whole_shape()[0] == CONFIG.vocab_size);
            Ok(of_vocabulary.map(|parameter| parameter.shape[0]).collect::<Vec<_>>())
        });
        assert_eq!(rows.unwrap(), [21, 20, 20].map(|rows| vec![rows; matrices]));
    }
}

#[test]
fn layers_that_cannot_be_divided_are_refused_by_name() {
    let heads = problem(ReferenceConfig { num_heads: 3, num_kv_heads: 3, ..CONFIG }, packed_batch());
    let error = format!("{:#}", heads.run(on_tp(1, 1, 4, 0)).unwrap_err());
    assert!(error.contains("layer model.layers.0") && error.contains("tp of 1 to 3 is valid"), "{error}");
}
