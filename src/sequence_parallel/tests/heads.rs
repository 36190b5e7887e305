//! The exchange around linear attention.

use super::part;
use crate::comm::{CollectiveOp, LaunchOptions, ProcessGroup, ProcessGroupExt, launch};
use crate::mesh::SeqSharding;
use crate::nn::{
    ExchangedHeads, HeadExchange, HeadKind, HeadTransfer, Heads, LayerError, LinearAttentionConfig,
    LinearAttentionKind, NumHeads, ShortConvConfig,
};
use crate::sequence_parallel::{ExchangeVolume, SpShard, UlyssesHeads};
use candle_core::Tensor;
use std::sync::Arc;
use ulysses_kernels::Workspace;
use ulysses_kernels::tensor::to_vec;

const SHAPE: LinearAttentionConfig = LinearAttentionConfig {
    num_key_heads: 2,
    num_value_heads: 4,
    key_head_dim: 3,
    value_head_dim: 5,
    conv_width: 4,
    kind: LinearAttentionKind::GatedDeltaNet,
};
const KIMI: LinearAttentionConfig = LinearAttentionConfig {
    num_key_heads: 4,
    key_head_dim: 5,
    kind: LinearAttentionKind::KimiDelta,
    ..SHAPE
};
const BATCH: usize = 2;
const SEQ_LEN: usize = 13;

/// Ulysses alone, and rings of groups of one or two ranks, whose ranks have two ranges of tokens.
const SHARDINGS: [SeqSharding; 6] = [
    SeqSharding { ring_size: 1, ulysses_size: 2 },
    SeqSharding { ring_size: 1, ulysses_size: 3 },
    SeqSharding { ring_size: 1, ulysses_size: 5 },
    SeqSharding { ring_size: 2, ulysses_size: 1 },
    SeqSharding { ring_size: 2, ulysses_size: 2 },
    SeqSharding { ring_size: 3, ulysses_size: 1 },
];

#[test]
fn value_heads_come_with_their_key_heads_and_ranks_beyond_them_have_none() {
    let heads = NumHeads { q: 6, kv: 2 };
    let shares: Vec<_> = (0..4).map(|rank| heads.on_sp_rank(4, rank)).collect();
    let ranges: Vec<_> = shares.iter().map(|share| (share.q.clone(), share.kv.clone())).collect();
    assert_eq!(ranges, [(0..2, 0..1), (2..4, 0..2), (4..5, 1..2), (5..6, 1..2)]);
    assert_eq!(shares[1].q_to_kv(heads), [0, 1]);
    assert!(heads.on_sp_rank(8, 7).q.is_empty() && heads.on_sp_rank(8, 7).kv.is_empty());
}

#[test]
fn heads_of_several_sizes_are_exchanged_and_gradients_of_shared_key_heads_are_summed() {
    let heads = SHAPE.heads();
    let dims = [(HeadKind::Key, 3), (HeadKind::Key, 3), (HeadKind::Value, 5), (HeadKind::Value, 1)];
    let kinds = dims.map(|(kind, _)| kind);
    for sharding in SHARDINGS {
        let size = sharding.sp_size();
        launch(size, &LaunchOptions::default(), |ctx| {
            let group: Arc<dyn ProcessGroup> = ctx.group.clone();
            let exchange = UlyssesHeads::new(group.clone(), sharding);
            let Heads { q: values, kv: keys } = exchange.share(heads);
            let of = |seq: Vec<usize>, keys: Vec<usize>, values: Vec<usize>| -> Vec<Tensor> {
                let tensor = |(index, (kind, dim)): (usize, (HeadKind, usize))| {
                    let heads = if kind == HeadKind::Key { &keys } else { &values };
                    part(index, BATCH, &seq, heads, dim)
                };
                dims.into_iter().enumerate().map(tensor).collect()
            };
            let exchanged = |transfer| ExchangedHeads { heads, kinds: &kinds, seq_len: SEQ_LEN, transfer };
            let own: Vec<usize> = sharding.tokens(SEQ_LEN, group.rank()).positions().collect();
            let ws = Workspace::new();
            let local = of(own.clone(), (0..2).collect(), (0..4).collect());
            let whole = exchange.exchange(local, &exchanged(HeadTransfer::Inputs), &ws)?;
            let expected = of((0..SEQ_LEN).collect(), keys.collect(), values.collect());
            for (got, expected) in whole.iter().zip(&expected) {
                assert_eq!(got.dims(), expected.dims());
                assert_eq!(
                    to_vec::<f32>(got)?,
                    to_vec::<f32>(expected)?,
                    "{sharding:?} rank {}",
                    group.rank()
                );
            }
            let back = exchange.exchange(whole, &exchanged(HeadTransfer::InputGradients), &ws)?;
            let users =
                |key| (0..size).filter(|rank| heads.on_sp_rank(size, *rank).kv.contains(&key)).count();
            for (index, got) in back.iter().enumerate() {
                let (kind, dim) = dims[index];
                let heads = if kind == HeadKind::Key { 2 } else { 4 };
                let all: Vec<usize> = (0..heads).collect();
                let once = to_vec::<f32>(&part(index, BATCH, &own, &all, dim))?;
                let copies = |at: usize| if kind == HeadKind::Key { users(at / dim % heads) } else { 1 };
                let expected: Vec<f32> =
                    once.iter().enumerate().map(|(at, value)| copies(at) as f32 * value).collect();
                assert_eq!(
                    to_vec::<f32>(got)?,
                    expected,
                    "{sharding:?} rank {} tensor {index}",
                    group.rank()
                );
            }
            Ok::<_, LayerError>(())
        })
        .unwrap();
    }
}

#[test]
fn the_formula_counts_the_bytes_that_are_sent() {
    let kinds = [HeadKind::Key, HeadKind::Key, HeadKind::Value, HeadKind::Value, HeadKind::Value];
    for (sharding, shape) in SHARDINGS.into_iter().flat_map(|sharding| [(sharding, SHAPE), (sharding, KIMI)])
    {
        launch(sharding.sp_size(), &LaunchOptions::default(), |ctx| {
            let group: Arc<dyn ProcessGroup> = ctx.group.clone();
            let exchange = UlyssesHeads::new(group.clone(), sharding);
            let (own, ws) = (sharding.tokens(SEQ_LEN, group.rank()).len(), Workspace::new());
            let run = |tensors: Vec<Tensor>, kinds: &[HeadKind], transfer| {
                let heads = shape.heads();
                let exchanged = ExchangedHeads { heads, kinds, seq_len: SEQ_LEN, transfer };
                exchange.exchange(tensors, &exchanged, &ws)
            };
            let sent = || {
                group.barrier().unwrap();
                group.stats().get(CollectiveOp::AllToAllStrided).bytes_sent / 4
            };
            let keys = (shape.num_key_heads, shape.key_head_dim);
            let mixed = [keys, keys, (4, 5), (4, 1), (4, shape.decays_per_head())];
            let mixed = mixed.map(|(heads, dim)| ws.alloc((BATCH, own, heads, dim)));
            let mixed = mixed.into_iter().collect::<Result<Vec<_>, _>>()?;
            let mixed = run(mixed, &kinds, HeadTransfer::Inputs)?;
            let out = ws.alloc(mixed[2].dims())?;
            let out = run(vec![out], &kinds[2..3], HeadTransfer::Output)?;
            let forward = sent();
            run(out, &kinds[2..3], HeadTransfer::OutputGradient)?;
            run(mixed, &kinds, HeadTransfer::InputGradients)?;
            let backward = sent() - forward;
            let shard = SpShard { sharding, rank: group.rank(), batch: BATCH, seq_len: SEQ_LEN };
            let volume = ExchangeVolume::of_linear_attention(&shape, shard);
            assert_eq!((volume.forward_elems, volume.backward_elems), (forward, backward), "{sharding:?}");

            // The channels of a convolution are heads of one element.
            let (conv, before) = (ShortConvConfig { channels: 7, taps: 3, bias: false }, sent());
            let value = [HeadKind::Value];
            let exchanged =
                |transfer| ExchangedHeads { heads: conv.heads(), kinds: &value, seq_len: SEQ_LEN, transfer };
            let x = vec![ws.alloc((BATCH, own, 7, 1))?];
            let gated = exchange.exchange(x, &exchanged(HeadTransfer::Inputs), &ws)?;
            exchange.exchange(gated, &exchanged(HeadTransfer::Output), &ws)?;
            let volume = ExchangeVolume::of_short_conv(&conv, shard);
            assert_eq!([volume.forward_elems, volume.backward_elems], [sent() - before; 2], "{sharding:?}");
            Ok::<_, LayerError>(())
        })
        .unwrap();
    }
}
