//! Which rank the others wait for.

use super::observer::{Observer, ObserverError, StepEnd};
use crate::comm::{CommError, MeshGroups, ProcessGroup, ProcessGroupExt};
use crate::engine::Engine;
use std::sync::Arc;

/// Compares how long the ranks work in a step. An observer of every rank.
pub(super) struct Stragglers {
    /// Of all ranks, for this alone: its traffic is not that of a step. None where there is one rank.
    group: Option<Arc<dyn ProcessGroup>>,
}

/// The rank that worked longest, and its time relative to the mean of all.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Slowest {
    rank: usize,
    ratio: f64,
}

impl Stragglers {
    /// Collective.
    pub(super) fn new(groups: &MeshGroups) -> Result<Self, CommError> {
        let all = groups.whole()?;
        let group = if all.world_size() > 1 { all.split("stragglers", Some(0), all.rank())? } else { None };
        Ok(Self { group })
    }

    /// The slowest rank of a step in which this one worked for so many seconds, and else waited for data or for
    /// others. Collective.
    fn slowest(&self, compute_seconds: f64) -> Result<Slowest, CommError> {
        let Some(group) = &self.group else { return Ok(Slowest { rank: 0, ratio: 1.0 }) };
        let slowest = slowest_of(&group.all_gather_values(&[compute_seconds])?);
        Ok(Slowest { rank: group.global_ranks()[slowest.rank], ..slowest })
    }
}

impl Observer for Stragglers {
    fn on_step_end(&mut self, _engine: &mut Engine, step: &mut StepEnd) -> Result<(), ObserverError> {
        let Slowest { rank, ratio } = self.slowest(step.metrics.time.compute_seconds)?;
        (step.metrics.slowest_rank, step.metrics.slowest_rank_ratio) = (rank, ratio);
        Ok(())
    }
}

fn slowest_of(seconds: &[f64]) -> Slowest {
    let longest = seconds.iter().enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b));
    let (rank, &longest) = longest.unwrap_or((0, &0.0));
    let mean = seconds.iter().sum::<f64>() / seconds.len().max(1) as f64;
    Slowest { rank, ratio: if mean > 0.0 { longest / mean } else { 1.0 } }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::{LaunchError, LaunchOptions, launch};
    use crate::mesh::DeviceMesh;

    #[test]
    fn the_rank_that_works_longest_is_told_with_its_share() {
        assert_eq!(slowest_of(&[1.0, 3.0, 2.0]), Slowest { rank: 1, ratio: 1.5 });
        assert_eq!(slowest_of(&[0.0, 0.0]).ratio, 1.0);
    }

    #[test]
    fn every_rank_is_told_of_the_slowest() {
        let slowest = launch(3, &LaunchOptions::default(), |context| {
            let mesh = DeviceMesh::dp_sp(1, 3)?;
            let stragglers = Stragglers::new(&MeshGroups::new(&mesh, context.group.clone())?)?;
            stragglers.slowest([1.0, 1.0, 4.0][context.rank])
        });
        let slowest = slowest.unwrap_or_else(|error: LaunchError| panic!("{error}"));
        assert_eq!(slowest, [Slowest { rank: 2, ratio: 2.0 }; 3]);
    }
}
