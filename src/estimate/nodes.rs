//! The nodes of a rank's peers.

use crate::comm::TrainingGroups;
use crate::estimate::event::{Axis, Transfer};
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

/// The nodes of the members of a rank's groups.
pub(super) struct Nodes {
    own_node: usize,
    ranks_per_node: usize,
    groups: TrainingGroups,
}

impl Nodes {
    pub(super) fn new(groups: TrainingGroups, rank: usize, ranks_per_node: usize) -> Self {
        let ranks_per_node = ranks_per_node.max(1);
        Self { own_node: rank / ranks_per_node, ranks_per_node, groups }
    }

    /// Global ranks of the group along an axis; none if there is no such group.
    fn members(&self, axis: Axis) -> &[usize] {
        let TrainingGroups { dp, sp, sharding, ring, tensor, pipeline, .. } = &self.groups;
        let group = match axis {
            Axis::Dp => Some(dp),
            Axis::Sp => Some(sp),
            Axis::Shard => sharding.as_ref().map(|groups| &groups.shard),
            Axis::Replicas => sharding.as_ref().map(|groups| &groups.replicas),
            Axis::Ring => ring.as_ref().map(|groups| &groups.ring),
            Axis::Ulysses => ring.as_ref().map(|groups| &groups.ulysses),
            Axis::Tp => tensor.as_ref().map(|groups| &groups.tp),
            Axis::Tokens => tensor.as_ref().map(|groups| &groups.tokens),
            Axis::Pp => pipeline.as_ref().map(|groups| &groups.pp),
            Axis::Tied => pipeline.as_ref().and_then(|groups| groups.tied.as_ref()),
        };
        group.map_or(&[], |group| group.global_ranks())
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
