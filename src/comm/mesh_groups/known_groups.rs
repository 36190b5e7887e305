//! The groups that exist, by their ordered list of ranks.

use crate::comm::{CommError, ProcessGroup, ProcessGroupExt};
use crate::fnv1a::Fnv1a;
use crate::mesh::DeviceMesh;
use parking_lot::Mutex;
use std::collections::HashSet;
use std::sync::Arc;

/// The groups within a world. All its ranks know the same lists of ranks, and each has the groups that it belongs to.
#[derive(Debug)]
pub(super) struct KnownGroups {
    world: Arc<dyn ProcessGroup>,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    lists: HashSet<Vec<usize>>,
    /// This rank's groups.
    own: Vec<Arc<dyn ProcessGroup>>,
}

impl KnownGroups {
    /// Knows no group but the world.
    pub(super) fn of_world(world: Arc<dyn ProcessGroup>) -> Self {
        let known = Self::empty(world.clone());
        known.add(vec![world.global_ranks().to_vec()], &[world]);
        known
    }

    /// Knows no group.
    pub(super) fn empty(world: Arc<dyn ProcessGroup>) -> Self {
        Self { world, known: Mutex::default() }
    }

    pub(super) fn world(&self) -> &Arc<dyn ProcessGroup> {
        &self.world
    }

    /// The global rank of this rank.
    pub(super) fn own_rank(&self) -> usize {
        self.world.membership().global_rank()
    }

    /// Adds groups: the lists of all ranks, and this rank's groups among them. Of two groups with the same list, the
    /// first is used.
    pub(super) fn add(&self, lists: Vec<Vec<usize>>, own: &[Arc<dyn ProcessGroup>]) {
        let mut known = self.known.lock();
        known.lists.extend(lists);
        known.own.extend_from_slice(own);
    }

    /// Returns the group with this list of ranks.
    pub(super) fn get(&self, ranks: &[usize]) -> Option<Arc<dyn ProcessGroup>> {
        self.known.lock().own.iter().find(|group| group.global_ranks() == ranks).cloned()
    }

    /// Creates the groups of those lists that have none, in one split. The lists share no rank. All ranks know the same
    /// lists, so either all ranks split or none does.
    pub(super) fn find_or_split(&self, name: &str, lists: Vec<Vec<usize>>) -> Result<(), CommError> {
        let is_new = |list: &Vec<usize>| !self.known.lock().lists.contains(list);
        let new: Vec<Vec<usize>> = lists.into_iter().filter(is_new).collect();
        if new.is_empty() {
            return Ok(());
        }
        let own_rank = self.own_rank();
        let place = |(color, list): (usize, &Vec<usize>)| {
            list.iter().position(|&rank| rank == own_rank).map(|key| (color, key))
        };
        let place = new.iter().enumerate().find_map(place);
        let group = self.world.split(name, place.map(|(color, _)| color), place.map_or(0, |(_, key)| key))?;
        self.add(new, group.as_slice());
        Ok(())
    }

    /// Returns the groups of one rank, without the others.
    pub(super) fn of_single_ranks(&self) -> Self {
        let (single, known) = (Self::empty(self.world.clone()), self.known.lock());
        let lists = known.lists.iter().filter(|list| list.len() == 1).cloned().collect();
        let own = known.own.iter().filter(|group| group.world_size() == 1).cloned().collect::<Vec<_>>();
        single.add(lists, &own);
        single
    }

    /// Checks that all ranks pass the same mesh, and that its ranks are in the world.
    pub(super) fn check_mesh(&self, mesh: &DeviceMesh) -> Result<(), CommError> {
        self.compare(std::slice::from_ref(mesh), mesh)?;
        let members = self.world.global_ranks().to_vec();
        let is_outside = |rank: &usize| !members.contains(rank);
        let missing: Vec<usize> = mesh.ranks().iter().copied().filter(is_outside).collect();
        if missing.is_empty() {
            return Ok(());
        }
        Err(CommError::MeshOutsideGroup { group: self.world.name().to_owned(), missing, members })
    }

    /// Ranks with different meshes would wait for each other in different groups, so
    /// the meshes are compared before any group is created. `own` is the one to name.
    pub(super) fn compare(&self, meshes: &[DeviceMesh], own: &DeviceMesh) -> Result<(), CommError> {
        let mut hash = Fnv1a::default();
        meshes.iter().for_each(|mesh| hash.write(&mesh.fingerprint().to_le_bytes()));
        let fingerprints = self.world.all_gather_values(&[hash.finish().cast_signed()])?;
        let votes = |of: i64| fingerprints.iter().filter(|&&fingerprint| fingerprint == of).count();
        // Ties go to the lowest rank.
        let majority = fingerprints
            .iter()
            .copied()
            .reduce(|best, next| if votes(next) > votes(best) { next } else { best });
        let differs = |&(fingerprint, _): &(&i64, &usize)| Some(*fingerprint) != majority;
        let ranks = fingerprints.iter().zip(self.world.global_ranks());
        let differing: Vec<usize> = ranks.filter(differs).map(|(_, &rank)| rank).collect();
        if differing.is_empty() {
            return Ok(());
        }
        let rank = self.own_rank();
        let mesh = format!("{:?} of shape {:?} over ranks {:?}", own.axis_names(), own.shape(), own.ranks());
        Err(CommError::MeshMismatch { differing, rank, mesh })
    }
}
