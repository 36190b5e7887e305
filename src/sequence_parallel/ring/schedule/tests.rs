//! Routes and volumes of rings.

use super::*;
use crate::comm::fake::FakeGroup;
use crate::sequence_parallel::{AttentionShape, RingVolume};

/// The schedules of all ring ranks for sequences with these document bounds.
fn schedules(
    sharding: SeqSharding,
    documents: &[u32],
    window: Option<usize>,
) -> Result<Vec<RingSchedule>, SequenceParallelError> {
    let (ranks, seq_len) = (sharding.ring_size, documents.last().map_or(0, |&end| end as usize));
    let of_rank = |rank: usize| {
        let tokens = sharding.ring_tokens(seq_len, rank);
        let tokens = tokens.ranges();
        let documents = vec![documents.to_vec()];
        let layout = AttentionLayout::of_ranges(tokens, tokens, documents, vec![0], window)?;
        let group = FakeGroup::new("ring", (0..ranks).collect(), rank)?;
        RingSchedule::new(&layout, sharding, &group)
    };
    (0..ranks).map(of_rank).collect()
}

fn ring(ring_size: usize) -> SeqSharding {
    SeqSharding { ring_size, ulysses_size: 1 }
}

/// Visible pairs of every ring rank, over all its steps.
fn pairs(ring_size: usize, documents: &[u32]) -> Vec<u64> {
    let of_rank = |schedule: RingSchedule| {
        schedule.blocks.iter().flatten().map(AttentionLayout::num_visible_pairs).sum()
    };
    schedules(ring(ring_size), documents, None).unwrap().into_iter().map(of_rank).collect()
}

#[test]
fn causal_work_is_within_two_percent_on_all_ring_ranks() {
    for ring_size in [2, 3, 4, 8, 16] {
        for seq_len in [2048, 4099, 10_007] {
            let pairs = pairs(ring_size, &[0, seq_len]);
            let seq_len = u64::from(seq_len);
            assert_eq!(pairs.iter().sum::<u64>(), seq_len * (seq_len + 1) / 2, "every pair once");
            let (least, most) = (pairs.iter().min().unwrap(), pairs.iter().max().unwrap());
            let excess = *most as f64 / *least as f64 - 1.0;
            assert!(excess < 0.02, "ring {ring_size}, {seq_len} tokens: {excess:.4} more");
        }
    }
}

/// Pairs of the ring rank with most, relative to the mean.
fn imbalance(pairs: &[u64]) -> f64 {
    let most = pairs.iter().max().copied().unwrap_or(0) as f64;
    most * pairs.len() as f64 / pairs.iter().sum::<u64>() as f64
}

#[test]
fn contiguous_shards_would_wait_for_the_last_rank_and_packed_documents_are_uneven() {
    const TOKENS: u32 = 4096;
    for (ring_size, contiguous, packed) in [(2, 1.5, 1.294), (4, 1.75, 1.882), (8, 1.875, 1.882)] {
        let layout = AttentionLayout::causal(1, TOKENS, vec![0]).unwrap();
        let all = 0..TOKENS as usize;
        let in_order: Vec<u64> = (0..ring_size)
            .map(|rank| crate::mesh::shard_range(TOKENS as usize, ring_size, rank))
            .map(|shard| layout.num_visible_pairs_between(&[shard], std::slice::from_ref(&all)))
            .collect();
        assert!((imbalance(&in_order) - contiguous).abs() < 1e-3, "{ring_size}: {in_order:?}");
        let zigzag = pairs(ring_size, &[0, TOKENS]);
        assert!((imbalance(&zigzag) - 1.0).abs() < 1e-3, "{ring_size}: {zigzag:?}");
        let documents = pairs(ring_size, &[0, 5 * TOKENS / 8, TOKENS]);
        assert!((imbalance(&documents) - packed).abs() < 1e-2, "{ring_size}: {}", imbalance(&documents));
    }
}

/// Pairs of a block and another rank that it is sent to, over all ranks.
fn num_hops(schedules: &[RingSchedule]) -> usize {
    let of_rank = |schedule: &RingSchedule| -> usize {
        schedule.steps().iter().map(|&step| schedule.sent(step).count()).sum()
    };
    schedules.iter().map(of_rank).sum()
}

#[test]
fn a_block_is_sent_once_per_rank_that_sees_it() {
    const LEN: u32 = 131_072;
    let quarters = [0, LEN / 4, LEN / 2, 3 * LEN / 4, LEN];
    for (documents, window, hops, steps, is_relayed) in [
        (&[0, LEN][..], None, 56, 8, true),
        (&[0, LEN], Some(4096), 14, 3, false),
        (&quarters, None, 24, 7, false),
        (&quarters, Some(1), 0, 1, true),
    ] {
        let schedules = schedules(ring(8), documents, window).unwrap();
        let label = format!("{documents:?}, window {window:?}");
        let seen = |schedule: &RingSchedule| schedule.blocks[1..].iter().flatten().count();
        assert_eq!(schedules.iter().map(seen).sum::<usize>(), hops, "{label}");
        assert_eq!(num_hops(&schedules), hops, "{label}");
        assert_eq!(schedules[0].steps().len(), steps, "{label}");
        // Without gaps, only neighbors exchange blocks.
        let mut routes = schedules[0].routes.iter();
        assert_eq!(routes.all(Route::is_relayed), is_relayed, "{label}");
    }
}

#[test]
fn every_message_has_its_receiver() {
    let documents: [&[u32]; 5] = [&[0, 64], &[0, 16, 48, 64], &[0, 8, 33, 34, 61, 67], &[0, 50, 67], &[0, 5]];
    for (ring_size, documents, window) in [2, 3, 4, 5, 8]
        .into_iter()
        .flat_map(|ring| documents.map(|documents| (ring, documents)))
        .flat_map(|(ring, documents)| [None, Some(3), Some(20)].map(|window| (ring, documents, window)))
        .filter(|(ring, documents, _)| documents.last() >= Some(&(*ring as u32)))
    {
        let schedules = schedules(ring(ring_size), documents, window).unwrap();
        let label = format!("ring {ring_size}, {documents:?}, window {window:?}");
        for (step, next) in schedules[0].steps().iter().zip(schedules[0].steps().iter().skip(1)) {
            // Owner of each block, with its sender and its receiver.
            let (mut sent, mut received) = (Vec::new(), Vec::new());
            for schedule in &schedules {
                assert_eq!(schedule.steps(), schedules[0].steps(), "{label}");
                sent.extend(schedule.sent(*step).map(|sent| match sent {
                    Sent::Own(to) => (schedule.rank, schedule.rank, to),
                    Sent::Current(to) => (schedule.owner(*step), schedule.rank, to),
                }));
                received.extend(
                    schedule
                        .block(*next)
                        .map(|_| (schedule.owner(*next), schedule.sender(*next), schedule.rank)),
                );
            }
            sent.sort_unstable();
            received.sort_unstable();
            assert_eq!(sent, received, "{label}, blocks of step {next}");
        }
        for &step in &schedules[0].steps()[1..] {
            let (mut sent, mut received) = (Vec::new(), Vec::new());
            for schedule in &schedules {
                let sends = schedule.block(step).map(|_| schedule.gradients_to(step));
                sent.extend(sends.map(|to| (schedule.owner(step), schedule.rank, to)));
                let passed = schedule.tokens_passed(step).and_then(|_| schedule.next(step));
                let passed = passed.map(|next| (schedule.owner(next), schedule.rank_before(), schedule.rank));
                let returned = schedule.returns_from(step);
                received.extend(passed);
                received.extend(returned.map(|from| (schedule.rank, from, schedule.rank)));
            }
            sent.sort_unstable();
            received.sort_unstable();
            assert_eq!(sent, received, "{label}, gradients after step {step}");
        }
    }
}

#[test]
fn the_closed_form_counts_the_tokens_of_the_schedule() {
    for (documents, window) in
        [(&[0, 67][..], None), (&[0, 67], Some(5)), (&[0, 16, 17, 48, 67], None), (&[0, 30, 67], Some(20))]
    {
        for schedule in schedules(ring(5), documents, window).unwrap() {
            let blocks =
                schedule.steps().iter().flat_map(|&step| schedule.sent(step).map(move |sent| (step, sent)));
            let tokens = |(step, sent)| match sent {
                Sent::Own(_) => schedule.tokens[schedule.rank],
                Sent::Current(_) => schedule.tokens[schedule.owner(step)],
            };
            let gradients = schedule.steps()[1..].iter().filter_map(|&step| schedule.tokens(step));
            let counted =
                [blocks.map(tokens).sum::<usize>(), gradients.sum()].map(|tokens| 2 * tokens as u64);
            let shape = AttentionShape {
                batch: 1,
                seq_len: 67,
                num_heads: 1,
                num_kv_heads: 1,
                head_dim: 1,
                value_head_dim: 1,
            };
            let tokens = |rank| ring(5).ring_tokens(67, rank);
            let sees = |queries, keys| {
                let (queries, keys) = (tokens(queries), tokens(keys));
                schedule.own.num_visible_pairs_between(queries.ranges(), keys.ranges()) > 0
            };
            let RingVolume { block_elems, gradient_elems } =
                RingVolume::new(ring(5), schedule.rank, shape, sees);
            assert_eq!(
                [block_elems, gradient_elems],
                counted,
                "{documents:?}, {window:?}, {}",
                schedule.rank
            );
        }
    }
}

#[test]
fn a_sequence_shorter_than_the_ring_names_the_ring() {
    let error = schedules(ring(4), &[0, 3], None).unwrap_err().to_string();
    assert!(error.contains("a ring of 4 ranks") && error.contains("`ulysses.ring_size` is 3"), "{error}");
}

#[test]
fn a_ring_that_does_not_fit_its_group_or_its_tokens_is_refused() {
    let contiguous = std::slice::from_ref(&(0..2));
    let layout = AttentionLayout::of_ranges(contiguous, contiguous, vec![vec![0, 4]], vec![0], None).unwrap();
    let group = FakeGroup::new("ring", vec![0, 1], 0).unwrap();
    let error = |ring_size| {
        let sharding = SeqSharding { ring_size, ulysses_size: 1 };
        RingSchedule::new(&layout, sharding, &group).unwrap_err().to_string()
    };
    assert_eq!(error(3), "the sharding has a ring of 3 ranks, but its group has 2");
    assert_eq!(
        error(2),
        "rank 0 of 2 in the sp group holds tokens 0..1, 3..4 of a sequence of 4, but its layout covers positions 0 to 1"
    );
}
