//! The nodes of a rank's peers.

use crate::config::Config;
use crate::engine::EngineError;
use crate::estimate::event::{Axis, Transfer};
use crate::mesh::{
    DeviceMesh, MeshError, PP_AXIS, REPLICAS_AXIS, RING_AXIS, SHARD_AXIS, TOKENS_AXIS, TP_AXIS, ULYSSES_AXIS,
};
use serde::Serialize;
use std::collections::BTreeMap;

/// Bytes that a rank sends per step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct SentBytes {
    /// To ranks of its own node.
    pub intra_node_bytes: u64,
    /// To ranks of other nodes.
    pub inter_node_bytes: u64,
}

impl SentBytes {
    /// Returns the total.
    pub fn total(self) -> u64 {
        self.intra_node_bytes + self.inter_node_bytes
    }

    /// Adds `other` `times` times; `None` on overflow.
    pub(super) fn add(&mut self, other: Self, times: u64) -> Option<()> {
        let added = |sum: u64, bytes: u64| sum.checked_add(bytes.checked_mul(times)?);
        self.intra_node_bytes = added(self.intra_node_bytes, other.intra_node_bytes)?;
        self.inter_node_bytes = added(self.inter_node_bytes, other.inter_node_bytes)?;
        // The total must not overflow either.
        self.intra_node_bytes.checked_add(self.inter_node_bytes).map(|_| ())
    }
}

/// Members of a rank's groups that share its node.
pub(super) struct Nodes {
    own_node: usize,
    ranks_per_node: usize,
    dp: Vec<usize>,
    sp: Vec<usize>,
    /// The groups of partitions and of replicas, if they are not dp and sp.
    sharding: Option<[Vec<usize>; 2]>,
    ring: Vec<usize>,
    ulysses: Vec<usize>,
    tp: Vec<usize>,
    tokens: Vec<usize>,
    pp: Vec<usize>,
    /// The first and the last of `pp`.
    tied: Vec<usize>,
}

impl Nodes {
    pub(super) fn new(
        mesh: &DeviceMesh,
        config: &Config,
        rank: usize,
        ranks_per_node: usize,
    ) -> Result<Self, EngineError> {
        let ranks_per_node = ranks_per_node.max(1);
        let (dp, sp) = (mesh.group_of("dp", rank)?, mesh.group_of("sp", rank)?);
        let sharded = config.zero_shards().map(|shape| mesh.sharded(shape)).transpose()?;
        let sharding = sharded.map(|mesh| -> Result<_, MeshError> {
            Ok([mesh.group_of(SHARD_AXIS, rank)?, mesh.group_of(REPLICAS_AXIS, rank)?])
        });
        let (tp, tokens) = match mesh.has_axis(TP_AXIS) {
            true => {
                let flat = mesh.flatten(&["sp", TP_AXIS], TOKENS_AXIS)?;
                (mesh.group_of(TP_AXIS, rank)?, flat.group_of(TOKENS_AXIS, rank)?)
            }
            false => (vec![rank], sp.clone()),
        };
        let pp = match mesh.has_axis(PP_AXIS) {
            true => mesh.group_of(PP_AXIS, rank)?,
            false => vec![rank],
        };
        let within_sp = mesh.ring(config.seq_sharding().ring_size)?;
        Ok(Self {
            own_node: rank / ranks_per_node,
            ranks_per_node,
            dp,
            sp,
            sharding: sharding.transpose()?,
            ring: within_sp.group_of(RING_AXIS, rank)?,
            ulysses: within_sp.group_of(ULYSSES_AXIS, rank)?,
            tp,
            tokens,
            tied: pp.iter().take(1).chain(pp.last()).copied().collect(),
            pp,
        })
    }

    fn members(&self, axis: Axis) -> &[usize] {
        match (axis, &self.sharding) {
            (Axis::Shard, Some([shard, _])) => shard,
            (Axis::Replicas, Some([_, replicas])) => replicas,
            (Axis::Dp | Axis::Shard, _) => &self.dp,
            (Axis::Sp | Axis::Replicas, _) => &self.sp,
            (Axis::Ring, _) => &self.ring,
            (Axis::Ulysses, _) => &self.ulysses,
            (Axis::Tp, _) => &self.tp,
            (Axis::Tokens, _) => &self.tokens,
            (Axis::Pp, _) => &self.pp,
            (Axis::Tied, _) => &self.tied,
        }
    }

    /// Adds the bytes that a transfer sends to each rank, `times` times; `None` on overflow.
    pub(super) fn add_sent_to(
        &self,
        sent_to: &mut BTreeMap<usize, u64>,
        transfer: &Transfer,
        times: u64,
    ) -> Option<()> {
        for (member, bytes) in self.members(transfer.axis).iter().zip(&*transfer.sent_to) {
            let sum = sent_to.entry(*member).or_default();
            *sum = sum.checked_add(bytes.checked_mul(times)?)?;
        }
        Some(())
    }

    pub(super) fn sent(&self, transfer: &Transfer) -> SentBytes {
        let mut sent = SentBytes::default();
        for (member, bytes) in self.members(transfer.axis).iter().zip(&*transfer.sent_to) {
            if member / self.ranks_per_node == self.own_node {
                sent.intra_node_bytes += bytes;
            } else {
                sent.inter_node_bytes += bytes;
            }
        }
        sent
    }
}
