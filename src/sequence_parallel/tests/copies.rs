//! Exchange plans executed by strided copies, on the CPU and on a GPU.

use crate::comm::StridedPlan;
use crate::sequence_parallel::{AttentionShape, ExchangePlan};
use candle_core::{Device, Tensor};
use ulysses_kernels::strided_copy::{BlockCopy, StridedBlock, copy_blocks};
use ulysses_kernels::tensor::to_vec;

/// Batch, tokens, heads, KV heads, head dimension, ranks.
const EXCHANGES: [[usize; 6]; 6] = [
    [1, 8, 4, 4, 8, 2],
    [2, 7, 4, 2, 8, 2],
    [2, 64, 8, 4, 16, 3],
    [1, 11, 5, 1, 3, 4],
    [3, 10, 7, 3, 5, 4],
    [2, 9, 6, 2, 2, 1],
];

fn plans([batch, seq_len, num_heads, num_kv_heads, head_dim, ranks]: [usize; 6]) -> Vec<ExchangePlan> {
    let shape = AttentionShape {
        batch,
        seq_len,
        num_heads,
        num_kv_heads,
        head_dim,
        value_head_dim: head_dim.div_ceil(2),
    };
    let q_to_kv: Vec<usize> = (0..num_heads).map(|head| head * num_kv_heads / num_heads).collect();
    (0..ranks).map(|rank| ExchangePlan::new(shape, &q_to_kv, ranks, rank).unwrap()).collect()
}

/// Dimensions, first token and first head of a shard.
type Shard = ([usize; 4], usize, usize);

/// Shards of q, k and v on one rank, by sequence or by head.
fn shards(plan: &ExchangePlan, by_head: bool) -> [Shard; 3] {
    let (rank, dims) = (plan.rank(), [plan.q_dims(), plan.k_dims(), plan.v_dims()]);
    if by_head {
        let [q, kv] = [plan.q_head_ranges(), plan.kv_head_ranges()].map(|ranges| ranges[rank].start);
        let [q_dims, k_dims, v_dims] = dims.map(|dims| dims.head_sharded);
        return [(q_dims, 0, q), (k_dims, 0, kv), (v_dims, 0, kv)];
    }
    let token = plan.seq_ranges()[rank].start;
    dims.map(|dims| (dims.seq_sharded, token, 0))
}

/// A shard whose values encode tensor, batch, token, head and element; times `factor(head)`.
fn fill(device: &Device, k: usize, shard: Shard, factor: impl Fn(usize) -> usize) -> Tensor {
    let ([batch, tokens, heads, dim], token, head) = shard;
    let element = |i| {
        let (b, t, h, e) = (i / (tokens * heads * dim), i / (heads * dim) % tokens, i / dim % heads, i % dim);
        ((((k * 4 + b) * 100 + t + token) * 10 + h + head) * 20 + e) as f32 * factor(h + head) as f32
    };
    let elements: Vec<f32> = (0..batch * tokens * heads * dim).map(element).collect();
    Tensor::from_slice(&elements, elements.len(), device).unwrap()
}

/// Executes the receives of every rank, as a backend does, in one call per rank.
fn exchange(
    plans: &[ExchangePlan],
    plan_of: impl Fn(&ExchangePlan) -> StridedPlan,
    inputs: &[[Tensor; 3]],
    outputs: &[[Tensor; 3]],
) {
    let strided: Vec<_> = plans.iter().map(plan_of).collect();
    let sources: Vec<&Tensor> = inputs.iter().flatten().collect();
    for (rank, outputs) in outputs.iter().enumerate() {
        let mut copies = Vec::new();
        for (peer, received) in strided[rank].recv.iter().enumerate() {
            for (from, recv) in strided[peer].send[rank].iter().zip(received) {
                let from = StridedBlock { tensor: 3 * peer + from.tensor, ..from.clone() };
                copies.push(BlockCopy { from, to: recv.block.clone(), accumulate: recv.accumulate });
            }
        }
        copy_blocks(&sources, &outputs.each_ref(), &copies).unwrap();
    }
}

#[test]
fn every_exchange_plan_turns_sequence_shards_into_head_shards_and_back_with_shared_gradients_summed() {
    check_every_exchange_plan(&Device::Cpu);
}

#[cfg(feature = "cuda")]
#[test]
fn so_does_every_exchange_plan_on_a_gpu() {
    let device = ulysses_kernels::device::DeviceKind::Cuda.open();
    check_every_exchange_plan(&device.expect("a GPU; without, leave this test out with `--skip on_a_gpu`"));
}

fn check_every_exchange_plan(device: &Device) {
    for case in EXCHANGES {
        let plans = plans(case);
        let tensors = |by_head, factor: &dyn Fn(usize, usize) -> usize| -> Vec<[Tensor; 3]> {
            let of = |plan: &ExchangePlan| {
                let shards = shards(plan, by_head);
                std::array::from_fn(|k| fill(device, k, shards[k], |head| factor(k, head)))
            };
            plans.iter().map(of).collect()
        };
        let same = |tensors: &[[Tensor; 3]], expected: &[[Tensor; 3]], way: &str| {
            for (tensor, expected) in tensors.iter().flatten().zip(expected.iter().flatten()) {
                let (tensor, expected): (Vec<f32>, Vec<f32>) =
                    (to_vec(tensor).unwrap(), to_vec(expected).unwrap());
                assert!(tensor == expected, "{way} {case:?}");
            }
        };
        let by_head = tensors(true, &|_, _| 0);
        exchange(&plans, ExchangePlan::qkv_seq_to_head, &tensors(false, &|_, _| 1), &by_head);
        same(&by_head, &tensors(true, &|_, _| 1), "to heads");

        // Back: every rank with a KV head adds its gradient.
        let holders = |k: usize, head: usize| match k {
            0 => 1,
            _ => plans[0].kv_head_ranges().iter().filter(|heads| heads.contains(&head)).count(),
        };
        let by_sequence = tensors(false, &|_, _| 0);
        exchange(&plans, ExchangePlan::qkv_head_to_seq, &by_head, &by_sequence);
        same(&by_sequence, &tensors(false, &holders), "to sequence");
    }
}
