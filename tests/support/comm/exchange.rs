//! all_to_all and strided all_to_all.

use super::{Backend, Value, code, for_each_dtype, tensor, values, zeros};
use candle_core::Tensor;
use std::ops::Range;
use std::sync::Arc;
use ulysses::comm::{CommError, ProcessGroupExt, RecvBlock, StridedBlock, StridedPlan};

pub(crate) fn all_to_all_moves_uneven_counts_and_none(backend: &dyn Backend) {
    fn case<T: Value>(backend: &dyn Backend) {
        // Rank i sends `scale · ((i + 2j) mod 4)` elements to rank j, which may be 0.
        let count = |src: usize, dst: usize, scale: usize| (src + 2 * dst) % 4 * scale;
        for (world_size, scale) in [(1, 5), (2, 1), (3, 2), (4, 1), (4, 20_000)] {
            let results = backend.run(world_size, |group| {
                let rank = group.rank();
                let send: Vec<usize> = (0..world_size).map(|dst| count(rank, dst, scale)).collect();
                let recv: Vec<usize> = (0..world_size).map(|src| count(src, rank, scale)).collect();
                let input = tensor(send.iter().sum(), |i| code::<T>(rank, i));
                let output = zeros::<T>(recv.iter().sum());
                group.all_to_all(&input, &output, &send, &recv)?;
                Ok(values::<T>(&output))
            });
            for (rank, received) in results.iter().enumerate() {
                let from = |src: usize| {
                    let before: usize = (0..rank).map(|dst| count(src, dst, scale)).sum();
                    (0..count(src, rank, scale)).map(move |i| code::<T>(src, before + i))
                };
                assert!((0..world_size).flat_map(from).eq(received.iter().copied()), "{:?}", T::DTYPE);
            }
        }
    }
    for_each_dtype!(case(backend));
}

/// Returns the contiguous shards of `total` tokens or heads; the first ones are one larger.
fn part(total: usize, parts: usize, index: usize) -> Range<usize> {
    let start = |index: usize| index * (total / parts) + index.min(total % parts);
    start(index)..start(index + 1)
}

const BATCH: usize = 2;
const HEAD_DIM: usize = 3;

/// Returns the block of some tokens and heads within `[batch, tokens, heads, head_dim]`.
fn tokens_by_heads(
    shape: (usize, usize),
    tokens: Range<usize>,
    heads: Range<usize>,
    tensor: usize,
) -> StridedBlock {
    let (num_tokens, num_heads) = shape;
    StridedBlock {
        tensor,
        offset: (tokens.start * num_heads + heads.start) * HEAD_DIM,
        batch: BATCH,
        batch_stride: num_tokens * num_heads * HEAD_DIM,
        rows: tokens.len(),
        row_stride: num_heads * HEAD_DIM,
        run: heads.len() * HEAD_DIM,
    }
}

/// Plans the seq-to-head exchange of two tensors with `heads[k]` heads each: from `[batch, tokens_local, heads, dim]` to `[batch, tokens, heads_local, dim]`.
fn seq_to_head(rank: usize, ranks: usize, seq_len: usize, heads: [usize; 2]) -> StridedPlan {
    let own_tokens = part(seq_len, ranks, rank);
    let send = |peer: usize| {
        let block = |k: usize| {
            let shape = (own_tokens.len(), heads[k]);
            tokens_by_heads(shape, 0..own_tokens.len(), part(heads[k], ranks, peer), k)
        };
        vec![block(0), block(1)]
    };
    let recv = |peer: usize| {
        let block = |k: usize| {
            let own_heads = part(heads[k], ranks, rank).len();
            let block = tokens_by_heads((seq_len, own_heads), part(seq_len, ranks, peer), 0..own_heads, k);
            RecvBlock { block, accumulate: false }
        };
        vec![block(0), block(1)]
    };
    StridedPlan { send: (0..ranks).map(send).collect(), recv: (0..ranks).map(recv).collect() }
}

/// Plans the head-to-seq exchange.
fn inverse(plan: &StridedPlan) -> StridedPlan {
    let send =
        plan.recv.iter().map(|blocks| blocks.iter().map(|recv| recv.block.clone()).collect()).collect();
    let to_recv = |block: &StridedBlock| RecvBlock { block: block.clone(), accumulate: false };
    let recv = plan.send.iter().map(|blocks| blocks.iter().map(to_recv).collect()).collect();
    StridedPlan { send, recv }
}

/// Returns a value that encodes batch, token, head and element.
fn place(k: usize, b: usize, token: usize, head: usize, e: usize) -> f32 {
    ((((k * BATCH + b) * 1_000 + token) * 20 + head) * HEAD_DIM + e) as f32
}

fn fill(k: usize, tokens: Range<usize>, heads: Range<usize>) -> Vec<f32> {
    let mut elements = Vec::new();
    for b in 0..BATCH {
        for token in tokens.clone() {
            for head in heads.clone() {
                elements.extend((0..HEAD_DIM).map(|e| place(k, b, token, head, e)));
            }
        }
    }
    elements
}

fn flat(elements: Vec<f32>) -> Tensor {
    tensor(elements.len(), |i| elements[i])
}

pub(crate) fn strided_exchange_turns_sequence_shards_into_head_shards_and_back(backend: &dyn Backend) {
    for (ranks, seq_len, heads) in
        [(1, 5, [3, 2]), (2, 7, [4, 3]), (3, 64, [8, 4]), (4, 3, [5, 4]), (4, 900, [9, 6])]
    {
        backend.run(ranks, |group| {
            let rank = group.rank();
            let plan = Arc::new(seq_to_head(rank, ranks, seq_len, heads));
            let tokens = part(seq_len, ranks, rank);
            let sequence = |k: usize| flat(fill(k, tokens.clone(), 0..heads[k]));
            let by_sequence = [sequence(0), sequence(1)];
            let head_count = |k: usize| BATCH * seq_len * part(heads[k], ranks, rank).len() * HEAD_DIM;
            let by_head = [zeros::<f32>(head_count(0)), zeros::<f32>(head_count(1))];
            group.all_to_all_strided(&by_sequence, &by_head, &plan)?;
            for k in 0..2 {
                let expected = fill(k, 0..seq_len, part(heads[k], ranks, rank));
                assert!(values::<f32>(&by_head[k]) == expected, "rank {rank} of {ranks}, tensor {k}");
            }
            let back = [zeros::<f32>(by_sequence[0].elem_count()), zeros::<f32>(by_sequence[1].elem_count())];
            group.all_to_all_strided(&by_head, &back, &Arc::new(inverse(&plan)))?;
            for k in 0..2 {
                assert!(values::<f32>(&back[k]) == values::<f32>(&by_sequence[k]), "rank {rank}, tensor {k}");
            }
            Ok(())
        });
    }
}

/// Returns a block of `count` elements at `offset` of tensor `tensor`.
fn run(tensor: usize, offset: usize, count: usize) -> StridedBlock {
    StridedBlock { tensor, offset, batch: 1, batch_stride: 0, rows: 1, row_stride: 0, run: count }
}

pub(crate) fn strided_exchange_accumulates_in_rank_order(backend: &dyn Backend) {
    fn case<T: Value>(backend: &dyn Backend) {
        // Every rank adds its elements to rank 0's, as for shared KV heads.
        let results = backend.run(4, |group| {
            let (rank, ranks) = (group.rank(), group.world_size());
            let mut plan = StridedPlan { send: vec![vec![]; ranks], recv: vec![vec![]; ranks] };
            plan.send[0].push(run(0, 0, 6));
            if rank == 0 {
                plan.recv =
                    (0..ranks).map(|_| vec![RecvBlock { block: run(0, 2, 6), accumulate: true }]).collect();
            }
            let output = tensor(8, |i| T::from_f64(i as f64));
            group.all_to_all_strided(
                &[tensor(6, |i| code::<T>(rank, i))],
                std::slice::from_ref(&output),
                &Arc::new(plan),
            )?;
            Ok(values::<T>(&output))
        });
        let before: Vec<T> = (0..8).map(|i| T::from_f64(i as f64)).collect();
        let after = |i: usize| if i < 2 { i } else { i + 30 + 4 * (i - 2) };
        assert!(
            results[0] == (0..8).map(|i| T::from_f64(after(i) as f64)).collect::<Vec<T>>(),
            "{:?}",
            T::DTYPE
        );
        assert!(results[1..].iter().all(|output| *output == before), "{:?}", T::DTYPE);
    }
    for_each_dtype!(case(backend));

    // In f32, 1e8 + 1 - 1e8 + 1 is 1 only from left to right.
    let sums = backend.run(4, |group| {
        let to_all = vec![vec![run(0, 0, 1)]; 4];
        let recv = vec![vec![RecvBlock { block: run(0, 0, 1), accumulate: true }]; 4];
        let (input, output) = (tensor(1, |_| [1e8_f32, 1.0, -1e8, 1.0][group.rank()]), zeros::<f32>(1));
        group.all_to_all_strided(
            &[input],
            std::slice::from_ref(&output),
            &Arc::new(StridedPlan { send: to_all, recv }),
        )?;
        Ok(values::<f32>(&output)[0])
    });
    assert_eq!(sums, [1.0; 4]);
}

pub(crate) fn strided_exchange_may_write_into_the_storage_it_reads(backend: &dyn Backend) {
    // Inputs and outputs are two halves of one buffer on every rank.
    for _ in 0..20 {
        backend.run(3, |group| {
            let (rank, ranks) = (group.rank(), group.world_size());
            let flat = tensor(600, |i| (rank * 1_000 + i) as f32);
            let (input, output) = (flat.narrow(0, 0, 300)?, flat.narrow(0, 300, 300)?);
            let plan = StridedPlan {
                send: (0..ranks).map(|peer| vec![run(0, 100 * peer, 100)]).collect(),
                recv: (0..ranks)
                    .map(|peer| vec![RecvBlock { block: run(0, 100 * peer, 100), accumulate: false }])
                    .collect(),
            };
            group.all_to_all_strided(&[input], &[output], &Arc::new(plan))?;
            let expected = |i: usize| {
                if i < 300 { rank * 1_000 + i } else { (i / 100 - 3) * 1_000 + rank * 100 + i % 100 }
            };
            assert!(values::<f32>(&flat).into_iter().enumerate().all(|(i, x)| x == expected(i) as f32));
            Ok(())
        });
    }
}

pub(crate) fn plans_that_exceed_their_tensors_are_errors(backend: &dyn Backend) {
    backend.run(2, |group| {
        let good = StridedPlan {
            send: vec![vec![run(0, 0, 2)], vec![run(0, 2, 2)]],
            recv: vec![
                vec![RecvBlock { block: run(0, 0, 2), accumulate: false }],
                vec![RecvBlock { block: run(0, 2, 2), accumulate: false }],
            ],
        };
        let (input, output) = ([tensor(4, |i| i as f32)], [zeros::<f32>(4)]);
        let refuse = |expected: &str, break_it: &dyn Fn(&mut StridedPlan)| {
            let mut plan = good.clone();
            break_it(&mut plan);
            let error = group.all_to_all_strided(&input, &output, &Arc::new(plan)).unwrap_err();
            assert!(matches!(error, CommError::InvalidArgument { .. }), "{error}");
            assert!(error.to_string().contains(expected), "{error}");
        };
        refuse("ends at element 5 of 4", &|plan| plan.send[1][0].offset = 3);
        refuse("names tensor 1 of 1 inputs", &|plan| plan.send[0][0].tensor = 1);
        refuse("names tensor 7 of 1 outputs", &|plan| plan.recv[0][0].block.tensor = 7);
        refuse("overflows", &|plan| plan.recv[1][0].block.offset = usize::MAX);
        refuse("overflows", &|plan| plan.send[1][0].batch = usize::MAX);
        refuse("for 3 ranks, not 2", &|plan| plan.send.push(vec![]));
        refuse("for 1 ranks, not 2", &|plan| drop(plan.recv.pop()));
        refuse("more than once", &|plan| plan.recv[0][0].block.rows = 2);
        refuse("recv block 0 from rank 1 overwrites elements of recv block 0 from rank 0", &|plan| {
            plan.recv[1][0].block.offset = 1;
        });
        // All ranks got the same error before communicating, so the group still works.
        group.all_to_all_strided(&input, &output, &Arc::new(good.clone()))
    });
}
