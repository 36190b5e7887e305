//! Plans against hand-worked literals; exchanges of values that encode their position.

mod copies;
mod heads;

use super::*;
use crate::comm::{CollectiveOp, LaunchOptions, ProcessGroup, launch};
use candle_core::{Device, Tensor};
use std::sync::Arc;
use ulysses_kernels::Workspace;
use ulysses_kernels::tensor::to_vec;

/// S = 64, H = 8, KV = 4, sp = 3: shards of 22/21/21 tokens, heads of 3/3/2.
const WORKED: AttentionShape =
    AttentionShape { batch: 2, seq_len: 64, num_heads: 8, num_kv_heads: 4, head_dim: 4, value_head_dim: 4 };

fn grouped(shape: &AttentionShape) -> Vec<usize> {
    (0..shape.num_heads).map(|h| h * shape.num_kv_heads / shape.num_heads).collect()
}

fn plan(shape: AttentionShape, sp_size: usize, rank: usize) -> ExchangePlan {
    ExchangePlan::new(shape, &grouped(&shape), sp_size, rank).unwrap()
}

/// Elements that a plan sends to other ranks.
fn sent(plan: &crate::comm::StridedPlan, rank: usize) -> u64 {
    let others = plan.send.iter().enumerate().filter(|(peer, _)| *peer != rank);
    others.flat_map(|(_, blocks)| blocks).map(|block| (block.batch * block.rows * block.run) as u64).sum()
}

#[test]
fn kv_heads_go_only_where_their_query_heads_are() {
    let plan = plan(WORKED, 3, 0);
    assert_eq!(plan.seq_ranges(), [0..22, 22..43, 43..64]);
    assert_eq!(plan.q_head_ranges(), [0..3, 3..6, 6..8]);
    assert_eq!(plan.kv_head_ranges(), [0..2, 1..3, 3..4]);
}

#[test]
fn local_head_map_is_explicit_where_a_rank_owns_part_of_a_group() {
    let maps: Vec<_> = (0..3).map(|rank| plan(WORKED, 3, rank).q_to_kv_local()).collect();
    // Heads 0..3 use KV 0,0,1; heads 3..6 use KV 1,2,2; heads 6..8 use KV 3,3.
    assert_eq!(maps, [vec![0, 0, 1], vec![0, 1, 1], vec![0, 0]]);
}

#[test]
fn volumes_match_the_hand_worked_example() {
    let unit = (WORKED.batch * WORKED.head_dim) as u64;
    // q, k and v of 22, 21 and 21 tokens for 11, 11 and 14 heads of others; delta for 5, 5 and 6.
    for (rank, [forward, qkv, backward, delta]) in
        [(0, [368, 242, 404, 110]), (1, [360, 231, 406, 105]), (2, [380, 294, 298, 126])]
    {
        let plan = plan(WORKED, 3, rank);
        let expected = ExchangeVolume {
            forward_elems: forward * unit,
            qkv_elems: qkv * unit,
            backward_elems: backward * unit,
            delta_elems: delta * WORKED.batch as u64,
        };
        assert_eq!(plan.volume(), expected, "rank {rank}");
        assert_eq!(sent(&plan.qkv_seq_to_head(), rank), expected.qkv_elems);
        assert_eq!(sent(&plan.delta_seq_to_head(), rank), expected.delta_elems);
        // bf16 elements, and delta in f32.
        let recomputed = [false, true].map(|saves_output| expected.recompute_bytes(saves_output, 2));
        assert_eq!(recomputed, [forward * unit * 2, qkv * unit * 2 + delta * WORKED.batch as u64 * 4]);
        assert_eq!(
            sent(&plan.qkv_seq_to_head(), rank) + sent(&plan.out_head_to_seq(), rank),
            expected.forward_elems
        );
        assert_eq!(
            sent(&plan.out_seq_to_head(), rank) + sent(&plan.qkv_head_to_seq(), rank),
            expected.backward_elems
        );
    }
}

#[test]
fn even_volume_is_the_textbook_formula() {
    let shape = AttentionShape {
        batch: 3,
        seq_len: 32,
        num_heads: 8,
        num_kv_heads: 8,
        head_dim: 5,
        value_head_dim: 5,
    };
    // 4 · b · (S/sp) · (sp−1)/sp · H · D with sp = 4: 4 · 3 · 8 · 3/4 · 8 · 5 = 2880.
    // Of the forward, q, k and v are 3 of 4 tensors; delta has one element per head.
    let expected =
        ExchangeVolume { forward_elems: 2880, qkv_elems: 2160, backward_elems: 2880, delta_elems: 144 };
    (0..4).for_each(|rank| assert_eq!(plan(shape, 4, rank).volume(), expected));
}

#[test]
fn fewer_heads_than_ranks_is_an_error_that_names_the_largest_valid_sp() {
    let shape = AttentionShape { num_heads: 2, num_kv_heads: 1, ..WORKED };
    let error = ExchangePlan::new(shape, &[0, 0], 3, 0).unwrap_err().to_string();
    assert!(error.contains("largest valid sp is 2"), "{error}");
}

#[test]
fn head_maps_with_gaps_or_descents_are_refused() {
    let shape = AttentionShape { num_heads: 4, num_kv_heads: 2, ..WORKED };
    for q_to_kv in [&[0, 0, 0, 0][..], &[0, 1, 0, 1], &[0, 0, 2, 2], &[1, 1, 1, 1], &[0, 0, 1]] {
        assert!(ExchangePlan::new(shape, q_to_kv, 2, 0).is_err(), "{q_to_kv:?}");
    }
}

/// The value of one element of a global `[batch, seq, heads, head_dim]` tensor.
fn value(tensor: usize, b: usize, s: usize, h: usize, d: usize) -> f32 {
    (((tensor * 3 + b) * 64 + s) * 16 + h) as f32 * 8.0 + d as f32
}

/// A part of the global tensor, selected by tokens and heads.
fn part(tensor: usize, batch: usize, seq: &[usize], heads: &[usize], head_dim: usize) -> Tensor {
    let mut values = Vec::new();
    for b in 0..batch {
        for &s in seq {
            for &h in heads {
                values.extend((0..head_dim).map(|d| value(tensor, b, s, h, d)));
            }
        }
    }
    Tensor::from_vec(values, (batch, seq.len(), heads.len(), head_dim), &Device::Cpu).unwrap()
}

fn all(range: std::ops::Range<usize>) -> Vec<usize> {
    range.collect()
}

/// Runs `check` on every rank with its exchange.
fn on_ranks(shape: AttentionShape, sp_size: usize, check: impl Fn(&Exchange, &Arc<dyn ProcessGroup>) + Sync) {
    launch(sp_size, &LaunchOptions::default(), |ctx| {
        let group: Arc<dyn ProcessGroup> = ctx.group.clone();
        let plan = plan(shape, sp_size, group.rank());
        check(&Exchange::new(plan, group.clone()), &group);
        Ok::<_, SequenceParallelError>(())
    })
    .unwrap();
}

/// In the fourth and fifth values are narrower than queries.
const SHAPES: [(AttentionShape, usize); 6] = [
    (WORKED, 3),
    (
        AttentionShape {
            batch: 1,
            seq_len: 8,
            num_heads: 4,
            num_kv_heads: 4,
            head_dim: 2,
            value_head_dim: 2,
        },
        2,
    ),
    (
        AttentionShape {
            batch: 2,
            seq_len: 7,
            num_heads: 6,
            num_kv_heads: 1,
            head_dim: 3,
            value_head_dim: 3,
        },
        4,
    ),
    (
        AttentionShape {
            batch: 3,
            seq_len: 13,
            num_heads: 8,
            num_kv_heads: 2,
            head_dim: 3,
            value_head_dim: 1,
        },
        3,
    ),
    (
        AttentionShape {
            batch: 1,
            seq_len: 5,
            num_heads: 5,
            num_kv_heads: 5,
            head_dim: 4,
            value_head_dim: 3,
        },
        4,
    ),
    (
        AttentionShape {
            batch: 2,
            seq_len: 9,
            num_heads: 6,
            num_kv_heads: 3,
            head_dim: 2,
            value_head_dim: 2,
        },
        1,
    ),
];

/// Elements per head of q, k and v.
fn sizes(shape: AttentionShape) -> [usize; 3] {
    [shape.head_dim, shape.head_dim, shape.value_head_dim]
}

#[test]
fn seq_to_head_gathers_every_token_of_the_local_heads() {
    for (shape, sp_size) in SHAPES {
        on_ranks(shape, sp_size, |exchange, group| {
            let (plan, rank) = (exchange.plan(), group.rank());
            let tokens = all(plan.seq_ranges()[rank].clone());
            let heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads];
            let qkv = [0, 1, 2].map(|t| part(t, shape.batch, &tokens, &all(0..heads[t]), sizes(shape)[t]));
            let HeadSharded(got) =
                exchange.qkv_seq_to_head(&SeqSharded(qkv), &Workspace::new()).unwrap().wait().unwrap();
            let (q, kv) = (&plan.q_head_ranges()[rank], &plan.kv_head_ranges()[rank]);
            for (t, heads) in [q, kv, kv].into_iter().enumerate() {
                let expected =
                    part(t, shape.batch, &all(0..shape.seq_len), &all(heads.clone()), sizes(shape)[t]);
                assert_eq!(got[t].dims(), expected.dims());
                assert_eq!(
                    to_vec::<f32>(&got[t]).unwrap(),
                    to_vec::<f32>(&expected).unwrap(),
                    "{shape:?} sp {sp_size} rank {rank} tensor {t}"
                );
            }
        });
    }
}

#[test]
fn head_to_seq_inverts_seq_to_head() {
    for (shape, sp_size) in SHAPES {
        on_ranks(shape, sp_size, |exchange, group| {
            let tokens = all(exchange.plan().seq_ranges()[group.rank()].clone());
            let out = part(0, shape.batch, &tokens, &all(0..shape.num_heads), shape.value_head_dim);
            let there = exchange
                .out_seq_to_head(&SeqSharded(out.clone()), &Workspace::new())
                .unwrap()
                .wait()
                .unwrap();
            let SeqSharded(back) =
                exchange.out_head_to_seq(&there, &Workspace::new()).unwrap().wait().unwrap();
            assert_eq!(to_vec::<f32>(&back).unwrap(), to_vec::<f32>(&out).unwrap(), "{shape:?} sp {sp_size}");
        });
    }
}

#[test]
fn delta_arrives_with_every_token_of_the_local_heads() {
    // Heads before tokens, as in lse.
    let part = |batch: usize, heads: &[usize], tokens: &[usize]| {
        let at = |b, h: usize| tokens.iter().map(move |&s| value(0, b, s, h, 0));
        let values: Vec<f32> = (0..batch).flat_map(|b| heads.iter().flat_map(move |&h| at(b, h))).collect();
        Tensor::from_vec(values, (batch, heads.len(), tokens.len()), &Device::Cpu).unwrap()
    };
    for (shape, sp_size) in SHAPES {
        on_ranks(shape, sp_size, |exchange, group| {
            let (plan, rank) = (exchange.plan(), group.rank());
            let own_tokens = all(plan.seq_ranges()[rank].clone());
            let delta = part(shape.batch, &all(0..shape.num_heads), &own_tokens);
            let HeadSharded(got) =
                exchange.delta_seq_to_head(&SeqSharded(delta), &Workspace::new()).unwrap().wait().unwrap();
            let own_heads = all(plan.q_head_ranges()[rank].clone());
            let expected = part(shape.batch, &own_heads, &all(0..shape.seq_len));
            assert_eq!(got.dims(), expected.dims());
            let [got, expected] = [got, expected].map(|tensor| to_vec::<f32>(&tensor).unwrap());
            assert_eq!(got, expected, "{shape:?} sp {sp_size} rank {rank}");
        });
    }
}

#[test]
fn gradients_of_shared_kv_heads_are_summed_over_the_ranks_that_used_them() {
    for (shape, sp_size) in SHAPES {
        on_ranks(shape, sp_size, |exchange, group| {
            let (plan, rank) = (exchange.plan(), group.rank());
            let whole = all(0..shape.seq_len);
            let (q, kv) = (plan.q_head_ranges()[rank].clone(), plan.kv_head_ranges()[rank].clone());
            let heads = [all(q), all(kv.clone()), all(kv)];
            let grads = [0, 1, 2].map(|t| part(t, shape.batch, &whole, &heads[t], sizes(shape)[t]));
            let SeqSharded(got) =
                exchange.qkv_head_to_seq(&HeadSharded(grads), &Workspace::new()).unwrap().wait().unwrap();
            let tokens = plan.seq_ranges()[rank].clone();
            let users =
                |kv_head: usize| plan.kv_head_ranges().iter().filter(|r| r.contains(&kv_head)).count();
            let num_heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads];
            for t in 0..3 {
                let mut expected = Vec::new();
                for (b, s) in (0..shape.batch).flat_map(|b| tokens.clone().map(move |s| (b, s))) {
                    for h in 0..num_heads[t] {
                        let copies = if t == 0 { 1 } else { users(h) } as f32;
                        expected.extend((0..sizes(shape)[t]).map(|d| copies * value(t, b, s, h, d)));
                    }
                }
                assert_eq!(to_vec::<f32>(&got[t]).unwrap(), expected, "{shape:?} sp {sp_size} rank {rank}");
            }
        });
    }
}

#[test]
fn backend_counts_the_bytes_of_the_hand_worked_example() {
    let expected = [(368_u64, 404_u64), (360, 406), (380, 298)];
    on_ranks(WORKED, 3, |exchange, group| {
        let (plan, rank) = (exchange.plan(), group.rank());
        let moved = || group.stats().get(CollectiveOp::AllToAllStrided).bytes_sent;
        // Counters of data that others receive are complete once all ranks have passed a barrier.
        let settled = || {
            crate::comm::ProcessGroupExt::barrier(&**group).unwrap();
            moved()
        };
        let tokens = all(plan.seq_ranges()[rank].clone());
        let heads = [WORKED.num_heads, WORKED.num_kv_heads, WORKED.num_kv_heads];
        let qkv = [0, 1, 2].map(|t| part(t, WORKED.batch, &tokens, &all(0..heads[t]), WORKED.head_dim));
        let out = qkv[0].clone();
        let there = exchange.qkv_seq_to_head(&SeqSharded(qkv), &Workspace::new()).unwrap().wait().unwrap();
        exchange
            .out_head_to_seq(&HeadSharded(there.0[0].clone()), &Workspace::new())
            .unwrap()
            .wait()
            .unwrap();
        let forward = settled();
        exchange.out_seq_to_head(&SeqSharded(out), &Workspace::new()).unwrap().wait().unwrap();
        exchange.qkv_head_to_seq(&there, &Workspace::new()).unwrap().wait().unwrap();
        let backward = settled() - forward;
        // batch 2 · head_dim 4 · 4 bytes
        assert_eq!((forward, backward), (expected[rank].0 * 32, expected[rank].1 * 32), "rank {rank}");
    });
}

#[test]
fn a_tensor_of_another_shape_is_refused_by_name() {
    on_ranks(WORKED, 1, |exchange, _| {
        let wrong = part(0, 2, &all(0..63), &all(0..8), 4);
        let error = exchange.out_seq_to_head(&SeqSharded(wrong), &Workspace::new()).unwrap_err().to_string();
        assert!(error.contains("do: expected") && error.contains("[2, 64, 8, 4]"), "{error}");
    });
}
