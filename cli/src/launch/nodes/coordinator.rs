//! Node 0's decisions: who runs which ranks, who failed first, and whether the job starts once more.

use super::super::job_spec::JobSpec;
use super::super::restart::Cause;
use super::super::supervisor::Ended;
use super::super::training::{SmallerMesh, Variation};
use super::messages::{JobResult, NodeFailure, NodeInfo, StartPlan};
use super::{read, text};
use crate::output::log_line;
use std::collections::{BTreeMap, BTreeSet};
use std::net::TcpListener;
use ulysses::comm::store::{JobStore, LostNode, NodeEndpoint, NodeLoss, NodeStore};

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
    /// The store of the planned ranks, before they are started.
    rank_store: Option<JobStore>,
    failures: Failures,
}

/// The failures of a start.
#[derive(Default)]
struct Failures {
    lost: Vec<LostNode>,
    /// In the order of their arrival.
    reported: Vec<NodeFailure>,
    /// The ranks' own report: the first rank that failed, and how.
    first_rank: Option<usize>,
    by_ranks: Option<String>,
}

impl Failures {
    /// Notes the first report of a node, or one that allows no restart: its ranks may still run.
    fn note(&mut self, report: NodeFailure) {
        match self.reported.iter_mut().find(|earlier| earlier.node == report.node) {
            None => self.reported.push(report),
            Some(earlier) if report.final_exit_code.is_some() => *earlier = report,
            Some(_) => {}
        }
    }
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
            rank_store: None,
            failures: Failures::default(),
        }
    }

    /// Returns the number of the current start.
    fn start(&self) -> u32 {
        self.plan.as_ref().map_or(0, |plan| plan.variation.restarts())
    }

    pub(super) fn take_rank_store(&mut self) -> Option<JobStore> {
        self.rank_store.take()
    }

    /// Notes lost nodes and failures, and asks all nodes to stop after the first.
    pub(super) fn watch(&mut self, lost: &[LostNode], nodes: &mut NodeStore, rank_store: Option<&JobStore>) {
        for lost in lost {
            self.nodes.remove(&lost.node);
            if self.is_idle(lost.node) {
                let lost = self.describe(*lost);
                log_line(format_args!("launch: {lost}; it had no ranks, so the job continues"));
            } else {
                self.failures.lost.push(*lost);
            }
        }
        let start = self.start();
        for node in &self.nodes {
            if let Some(report) = read(nodes, &format!("failed/{start}/{node}")) {
                self.failures.note(report);
            }
        }
        if let Some(store) = rank_store {
            self.failures.first_rank = store.first_failed();
            self.failures.by_ranks = store.failure().map(str::to_owned);
        }
        let stop = format!("stop/{start}");
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
        let planned = match self.plan.clone() {
            None => self.first_plan(job, nodes),
            Some(last) => self.plan_after(&last, job, nodes),
        };
        let opened = planned.and_then(|plan| plan.map(|plan| self.open(plan, nodes)).transpose());
        match opened {
            Ok(None) => {}
            Ok(Some(plan)) => nodes.set(&format!("plan/{}", self.start()), &text(&plan)),
            Err(result) => nodes.set("result", &text(&result)),
        }
    }

    /// Returns the first plan; `None` before all nodes have reported.
    ///
    /// # Errors
    /// The end of the job, because nodes contradict each other, or have failed.
    fn first_plan(&mut self, job: &JobSpec, nodes: &NodeStore) -> Result<Option<StartPlan>, JobResult> {
        if let Some(reason) = self.failure() {
            return Err(JobResult::failed(reason));
        }
        let info = |node: &usize| Some((*node, read(nodes, &format!("node/{node}"))?));
        let infos: BTreeMap<usize, NodeInfo> = self.nodes.iter().filter_map(info).collect();
        if infos.len() < self.nodes.len() {
            return Ok(None);
        }
        let refused = infos.iter().find_map(|(node, info)| info.contradiction(*node, &infos[&0]));
        self.infos = infos;
        refused.map_or(Ok(()), Err).map_err(JobResult::refused)?;
        job.check_min_nodes(self.num_nodes, self.slots()).map_err(JobResult::refused)?;
        let mut variation = Variation::default();
        if self.nodes.len() < self.num_nodes {
            let fewer = job.on_fewer("node", self.slots()).map_err(JobResult::failed)?;
            let missing: Vec<usize> = (0..self.num_nodes).filter(|node| !self.nodes.contains(node)).collect();
            log_line(format_args!("launch: nodes {missing:?} did not join in time; the job starts{fewer}"));
            variation.smaller = fewer.mesh;
        }
        Ok(Some(StartPlan::new(self.ranks_on(variation.smaller), variation)))
    }

    /// Returns the next plan after a start; `None` before all nodes that are left have ended it.
    ///
    /// # Errors
    /// The end of the job, because all ranks are done, a signal stopped them, or no restart is possible.
    fn plan_after(
        &mut self,
        last: &StartPlan,
        job: &JobSpec,
        nodes: &NodeStore,
    ) -> Result<Option<StartPlan>, JobResult> {
        let ended = |node: &usize| read(nodes, &format!("ended/{}/{node}", self.start()));
        let Some(ended) = self.nodes.iter().map(ended).collect::<Option<Vec<Ended>>>() else {
            return Ok(None);
        };
        let stopped = ended.iter().filter_map(|ended| match ended {
            Ended::Stopped(exit_code) => Some(*exit_code),
            _ => None,
        });
        // 75 is the smallest: a rank has saved.
        if let Some(exit_code) = stopped.min() {
            return Err(JobResult::stopped(exit_code));
        }
        let Some(reason) = self.failure() else { return Err(JobResult::stopped(0)) };
        let mut reported = self.failures.reported.iter();
        if let Some((exit_code, text)) =
            reported.find_map(|report| Some((report.final_exit_code?, &report.text)))
        {
            let message = if reason.contains(text) { reason } else { format!("{reason}; {text}") };
            return Err(JobResult { exit_code, message });
        }
        let (mut fewer, mut ranks) = (None, last.ranks.clone());
        if !self.failures.lost.is_empty() {
            let left = job.on_fewer("node", self.slots());
            let left = left.map_err(|why| JobResult::failed(format!("{reason}; {why}")))?;
            (fewer, ranks) = (Some(left), self.ranks_on(left.mesh));
        }
        let variation = job.restart(self.cause(reason), fewer, &last.variation).map_err(JobResult::failed)?;
        self.failures = Failures::default();
        Ok(Some(StartPlan::new(ranks, variation)))
    }

    /// Returns the number of ranks that each node that is left may run.
    fn slots(&self) -> impl ExactSizeIterator<Item = usize> {
        self.nodes.iter().map(|node| self.infos[node].num_processes)
    }

    /// Returns the number of ranks of each node that is left: as many as it may run, or as a smaller mesh needs.
    fn ranks_on(&self, mesh: Option<SmallerMesh>) -> BTreeMap<usize, usize> {
        let ranks: Vec<usize> = match mesh {
            Some(mesh) => mesh.fill(self.slots()).collect(),
            None => self.slots().collect(),
        };
        self.nodes.iter().copied().zip(ranks).filter(|(_, ranks)| *ranks > 0).collect()
    }

    fn cause(&self, text: String) -> Cause {
        let Failures { lost, first_rank, .. } = &self.failures;
        let host = |lost: &LostNode| Some(self.infos.get(&lost.node)?.host.clone());
        let failed_rank = match lost.is_empty() {
            true => first_rank.or(self.first_report().and_then(|failure| failure.rank)),
            false => None,
        };
        Cause { text, failed_rank, lost_hosts: lost.iter().filter_map(host).collect() }
    }

    /// Opens the store of the planned ranks, and completes the plan with its port.
    fn open(&mut self, mut plan: StartPlan, nodes: &NodeStore) -> Result<StartPlan, JobResult> {
        let (world_size, secret) = (plan.ranks.values().sum(), nodes.rank_secret(&plan.nonce));
        let store = JobStore::listen(&self.host, nodes.bind(), world_size, &secret).map_err(|error| {
            JobResult::failed(format!("cannot open the store of the ranks at {}: {error}", self.host))
        })?;
        plan.store_port = store.port();
        plan.master_port = free_port().map_err(|error| JobResult::failed(error.to_string()))?;
        self.rank_store = Some(store);
        self.plan = Some(plan.clone());
        Ok(plan)
    }

    /// Describes the root cause. The loss of a node explains failures of ranks elsewhere; among those, ranks tell each
    /// other which was first, and otherwise the first report counts.
    fn failure(&self) -> Option<String> {
        let Failures { lost, by_ranks, .. } = &self.failures;
        if let Some(lost) = lost.first() {
            return Some(self.describe(*lost));
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

    fn describe(&self, LostNode { node, loss }: LostNode) -> String {
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

/// Returns a port for PyTorch programs, which meet at their own. Nothing on this machine uses it.
fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind(("0.0.0.0", 0))?.local_addr()?.port())
}

#[cfg(test)]
mod tests {
    use super::super::super::training::tests::training;
    use super::*;
    use serde_json::json;

    fn failure(node: usize, rank: usize) -> NodeFailure {
        NodeFailure { node, rank: Some(rank), text: format!("rank {rank} ended"), final_exit_code: None }
    }

    #[test]
    fn the_root_cause_is_a_lost_node_or_the_rank_that_others_blame_or_the_first_report() {
        let mut coordinator = coordinator(&[]);
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
        coordinator.failures.lost = vec![LostNode { node: 2, loss: NodeLoss::Silent }];
        let lost = "node 2 (host unknown, ranks 4 to 5) sent no heartbeat";
        assert_eq!(coordinator.failure().unwrap(), lost);
    }

    /// Node 0 of three, of which some are missing.
    fn coordinator(missing: &[usize]) -> Coordinator {
        let endpoint = NodeEndpoint { host: "127.0.0.1".into(), port: 1, node: 0, num_nodes: 3 };
        Coordinator::new(&endpoint, &missing.iter().copied().collect())
    }

    #[test]
    fn a_start_without_a_node_has_the_next_smaller_mesh() {
        let (mut nodes, place) = (NodeStore::alone().unwrap(), tempfile::tempdir().unwrap());
        let batch = json!({ "train_micro_batch_size_per_gpu": 1 });
        let training = Some(training(&place, batch, &["--mesh", "3x2"]));
        let job = JobSpec {
            program: "ulysses".into(),
            arguments: Vec::new(),
            training,
            max_restarts: 0,
            min_nodes: 2,
        };
        let mut coordinator = coordinator(&[1]);
        nodes.set("node/0", &text(&NodeInfo::new(&job, 2)));
        assert_eq!(coordinator.first_plan(&job, &nodes), Ok(None), "node 2 has joined, but not yet reported");
        nodes.set("node/2", &text(&NodeInfo::new(&job, 2)));
        let plan = coordinator.first_plan(&job, &nodes).unwrap().unwrap();
        assert_eq!(plan.ranks, BTreeMap::from([(0, 2), (2, 2)]));
        assert_eq!(plan.variation.smaller.unwrap().to_string(), "2x2");
        assert_eq!(plan.variation.restart, None, "nothing has been started before");
    }

    #[test]
    fn the_loss_of_a_node_without_ranks_is_no_failure() {
        let (mut nodes, mut coordinator) = (NodeStore::alone().unwrap(), coordinator(&[]));
        let ranks = BTreeMap::from([(0, 2), (1, 2)]);
        coordinator.plan = Some(StartPlan::new(ranks, Variation::default()));
        coordinator.watch(&[LostNode { node: 2, loss: NodeLoss::Ended }], &mut nodes, None);
        assert_eq!((coordinator.failure(), nodes.get("stop/0")), (None, None));
        assert_eq!(coordinator.nodes, BTreeSet::from([0, 1]), "no restart counts on it");
        coordinator.watch(&[LostNode { node: 1, loss: NodeLoss::Ended }], &mut nodes, None);
        let stop = nodes.get("stop/0").unwrap();
        assert!(stop.contains("node 1 (host unknown, ranks 2 to 3) left the job"), "{stop}");
    }

    #[test]
    fn a_node_whose_ranks_cannot_be_ended_is_not_restarted() {
        let (mut nodes, mut coordinator) = (NodeStore::alone().unwrap(), coordinator(&[]));
        let job = JobSpec {
            program: "sh".into(),
            arguments: Vec::new(),
            training: None,
            max_restarts: 5,
            min_nodes: 3,
        };
        nodes.set("failed/0/0", &text(&failure(0, 1)));
        nodes.set("failed/0/1", &text(&failure(1, 2)));
        coordinator.watch(&[], &mut nodes, None);
        assert_eq!(nodes.get("stop/0").unwrap(), "rank 1 ended");
        let hangs = "node 1 (n1): processes [7] have not ended";
        let report = NodeFailure { node: 1, rank: None, text: hangs.to_owned(), final_exit_code: Some(1) };
        nodes.set("failed/0/1", &text(&report));
        (0..3).for_each(|node| nodes.set(&format!("ended/0/{node}"), &text(&Ended::Failed)));
        coordinator.watch(&[], &mut nodes, None);
        let plan = StartPlan::new(BTreeMap::from([(0, 2), (1, 2), (2, 2)]), Variation::default());
        let result = coordinator.plan_after(&plan, &job, &nodes);
        assert_eq!(result, Err(JobResult::failed(format!("rank 1 ended; {hangs}"))));
    }
}
