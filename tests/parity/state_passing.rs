//! Recurrences and convolutions whose ranks pass on states and tokens (`ulysses.state_passing`), against the independent f64 reference.

use super::linear_attention::{KIMI, NEXT};
use crate::support::compare::rms_error;
use crate::support::mesh_run::{Layout, Problem, Rule, assert_matches, by_name, layout};
use crate::support::problems::{ADAMW, CONFIG, packed_batch, problem};
use crate::support::reference::{Family, ReferenceConfig};
use crate::support::sample::{axes, sampled_every};
use serde_json::{Value, json};

/// Two layers that pass something on, one with attention. `qkv_bias`: two groups of heads of Mamba 2, and biases.
fn hybrid(family: Family, qkv_bias: bool, ulysses: Value) -> Problem {
    let partial_rotary_factor = if family.has_delta_net() { 0.5 } else { CONFIG.partial_rotary_factor };
    let tie_word_embeddings = !family.has_delta_net();
    let like = match family {
        Family::KimiLinear => KIMI,
        Family::Qwen3Next => NEXT,
        _ => CONFIG,
    };
    let config = ReferenceConfig {
        family,
        num_layers: 3,
        qkv_bias,
        partial_rotary_factor,
        tie_word_embeddings,
        ..like
    };
    let mut extra = json!({ "ulysses": ulysses });
    extra["ulysses"]["state_passing"] = json!(true);
    let problem = Problem { extra, ..problem(config, packed_batch()) };
    match family {
        // AdamW's first steps follow the signs of gradients, also of some that are rounding with these weights of Qwen3-Next.
        Family::Lfm2 | Family::Qwen3Next => Problem { clip: Some(0.25), ..problem },
        _ => Problem { rule: Rule::AdamW(ADAMW), ..problem },
    }
}

/// Uneven shards, of 2 tokens at least: with more ranks than heads, and a convolution that reads tokens of several ranks.
fn layouts() -> impl Iterator<Item = Layout> {
    let meshes = [(1, 2), (1, 3), (2, 2), (1, 4), (2, 3), (1, 5), (1, 8)];
    let with_stages = meshes.into_iter().flat_map(|(dp, sp)| [0, 3].map(|stage| layout(dp, sp, stage)));
    let pipelines = [(1, 2), (2, 2), (1, 3)].map(|(dp, sp)| Layout { pp: 2, ..layout(dp, sp, 1) });
    let divided = [(1, 2, 2), (2, 2, 2), (1, 3, 2), (1, 2, 3), (1, 2, 4)];
    let divided = divided.map(|(dp, sp, tp)| Layout { tp, ..layout(dp, sp, 3) });
    // With two ranges on all or some of the ranks, or on none but the last ring rank, and ranges of one token.
    let rings = [(1, 2, 2), (1, 3, 3), (2, 4, 2), (1, 6, 3), (2, 4, 4), (1, 8, 2), (1, 8, 8)];
    let rings = rings.map(|(dp, sp, ring)| Layout { ring, ..layout(dp, sp, 2) });
    let all_axes = [(2, 1), (1, 2), (2, 2)].map(|(pp, tp)| Layout { pp, tp, ring: 2, ..layout(1, 2, 1) });
    with_stages
        .chain(pipelines)
        .chain(divided)
        .chain(rings)
        .chain(all_axes)
        .map(|layout| Layout { accumulation: 1 + layout.dp % 2, ..layout })
}

#[test]
fn passed_states_change_no_result_on_any_mesh() {
    let features = [
        json!({}),
        json!({ "activation_checkpointing": true }),
        json!({ "tile_tokens": 5, "activation_checkpointing": true, "save_attention_output": false }),
    ];
    let families = [
        (Family::Qwen35, false),
        (Family::Qwen3Next, false),
        (Family::GraniteHybrid, false),
        (Family::GraniteHybrid, true),
        (Family::Lfm2, true),
        (Family::KimiLinear, false),
    ];
    let problems: Vec<_> = families
        .iter()
        .flat_map(|&(family, bias)| features.each_ref().map(|feature| hybrid(family, bias, feature.clone())))
        .collect();
    let expected: Vec<_> =
        problems.iter().step_by(features.len()).map(|problem| problem.reference().unwrap()).collect();
    let cases = layouts().flat_map(|layout| (0..problems.len()).map(move |number| (layout, number)));
    // Two groups of heads are divided over two ranks.
    let fits =
        |(Layout { tp, .. }, number): &(Layout, usize)| *tp <= 2 || !families[number / features.len()].1;
    let of_case = |(layout, number): &(Layout, usize)| [axes![number], layout.axes()].concat();
    for (layout, number) in sampled_every(6, cases.filter(fits), of_case) {
        let outcome = problems[number].run(layout).unwrap();
        let context = format!("problem {number}, {layout:?}");
        assert_matches(&outcome, &expected[number / features.len()], 5e-5, &context);
    }
}

#[test]
fn the_gradients_have_the_scale_of_one_rank_with_sgd_and_clipping() {
    for family in [Family::Qwen35, Family::GraniteHybrid, Family::Lfm2, Family::KimiLinear] {
        let sgd =
            Problem { rule: Rule::Sgd { lr: 0.1 }, clip: Some(0.25), ..hybrid(family, false, json!({})) };
        let expected = sgd.reference().unwrap();
        let ring = Layout { ring: 3, ..layout(1, 6, 2) };
        for layout in [layout(2, 3, 3), layout(1, 5, 2), Layout { tp: 2, ..layout(1, 3, 2) }, ring] {
            assert_matches(&sgd.run(layout).unwrap(), &expected, 5e-5, &format!("{family:?}, {layout:?}"));
        }
    }
}

#[test]
fn bf16_is_as_exact_as_on_one_rank() {
    let bf16 = |family| {
        let mut half = hybrid(family, false, json!({}));
        half.extra["bf16"] = json!({ "enabled": true });
        Problem { steps: 1, ..half }
    };
    for half in [bf16(Family::Qwen35), bf16(Family::GraniteHybrid)] {
        let expected = half.reference().unwrap();
        let error =
            |layout| rms_error(&by_name(&half.run(layout).unwrap().gradients), &expected.steps[0].grads);
        let alone = error(layout(1, 1, 0));
        for layout in [layout(1, 3, 3), layout(1, 5, 2), Layout { ring: 2, ..layout(1, 4, 2) }] {
            let error = error(layout);
            assert!(error < 1.3 * alone, "{layout:?}: {error}, alone {alone}");
        }
    }
}
