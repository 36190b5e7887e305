//! Which rank the others wait for.

use std::sync::Arc;
use std::time::Duration;
use ulysses::comm::{CommError, MeshGroups, ProcessGroup, ProcessGroupExt, take_waited};

/// Compares how long the ranks work in a step.
pub(super) struct Stragglers {
    /// Of all ranks, for this alone: its traffic is not that of a step. None where there is one rank.
    group: Option<Arc<dyn ProcessGroup>>,
}

/// The rank that worked longest, and its time relative to the mean of all.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Slowest {
    pub(super) rank: usize,
    pub(super) ratio: f64,
}

impl Stragglers {
    /// Collective.
    pub(super) fn new(groups: &MeshGroups) -> Result<Self, CommError> {
        let all = groups.whole()?;
        let group = if all.world_size() > 1 { all.split("stragglers", Some(0), all.rank())? } else { None };
        take_waited();
        Ok(Self { group })
    }

    /// What the ranks come to in a step that took so long here, of which it waited for data so long. Collective.
    pub(super) fn slowest(&self, step: Duration, waited_for_data: Duration) -> Result<Slowest, CommError> {
        let own = step.saturating_sub(take_waited()).saturating_sub(waited_for_data).as_secs_f32();
        let Some(group) = &self.group else { return Ok(Slowest { rank: 0, ratio: 1.0 }) };
        let all = group.all_gather_values(&[own])?;
        // The comparison is no part of the next step.
        take_waited();
        let slowest = slowest_of(&all);
        Ok(Slowest { rank: group.global_ranks()[slowest.rank], ..slowest })
    }
}

fn slowest_of(seconds: &[f32]) -> Slowest {
    let longest = seconds.iter().enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b));
    let (rank, &longest) = longest.unwrap_or((0, &0.0));
    let mean = seconds.iter().map(|&seconds| f64::from(seconds)).sum::<f64>() / seconds.len().max(1) as f64;
    let ratio = if mean > 0.0 { f64::from(longest) / mean } else { 1.0 };
    Slowest { rank, ratio }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rank_that_works_longest_is_told_with_its_share() {
        assert_eq!(slowest_of(&[1.0, 3.0, 2.0]), Slowest { rank: 1, ratio: 1.5 });
        assert_eq!(slowest_of(&[0.0, 0.0]).ratio, 1.0);
    }

    #[test]
    fn who_waits_for_others_is_not_slow() {
        let slowest = ulysses::comm::launch(2, &ulysses::comm::LaunchOptions::default(), |context| {
            let mesh = ulysses::mesh::DeviceMesh::dp_sp(1, 2)?;
            let groups = MeshGroups::new(&mesh, context.group.clone())?;
            let stragglers = Stragglers::new(&groups)?;
            let start = std::time::Instant::now();
            if context.rank == 1 {
                std::thread::sleep(Duration::from_millis(200));
            }
            context.group.barrier()?;
            stragglers.slowest(start.elapsed(), Duration::ZERO)
        });
        for slowest in slowest.unwrap_or_else(|error: ulysses::comm::LaunchError| panic!("{error}")) {
            assert_eq!(slowest.rank, 1);
            assert!(slowest.ratio > 1.0, "{slowest:?}");
        }
    }
}
