//! The criteria by which alternatives and meshes are compared.

use super::{RankPlan, Workload};
use crate::config::MachineProfile;
use crate::engine::EngineError;
use serde::Serialize;
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

/// The criteria by which alternatives and meshes are compared, in addition to memory and traffic.
#[derive(Debug, Clone, Copy, Default)]
pub struct Criteria<'a> {
    /// The memory to fit into.
    pub budget: Option<MemoryBudget>,
    /// The machine profile for step times.
    pub machine: Option<&'a MachineProfile>,
}

/// The predicted speed of a step on a machine.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Throughput {
    /// The profile has all rates that the step needs.
    Known {
        /// The predicted time of a step.
        step_seconds: f64,
        /// Tokens of the global batch per second.
        tokens_per_second: f64,
    },
    /// The profile lacks a rate.
    Unknown {
        /// The key of the missing rate.
        profile_lacks: &'static str,
    },
}

impl Throughput {
    /// Returns the predicted time of a step, if known.
    pub fn step_seconds(&self) -> Option<f64> {
        match self {
            Self::Known { step_seconds, .. } => Some(*step_seconds),
            Self::Unknown { .. } => None,
        }
    }
}

impl Workload {
    /// Returns the bytes of host memory that the ranks of a node offload to, all with the same `plan`: none on CPUs, which
    /// offload to files.
    pub fn host_bytes_per_node(&self, plan: &RankPlan) -> u64 {
        let ranks = match self.device {
            DeviceKind::Cpu => 0,
            DeviceKind::Cuda => self.ranks_per_node.min(self.config.world_size()),
        };
        plan.offloaded_bytes.saturating_mul(ranks as u64)
    }

    /// Returns whether `plan` is within `budget`.
    pub fn fits(&self, plan: &RankPlan, budget: MemoryBudget) -> bool {
        let MemoryBudget { rank_bytes, host_bytes_per_node } = budget;
        plan.peak_bytes <= rank_bytes
            && host_bytes_per_node.is_none_or(|bytes| self.host_bytes_per_node(plan) <= bytes)
    }

    /// Returns the workload with `ulysses.save_attention_output` set, if the config leaves that open: on if it is within
    /// `budget`, or if there is no budget.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn decided(&self, budget: Option<MemoryBudget>) -> Result<Self, EngineError> {
        let mut workload = self.clone();
        if self.config.saves_attention_output_if_it_fits() {
            let fits = match budget {
                Some(budget) => self.fits(&self.plan()?, budget),
                None => true,
            };
            workload.config.ulysses.save_attention_output = Some(fits);
        }
        Ok(workload)
    }

    pub(super) fn throughput(&self, criteria: Criteria<'_>) -> Result<Option<Throughput>, EngineError> {
        let Some(machine) = criteria.machine else { return Ok(None) };
        match self.step_time(machine) {
            Ok(time) => Ok(Some(Throughput::Known {
                step_seconds: time.total_seconds,
                tokens_per_second: time.tokens_per_second,
            })),
            // Other variants may not need the rate.
            Err(EngineError::MachineRate { key, .. }) => Ok(Some(Throughput::Unknown { profile_lacks: key })),
            Err(error) => Err(error),
        }
    }

    pub(super) fn max_seq_len_within(&self, criteria: Criteria<'_>) -> Result<Option<usize>, EngineError> {
        criteria.budget.map_or(Ok(None), |budget| self.max_seq_len(budget))
    }
}
