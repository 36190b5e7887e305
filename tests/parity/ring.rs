//! Rings: sequence parallelism over more ranks than heads never changes the math either.

use crate::support::compare::assert_all_close;
use crate::support::mesh_run::{Layout, Problem, Rule, assert_matches, by_name, layout};
use crate::support::problems::{ADAMW, CONFIG, SEQ_LEN, main_problem, packed_batch, problem};
use crate::support::reference::{Batch, Family, ReferenceConfig, RopeScaling};
use crate::support::sample::{axes, sampled};
use serde_json::json;
use std::collections::BTreeSet;
use ulysses::mesh::SeqSharding;

/// Ring and Ulysses degree.
type Degrees = (usize, usize);

const ALL_DEGREES: [Degrees; 6] = [(1, 4), (2, 2), (4, 1), (3, 2), (2, 1), (8, 1)];
/// Even and uneven divisions of 22 tokens.
const SOME_DEGREES: [Degrees; 3] = [(2, 2), (3, 1), (4, 1)];

/// A degree on one or two dp ranks.
fn on_ring((ring, ulysses): Degrees, stage: u8) -> Layout {
    // Large meshes on one dp rank only.
    let dp = if ring * ulysses > 4 { 1 } else { 1 + usize::from(stage) % 2 };
    Layout { ring, ..layout(dp, ring * ulysses, stage) }
}

/// Checks a sample of problems, degrees and stages.
#[track_caller]
fn check(problems: &[Problem], degrees: &[Degrees], stages: &[u8]) {
    let expected: Vec<_> = problems.iter().map(|problem| problem.reference().unwrap()).collect();
    let cases = (0..problems.len()).flat_map(|number| {
        degrees.iter().flat_map(move |&degrees| stages.iter().map(move |&stage| (number, degrees, stage)))
    });
    for (number, degrees, stage) in sampled(cases, |(number, degrees, stage)| axes![number, degrees, stage]) {
        let layout = on_ring(degrees, stage);
        let outcome = problems[number].run(layout).unwrap();
        assert_matches(&outcome, &expected[number], 2e-5, &format!("problem {number}, {layout:?}"));
    }
}

#[test]
fn sgd_is_the_same_on_every_ring_and_stage() {
    check(&[main_problem(Rule::Sgd { lr: 0.1 }, Some(0.25))], &ALL_DEGREES, &[0, 1, 2, 3]);
}

#[test]
fn adamw_with_accumulation_and_partitions_over_sp_is_the_same_on_a_ring() {
    let problem = main_problem(Rule::AdamW(ADAMW), None);
    let expected = problem.reference().unwrap();
    for (ring, ulysses, spans_sp) in [(2, 2, false), (2, 2, true), (4, 1, true)] {
        let layout = Layout { accumulation: 2, spans_sp, ring, ..layout(2, ring * ulysses, 3) };
        let outcome = problem.run(layout).unwrap();
        assert_matches(&outcome, &expected, 5e-5, &format!("ring {ring}, {layout:?}"));
    }
}

#[test]
fn few_heads_train_on_many_ranks() {
    let problems = [(2, 1), (2, 2), (4, 2), (5, 5)].map(|(num_heads, num_kv_heads)| {
        problem(ReferenceConfig { num_heads, num_kv_heads, ..CONFIG }, packed_batch())
    });
    check(&problems, &[(8, 1), (4, 2), (3, 2)], &[0]);
}

#[test]
fn windows_and_chunks_are_the_same_on_every_ring() {
    let windowed = |window| ReferenceConfig { sliding_window: Some(window), ..CONFIG };
    let chunked = ReferenceConfig { family: Family::Llama4, ..windowed(7) };
    let windowed = [1, 5, SEQ_LEN].map(windowed);
    let problems = windowed.into_iter().chain([chunked]).map(|config| problem(config, packed_batch()));
    check(&problems.collect::<Vec<_>>(), &SOME_DEGREES, &[0, 3]);
}

#[test]
fn soft_caps_and_factors_by_the_documents_length_are_the_same_on_every_ring() {
    let capped = ReferenceConfig { family: Family::Gemma2, sliding_window: Some(6), ..CONFIG };
    let rope_scaling = RopeScaling::LongRope {
        short_factor: &[1.0, 1.5],
        long_factor: &[2.0, 8.0],
        attention_factor: 1.2,
        original: 8,
    };
    let long = ReferenceConfig { family: Family::Phi3, rope_theta: 100.0, rope_scaling, ..CONFIG };
    let problems = [capped, long].map(|config| problem(config, packed_batch()));
    check(&problems, &SOME_DEGREES, &[0, 3]);
}

#[test]
fn sequences_of_any_length_are_the_same_on_every_ring() {
    // From one token per rank on; a chunk of the zigzag may be empty.
    let batch = |seq_len| Batch::random(CONFIG.vocab_size, 4, seq_len, 3);
    let problems = [4, 5, 9, SEQ_LEN + 3].map(|seq_len| problem(CONFIG, batch(seq_len)));
    check(&problems, &SOME_DEGREES, &[0]);
}

#[test]
fn a_ring_rank_whose_labels_are_all_masked_contributes_zero() {
    // With a ring of 2 ranks, rank 0 has the tokens 0..6 and 17..22, rank 1 those in between.
    let masked_ends = packed_batch().mask_tokens(0..6).mask_tokens(17..22);
    let batches = [packed_batch().mask_tokens(6..17), masked_ends];
    check(&batches.map(|batch| problem(CONFIG, batch)), &SOME_DEGREES, &[0, 3]);
}

#[test]
fn recomputation_head_chunks_and_overlap_change_nothing_on_a_ring() {
    let problems = [
        json!({ "activation_checkpointing": true, "save_attention_output": true }),
        json!({ "activation_checkpointing": true, "save_attention_output": false }),
        json!({ "head_chunks": 2, "overlap_exchange": true }),
        json!({ "head_chunks": 2, "overlap_exchange": true, "activation_checkpointing": true }),
    ]
    .map(|extra| Problem { extra: json!({ "ulysses": extra }), ..problem(CONFIG, packed_batch()) });
    check(&problems, &[(2, 2), (3, 1)], &[0, 3]);
}

/// One combination of the grid.
#[derive(Debug, Clone, Copy)]
struct Combination {
    degrees: Degrees,
    stage: u8,
    /// One KV head, instead of four.
    is_mqa: bool,
    is_packed: bool,
    has_window: bool,
    /// 48 tokens, which all degrees divide, instead of 22.
    is_even: bool,
    /// All labels of sp rank 0 are masked.
    is_masked: bool,
}

impl Combination {
    /// A stage for every degree, with flags in which all pairs of values occur.
    fn all() -> impl Iterator<Item = Self> {
        let of_degree = |(index, degrees): (usize, Degrees)| {
            let [d0, d1, d2] = [1, 2, 4].map(|bit| index & bit > 0);
            (0..4).map(move |stage| {
                let [s0, s1] = [1, 2].map(|bit| stage & bit > 0);
                Self {
                    degrees,
                    stage,
                    is_mqa: s0 ^ d0,
                    is_packed: s1 ^ d1,
                    has_window: s0 ^ s1 ^ d2,
                    is_even: s0 ^ d1 ^ d2,
                    is_masked: s1 ^ d0 ^ d2,
                }
            })
        };
        ALL_DEGREES.into_iter().enumerate().flat_map(of_degree)
    }

    fn values(self) -> [String; 7] {
        let Self { degrees, stage, is_mqa, is_packed, has_window, is_even, is_masked } = self;
        let flags = [is_mqa, is_packed, has_window, is_even, is_masked].map(|flag| flag.to_string());
        let [mqa, packed, window, even, masked] = flags;
        [format!("{degrees:?}"), stage.to_string(), mqa, packed, window, even, masked]
    }

    fn problem(self) -> Problem {
        let rows: [&[usize]; 4] = [&[20, 28], &[48], &[1, 30, 17], &[33, 2, 13]];
        let (vocab_size, seq_len) = (CONFIG.vocab_size, if self.is_even { 48 } else { SEQ_LEN });
        let batch = match (self.is_packed, self.is_even) {
            (true, true) => Batch::packed(vocab_size, &rows, 11),
            (true, false) => packed_batch(),
            (false, _) => Batch::random(vocab_size, 4, seq_len, 7),
        };
        let (ring_size, ulysses_size) = self.degrees;
        let of_first = SeqSharding { ring_size, ulysses_size }.tokens(seq_len, 0);
        let masked = of_first.ranges().iter().filter(|_| self.is_masked);
        let batch = masked.fold(batch, |batch, range| batch.mask_tokens(range.clone()));
        let config = ReferenceConfig {
            num_kv_heads: if self.is_mqa { 1 } else { CONFIG.num_kv_heads },
            sliding_window: self.has_window.then_some(7),
            ..CONFIG
        };
        problem(config, batch)
    }
}

#[test]
fn every_pair_of_degrees_heads_masks_lengths_and_stages_is_the_same() {
    for combination in Combination::all() {
        check(&[combination.problem()], &[combination.degrees], &[combination.stage]);
    }
    // All pairs: each value with each of another kind.
    let sizes = [ALL_DEGREES.len(), 4, 2, 2, 2, 2, 2];
    for (first, second) in (0..sizes.len()).flat_map(|first| (0..first).map(move |second| (first, second))) {
        let pairs: BTreeSet<[String; 2]> = Combination::all()
            .map(|combination| [first, second].map(|index| combination.values()[index].clone()))
            .collect();
        assert_eq!(pairs.len(), sizes[first] * sizes[second], "kinds {first} and {second}");
    }
}

#[test]
fn equal_runs_give_equal_bits_on_a_ring() {
    let problem = main_problem(Rule::AdamW(ADAMW), None);
    let layout = Layout { ring: 3, ..layout(1, 6, 3) };
    let [first, again] = [(); 2].map(|()| by_name(&problem.run(layout).unwrap().parameters));
    assert_all_close("parameter", &again, &first, 0.0);
}
