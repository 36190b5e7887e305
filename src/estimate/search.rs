//! The search: candidates are run dry, compared with the memory, and rated by step time and longest sequence.
//!
//! Alternatives, meshes and fits are views of it. Each lists candidates and orders those that it keeps.

use super::{RankPlan, StepTime, Workload};
use crate::config::{Config, MachineProfile};
use crate::engine::EngineError;
use serde::Serialize;
use std::cmp::Ordering;
use ulysses_kernels::device::DeviceKind;

/// The memory that ranks may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct MemoryBudget {
    /// Bytes per rank, on its device.
    pub rank_bytes: u64,
    /// Bytes of host memory per node, which ranks on GPUs share for what they offload; `None` for any.
    pub host_bytes_per_node: Option<u64>,
}

impl From<u64> for MemoryBudget {
    /// Returns a budget of `rank_bytes` per rank and any host memory.
    fn from(rank_bytes: u64) -> Self {
        Self { rank_bytes, host_bytes_per_node: None }
    }
}

/// The criteria by which candidates are compared, in addition to memory and traffic.
#[derive(Debug, Clone, Copy, Default)]
pub struct Criteria<'a> {
    /// The memory to fit into.
    pub budget: Option<MemoryBudget>,
    /// The machine profile for step times.
    pub machine: Option<&'a MachineProfile>,
}

/// A configuration that was run dry, and what the search found out about it.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// The configuration.
    pub workload: Workload,
    /// The configuration that was planned: `ulysses.save_attention_output` is set, if the config leaves that open.
    pub decided: Workload,
    /// The plan of the rank that needs most memory.
    pub plan: RankPlan,
    /// Bytes of host memory per node that ranks on GPUs offload to.
    pub host_bytes_per_node: u64,
    /// The bytes above the budget; `None` if it fits, or without a budget.
    pub excess: Option<Excess>,
    /// The step time, if there is a machine profile with all rates that the step needs.
    pub time: Option<StepTime>,
    /// The key of the rate that the machine profile lacks, if it does.
    pub profile_lacks: Option<&'static str>,
    /// The longest sequence that fits the budget, if it was searched and there is one.
    pub max_seq_len: Option<usize>,
}

/// The bytes by which a candidate exceeds the budget.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Excess {
    /// Of a rank.
    pub rank_bytes: u64,
    /// Of the host memory of a node.
    pub host_bytes_per_node: u64,
}

impl Candidate {
    /// Returns whether it is within the budget; true without one.
    pub fn fits(&self) -> bool {
        self.excess.is_none()
    }

    /// Returns the predicted time of a step, if known.
    pub fn step_seconds(&self) -> Option<f64> {
        self.time.as_ref().map(|time| time.total_seconds)
    }

    /// Orders the faster one first, known times before unknown ones.
    pub(super) fn compare_seconds(&self, other: &Self) -> Ordering {
        let seconds = |candidate: &Self| candidate.step_seconds().unwrap_or(f64::INFINITY);
        seconds(self).total_cmp(&seconds(other))
    }

    /// Predicts the step time, if there is a machine profile.
    pub(super) fn timed(mut self, machine: Option<&MachineProfile>) -> Result<Self, EngineError> {
        let Some(machine) = machine else { return Ok(self) };
        match self.decided.step_time(machine) {
            Ok(time) => self.time = Some(time),
            // Other candidates may not need the rate.
            Err(EngineError::MachineRate { key, .. }) => self.profile_lacks = Some(key),
            Err(error) => return Err(error),
        }
        Ok(self)
    }

    /// Predicts the step time and searches the longest sequence.
    pub(super) fn rated(self, criteria: Criteria<'_>) -> Result<Self, EngineError> {
        let mut rated = self.timed(criteria.machine)?;
        let longest = criteria.budget.map(|budget| rated.workload.max_seq_len(budget));
        rated.max_seq_len = longest.transpose()?.flatten();
        Ok(rated)
    }
}

impl Workload {
    /// Runs the configuration dry. If it leaves open whether the attention output is saved, it is if that is within
    /// `budget`, or if there is no budget.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn candidate(&self, budget: Option<MemoryBudget>) -> Result<Candidate, EngineError> {
        let plan = self.plan()?;
        let (host_bytes_per_node, excess) = (self.host_bytes_per_node(&plan), self.excess(&plan, budget));
        let (workload, decided) = (self.clone(), self.saving_attention_output(excess.is_none()));
        if decided.config.saves_attention_output() != self.config.saves_attention_output() {
            // The plan was that of a saved output, which does not fit.
            return Ok(Candidate { workload, ..decided.candidate(budget)? });
        }
        let (time, profile_lacks, max_seq_len) = (None, None, None);
        Ok(Candidate {
            workload,
            decided,
            plan,
            host_bytes_per_node,
            excess,
            time,
            profile_lacks,
            max_seq_len,
        })
    }

    /// Returns the workload with this value of `ulysses.save_attention_output`, if the config leaves that open.
    pub(super) fn saving_attention_output(&self, saves: bool) -> Self {
        let mut workload = self.clone();
        if self.config.saves_attention_output_if_it_fits() {
            workload.config.ulysses.save_attention_output = Some(saves);
        }
        workload
    }

    /// Returns the bytes of host memory that the ranks of a node offload to, all with the same `plan`: none on CPUs,
    /// which offload to files.
    pub(super) fn host_bytes_per_node(&self, plan: &RankPlan) -> u64 {
        let ranks = match self.device {
            DeviceKind::Cpu => 0,
            DeviceKind::Cuda => self.ranks_per_node.min(self.config.world_size()),
        };
        plan.offloaded_bytes.saturating_mul(ranks as u64)
    }

    fn excess(&self, plan: &RankPlan, budget: Option<MemoryBudget>) -> Option<Excess> {
        let MemoryBudget { rank_bytes, host_bytes_per_node } = budget?;
        let excess = Excess {
            rank_bytes: plan.peak_bytes.saturating_sub(rank_bytes),
            host_bytes_per_node: host_bytes_per_node
                .map_or(0, |bytes| self.host_bytes_per_node(plan).saturating_sub(bytes)),
        };
        (excess.rank_bytes > 0 || excess.host_bytes_per_node > 0).then_some(excess)
    }
}

/// The dry runs of a search, each of which is done once.
#[derive(Debug)]
pub(super) struct Search {
    pub(super) budget: MemoryBudget,
    /// Every configuration that was run; `None` if the bytes of its step overflow.
    pub(super) tried: Vec<(Config, Option<Candidate>)>,
}

impl Search {
    pub(super) fn new(budget: MemoryBudget) -> Self {
        Self { budget, tried: Vec::new() }
    }

    /// Returns a candidate; `None` if the bytes of its step overflow.
    pub(super) fn candidate(&mut self, workload: &Workload) -> Result<Option<&Candidate>, EngineError> {
        let known = self.tried.iter().position(|(config, _)| *config == workload.config);
        let index = match known {
            Some(index) => index,
            None => {
                let candidate = match workload.candidate(Some(self.budget)) {
                    Err(EngineError::StepTooLarge { .. }) => None,
                    candidate => Some(candidate?),
                };
                self.tried.push((workload.config.clone(), candidate));
                self.tried.len() - 1
            }
        };
        Ok(self.tried[index].1.as_ref())
    }

    pub(super) fn fits(&mut self, workload: &Workload) -> Result<bool, EngineError> {
        Ok(self.candidate(workload)?.is_some_and(Candidate::fits))
    }

    /// Returns the first level below `last` that fits, else `last`. Each level saves more memory than the one before.
    pub(super) fn first_that_fits(
        &mut self,
        mut last: usize,
        workload: impl Fn(usize) -> Workload,
    ) -> Result<usize, EngineError> {
        let mut first = 0;
        while first < last {
            let middle = first.midpoint(last);
            if self.fits(&workload(middle))? { last = middle } else { first = middle + 1 }
        }
        Ok(last)
    }
}
