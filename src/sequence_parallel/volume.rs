//! Number of elements that an exchange and a ring send, in closed form.

use super::{AttentionShape, ExchangePlan};
use crate::mesh::{SeqSharding, TokenRanges};
use crate::nn::MixerConfig;

/// The shard of a rank of sp in the sequences of a micro batch.
#[derive(Debug, Clone, Copy)]
pub struct SpShard {
    /// How the group shares each sequence.
    pub sharding: SeqSharding,
    /// The rank.
    pub rank: usize,
    /// Number of sequences.
    pub batch: usize,
    /// Tokens per sequence.
    pub seq_len: usize,
}

impl SpShard {
    /// The tokens of a rank of the group.
    pub(super) fn tokens(&self, rank: usize) -> TokenRanges {
        self.sharding.tokens(self.seq_len, rank)
    }

    /// The other ranks of the group.
    pub(super) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank;
        (0..self.sharding.sp_size()).filter(move |peer| *peer != rank)
    }
}

/// Elements that one rank sends to others for one layer and one micro batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ExchangeVolume {
    /// Forward: q, k, v to the heads, and the output back.
    pub forward_elems: u64,
    /// The part of the forward for q, k and v.
    pub qkv_elems: u64,
    /// Backward: the output's gradient to the heads, and those of q, k and v back.
    pub backward_elems: u64,
    /// `delta` to the heads, in f32, in the backward pass of a saved attention output.
    pub delta_elems: u64,
}

impl ExchangeVolume {
    /// The volume of a module that reads whole sequences and is not attention, in elements of `elem_bytes`; `None` of another module.
    /// `passes_states`: ranks do not exchange tokens for heads, but pass states on.
    pub fn of_mixer(
        mixer: &MixerConfig,
        shard: SpShard,
        passes_states: bool,
        elem_bytes: u64,
    ) -> Option<Self> {
        match mixer {
            MixerConfig::Attention(_) | MixerConfig::Mlp => None,
            MixerConfig::LinearAttention(linear) => Some(match passes_states {
                true => Self::of_passed_states(linear, shard, elem_bytes),
                false => Self::of_linear_attention(linear, shard),
            }),
            MixerConfig::ShortConv(conv) => Some(match passes_states {
                true => Self::of_passed_tokens(conv, shard),
                false => Self::of_short_conv(conv, shard),
            }),
        }
    }

    /// Sum of forward and backward.
    pub fn total_elems(&self) -> u64 {
        self.forward_elems + self.backward_elems
    }

    /// Bytes that recomputation adds, with elements of `elem_bytes`: those of a forward or, if the attention
    /// output is saved, those of q, k, v and `delta`.
    pub fn recompute_bytes(&self, saves_attention_output: bool, elem_bytes: u64) -> u64 {
        match saves_attention_output {
            true => self.qkv_elems * elem_bytes + self.delta_elems * size_of::<f32>() as u64,
            false => self.forward_elems * elem_bytes,
        }
    }
}

impl ExchangePlan {
    /// The volume of this rank i, with S tokens, Hq query heads and Hkv KV heads per rank, batch b and head
    /// dimensions D of queries and keys and V of values and output, which are the same except with latent attention:
    ///
    /// - forward `b·Σ_{j≠i} [S_i(D·(Hq_j + Hkv_j) + V·Hkv_j) + V·S_j·Hq_i]`, of which the first term is q, k and v
    /// - backward `b·Σ_{j≠i} [V·S_i·Hq_j + S_j(D·(Hq_i + Hkv_i) + V·Hkv_i)]`
    /// - `delta` `b·Σ_{j≠i} S_i·Hq_j`
    ///
    /// With V = D, even shards and equally many KV and query heads forward and backward are
    /// `4·b·(S/sp)·(sp−1)/sp·H·D`. The formula does not use the plan's blocks; tests compare it with them and
    /// with the backends' counters.
    pub fn volume(&self) -> ExchangeVolume {
        let (i, shape) = (self.rank(), self.shape());
        let seq = |rank: usize| self.seq_ranges()[rank].len();
        let (q, kv) = (|r: usize| self.q_head_ranges()[r].len(), |r: usize| self.kv_head_ranges()[r].len());
        let over_peers = |elems: &dyn Fn(usize) -> usize| {
            (0..self.seq_ranges().len()).filter(|&j| j != i).map(elems).sum::<usize>() as u64
        };
        let (batch, dim, value_dim) = (shape.batch as u64, shape.head_dim, shape.value_head_dim);
        let of_token = |rank: usize| dim * (q(rank) + kv(rank)) + value_dim * kv(rank);
        let qkv_elems = batch * over_peers(&|j| seq(i) * of_token(j));
        ExchangeVolume {
            forward_elems: qkv_elems + batch * over_peers(&|j| value_dim * seq(j) * q(i)),
            qkv_elems,
            backward_elems: batch * over_peers(&|j| value_dim * seq(i) * q(j) + seq(j) * of_token(i)),
            delta_elems: batch * over_peers(&|j| seq(i) * q(j)),
        }
    }
}

/// Elements that a ring rank sends to others for one layer and one micro batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RingVolume {
    /// Keys and values, in the forward pass and again in the backward pass.
    pub block_elems: u64,
    /// Gradients of keys and values, in f32.
    pub gradient_elems: u64,
}

impl RingVolume {
    /// The volume of ring rank `rank`, where `sees(i, j)` says whether a query of ring rank i sees a key of ring rank j.
    /// With T_j tokens on ring rank j, batch b, Hkv KV heads on this rank and head dimensions D of keys and V of values, in units of `b·Hkv·(D + V)`:
    ///
    /// - keys and values: every block is sent once per rank that sees it. If those are the n ranks after its owner, the
    ///   owner and the n − 1 ranks after it send T_j each; otherwise the owner sends them all
    /// - their gradients: T_j for every other rank j that this rank sees
    ///
    /// Tests compare it with the schedule and with the backends' counters.
    pub fn new(
        sharding: SeqSharding,
        rank: usize,
        shape: AttentionShape,
        sees: impl Fn(usize, usize) -> bool,
    ) -> Self {
        let ranks = sharding.ring_size;
        let tokens = |rank: usize| sharding.ring_tokens(shape.seq_len, rank).len();
        let sees_at = |owner: usize, distance: usize| sees((owner + distance) % ranks, owner);
        // Blocks by the distance of this rank from their owner.
        let sent_copies = |distance: usize| {
            let owner = (rank + ranks - distance) % ranks;
            let viewers = (1..ranks).filter(|&other| sees_at(owner, other)).count();
            let is_relayed = (1..=viewers).all(|other| sees_at(owner, other));
            let copies = match (is_relayed, distance) {
                (true, _) => usize::from(distance < viewers),
                (false, 0) => viewers,
                (false, _) => 0,
            };
            copies * tokens(owner)
        };
        let seen = (0..ranks).filter(|&owner| owner != rank && sees(rank, owner));
        let unit = shape.batch * shape.num_kv_heads * (shape.head_dim + shape.value_head_dim);
        Self {
            block_elems: (unit * (0..ranks).map(sent_copies).sum::<usize>()) as u64,
            gradient_elems: (unit * seen.map(tokens).sum::<usize>()) as u64,
        }
    }

    /// The volume of ring rank `rank` if every rank sees keys of every block, as in one causal document.
    pub fn causal(sharding: SeqSharding, rank: usize, shape: AttentionShape) -> Self {
        Self::new(sharding, rank, shape, |_, _| true)
    }
}
