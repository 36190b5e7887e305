//! The collectives of a rank, planned and measured: calls, bytes, and bytes within its node and between nodes.

use super::prepared::PreparedJob;
use crate::comm::TrainingGroups;
use crate::estimate::{PlannedCalls, RankStep};
use crate::mesh::RankHosts;
use crate::monitor::{PlannedVolume, RankComms, RankSummary, Volume};
use crate::trainer::Trainer;
use std::collections::BTreeMap;

/// Returns a rank's collectives, measured and planned over the same steps and evaluations.
pub(super) fn measure(job: &PreparedJob, trainer: &Trainer<'_>, summary: &RankSummary) -> RankComms {
    let PreparedJob { config, mesh, model, .. } = job;
    let (engine, passes) = (trainer.engine(), trainer.data().passes());
    let (model, rank) = (&model.config, summary.rank);
    let sent = summary.groups.iter().flat_map(|(axis, stats)| {
        stats.ops.iter().map(|(op, counted)| (axis.clone(), *op, counted.bytes_sent))
    });
    let mut planned_to = BTreeMap::new();
    // Rows of flexible sequence parallelism have no plan.
    let planned: Vec<_> = passes
        .iter()
        .filter(|passes| passes.block_size.is_none())
        .flat_map(|passes| {
            let steps = passes.trained / config.gradient_accumulation_steps as u64;
            let config = config.clone().with_seq_len(passes.seq_len);
            let plans = [
                (steps, RankStep::of(&config, model, mesh, rank)),
                (passes.evaluated, RankStep::of_evaluation(&config, model, mesh, rank)),
            ];
            // Without a plan only the measured volume is reported.
            let plans: Vec<_> =
                plans.into_iter().filter_map(|(times, plan)| Some((times, plan.ok()?))).collect();
            for (times, plan) in &plans {
                plan.sent_to
                    .iter()
                    .for_each(|(peer, bytes)| *planned_to.entry(*peer).or_default() += times * bytes);
            }
            plans.into_iter().flat_map(|(times, plan)| {
                plan.collectives.into_iter().map(
                    move |PlannedCalls { axis, op, purpose, sent_bytes, .. }| PlannedVolume {
                        axis,
                        op,
                        purpose,
                        sent_bytes: times.saturating_mul(sent_bytes),
                    },
                )
            })
        })
        .collect();
    let sent_bytes = sent_to(engine.groups());
    let volumes = job.hosts.as_ref().map(|hosts| by_node(hosts, rank, &planned_to, &sent_bytes));
    RankComms {
        calls: engine.comm_calls(),
        each: engine.each_comm_call(),
        planned,
        sent: sent.collect(),
        by_node: volumes.unwrap_or_default(),
    }
}

/// Returns the bytes by node, planned and measured by global rank of the receiver. Empty if the backend does not count
/// the bytes to each rank.
fn by_node(
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
fn sent_to(groups: &TrainingGroups) -> BTreeMap<usize, u64> {
    let mut sums = BTreeMap::new();
    for (_, group) in groups.by_axis() {
        for (peer, bytes) in group.global_ranks().iter().zip(group.sent_to()) {
            *sums.entry(*peer).or_default() += bytes;
        }
    }
    sums
}
