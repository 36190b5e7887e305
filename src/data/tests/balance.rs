//! The assignment of documents to ranks, and the rows that follow from it.

use super::super::balance::*;
use super::*;
use crate::mesh::SeqSharding;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The FLOPs of the preset `small`, whose attention costs as much as all else at about 1900 tokens.
const COST: DocumentCost =
    DocumentCost { per_token: 18_874_368, per_pair: 12_288, window: None, chunk: None };

/// Log-normal lengths from `min` to `max`, by a linear congruential generator and the sum of uniform variables.
fn log_normal(seed: u64, count: usize, min: usize, max: usize) -> Vec<usize> {
    let mut state = seed;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1_u64 << 53) as f64
    };
    let median = ((min * max) as f64).sqrt().ln();
    let mut len = || {
        let normal: f64 = (0..12).map(|_| uniform()).sum::<f64>() - 6.0;
        ((median + normal).exp() as usize).clamp(min, max)
    };
    (0..count).map(|_| len()).collect()
}

fn grid(dp_size: usize, sp_size: usize, tokens_per_rank: usize) -> RankGrid {
    RankGrid { dp_size, sp_size, tokens_per_rank }
}

#[test]
fn every_document_is_in_one_block_and_every_rank_in_one_block_of_a_micro_step() {
    for (dp_size, sp_size) in [(1, 1), (1, 2), (3, 1), (2, 4), (1, 6), (2, 12), (4, 8)] {
        for (seed, count) in [(1, 0), (2, 1), (3, 7), (4, 40), (5, 300)] {
            let max = 1024;
            let lens = log_normal(seed, count, 1, max);
            let tokens_per_rank = max.div_ceil(sp_size);
            let assignment = Assignment::new(&lens, &COST, grid(dp_size, sp_size, tokens_per_rank));
            assert!(!assignment.micro_steps.is_empty());
            let mut seen = vec![0; count];
            for blocks in &assignment.micro_steps {
                let mut ranks = Vec::new();
                for block in blocks {
                    let size = block.sp_ranks.len();
                    assert!(
                        sp_size.is_multiple_of(size) && block.sp_ranks.start.is_multiple_of(size),
                        "{block:?}"
                    );
                    assert_eq!(block.tokens, block.documents.iter().map(|&at| lens[at]).sum::<usize>());
                    assert_eq!(
                        block.flops,
                        block.documents.iter().map(|&at| COST.flops(lens[at])).sum::<u128>()
                    );
                    assert!(
                        block.tokens <= size * tokens_per_rank,
                        "{block:?} exceeds {tokens_per_rank} per rank"
                    );
                    block.documents.iter().for_each(|&document| seen[document] += 1);
                    ranks.extend(block.sp_ranks.clone().map(|rank| block.dp_rank * sp_size + rank));
                }
                assert_eq!(ranks, (0..dp_size * sp_size).collect::<Vec<_>>());
            }
            assert_eq!(seen, vec![1; count], "dp {dp_size}, sp {sp_size}, {count} documents");
        }
    }
}

#[test]
fn short_documents_run_on_one_rank_next_to_long_ones_on_several() {
    // Eight ranks of 16 tokens each: the long document takes four of them.
    let cost = DocumentCost { per_token: 1, per_pair: 0, window: None, chunk: None };
    let assignment = Assignment::new(&[9, 64, 16, 5, 16, 11, 7], &cost, grid(1, 8, 16));
    let blocks: Vec<_> =
        assignment.micro_steps[0].iter().map(|block| (block.sp_ranks.clone(), &*block.documents)).collect();
    assert_eq!(assignment.micro_steps.len(), 1);
    let expected: [(_, &[usize]); 5] =
        [(0..4, &[1]), (4..5, &[2]), (5..6, &[4]), (6..7, &[3, 5]), (7..8, &[0, 6])];
    assert_eq!(blocks, expected);
    assert_eq!(assignment.imbalance(), 1.0);
}

#[test]
fn a_document_whose_flops_exceed_the_mean_takes_more_ranks_than_its_tokens_need() {
    let quadratic = DocumentCost { per_token: 0, per_pair: 1, window: None, chunk: None };
    let lens = [64, 16, 16, 16, 16, 16, 16];
    let of_cost = |cost: &DocumentCost| {
        let assignment = Assignment::new(&lens, cost, grid(1, 4, 64));
        let block = assignment.micro_steps[0].iter().find(|block| block.documents.contains(&0)).cloned();
        block.unwrap().sp_ranks.len()
    };
    assert_eq!(of_cost(&DocumentCost { per_token: 1, per_pair: 0, window: None, chunk: None }), 2);
    assert_eq!(of_cost(&quadratic), 4);
    assert_eq!(of_cost(&DocumentCost { window: Some(4), ..quadratic }), 2, "a window makes attention linear");
    let chunked = DocumentCost { chunk: Some(4), ..quadratic };
    assert_eq!(
        [3, 4, 11].map(|len| chunked.flops(len)),
        [6, 10, 2 * 10 + 6],
        "chunks of 4, and what is left"
    );
}

#[test]
fn costs_count_the_pairs_that_a_causal_window_shows() {
    for window in [None, Some(1), Some(3), Some(100)] {
        for len in 0..20_usize {
            let pairs: usize = (0..len).map(|query| window.unwrap_or(len).min(query + 1)).sum();
            let cost = DocumentCost { per_token: 1000, per_pair: 7, window, chunk: None };
            assert_eq!(cost.flops(len), (1000 * len + 7 * pairs) as u128, "{len} tokens, window {window:?}");
        }
    }
    let cost = DocumentCost { per_token: u64::MAX, per_pair: u64::MAX, window: None, chunk: None };
    assert!(cost.flops(u32::MAX as usize) > u128::from(u64::MAX), "no overflow");
}

#[test]
fn log_normal_documents_are_balanced() {
    for (dp_size, sp_size) in [(1, 2), (1, 4), (2, 2), (2, 4), (4, 8)] {
        for seed in 1..6 {
            let max = 16384;
            let lens = log_normal(seed, 16 * dp_size * sp_size, 256, max);
            let assignment = Assignment::new(&lens, &COST, grid(dp_size, sp_size, max / sp_size));
            let imbalance = assignment.imbalance();
            assert!(imbalance < 1.35, "dp {dp_size}, sp {sp_size}, seed {seed}: {imbalance:.3}");
            let tokens: usize = lens.iter().sum();
            let needed = tokens.div_ceil(dp_size * max);
            let micro_steps = assignment.micro_steps.len();
            assert!(micro_steps <= needed + needed.div_ceil(4), "{micro_steps} micro steps, {needed} needed");
        }
    }
}

const SEQ_LEN: usize = 24;
const BATCH: usize = 4;

fn loader(data: &Arc<PackedSequences>, sizes: (usize, usize), ranks: (usize, usize)) -> DataLoader {
    let ((dp_size, sp_size), (dp_rank, sp_rank)) = (sizes, ranks);
    let rank = DataRank { dp_size, dp_rank, sharding: SeqSharding::from(sp_size), sp_rank };
    let options = LoaderOptions { seed: 3, micro_batch: 1, accumulation: BATCH / dp_size, rank };
    DataLoader::new(data.clone(), options).unwrap()
}

/// Counts the tokens of a step that have labels, as (token, label, position).
type Labeled = BTreeMap<(u32, i64, u32), usize>;

fn add(labeled: &mut Labeled, batch: &MicroBatch) {
    for ((&id, &label), &position) in batch.input_ids.iter().zip(&batch.labels).zip(&batch.position_ids) {
        if label != IGNORED_LABEL {
            *labeled.entry((id, label, position)).or_default() += 1;
        }
    }
}

#[test]
fn all_ranks_together_get_the_labeled_tokens_of_the_fixed_layout() {
    for packing in [Packing::Greedy, Packing::Cut, Packing::Concat] {
        let lens = log_normal(8, 40, 1, 60);
        let data = Arc::new(PackedSequences::with_packing(documents(&lens), SEQ_LEN, packing).unwrap());
        for (dp_size, sp_size) in [(1, 1), (1, 2), (2, 2), (1, 5), (2, 4)] {
            let sizes = (dp_size, sp_size);
            let ranks: Vec<_> = (0..dp_size).flat_map(|dp| (0..sp_size).map(move |sp| (dp, sp))).collect();
            let mut fixed: Vec<_> = ranks.iter().map(|&rank| loader(&data, sizes, rank)).collect();
            let mut flexible: Vec<_> = ranks
                .iter()
                .map(|&rank| ReadAhead::new(loader(&data, sizes, rank).balanced(COST).ending_at(30)))
                .collect();
            for step in 0..5 {
                let (mut expected, mut got) = (Labeled::new(), Labeled::new());
                for loader in &mut fixed {
                    (0..BATCH / dp_size)
                        .for_each(|_| add(&mut expected, &loader.next_micro_batch().unwrap()));
                }
                let mut hashes = Vec::new();
                for loader in &mut flexible {
                    let mut micro_steps = 1;
                    let mut done = 0;
                    while done < micro_steps {
                        let batch = loader.next_micro_batch().unwrap();
                        let step = batch.flexible.unwrap();
                        micro_steps = step.micro_steps;
                        assert!(batch.seq_len_local() <= SEQ_LEN.div_ceil(sp_size));
                        assert_eq!((batch.batch_size, step.tokens), (1, (BATCH * SEQ_LEN) as u64));
                        hashes.push(batch.batch_hash);
                        add(&mut got, &batch);
                        done += 1;
                    }
                    assert_eq!(loader.cursor().samples_consumed(), fixed[0].samples_consumed());
                }
                assert!(hashes.windows(2).all(|pair| pair[0] == pair[1]), "the ranks agree");
                assert_eq!(got, expected, "{packing:?}, dp {dp_size}, sp {sp_size}, step {step}");
            }
        }
    }
}

#[test]
fn a_step_after_the_end_of_the_data_is_masked_on_every_rank() {
    let data = Arc::new(packed(&[SEQ_LEN, SEQ_LEN], SEQ_LEN));
    for sp_rank in 0..2 {
        let mut loader = loader(&data, (1, 2), (0, sp_rank)).balanced(COST).ending_at(0);
        let batch = loader.next_micro_batch().unwrap();
        assert_eq!((batch.num_valid_tokens(), batch.seq_len), (0, 1));
        assert_eq!(batch.flexible.unwrap().micro_steps, 1);
    }
}
