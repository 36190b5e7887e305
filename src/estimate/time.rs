//! The step time on a machine: the events of a dry step at the machine's rates.
//!
//! A rank executes events one after another. Matmuls, attention and element-wise operations take their work divided by
//! their rate; a collective takes its latency plus the bytes that it sends divided by the bus bandwidth of its link.
//! ZeRO's asynchronous collectives and the exchange overlap with compute between their start and their wait if the machine
//! [supports it](MachineProfile::overlaps_communication): one after another, in the order of their start, as on NCCL's
//! single stream. Otherwise the rank transfers them itself when it waits. `docs/planning.md` lists what is not modeled.

use super::dry_run::{DryPass, DryStep};
use super::event::{Axis, Event, Pass, Purpose, Transfer, Work};
use super::nodes::Nodes;
use super::{SentBytes, Workload};
use crate::comm::CollectiveOp;
use crate::config::{LinkRates, MachineProfile, Rates};
use crate::engine::{EngineError, pipeline_schedule};
use crate::mesh::DeviceMesh;
use crate::pipeline::Action;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use ulysses_kernels::device::dry::MatmulOp;

/// The step time of the slowest rank. The parts add up to the total.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepTime {
    /// The machine.
    pub machine: String,
    /// Where the rates of its profile are from: whether they are measured.
    pub origin: String,
    /// Global rank.
    pub rank: usize,
    /// The parts of the time.
    #[serde(flatten)]
    pub parts: TimeParts,
    /// The total time.
    pub total_seconds: f64,
    /// Recomputation of matmuls and attention, included in the parts.
    pub recompute_seconds: f64,
    /// Communication that overlaps with compute, not included in the parts.
    pub hidden_seconds: f64,
    /// Tokens of the global batch per second.
    pub tokens_per_second: f64,
    /// Model FLOPs utilization: FLOPs of all ranks without recomputation, relative to their peak.
    pub mfu: f64,
    /// The share of the step in which a pipeline stage waits for others, on average; `None` without a pipeline.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pipeline_idle: Option<f64>,
}

/// The parts of a step's time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct TimeParts {
    /// Matmuls.
    #[serde(rename = "products_seconds")]
    pub matmul_seconds: f64,
    /// Attention.
    pub attention_seconds: f64,
    /// Norms, SwiGLU and other element-wise operations.
    pub elementwise_seconds: f64,
    /// The Ulysses exchange, and the exchange of tokens between tensor-parallel ranks.
    pub exchange_seconds: f64,
    /// Waiting for ZeRO's gathers and reductions, and for sums.
    pub zero_seconds: f64,
    /// Gradient norm and optimizer update.
    pub update_seconds: f64,
    /// Passing activations between pipeline stages, and waiting for them.
    pub pipeline_seconds: f64,
    /// Reads and writes of offload files.
    pub file_seconds: f64,
    /// Copies of offloaded tensors between GPU and host memory.
    pub host_copy_seconds: f64,
}

impl TimeParts {
    /// Returns the parts with their names; that of a pipeline only if there is one.
    pub fn named(&self) -> Vec<(&'static str, f64)> {
        let of_pipeline = ("pipeline", self.pipeline_seconds);
        let others = [
            ("matmuls", self.matmul_seconds),
            ("attention", self.attention_seconds),
            ("elementwise", self.elementwise_seconds),
            ("exchange", self.exchange_seconds),
            ("ZeRO collectives and all-reduces", self.zero_seconds),
            ("optimizer step", self.update_seconds),
            ("file I/O", self.file_seconds),
            ("GPU–host copies", self.host_copy_seconds),
        ];
        others.into_iter().chain(Some(of_pipeline).filter(|(_, seconds)| *seconds > 0.0)).collect()
    }
}

impl Workload {
    /// Returns the step time on `machine`: of the slowest rank, in an sp group that spans the most nodes.
    ///
    /// The passes of a pipeline begin in the order of its [`Schedule`](crate::pipeline::Schedule), once what they receive is sent.
    ///
    /// # Errors
    /// As [`plan`](Self::plan), or when the machine profile lacks a rate that the step needs.
    pub fn step_time(&self, machine: &MachineProfile) -> Result<StepTime, EngineError> {
        let config = &self.config;
        let mesh = self.mesh()?;
        let rates = machine.rates_of(config.precision).ok_or_else(|| EngineError::MachineRate {
            machine: machine.name.clone(),
            key: match config.precision.section() {
                None => "rates.f32",
                Some("bf16") => "rates.bf16",
                Some(_) => "rates.fp16",
            },
            needed_by: "it is the dtype of the config".to_owned(),
        })?;
        let first = self.first_dp_row_on_most_nodes(&mesh) * config.mesh.ranks_per_sequence();
        let mut stages: BTreeMap<usize, Simulation<'_>> = BTreeMap::new();
        let mut model_flops = 0.0;
        for kind in self.rank_classes()? {
            let rank = mesh.ranks()[first + kind.rank];
            let mut simulation = Simulation::new(rank, machine, rates, self.nodes(&mesh, rank)?);
            simulation.run(&self.warm_step(&mesh, rank)?)?;
            model_flops += (kind.ranks * config.mesh.dp_size) as f64 * simulation.model_flops;
            if stages.get(&kind.stage).is_none_or(|known| known.now < simulation.now) {
                stages.insert(kind.stage, simulation);
            }
        }
        let pipeline = match config.mesh.pp_size {
            1 => None,
            _ => Some(self.pipeline_time(&stages)?),
        };
        // The first of equal ones; `max_by` takes the last.
        let slowest = stages.into_values().rev().max_by(|a, b| a.now.total_cmp(&b.now));
        let mut simulation = slowest.unwrap_or_else(|| unreachable!("a mesh has a rank"));
        if let Some(PipelineTime { seconds, .. }) = pipeline {
            simulation.parts.pipeline_seconds += seconds - simulation.now;
            simulation.now = seconds;
        }
        let tokens = config.train_batch_size * config.require_seq_len()?;
        let peak = config.world_size() as f64 * rates.peak_flops_per_second;
        Ok(StepTime {
            machine: machine.name.clone(),
            origin: machine.origin.clone(),
            rank: simulation.rank,
            parts: simulation.parts,
            total_seconds: simulation.now,
            recompute_seconds: simulation.recompute,
            hidden_seconds: simulation.hidden,
            tokens_per_second: tokens as f64 / simulation.now,
            mfu: model_flops / simulation.now / peak,
            pipeline_idle: pipeline.map(|pipeline| pipeline.idle),
        })
    }

    /// Returns the time of a step of a pipeline. `stages`: the slowest rank of each kind of stage.
    fn pipeline_time(&self, stages: &BTreeMap<usize, Simulation<'_>>) -> Result<PipelineTime, EngineError> {
        let mut all: BTreeMap<usize, &Simulation<'_>> = BTreeMap::new();
        for equal in self.equal_stages()? {
            let simulation = &stages[&equal[0]];
            all.extend(equal.into_iter().map(|stage| (stage, simulation)));
        }
        let num_run = all[&0].passes.keys().map(|action| action.micro_batch + 1).max().unwrap_or(1);
        let timeline = pipeline_schedule(&self.config, num_run)?
            .simulate(|stage, action| all[&stage].passes.get(&action).map_or(0.0, |pass| pass.seconds))?;
        let slowest = |seconds: &dyn Fn(&Simulation<'_>) -> f64| {
            all.values().map(|stage| seconds(stage)).fold(0.0, f64::max)
        };
        // In the middle of a step, micro batches that are not run take a turn of the slowest stage each.
        let repeated = slowest(&|stage| {
            stage.passes.values().map(|pass| pass.seconds * (pass.times - 1) as f64).sum::<f64>()
        });
        let seconds = timeline.seconds + repeated + slowest(&|stage| stage.now - stage.passes_seconds);
        let busy: f64 = all.values().map(|stage| stage.now).sum();
        Ok(PipelineTime { seconds, idle: 1.0 - busy / (seconds * all.len() as f64) })
    }

    /// Returns the first dp rank whose ranks of sp and tp span the most nodes.
    fn first_dp_row_on_most_nodes(&self, mesh: &DeviceMesh) -> usize {
        let (in_row, per_node) = (self.config.mesh.ranks_per_sequence(), self.ranks_per_node.max(1));
        let nodes = |dp_rank: &usize| {
            let row = &mesh.ranks()[dp_rank * in_row..][..in_row];
            row.iter().map(|rank| rank / per_node).collect::<BTreeSet<_>>().len()
        };
        // `max_by_key` takes the last of equal ones.
        (0..self.config.mesh.dp_size).rev().max_by_key(nodes).unwrap_or(0)
    }
}

/// The time of a step of a pipeline.
#[derive(Clone, Copy)]
struct PipelineTime {
    seconds: f64,
    /// The share in which a stage waits, on average.
    idle: f64,
}

/// The time of a forward or backward pass.
struct PassTime {
    seconds: f64,
    /// The number of micro batches that it represents.
    times: u64,
}

/// A collective that has been started.
struct InFlight {
    /// The duration.
    seconds: f64,
    /// The end, if it overlaps with compute.
    ends: Option<f64>,
}

/// The simulation of one rank's step.
struct Simulation<'a> {
    rank: usize,
    machine: &'a MachineProfile,
    rates: Rates,
    nodes: Nodes,
    now: f64,
    /// The time of all forward and backward passes, and of each that was run.
    passes_seconds: f64,
    passes: HashMap<Action, PassTime>,
    /// The end of the last started collective.
    network_free: f64,
    in_flight: BTreeMap<(Purpose, Axis), VecDeque<InFlight>>,
    is_updating: bool,
    /// The number of micro batches that the current one represents. No collective is in flight between them, so times
    /// are multiplied.
    times: f64,
    parts: TimeParts,
    recompute: f64,
    /// Communication that overlapped with compute.
    hidden: f64,
    model_flops: f64,
}

impl<'a> Simulation<'a> {
    fn new(rank: usize, machine: &'a MachineProfile, rates: Rates, nodes: Nodes) -> Self {
        Self {
            rank,
            machine,
            rates,
            nodes,
            now: 0.0,
            passes_seconds: 0.0,
            passes: HashMap::new(),
            network_free: 0.0,
            in_flight: BTreeMap::new(),
            is_updating: false,
            times: 1.0,
            parts: TimeParts::default(),
            recompute: 0.0,
            hidden: 0.0,
            model_flops: 0.0,
        }
    }

    /// Simulates a step.
    fn run(&mut self, step: &DryStep) -> Result<(), EngineError> {
        for DryPass { action, times, events } in &step.passes {
            let begin = self.now;
            self.times = *times as f64;
            events.iter().try_for_each(|event| self.process(event))?;
            let seconds = (self.now - begin) / self.times;
            self.passes.insert(*action, PassTime { seconds, times: *times });
        }
        (self.times, self.is_updating, self.passes_seconds) = (1.0, true, self.now);
        step.update.iter().try_for_each(|event| self.process(event))?;
        self.end();
        Ok(())
    }

    fn process(&mut self, event: &Event) -> Result<(), EngineError> {
        match event {
            Event::Compute(work) => self.compute(*work),
            Event::Elementwise { bytes } => self.elementwise(*bytes),
            Event::File { bytes } => self.file(*bytes)?,
            Event::HostCopy { bytes } => self.host_copy(*bytes)?,
            Event::Collective(transfer) => self.communicate(transfer)?,
            Event::Wait { purpose, axis } => self.wait(*purpose, *axis),
        }
        Ok(())
    }

    fn compute(&mut self, Work { op, pass, flops }: Work) {
        let flops = self.times * flops;
        let Rates {
            product_flops_per_second,
            attention_forward_flops_per_second,
            attention_backward_flops_per_second,
            ..
        } = self.rates;
        let (rate, part) = match (op, pass) {
            (MatmulOp::Attention, Pass::Forward | Pass::Recompute) => {
                (attention_forward_flops_per_second, &mut self.parts.attention_seconds)
            }
            (MatmulOp::Attention, Pass::Backward) => {
                (attention_backward_flops_per_second, &mut self.parts.attention_seconds)
            }
            (MatmulOp::Linear | MatmulOp::LmHead, _) => {
                (product_flops_per_second, &mut self.parts.matmul_seconds)
            }
        };
        // The backward pass recomputes the logits.
        let repeated = if (op, pass) == (MatmulOp::LmHead, Pass::Forward) { flops } else { 0.0 };
        let seconds = (flops + repeated) / rate;
        *part += seconds;
        self.now += seconds;
        self.recompute += repeated / rate;
        match pass {
            Pass::Forward | Pass::Backward => self.model_flops += flops,
            Pass::Recompute => self.recompute += seconds,
        }
    }

    fn elementwise(&mut self, bytes: u64) {
        let (rate, part) = match self.is_updating {
            true => (self.machine.update_bytes_per_second, &mut self.parts.update_seconds),
            false => (self.rates.elementwise_bytes_per_second, &mut self.parts.elementwise_seconds),
        };
        let seconds = self.times * bytes as f64 / rate;
        *part += seconds;
        self.now += seconds;
    }

    fn file(&mut self, bytes: u64) -> Result<(), EngineError> {
        let Some(rate) = self.machine.file_bytes_per_second else {
            return Err(self.unknown("file_bytes_per_second", "the config offloads to files".to_owned()));
        };
        let seconds = self.times * bytes as f64 / rate;
        self.parts.file_seconds += seconds;
        self.now += seconds;
        Ok(())
    }

    fn host_copy(&mut self, bytes: u64) -> Result<(), EngineError> {
        let Some(rate) = self.machine.host_bytes_per_second else {
            let needed_by = "the config offloads from a GPU to host memory".to_owned();
            return Err(self.unknown("host_bytes_per_second", needed_by));
        };
        let seconds = self.times * bytes as f64 / rate;
        self.parts.host_copy_seconds += seconds;
        self.now += seconds;
        Ok(())
    }

    fn communicate(&mut self, transfer: &Transfer) -> Result<(), EngineError> {
        let seconds = self.times * self.seconds_of(transfer)?;
        let starts = self.now.max(self.network_free);
        if !transfer.is_awaited_at_once() {
            let ends = self.machine.overlaps_communication.then_some(starts + seconds);
            self.network_free = ends.unwrap_or(self.network_free);
            self.hidden += seconds;
            let of_purpose = self.in_flight.entry((transfer.purpose, transfer.axis)).or_default();
            of_purpose.push_back(InFlight { seconds, ends });
            return Ok(());
        }
        // Collectives in flight finish first.
        self.wait_for_zero(starts - self.now);
        self.now += seconds;
        self.network_free = self.now;
        let part = match transfer.purpose {
            Purpose::ExchangeTokens => &mut self.parts.exchange_seconds,
            Purpose::PassActivations => &mut self.parts.pipeline_seconds,
            _ => &mut self.parts.zero_seconds,
        };
        *part += seconds;
        Ok(())
    }

    /// Waits for the part of a collective that compute has not hidden. Before an exchange, ZeRO's collectives in flight
    /// finish.
    fn wait(&mut self, purpose: Purpose, axis: Axis) {
        let first = self.in_flight.get_mut(&(purpose, axis)).and_then(VecDeque::pop_front);
        let Some(InFlight { seconds, ends }) = first else { return };
        let exposed = ends.map_or(seconds, |ends| (ends - self.now).max(0.0));
        let of_exchange = match purpose {
            Purpose::ExchangeForward | Purpose::ExchangeBackward => exposed.min(seconds),
            _ => 0.0,
        };
        self.wait_for_zero(exposed - of_exchange);
        self.now += of_exchange;
        self.parts.exchange_seconds += of_exchange;
        self.hidden -= of_exchange;
    }

    /// Waits for communication that was counted as hidden at its start.
    fn wait_for_zero(&mut self, seconds: f64) {
        self.now += seconds;
        self.parts.zero_seconds += seconds;
        self.hidden -= seconds;
    }

    /// Waits for all communication of the step.
    fn end(&mut self) {
        let pending: Vec<(Purpose, Axis)> = self.in_flight.keys().copied().collect();
        for (purpose, axis) in pending {
            while self.in_flight.get(&(purpose, axis)).is_some_and(|left| !left.is_empty()) {
                self.wait(purpose, axis);
            }
        }
    }

    /// Returns the time of a collective. Both links work in parallel, so the slower one counts.
    fn seconds_of(&self, transfer: &Transfer) -> Result<f64, EngineError> {
        let SentBytes { intra_node_bytes, inter_node_bytes } = self.nodes.sent(transfer);
        let links = &self.machine.links;
        let within = ("links.intra_node", "several of its ranks share a node");
        let between = ("links.inter_node", "it has ranks on several nodes");
        let mut slower = 0.0_f64;
        for (bytes, link, (key, why)) in
            [(intra_node_bytes, links.intra_node, within), (inter_node_bytes, links.inter_node, between)]
        {
            if bytes > 0 {
                let link = link.ok_or_else(|| {
                    self.unknown(key, format!("the mesh communicates along {}: {why}", transfer.axis.name()))
                })?;
                slower = slower.max(link.latency_seconds + bytes as f64 / bandwidth(&link, transfer.op));
            }
        }
        Ok(slower)
    }

    fn unknown(&self, key: &'static str, needed_by: String) -> EngineError {
        EngineError::MachineRate { machine: self.machine.name.clone(), key, needed_by }
    }
}

/// Returns the bus bandwidth of a collective.
fn bandwidth(link: &LinkRates, op: CollectiveOp) -> f64 {
    match op {
        CollectiveOp::AllReduce => link.all_reduce_bytes_per_second,
        CollectiveOp::ReduceScatter => link.reduce_scatter_bytes_per_second,
        CollectiveOp::AllGather => link.all_gather_bytes_per_second,
        CollectiveOp::AllToAll
        | CollectiveOp::AllToAllStrided
        | CollectiveOp::Broadcast
        | CollectiveOp::Reduce
        | CollectiveOp::Gather
        | CollectiveOp::Scatter
        | CollectiveOp::Send
        | CollectiveOp::Recv
        | CollectiveOp::Barrier
        | CollectiveOp::Split => link.all_to_all_bytes_per_second,
    }
}

#[cfg(test)]
mod tests;
