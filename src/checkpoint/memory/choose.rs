//! Which copy the nodes that are left still have.

use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// A copy: its step, and the hash of its manifest. A step that was saved twice may have two manifests.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct CopyId {
    pub(super) step: u64,
    pub(super) hash: String,
}

/// The files of a copy that a rank has found valid in its node's directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Listed {
    pub(super) copy: CopyId,
    /// Number of files of the copy, here or elsewhere.
    pub(super) num_files: usize,
    /// Indices of valid files in the manifest.
    pub(super) valid: Vec<usize>,
}

/// The copies of all nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Choice {
    /// The newest copy of which every file is on some node.
    pub(super) complete: Option<Holders>,
    /// Newer copies, with their first missing files.
    pub(super) incomplete: Vec<(Holders, usize)>,
}

/// Where a copy is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Holders {
    pub(super) copy: CopyId,
    /// The nodes with its manifest.
    pub(super) manifest: BTreeSet<usize>,
    /// The nodes with each file.
    pub(super) files: Vec<BTreeSet<usize>>,
    /// The lowest rank with the manifest.
    pub(super) first_rank: usize,
}

/// Chooses the newest complete copy. `listed` are the copies that each rank has found, `node_of` the node of a rank.
pub(super) fn choose(listed: &[Vec<Listed>], node_of: impl Fn(usize) -> usize) -> Choice {
    let mut copies: BTreeMap<Reverse<CopyId>, Holders> = BTreeMap::new();
    for (rank, listed) in listed.iter().enumerate() {
        for Listed { copy, num_files, valid } in listed {
            let empty = || Holders {
                copy: copy.clone(),
                manifest: BTreeSet::new(),
                files: vec![BTreeSet::new(); *num_files],
                first_rank: rank,
            };
            let holders = copies.entry(Reverse(copy.clone())).or_insert_with(empty);
            holders.manifest.insert(node_of(rank));
            for file in valid {
                // Equal hashes mean equal manifests, so the index is valid.
                if let Some(nodes) = holders.files.get_mut(*file) {
                    nodes.insert(node_of(rank));
                }
            }
        }
    }
    let mut incomplete = Vec::new();
    for holders in copies.into_values() {
        match holders.files.iter().position(BTreeSet::is_empty) {
            None => return Choice { complete: Some(holders), incomplete },
            Some(missing) => incomplete.push((holders, missing)),
        }
    }
    Choice { complete: None, incomplete }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(step: u64, hash: &str, valid: &[usize]) -> Listed {
        Listed { copy: CopyId { step, hash: hash.into() }, num_files: 3, valid: valid.to_vec() }
    }

    /// Returns the step that is chosen from the lists of nodes, one rank each, and those of the incomplete copies with
    /// their missing files.
    fn chosen(nodes: &[Vec<Listed>]) -> (Option<u64>, Vec<(u64, usize)>) {
        let Choice { complete, incomplete } = choose(nodes, |rank| rank);
        let missing = |(holders, file): &(Holders, usize)| (holders.copy.step, *file);
        (complete.map(|holders| holders.copy.step), incomplete.iter().map(missing).collect())
    }

    #[test]
    fn the_newest_step_whose_files_survive_on_any_nodes_is_chosen() {
        // Three nodes, of which each has its own file and that of the node before.
        let all = [(0, 2), (1, 0), (2, 1)]
            .map(|(own, copy)| vec![listed(4, "a", &[own, copy]), listed(2, "b", &[own, copy])]);
        assert_eq!(chosen(&all), (Some(4), vec![]));
        for lost in 0..3 {
            let left: Vec<_> =
                (0..3).map(|node| if node == lost { vec![] } else { all[node].clone() }).collect();
            assert_eq!(chosen(&left), (Some(4), vec![]), "node {lost} is lost");
        }
        assert_eq!(chosen(&[all[0].clone(), vec![], vec![]]), (None, vec![(4, 1), (2, 1)]), "two are lost");
        assert_eq!(chosen(&[vec![], vec![]]), (None, vec![]));
    }

    #[test]
    fn a_copy_that_was_not_completed_gives_way_to_the_one_before() {
        let torn = [vec![listed(4, "a", &[0, 2]), listed(2, "b", &[0, 1, 2])], vec![listed(2, "b", &[0, 1])]];
        assert_eq!(chosen(&torn), (Some(2), vec![(4, 1)]));
    }

    #[test]
    fn files_of_two_saves_of_a_step_are_not_mixed() {
        let mixed = [vec![listed(4, "a", &[0, 1])], vec![listed(4, "b", &[1, 2])]];
        assert_eq!(chosen(&mixed), (None, vec![(4, 0), (4, 2)]));
    }

    #[test]
    fn ranks_of_a_node_share_its_directory() {
        let ranks = [vec![listed(4, "a", &[0])], vec![listed(4, "a", &[1, 2])], vec![]];
        let complete = choose(&ranks, |rank| rank / 2).complete.unwrap();
        assert_eq!(complete.manifest, BTreeSet::from([0]));
        assert!(complete.files.iter().all(|nodes| *nodes == BTreeSet::from([0])));
    }
}
