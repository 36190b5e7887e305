//! Groups by name and ranks, and a rank's place in one.

use super::CommError;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// A group: its name, which is not unique, and its global ranks.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GroupLabel {
    /// The name.
    pub name: String,
    /// Global ranks, in group order.
    pub members: Vec<usize>,
}

/// The place of a rank in a group.
#[derive(Debug, Clone)]
pub struct Membership {
    /// The group.
    pub group: Arc<GroupLabel>,
    /// The rank's index within the group.
    pub rank: usize,
}

/// The arguments of a rank to a [split](super::ProcessGroup::split) of its group.
#[derive(Debug, Clone, Copy)]
pub(super) struct SplitPlace {
    pub(super) color: Option<usize>,
    pub(super) key: usize,
}

impl Membership {
    /// Creates the place `rank` in a group of these global ranks.
    pub fn new(name: impl Into<String>, global_ranks: Vec<usize>, rank: usize) -> Self {
        Self { group: Arc::new(GroupLabel { name: name.into(), members: global_ranks }), rank }
    }

    /// Number of ranks of the group.
    pub(super) fn world_size(&self) -> usize {
        self.group.members.len()
    }

    /// The global rank.
    pub(super) fn global_rank(&self) -> usize {
        self.group.members[self.rank]
    }

    /// Returns the place of this rank, which has the color `color`, in the group that a split gives that color: its ranks
    /// are ordered by key, then by rank. `places` are those of all ranks, in rank order.
    ///
    /// # Errors
    /// This rank's own place has another color.
    pub(super) fn after_split(
        &self,
        name: &str,
        color: usize,
        places: impl IntoIterator<Item = SplitPlace>,
    ) -> Result<Self, CommError> {
        let of_color = places.into_iter().enumerate().filter(|(_, place)| place.color == Some(color));
        let mut by_key: Vec<(usize, usize)> = of_color.map(|(rank, place)| (place.key, rank)).collect();
        by_key.sort_unstable();
        let rank = by_key.iter().position(|(_, rank)| *rank == self.rank).ok_or_else(|| {
            let Self { group, rank } = self;
            CommError::Tensor(format!(
                "split of group \"{}\": rank {rank} is not among the ranks of its color {color}",
                group.name
            ))
        })?;
        let members = by_key.into_iter().map(|(_, rank)| self.group.members[rank]).collect();
        Ok(Self::new(name, members, rank))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_ordered_by_key_then_rank_and_ranks_without_a_color_have_no_group() {
        let asked = [(Some(9), 1), (None, 0), (Some(2), 0), (Some(9), 0), (Some(9), 1)];
        let places = asked.map(|(color, key)| SplitPlace { color, key });
        let split = |rank, color| {
            let child =
                Membership::new("old", vec![10, 11, 12, 13, 14], rank).after_split("new", color, places);
            child.ok().map(|child| (child.group.members.clone(), child.rank))
        };
        assert_eq!(split(2, 2), Some((vec![12], 0)));
        assert_eq!(
            [0, 3, 4].map(|rank| split(rank, 9)),
            [1, 0, 2].map(|rank| Some((vec![13, 10, 14], rank)))
        );
        assert_eq!([split(1, 9), split(2, 9)], [None, None]);
    }
}
