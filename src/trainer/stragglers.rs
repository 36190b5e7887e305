//! Detects the slowest rank of each step.

use super::observer::{Observer, ObserverError, StepEnd};
use crate::comm::{CommError, MeshGroups, ProcessGroup, ProcessGroupExt};
use crate::engine::Engine;
use std::sync::Arc;

/// Compares the compute time of the ranks in each step. An observer on every rank.
pub(super) struct Stragglers {
    /// A separate group of all ranks, so that its traffic does not count for a step. `None` for one rank.
    group: Option<Arc<dyn ProcessGroup>>,
}

/// The rank with the longest compute time, and its time relative to the mean of all ranks.
#[derive(Debug, Clone, PartialEq)]
struct Slowest {
    rank: usize,
    ratio: f64,
    /// Seconds that each rank computed less, in the order of the ranks.
    idle_seconds: Vec<f64>,
}

impl Stragglers {
    /// Creates the group. Collective.
    pub(super) fn new(groups: &MeshGroups) -> Result<Self, CommError> {
        let all = groups.whole()?;
        let group = if all.world_size() > 1 { all.split("stragglers", Some(0), all.rank())? } else { None };
        Ok(Self { group })
    }

    /// Returns the slowest rank of a step, in which this rank computed for `compute_seconds`. Collective.
    fn slowest(&self, compute_seconds: f64) -> Result<Slowest, CommError> {
        let Some(group) = &self.group else { return Ok(slowest_of(&[compute_seconds])) };
        let slowest = slowest_of(&group.all_gather_values(&[compute_seconds])?);
        Ok(Slowest { rank: group.global_ranks()[slowest.rank], ..slowest })
    }
}

impl Observer for Stragglers {
    fn on_step_end(&mut self, _engine: &mut Engine, step: &mut StepEnd) -> Result<(), ObserverError> {
        let Slowest { rank, ratio, idle_seconds } = self.slowest(step.metrics.time.compute_seconds)?;
        (step.metrics.slowest_rank, step.metrics.slowest_rank_ratio) = (rank, ratio);
        step.metrics.idle_seconds = idle_seconds;
        Ok(())
    }
}

fn slowest_of(seconds: &[f64]) -> Slowest {
    let longest = seconds.iter().enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b));
    let (rank, &longest) = longest.unwrap_or((0, &0.0));
    let mean = seconds.iter().sum::<f64>() / seconds.len().max(1) as f64;
    let idle_seconds = seconds.iter().map(|seconds| longest - seconds).collect();
    Slowest { rank, ratio: if mean > 0.0 { longest / mean } else { 1.0 }, idle_seconds }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::{LaunchError, LaunchOptions, launch};
    use crate::mesh::DeviceMesh;

    #[test]
    fn the_slowest_rank_is_reported_with_its_ratio() {
        let expected = Slowest { rank: 1, ratio: 1.5, idle_seconds: vec![2.0, 0.0, 1.0] };
        assert_eq!(slowest_of(&[1.0, 3.0, 2.0]), expected);
        assert_eq!(slowest_of(&[3.0]), Slowest { rank: 0, ratio: 1.0, idle_seconds: vec![0.0] });
        assert_eq!(slowest_of(&[0.0, 0.0]).ratio, 1.0);
    }

    #[test]
    fn every_rank_knows_the_slowest() {
        let slowest = launch(3, &LaunchOptions::default(), |context| {
            let mesh = DeviceMesh::dp_sp(1, 3)?;
            let stragglers = Stragglers::new(&MeshGroups::new(&mesh, context.group.clone())?)?;
            stragglers.slowest([1.0, 1.0, 4.0][context.rank])
        });
        let slowest = slowest.unwrap_or_else(|error: LaunchError| panic!("{error}"));
        let expected = Slowest { rank: 2, ratio: 2.0, idle_seconds: vec![3.0, 3.0, 0.0] };
        assert_eq!(slowest, [(); 3].map(|()| expected.clone()));
    }
}
