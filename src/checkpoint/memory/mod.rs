//! [`MemoryCopies`]: checkpoints in the host memory of the nodes, each state file on two of them.
//!
//! Every node has one directory in memory, in which its ranks write ordinary checkpoints. A directory has the manifest, the
//! state files of the node's own ranks, and those of their partners on the previous node. So all files survive the loss
//! of any node whose next node survives. The directories outlive the ranks, not the nodes.

mod choose;
mod restore;
mod transfer;

pub use restore::{MemoryCheckpoint, NewestCopy};

use super::directory::{StepDirectories, saved_steps};
use super::save::{SavedCheckpoint, WriteJob, all_or_refused, gather_results, state_parts};
use super::{CheckpointError, LocalStorage, Manifest};
use crate::comm::{ProcessGroup, ProcessGroupExt, host_name};
use crate::mesh::RankHosts;
use crate::zero::{CheckpointPart, ZeroOptimizer};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use transfer::{Transfer, send_files};

/// One rank's part in saving copies in memory and in restoring them.
///
/// All ranks of the group must call the collective methods in the same order.
#[derive(Debug)]
pub struct MemoryCopies {
    group: Arc<dyn ProcessGroup>,
    /// This node's directory.
    directories: StepDirectories,
    nodes: RankHosts,
    /// The part that this rank writes, if any.
    part: Option<CheckpointPart>,
}

impl MemoryCopies {
    /// Opens the `directory` of this rank's node, and removes partial copies of an earlier start. Collective.
    ///
    /// Ranks with the same host name and the same path share a node. `group` has all ranks; `part` is that of
    /// [`TrainingGroups::written_part`](crate::comm::TrainingGroups::written_part). Returns `None` if any rank has no such directory.
    ///
    /// # Errors
    /// Fails if a partial copy cannot be removed, or communication fails.
    pub fn new(
        group: Arc<dyn ProcessGroup>,
        directory: Option<&Path>,
        part: Option<CheckpointPart>,
    ) -> Result<Option<Self>, CheckpointError> {
        let directory = directory.filter(|directory| directory.is_dir());
        let node =
            directory.map(|directory| format!("{}:{}", host_name().unwrap_or_default(), directory.display()));
        let nodes = all_or_refused(gather_results(&*group, &Ok(node))?)?;
        let nodes: Option<Vec<String>> = nodes.into_iter().collect();
        let (Some(nodes), Some(directory)) = (nodes, directory) else { return Ok(None) };
        let directories = StepDirectories { path: directory.to_owned(), storage: Arc::new(LocalStorage) };
        let this = Self { group, directories, nodes: RankHosts::new(&nodes), part };
        this.all(this.on_node(|directories| directories.clean()))?;
        Ok(Some(this))
    }

    /// Returns the number of nodes.
    pub fn num_nodes(&self) -> usize {
        self.nodes.num_nodes()
    }

    /// Saves a copy of the state, and then removes older copies. Collective.
    ///
    /// Fills in the files of `manifest`. Until the copy is complete on all nodes, the previous one stays.
    ///
    /// # Errors
    /// Returns the same [`CheckpointError::NotSaved`] on all ranks if one rank failed. Its files are removed and training may
    /// continue. Also fails if communication fails.
    pub fn save(
        &mut self,
        state: &ZeroOptimizer,
        mut manifest: Manifest,
    ) -> Result<SavedCheckpoint, CheckpointError> {
        let (started, step) = (Instant::now(), manifest.progress.step);
        self.all_or_abandon(step, self.on_node(|directories| directories.begin(step)))?;
        let files = self.all_or_abandon(step, self.write(state, &manifest))?;
        let transfers: Vec<Transfer> = files
            .iter()
            .enumerate()
            .flat_map(|(from, files)| files.iter().map(move |file| (from, file)))
            .filter_map(|(from, file)| Some(Transfer { file: file.clone(), from, to: self.partner(from)? }))
            .collect();
        manifest.files = files.into_iter().flatten().collect();
        let bytes = manifest.total_bytes();
        let dir = self.directories.unpublished(step);
        let sent = send_files(&*self.group, &*self.directories.storage, &dir, &transfers)?;
        self.all_or_abandon(step, sent)?;
        let published = self.on_node(|directories| {
            let text = manifest.to_text().map_err(|error| CheckpointError::Manifest {
                path: directories.unpublished(step),
                reason: format!("cannot be written: {error}"),
            })?;
            directories.publish(step, &text)
        });
        self.all_or_abandon(step, published)?;
        let warnings = self.on_node(|directories| directories.remove_all_but(step)).err();
        let (path, seconds) = (self.directories.of(step), started.elapsed().as_secs_f64());
        Ok(SavedCheckpoint { step, path, bytes, seconds, warnings: warnings.into_iter().collect() })
    }

    /// Writes this rank's files.
    fn write(&self, state: &ZeroOptimizer, manifest: &Manifest) -> Result<Vec<super::FileEntry>, String> {
        let Some(part) = self.part else { return Ok(Vec::new()) };
        let (storage, dir) =
            (self.directories.storage.clone(), self.directories.unpublished(manifest.progress.step));
        let job = WriteJob { storage, dir, manifest: manifest.clone(), part, read_back: false };
        job.write(&state_parts(state))
    }

    /// Returns the rank that gets copies of a rank's files: the one with the same position on the next node. `None` on
    /// one node.
    fn partner(&self, rank: usize) -> Option<usize> {
        let node = self.node_of(rank);
        let next = self.ranks_of((node + 1) % self.num_nodes());
        let position = self.ranks_of(node).iter().position(|other| *other == rank)?;
        (self.num_nodes() > 1).then(|| next[position % next.len()])
    }

    fn node_of(&self, rank: usize) -> usize {
        self.nodes.node_of(rank).unwrap_or_else(|| unreachable!("every rank of the group has a node"))
    }

    /// Returns the ranks of a node.
    fn ranks_of(&self, node: usize) -> Vec<usize> {
        (0..self.nodes.world_size()).filter(|rank| self.node_of(*rank) == node).collect()
    }

    /// Runs `work` on the first rank of every node.
    fn on_node(
        &self,
        work: impl FnOnce(&StepDirectories) -> Result<(), CheckpointError>,
    ) -> Result<(), String> {
        let rank = self.group.rank();
        let is_first = self.ranks_of(self.node_of(rank)).first() == Some(&rank);
        if is_first { work(&self.directories).map_err(|error| error.to_string()) } else { Ok(()) }
    }

    /// Gathers the results of all ranks, or returns the first failure.
    fn all<T: serde::Serialize + serde::de::DeserializeOwned>(
        &self,
        own: Result<T, String>,
    ) -> Result<Vec<T>, CheckpointError> {
        all_or_refused(gather_results(&*self.group, &own)?)
    }

    /// As [`all`](Self::all), and removes the partial copy after a failure.
    fn all_or_abandon<T: serde::Serialize + serde::de::DeserializeOwned>(
        &self,
        step: u64,
        own: Result<T, String>,
    ) -> Result<Vec<T>, CheckpointError> {
        self.all(own).map_err(|error| {
            let CheckpointError::Refused { rank, reason } = error else { return error };
            let _ = self.on_node(|directories| {
                directories.abandon(step);
                Ok(())
            });
            // The next save must not begin before.
            let _ = self.group.barrier();
            CheckpointError::NotSaved { step, rank, reason }
        })
    }
}

impl StepDirectories {
    /// Removes all steps but one.
    fn remove_all_but(&self, step: u64) -> Result<(), CheckpointError> {
        let mut others = saved_steps(&self.path)?.into_iter().filter(|other| *other != step);
        others.try_for_each(|other| self.remove(other))
    }
}
