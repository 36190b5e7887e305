//! What alternatives and meshes are judged by.

use super::Workload;
use crate::config::MachineProfile;
use crate::engine::EngineError;
use serde::Serialize;

/// What alternatives and meshes are judged by besides their bytes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Criteria<'a> {
    /// Memory of a rank.
    pub budget_bytes: Option<u64>,
    /// The machine that their steps are timed on.
    pub machine: Option<&'a MachineProfile>,
}

/// How fast a step is on a machine.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Throughput {
    /// The profile has all that the step needs.
    Known {
        /// The predicted time of the step.
        step_seconds: f64,
        /// Tokens of the global batch by the time.
        tokens_per_second: f64,
    },
    /// It does not.
    Unknown {
        /// The key of the profile that the step needs and that is not there.
        profile_lacks: &'static str,
    },
}

impl Throughput {
    /// The predicted time of the step, where it is known.
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
            // Others may do without the rate.
            Err(EngineError::MachineRate { key, .. }) => Ok(Some(Throughput::Unknown { profile_lacks: key })),
            Err(error) => Err(error),
        }
    }

    pub(super) fn max_seq_len_within(&self, criteria: Criteria<'_>) -> Result<Option<usize>, EngineError> {
        criteria.budget_bytes.map_or(Ok(None), |budget| self.max_seq_len(budget))
    }
}
