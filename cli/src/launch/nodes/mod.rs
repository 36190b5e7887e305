//! Jobs whose ranks `launch` starts itself, with one launcher on each machine (torchrun's agents).
//!
//! The launchers meet in a store that node 0 hosts; on one machine, it is alone there. Node 0 plans each start
//! (`coordinator.rs`): which node runs which ranks, and on which mesh. Each launcher starts its ranks, reports the first
//! that fails and how all ended, and stops its ranks when node 0 says that another node failed. When all have ended, node
//! 0 plans the next start or the end.
//!
//! Keys: `node/N` the host, number of processes and settings of node N; `plan/K` start K; `failed/K/N` the first failed
//! rank of node N, or why its launcher failed; `stop/K` the reason to stop all ranks; `ended/K/N` how the ranks of node N
//! ended; `result` the result of the job.

mod coordinator;
mod messages;

use super::job_spec::JobSpec;
use super::output::Source;
use super::rank_failure::RankFailure;
use super::signals::Signals;
use super::supervisor::{Ended, ProcessCommand, Supervisor};
use crate::failure::{Failure, OrFail};
use crate::output::log_line;
use anyhow::{Context, anyhow};
use coordinator::Coordinator;
use messages::{FAILED, JobResult, NodeFailure, NodeInfo, StartPlan};
use serde::{Serialize, de::DeserializeOwned};
use std::process::Command;
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

/// Runs this node's part of a job, with `num_processes` ranks. Without a meeting, that is the whole job.
pub(super) fn run(
    job: &JobSpec,
    supervisor: &mut Supervisor,
    meeting: Option<&Meeting>,
    num_processes: usize,
) -> Result<(), Failure> {
    let mut node = Node::join(job, meeting, num_processes)?;
    let signals = Signals::watch().or_run()?;
    let result = node.run(supervisor, &signals);
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
    /// The name of this machine in messages, if the job has a meeting.
    host_name: Option<String>,
    /// The number of the current start.
    start: u32,
    /// On node 0.
    coordinator: Option<Coordinator>,
    /// Node 0 is lost.
    is_alone: Option<NodeLoss>,
}

impl<'a> Node<'a> {
    /// Meets the launchers of the other nodes, if there are any.
    fn join(job: &'a JobSpec, meeting: Option<&Meeting>, num_processes: usize) -> Result<Self, Failure> {
        let (mut store, endpoint) = match meeting {
            Some(Meeting { endpoint, join_timeout, max_silence }) => {
                let lookup = |name: &str| std::env::var(name).ok();
                let store = NodeStore::meet(endpoint, job.min_nodes, lookup, *join_timeout, *max_silence);
                (store.map_err(|why| anyhow!("cannot join the job: {why}")).or_run()?, endpoint.clone())
            }
            None => {
                let store = NodeStore::alone().context("cannot open the store of the job").or_run()?;
                (store, NodeEndpoint { host: "127.0.0.1".to_owned(), port: 0, node: 0, num_nodes: 1 })
            }
        };
        let info = NodeInfo::new(job, num_processes);
        store.set(&format!("node/{}", endpoint.node), &text(&info));
        let coordinator = (endpoint.node == 0).then(|| Coordinator::new(&endpoint, &store.missing()));
        let host_name = meeting.map(|_| info.host);
        Ok(Self { job, store, endpoint, host_name, start: 0, coordinator, is_alone: None })
    }

    fn run(&mut self, supervisor: &mut Supervisor, signals: &Signals) -> Result<JobResult, Failure> {
        loop {
            let Some(plan) = self.next_plan(signals)? else { return self.result() };
            let ended = self.run_ranks(&plan, supervisor, signals);
            if self.is_alone.is_some() {
                return self.result();
            }
            self.store.set(&format!("ended/{}/{}", self.start, self.endpoint.node), &text(&ended));
            self.start += 1;
        }
    }

    /// Waits for the plan of the next start; `None` if the job has ended.
    fn next_plan(&mut self, signals: &Signals) -> Result<Option<StartPlan>, Failure> {
        loop {
            self.exchange(None, None);
            if let Some(coordinator) = &mut self.coordinator {
                coordinator.decide(self.job, &mut self.store);
            }
            // A signal that comes after the end of the job does not change its result.
            if self.is_alone.is_some() || self.store.get("result").is_some() {
                return Ok(None);
            }
            if let Some(signal) = signals.take().first() {
                // No rank runs.
                let exit_code = 128 + signal.as_raw() as u8;
                self.conclude(&JobResult::stopped(exit_code));
                return Err(Failure::Ended { exit_code });
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
    fn run_ranks(&mut self, plan: &StartPlan, supervisor: &mut Supervisor, signals: &Signals) -> Ended {
        let node = self.endpoint.node;
        if let Some(restart) = &plan.variation.restart
            && node != 0
        {
            log_line(format_args!("launch: {}", restart.reason));
        }
        if !plan.ranks.contains_key(&node) {
            return Ended::Done;
        }
        let commands = self.commands(plan);
        let store = self.coordinator.as_mut().and_then(Coordinator::take_rank_store);
        let ended = supervisor
            .run(commands, store, signals, &mut |failure, rank_store| self.exchange(failure, rank_store));
        ended.unwrap_or_else(|error| {
            let text = match &self.host_name {
                Some(host) => format!("node {node} ({host}): {error:#}"),
                None => format!("{error:#}"),
            };
            self.report(&NodeFailure { node, rank: None, text, final_exit_code: Some(FAILED) });
            Ended::Failed
        })
    }

    /// Returns the commands of this node's ranks, with torchrun's variables and those that lead to the ranks' store.
    fn commands(&self, plan: &StartPlan) -> Vec<ProcessCommand> {
        let node = self.endpoint.node;
        let before = plan.ranks.range(..node);
        let first: usize = before.clone().map(|(_, ranks)| ranks).sum();
        let num_ranks = plan.ranks.get(&node).copied().unwrap_or_default();
        let secret = self.store.rank_secret(&plan.nonce);
        let mut variables = store_environment(&self.endpoint.host, plan.store_port, &secret);
        variables.extend(
            [
                ("WORLD_SIZE", plan.ranks.values().sum()),
                ("LOCAL_WORLD_SIZE", num_ranks),
                ("GROUP_RANK", before.count()),
                ("GROUP_WORLD_SIZE", plan.ranks.len()),
                ("MASTER_PORT", usize::from(plan.master_port)),
                ("TORCHELASTIC_RESTART_COUNT", self.start as usize),
                ("TORCHELASTIC_MAX_RESTARTS", self.job.max_restarts as usize),
            ]
            .map(|(name, value)| (name, value.to_string())),
        );
        let arguments = self.job.arguments(&plan.variation);
        let command = |local: usize| {
            let (rank, mut command) = (first + local, Command::new(&self.job.program));
            command.args(&arguments).envs(&variables);
            command.env("RANK", rank.to_string()).env("LOCAL_RANK", local.to_string());
            plan.variation.set_restart(&mut command);
            ProcessCommand { source: Source::Rank(rank), command }
        };
        (0..num_ranks).map(command).collect()
    }

    /// Exchanges changes with the other nodes, and reports the first failure of a rank of this one. Returns why the ranks are
    /// to be stopped, if they are.
    fn exchange(&mut self, failure: Option<&RankFailure>, rank_store: Option<&JobStore>) -> Option<String> {
        if let Some(failure) = failure {
            let mut failure = failure.clone();
            failure.host = self.host_name.clone();
            self.report(&NodeFailure::new(self.endpoint.node, &failure));
        }
        let lost = self.store.poll();
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.watch(&lost, &mut self.store, rank_store);
        } else if let Some(lost) = lost.first() {
            self.is_alone = Some(lost.loss);
        }
        if self.is_alone.is_some() {
            return Some("the launcher of node 0 is lost".to_owned());
        }
        self.store.get(&format!("stop/{}", self.start))
    }

    fn report(&mut self, failure: &NodeFailure) {
        self.store.set(&format!("failed/{}/{}", self.start, failure.node), &text(failure));
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
