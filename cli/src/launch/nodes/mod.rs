//! Jobs on several machines whose ranks `launch` starts itself, with one launcher on each machine (torchrun's agents).
//!
//! The launchers meet in a store that node 0 hosts. Node 0 plans each start (`coordinator.rs`): which node runs which
//! ranks, and on which mesh. Each launcher starts its ranks, reports the first that fails and how all ended, and stops
//! its ranks when node 0 says that another node failed. When all have ended, node 0 plans the next start or the end.
//!
//! Keys: `node/N` the host, number of processes and settings of node N; `plan/K` start K; `failed/K/N` the first failed
//! rank of node N; `stop/K` the reason to stop all ranks; `ended/K/N` how the ranks of node N ended; `result` the result
//! of the job.

mod coordinator;
mod messages;

use super::job::{OtherNodes, Outcome};
use super::job_spec::JobSpec;
use super::rank_failure::RankFailure;
use super::ranks::NodeRanks;
use super::signals::Signals;
use crate::failure::{Failure, OrFail};
use crate::output::log_line;
use anyhow::{Context, anyhow};
use coordinator::Coordinator;
use messages::{Ended, JobResult, NodeFailure, NodeInfo, StartPlan};
use serde::{Serialize, de::DeserializeOwned};
use std::time::Duration;
use ulysses::comm::store::{JobStore, NodeEndpoint, NodeLoss, NodeStore, store_environment};

/// Interval of polling the store between two starts.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Where the launchers of a job meet.
pub(super) struct Meeting {
    pub(super) endpoint: NodeEndpoint,
    pub(super) join_timeout: Duration,
    /// Silence after which a node is lost.
    pub(super) max_silence: Duration,
}

/// Runs this node's part of a job, with `num_processes` ranks.
pub(super) fn run(job: &JobSpec, meeting: &Meeting, num_processes: usize) -> Result<(), Failure> {
    let mut node = Node::join(job, meeting, num_processes)?;
    let signals = Signals::watch().context("cannot handle signals").or_run()?;
    let result = node.run(&signals);
    if let Ok(result) = &result {
        node.conclude(result);
    }
    node.store.close();
    result?.into_result()
}

/// A launcher's view of the job.
struct Node<'a> {
    job: &'a JobSpec,
    store: NodeStore,
    endpoint: NodeEndpoint,
    host_name: String,
    /// The number of the current start.
    start: u32,
    /// On node 0.
    coordinator: Option<Coordinator>,
    /// Node 0 is lost.
    is_alone: Option<NodeLoss>,
}

impl<'a> Node<'a> {
    /// Meets the launchers of the other nodes.
    fn join(job: &'a JobSpec, meeting: &Meeting, num_processes: usize) -> Result<Self, Failure> {
        let endpoint = meeting.endpoint.clone();
        let lookup = |name: &str| std::env::var(name).ok();
        let store =
            NodeStore::meet(&endpoint, job.min_nodes, lookup, meeting.join_timeout, meeting.max_silence);
        let mut store = store.map_err(|why| anyhow!("cannot join the job: {why}")).or_run()?;
        let info = NodeInfo::new(job, num_processes);
        let coordinator = (endpoint.node == 0).then(|| Coordinator::new(&endpoint, store.missing()));
        store.set(&format!("node/{}", endpoint.node), &text(&info));
        let host_name = info.host;
        Ok(Self { job, store, endpoint, host_name, start: 0, coordinator, is_alone: None })
    }

    fn run(&mut self, signals: &Signals) -> Result<JobResult, Failure> {
        loop {
            let Some(plan) = self.next_plan(signals)? else { return self.result() };
            let outcome = self.run_ranks(&plan, signals)?;
            if self.is_alone.is_some() {
                return self.result();
            }
            let ended = Ended::from(outcome);
            self.store.set(&format!("ended/{}/{}", self.start, self.endpoint.node), &text(&ended));
            self.start += 1;
        }
    }

    /// Waits for the plan of the next start; `None` if the job has ended.
    fn next_plan(&mut self, signals: &Signals) -> Result<Option<StartPlan>, Failure> {
        loop {
            self.exchange(None);
            if let Some(signal) = signals.take().first() {
                // No rank runs.
                let exit_code = 128 + signal.as_raw() as u8;
                self.conclude(&JobResult::stopped(exit_code));
                return Err(Failure::Ended { exit_code });
            }
            if self.is_alone.is_some() || self.store.get("result").is_some() {
                return Ok(None);
            }
            if let Some(mut coordinator) = self.coordinator.take() {
                coordinator.decide(self.job, &mut self.store);
                self.coordinator = Some(coordinator);
            }
            if let Some(plan) = read::<StartPlan>(&self.store, &format!("plan/{}", self.start)) {
                return Ok(Some(plan));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Returns the result of node 0, or that node 0 was lost.
    fn result(&self) -> Result<JobResult, Failure> {
        if let Some(result) = read(&self.store, "result") {
            return Ok(result);
        }
        let NodeEndpoint { host, port, node, .. } = &self.endpoint;
        let why = match self.is_alone {
            Some(NodeLoss::Silent) => "no heartbeat from it in time",
            _ => "it has ended, or it has dropped this node",
        };
        Err(Failure::Run(anyhow!("node {node} lost the launcher of node 0 at {host}:{port}: {why}")))
    }

    /// On node 0: sends the result of the job to all nodes.
    fn conclude(&mut self, result: &JobResult) {
        if self.coordinator.is_some() {
            self.store.set("result", &text(result));
        }
    }

    /// Runs this node's ranks of a start to their end.
    fn run_ranks(&mut self, plan: &StartPlan, signals: &Signals) -> Result<Outcome, Failure> {
        let node = self.endpoint.node;
        if let Some(restart) = &plan.variation.restart
            && node != 0
        {
            log_line(format_args!("launch: {}", restart.reason));
        }
        let Some(count) = plan.ranks.get(&node) else { return Ok(Outcome::Done) };
        let before = plan.ranks.range(..node);
        let ranks = NodeRanks {
            first: before.clone().map(|(_, count)| count).sum(),
            count: *count,
            world_size: plan.ranks.values().sum(),
            node: before.count(),
            num_nodes: plan.ranks.len(),
            master_port: plan.master_port,
            restarts: self.start,
            max_restarts: self.job.max_restarts,
        };
        let secret = self.store.rank_secret(&plan.nonce);
        let environment = store_environment(&self.endpoint.host, plan.store_port, &secret);
        let arguments = self.job.arguments(&plan.variation);
        let commands = ranks.commands(&self.job.program, &arguments, &environment);
        let store = self.coordinator.as_mut().and_then(Coordinator::take_rank_store);
        let started = self.job.start(commands, store, &plan.variation).run(signals, self);
        started.or_else(|error| {
            let failure = NodeFailure::of_node(node, format!("node {node} ({}): {error:#}", self.host_name));
            self.store.set(&format!("failed/{}/{node}", self.start), &text(&failure));
            Ok(Outcome::Interrupted)
        })
    }

    /// Exchanges changes with the other nodes. Returns why the ranks are to be stopped, if they are.
    fn exchange(&mut self, rank_store: Option<&JobStore>) -> Option<String> {
        let lost = self.store.poll();
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.watch(&lost, &mut self.store, rank_store);
        } else if let Some((_, loss)) = lost.first() {
            self.is_alone = Some(*loss);
        }
        if self.is_alone.is_some() {
            return Some("the launcher of node 0 is lost".to_owned());
        }
        self.store.get(&format!("stop/{}", self.start))
    }
}

impl OtherNodes for Node<'_> {
    fn report(&mut self, failure: &RankFailure) {
        let failure = failure.clone().on_host(Some(self.host_name.clone()));
        let failure = NodeFailure::of_rank(self.endpoint.node, &failure);
        self.store.set(&format!("failed/{}/{}", self.start, self.endpoint.node), &text(&failure));
    }

    fn poll(&mut self, store: Option<&JobStore>) -> Option<String> {
        self.exchange(store)
    }
}

fn text(message: &impl Serialize) -> String {
    // Maps with integer keys and plain structs cannot fail.
    serde_json::to_string(message).unwrap_or_default()
}

/// Returns a message that has arrived. Messages come from launchers of the same version.
fn read<T: DeserializeOwned>(store: &NodeStore, key: &str) -> Option<T> {
    serde_json::from_str(&store.get(key)?).ok()
}
