//! The criteria by which alternatives and meshes are compared.

use super::Workload;
use crate::config::MachineProfile;
use crate::engine::EngineError;
use serde::Serialize;

/// The criteria by which alternatives and meshes are compared, in addition to memory and traffic.
#[derive(Debug, Clone, Copy, Default)]
pub struct Criteria<'a> {
    /// Memory per rank.
    pub budget_bytes: Option<u64>,
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
        criteria.budget_bytes.map_or(Ok(None), |budget| self.max_seq_len(budget))
    }
}
