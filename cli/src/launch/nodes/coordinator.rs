//! Node 0's decisions: who runs which ranks, who failed first, and whether the job starts once more.

use super::super::job_spec::{FewerNodes, JobSpec};
use super::super::ranks::free_port;
use super::super::restart::Cause;
use super::super::training::{SmallerMesh, Variation};
use super::messages::{Ended, JobResult, NodeFailure, NodeInfo, StartPlan};
use super::{read, text};
use crate::output::log_line;
use anyhow::Context;
use std::collections::{BTreeMap, BTreeSet};
use ulysses::comm::store::{JobStore, NodeEndpoint, NodeLoss, NodeStore};

/// Node 0's view of the job.
pub(super) struct Coordinator {
    /// This machine, as the other nodes know it.
    host: String,
    /// Number of nodes of the whole job.
    num_nodes: usize,
    /// The nodes that are left.
    nodes: BTreeSet<usize>,
    /// The nodes' messages about themselves; empty until all nodes have reported.
    infos: BTreeMap<usize, NodeInfo>,
    /// The last start that was planned.
    plan: Option<StartPlan>,
    restarts: u32,
    /// The store of the planned ranks, before they are started.
    rank_store: Option<JobStore>,
    failures: Failures,
}

/// The failures of a start.
#[derive(Default)]
struct Failures {
    lost: Vec<(usize, NodeLoss)>,
    /// In the order of their arrival.
    reported: Vec<NodeFailure>,
    /// The ranks' own report: the first rank that failed, and how.
    first_rank: Option<usize>,
    by_ranks: Option<String>,
}

impl Coordinator {
    /// `missing` are the nodes that did not join.
    pub(super) fn new(endpoint: &NodeEndpoint, missing: &BTreeSet<usize>) -> Self {
        Self {
            host: endpoint.host.clone(),
            num_nodes: endpoint.num_nodes,
            nodes: (0..endpoint.num_nodes).filter(|node| !missing.contains(node)).collect(),
            infos: BTreeMap::new(),
            plan: None,
            restarts: 0,
            rank_store: None,
            failures: Failures::default(),
        }
    }

    pub(super) fn take_rank_store(&mut self) -> Option<JobStore> {
        self.rank_store.take()
    }

    /// Notes lost nodes and failures, and asks all nodes to stop after the first.
    pub(super) fn watch(
        &mut self,
        lost: &[(usize, NodeLoss)],
        nodes: &mut NodeStore,
        rank_store: Option<&JobStore>,
    ) {
        for (node, loss) in lost {
            self.nodes.remove(node);
            if self.is_idle(*node) {
                let lost = self.describe_loss(*node, *loss);
                log_line(format_args!("launch: {lost}; it had no ranks, so the job continues"));
            } else {
                self.failures.lost.push((*node, *loss));
            }
        }
        for node in self.nodes.clone() {
            let is_new = self.failures.reported.iter().all(|failure| failure.node != node);
            let reported = read(nodes, &format!("failed/{}/{node}", self.restarts)).filter(|_| is_new);
            self.failures.reported.extend(reported);
        }
        if let Some(store) = rank_store {
            self.failures.first_rank = store.first_failed();
            self.failures.by_ranks = store.failure().map(str::to_owned);
        }
        let stop = format!("stop/{}", self.restarts);
        if nodes.get(&stop).is_none()
            && let Some(reason) = self.failure()
        {
            nodes.set(&stop, &reason);
        }
    }

    /// Returns whether a node has no ranks because the mesh has become smaller.
    fn is_idle(&self, node: usize) -> bool {
        self.plan.as_ref().is_some_and(|plan| !plan.ranks.contains_key(&node))
    }

    /// Plans the next start, or ends the job, once all nodes have reported.
    pub(super) fn decide(&mut self, job: &JobSpec, nodes: &mut NodeStore) {
        let decided = match &self.plan {
            None => self.first_plan(job, nodes),
            Some(plan) => self.after(&plan.clone(), job, nodes),
        };
        let plan = match decided {
            None => return,
            Some(Ok(plan)) => plan,
            Some(Err(result)) => return nodes.set("result", &text(&result)),
        };
        match self.open(plan, nodes) {
            Ok(plan) => nodes.set(&format!("plan/{}", self.restarts), &text(&plan)),
            Err(error) => nodes.set("result", &text(&JobResult::failed(format!("{error:#}")))),
        }
    }

    /// Returns the first plan, or why the nodes contradict each other; `None` before all nodes have reported.
    fn first_plan(&mut self, job: &JobSpec, nodes: &NodeStore) -> Option<Result<StartPlan, JobResult>> {
        if let Some(reason) = self.failure() {
            return Some(Err(JobResult::failed(reason)));
        }
        let infos: BTreeMap<usize, NodeInfo> = self
            .nodes
            .iter()
            .filter_map(|node| Some((*node, read(nodes, &format!("node/{node}"))?)))
            .collect();
        if infos.len() < self.nodes.len() {
            return None;
        }
        let refused = infos.iter().find_map(|(node, info)| info.contradiction(*node, &infos[&0]));
        self.infos = infos;
        if let Some(refused) = refused {
            return Some(Err(JobResult::refused(refused)));
        }
        let ranks = self.offered();
        if job.min_nodes < self.num_nodes {
            let fewest = ranks.values().take(job.min_nodes).sum();
            if let Err(message) = job.smaller_mesh(fewest) {
                return Some(Err(JobResult::refused(format!("--min-nodes {}: {message}", job.min_nodes))));
            }
        }
        if self.nodes.len() == self.num_nodes {
            return Some(Ok(StartPlan::new(ranks, Variation::default())));
        }
        Some(self.on_fewer(job).map_err(JobResult::failed).map(|(ranks, fewer)| {
            let missing: Vec<usize> = (0..self.num_nodes).filter(|node| !self.nodes.contains(node)).collect();
            log_line(format_args!("launch: nodes {missing:?} did not join in time; the job starts{fewer}"));
            StartPlan::new(ranks, Variation { smaller: fewer.mesh, ..Variation::default() })
        }))
    }

    /// Returns the next plan after a start, or the end of the job; `None` before all nodes that are left have ended it.
    fn after(
        &mut self,
        last: &StartPlan,
        job: &JobSpec,
        nodes: &NodeStore,
    ) -> Option<Result<StartPlan, JobResult>> {
        let ended: Option<Vec<Ended>> =
            self.nodes.iter().map(|node| read(nodes, &format!("ended/{}/{node}", self.restarts))).collect();
        let ended = ended?;
        let stopped = ended.iter().filter_map(|ended| match ended {
            Ended::Stopped(exit_code) => Some(*exit_code),
            _ => None,
        });
        // 75 is the smallest: a rank has saved.
        if let Some(exit_code) = stopped.min() {
            return Some(Err(JobResult::stopped(exit_code)));
        }
        let Some(reason) = self.failure() else { return Some(Err(JobResult::done())) };
        if self.failures.reported.iter().any(|failure| failure.is_usage) {
            return Some(Err(JobResult::refused(reason)));
        }
        Some(self.restart(last, reason, job).map_err(JobResult::failed))
    }

    /// Plans a restart on the nodes that are left.
    ///
    /// # Errors
    /// Why the job cannot continue.
    fn restart(&mut self, last: &StartPlan, reason: String, job: &JobSpec) -> Result<StartPlan, String> {
        let (mut variation, mut ranks) = (last.variation.clone(), last.ranks.clone());
        let mut fewer = None;
        if !self.failures.lost.is_empty() {
            let (left, nodes) = self.on_fewer(job).map_err(|why| format!("{reason}; {why}"))?;
            (ranks, fewer) = (left, Some(nodes));
        }
        job.restart(self.cause(reason), fewer, &mut self.restarts, &mut variation)?;
        self.failures = Failures::default();
        Ok(StartPlan::new(ranks, variation))
    }

    /// Returns the ranks of the nodes that are left, with their mesh.
    ///
    /// # Errors
    /// Why the job cannot run on them.
    fn on_fewer(&self, job: &JobSpec) -> Result<(BTreeMap<usize, usize>, FewerNodes), String> {
        let offered = self.offered();
        let fewer = job.on_fewer("node", offered.values().copied())?;
        let ranks = fewer.mesh.map_or_else(|| offered.clone(), |mesh| first_ranks(&offered, mesh));
        Ok((ranks, fewer))
    }

    /// Returns the number of processes of each node that is left.
    fn offered(&self) -> BTreeMap<usize, usize> {
        self.nodes.iter().map(|node| (*node, self.infos[node].num_processes)).collect()
    }

    fn cause(&self, text: String) -> Cause {
        let Failures { lost, first_rank, .. } = &self.failures;
        let host = |(node, _): &(usize, NodeLoss)| Some(self.infos.get(node)?.host.clone());
        let failed_rank = match lost.is_empty() {
            true => first_rank.or(self.first_report().and_then(|failure| failure.rank)),
            false => None,
        };
        Cause { text, failed_rank, lost_hosts: lost.iter().filter_map(host).collect() }
    }

    /// Opens the store of the planned ranks.
    fn open(&mut self, mut plan: StartPlan, nodes: &NodeStore) -> anyhow::Result<StartPlan> {
        let secret = nodes.rank_secret(&plan.nonce);
        let world_size = plan.ranks.values().sum();
        let store = JobStore::listen_for_nodes(&self.host, nodes.bind(), world_size, secret);
        let store = store.with_context(|| format!("cannot open the store of the ranks at {}", self.host))?;
        (plan.store_port, plan.master_port) = (store.port(), free_port()?);
        self.rank_store = Some(store);
        self.plan = Some(plan.clone());
        Ok(plan)
    }

    /// Describes the root cause. The loss of a node explains failures of ranks elsewhere; among those, ranks tell each
    /// other which was first, and otherwise the first report counts.
    fn failure(&self) -> Option<String> {
        let Failures { lost, by_ranks, .. } = &self.failures;
        if let Some((node, loss)) = lost.first() {
            return Some(self.describe_loss(*node, *loss));
        }
        let text = &self.first_report()?.text;
        Some(match by_ranks {
            Some(by_ranks) if !text.contains(by_ranks.as_str()) => {
                format!("{text}; reported failure: {by_ranks}")
            }
            _ => text.clone(),
        })
    }

    /// Returns the report of the rank that the ranks name as the first, or the first report.
    fn first_report(&self) -> Option<&NodeFailure> {
        let Failures { reported, first_rank, .. } = &self.failures;
        let named = reported.iter().find(|failure| failure.rank.is_some() && failure.rank == *first_rank);
        named.or_else(|| reported.first())
    }

    fn describe_loss(&self, node: usize, loss: NodeLoss) -> String {
        let host = self.infos.get(&node).map_or("host unknown", |info| &info.host);
        let ranks = self.plan.as_ref().and_then(|plan| {
            let first: usize = plan.ranks.range(..node).map(|(_, count)| count).sum();
            Some(format!(", ranks {first} to {}", first + plan.ranks.get(&node)? - 1))
        });
        let why = match loss {
            NodeLoss::Silent => "sent no heartbeat",
            NodeLoss::Ended => "left the job: its launcher ended",
        };
        format!("node {node} ({host}{}) {why}", ranks.unwrap_or_default())
    }
}

/// Returns the ranks of a smaller mesh: each node runs as many as it offers, the last ones perhaps none.
fn first_ranks(offered: &BTreeMap<usize, usize>, mesh: SmallerMesh) -> BTreeMap<usize, usize> {
    let mut left = mesh.sizes.num_ranks();
    let take = |(node, count): (&usize, &usize)| {
        let taken = left.min(*count);
        left -= taken;
        (taken > 0).then_some((*node, taken))
    };
    offered.iter().filter_map(take).collect()
}

#[cfg(test)]
mod tests {
    use super::super::super::training::tests::training;
    use super::*;
    use serde_json::json;
    use std::time::Duration;
    use ulysses::mesh::MeshShape;

    fn failure(node: usize, rank: usize) -> NodeFailure {
        NodeFailure { node, rank: Some(rank), text: format!("rank {rank} ended"), is_usage: false }
    }

    #[test]
    fn the_root_cause_is_a_lost_node_or_the_rank_that_others_blame_or_the_first_report() {
        let endpoint = NodeEndpoint { host: "n0".into(), port: 1, node: 0, num_nodes: 3 };
        let mut coordinator = Coordinator::new(&endpoint, &BTreeSet::new());
        assert_eq!(coordinator.failure(), None);
        coordinator.failures.reported = vec![failure(0, 1), failure(1, 2)];
        assert_eq!(coordinator.failure().unwrap(), "rank 1 ended");
        coordinator.failures.first_rank = Some(2);
        assert_eq!(coordinator.failure().unwrap(), "rank 2 ended");
        coordinator.failures.by_ranks = Some("rank 2 failed: out of memory".to_owned());
        let reported = "rank 2 ended; reported failure: rank 2 failed: out of memory";
        assert_eq!(coordinator.failure().unwrap(), reported);
        let ranks = BTreeMap::from([(0, 2), (1, 2), (2, 2)]);
        coordinator.plan = Some(StartPlan::new(ranks, Variation::default()));
        coordinator.failures.lost = vec![(2, NodeLoss::Silent)];
        let lost = "node 2 (host unknown, ranks 4 to 5) sent no heartbeat";
        assert_eq!(coordinator.failure().unwrap(), lost);
    }

    /// Returns the endpoint of a job that has only node 0, and its store.
    fn alone() -> (NodeEndpoint, NodeStore) {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let alone = NodeEndpoint { host: "127.0.0.1".into(), port: free.port(), node: 0, num_nodes: 1 };
        let timeout = Duration::from_secs(10);
        let nodes = NodeStore::meet(&alone, 1, |_| None, timeout, timeout).unwrap();
        (alone, nodes)
    }

    #[test]
    fn a_start_without_a_node_has_the_next_smaller_mesh() {
        let ((alone, mut nodes), place) = (alone(), tempfile::tempdir().unwrap());
        let batch = json!({ "train_micro_batch_size_per_gpu": 1 });
        let training = Some(training(&place, batch, &["--mesh", "3x2"]));
        let job = JobSpec {
            program: "ulysses".into(),
            arguments: Vec::new(),
            training,
            max_restarts: 0,
            min_nodes: 2,
            grace: Duration::ZERO,
            logs: None,
            memory: None,
        };
        let endpoint = NodeEndpoint { num_nodes: 3, ..alone };
        let mut coordinator = Coordinator::new(&endpoint, &BTreeSet::from([1]));
        nodes.set("node/0", &text(&NodeInfo::new(&job, 2)));
        assert!(coordinator.first_plan(&job, &nodes).is_none(), "node 2 has joined, but not yet reported");
        nodes.set("node/2", &text(&NodeInfo::new(&job, 2)));
        let plan = coordinator.first_plan(&job, &nodes).unwrap().unwrap();
        assert_eq!(plan.ranks, BTreeMap::from([(0, 2), (2, 2)]));
        assert_eq!(plan.variation.smaller.unwrap().to_string(), "2x2");
        assert_eq!(plan.variation.restart, None, "nothing has been started before");
    }

    #[test]
    fn the_loss_of_a_node_without_ranks_is_no_failure() {
        let (alone, mut nodes) = alone();
        let mut coordinator = Coordinator::new(&NodeEndpoint { num_nodes: 3, ..alone }, &BTreeSet::new());
        let ranks = BTreeMap::from([(0, 2), (1, 2)]);
        coordinator.plan = Some(StartPlan::new(ranks, Variation::default()));
        coordinator.watch(&[(2, NodeLoss::Ended)], &mut nodes, None);
        assert_eq!((coordinator.failure(), nodes.get("stop/0")), (None, None));
        assert_eq!(coordinator.nodes, BTreeSet::from([0, 1]), "no restart counts on it");
        coordinator.watch(&[(1, NodeLoss::Ended)], &mut nodes, None);
        let stop = nodes.get("stop/0").unwrap();
        assert!(stop.contains("node 1 (host unknown, ranks 2 to 3) left the job"), "{stop}");
    }

    #[test]
    fn a_smaller_mesh_takes_the_first_ranks() {
        let mesh = |dp, sp| SmallerMesh {
            sizes: MeshShape::dp_sp(dp, sp),
            ring_size: None,
            shard_size: None,
            replaces_key: false,
            batch_size: 4,
            micro_batch_size: 1,
        };
        let offered = BTreeMap::from([(0, 2), (2, 2), (3, 2)]);
        assert_eq!(first_ranks(&offered, mesh(2, 2)), BTreeMap::from([(0, 2), (2, 2)]));
        assert_eq!(first_ranks(&offered, mesh(1, 3)), BTreeMap::from([(0, 2), (2, 1)]));
    }
}
