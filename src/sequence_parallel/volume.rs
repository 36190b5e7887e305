//! Number of elements that an exchange sends, in closed form.

use super::ExchangePlan;

/// Elements that one rank sends to others for one layer and one micro batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ExchangeVolume {
    /// Forward: q, k, v to the heads, and the output back.
    pub forward_elems: u64,
    /// Backward: the output's gradient to the heads, and those of q, k and v back.
    pub backward_elems: u64,
}

impl ExchangeVolume {
    /// Sum of forward and backward; a recomputed layer sends its forward twice.
    pub fn total_elems(&self, recomputed: bool) -> u64 {
        (1 + u64::from(recomputed)) * self.forward_elems + self.backward_elems
    }
}

impl ExchangePlan {
    /// The volume of this rank i, with S tokens, Hq query heads and Hkv KV heads per rank, batch b and head
    /// dimension D:
    ///
    /// - forward `b·D·Σ_{j≠i} [S_i(Hq_j + 2·Hkv_j) + S_j·Hq_i]`
    /// - backward `b·D·Σ_{j≠i} [S_i·Hq_j + S_j(Hq_i + 2·Hkv_i)]`
    ///
    /// With even shards and equally many KV and query heads both are `4·b·(S/sp)·(sp−1)/sp·H·D`. The formula
    /// does not use the plan's blocks; tests compare it with them and with the backends' counters.
    pub fn volume(&self) -> ExchangeVolume {
        let (i, shape) = (self.rank(), self.shape());
        let seq = |rank: usize| self.seq_ranges()[rank].len();
        let (q, kv) = (|r: usize| self.q_head_ranges()[r].len(), |r: usize| self.kv_head_ranges()[r].len());
        let peers = || (0..self.seq_ranges().len()).filter(|&j| j != i);
        let unit = (shape.batch * shape.head_dim) as u64;
        let forward: usize = peers().map(|j| seq(i) * (q(j) + 2 * kv(j)) + seq(j) * q(i)).sum();
        let backward: usize = peers().map(|j| seq(i) * q(j) + seq(j) * (q(i) + 2 * kv(i))).sum();
        ExchangeVolume { forward_elems: unit * forward as u64, backward_elems: unit * backward as u64 }
    }
}
