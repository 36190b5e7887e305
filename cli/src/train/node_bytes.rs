//! Bytes that a rank sends within its node and between nodes, planned and measured.

use std::collections::BTreeMap;
use ulysses::mesh::RankHosts;
use ulysses::monitor::Volume;
use ulysses::zero::ZeroGroups;

/// Returns the bytes by node, planned and measured by global rank of the receiver. Empty if the backend does not count
/// the bytes to each rank.
pub(super) fn by_node(
    hosts: &RankHosts,
    rank: usize,
    planned: &BTreeMap<usize, u64>,
    sent: &BTreeMap<usize, u64>,
) -> Vec<Volume> {
    let sides = [("within nodes", true), ("between nodes", false)];
    let volume = |(what, is_within): (&str, bool)| {
        let bytes = |of: &BTreeMap<usize, u64>| {
            let is_on_side = |peer: &usize| (hosts.node_of(*peer) == hosts.node_of(rank)) == is_within;
            of.iter().filter(|(peer, _)| is_on_side(peer)).map(|(_, bytes)| bytes).sum()
        };
        let (planned_bytes, sent_bytes) = (bytes(planned), bytes(sent));
        Volume { what: what.to_owned(), planned: Vec::new(), planned_bytes, sent_bytes }
    };
    if sent.is_empty() { Vec::new() } else { sides.map(volume).to_vec() }
}

/// Returns the bytes that a rank has sent to each other rank over all its groups.
pub(super) fn sent_to(groups: &ZeroGroups) -> BTreeMap<usize, u64> {
    let mut sums = BTreeMap::new();
    for (_, group) in groups.by_axis() {
        for (peer, bytes) in group.global_ranks().iter().zip(group.sent_to()) {
            *sums.entry(*peer).or_default() += bytes;
        }
    }
    sums
}
