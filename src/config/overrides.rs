//! The command-line flags that override the file.

use super::error::ConfigError;
use super::sections::data::{DataSource, Packing};
use super::sections::mesh_spec::StatedMesh;
use super::sections::ulysses::UlyssesConfig;
use crate::mesh::{Cluster, MeshShape, MeshSpec, Preset, TrainingShape};

/// Values of command-line flags. Flags override the file; sizes of a mesh that differ are noted.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Overrides {
    /// `--mesh`: the sizes.
    pub mesh: Option<MeshShape>,
    /// `--mesh`: the size of the ring, if sp is given as `ring` and `ulysses`.
    pub ring_size: Option<usize>,
    /// `--mesh`: the resolved mesh, if it gives the ranks an order.
    pub layout: Option<MeshSpec>,
    /// `--mesh`: the preset that gives the sizes, and may imply a ZeRO stage.
    pub preset: Option<Preset>,
    /// `--mesh`: the size of `dp_shard`, if dp is given as `dp_replicate` and `dp_shard`.
    pub shard_size: Option<usize>,
    /// `--mesh-selector`: the string that the patterns of `ulysses.mesh_rules` match, if `mesh` is `None`. Without it,
    /// no rule applies.
    pub mesh_selector: Option<String>,
    /// Ranks per node, if a launcher sets it, for meshes whose sizes depend on it.
    pub ranks_per_node: Option<usize>,
    /// Number of ranks, if a launcher rather than the mesh sets it; dp is then inferred.
    pub world_size: Option<usize>,
    /// `--seq-len`.
    pub seq_len: Option<usize>,
    /// `--steps`.
    pub steps: Option<u64>,
    /// `--epochs`.
    pub epochs: Option<u64>,
    /// `--seed`.
    pub seed: Option<u64>,
    /// `--threads-per-rank`.
    pub threads_per_rank: Option<usize>,
    /// `--model`.
    pub model: Option<String>,
    /// `--data`: replaces all data of the file, if not empty.
    pub data: Vec<DataSource>,
    /// `--packing`.
    pub packing: Option<Packing>,
    /// `--tokenizer`.
    pub tokenizer: Option<String>,
    /// `--output`.
    pub output: Option<String>,
}

impl Overrides {
    /// Sets all that `--mesh` gives.
    pub fn with_mesh(self, mesh: &StatedMesh) -> Self {
        let TrainingShape { ring_size, shard_size, .. } = mesh.shape;
        let (layout, preset) = (mesh.layout(), mesh.preset);
        Self { mesh: Some(mesh.shape.sizes), ring_size, layout, preset, shard_size, ..self }
    }

    /// Applies the flags to the section that they override.
    pub(super) fn apply(&self, ulysses: &mut UlyssesConfig) {
        if self.steps.is_some() || self.epochs.is_some() {
            (ulysses.steps, ulysses.epochs) = (self.steps, self.epochs);
        }
        ulysses.seq_len = self.seq_len.or(ulysses.seq_len);
        ulysses.threads_per_rank = self.threads_per_rank.or(ulysses.threads_per_rank);
        ulysses.model = self.model.clone().or(ulysses.model.take());
        ulysses.tokenizer = self.tokenizer.clone().or(ulysses.tokenizer.take());
        ulysses.output = self.output.clone().or(ulysses.output.take());
        if !self.data.is_empty() {
            ulysses.data.clone_from(&self.data);
        }
        ulysses.packing = self.packing.unwrap_or(ulysses.packing);
    }

    /// Returns the job's cluster, if a launcher sets it; one node if the ranks do not divide into nodes.
    pub(super) fn cluster(&self) -> Option<Cluster> {
        let ranks = self.world_size?;
        let ranks_per_node =
            self.ranks_per_node.filter(|of_node| ranks.is_multiple_of(*of_node)).unwrap_or(ranks);
        Some(Cluster { nodes: ranks / ranks_per_node.max(1), ranks_per_node })
    }

    /// Returns the selector of `ulysses.mesh_rules`, unless a flag sets the mesh, which overrides all rules.
    pub(super) fn selector(&self) -> Option<&str> {
        self.mesh_selector.as_deref().filter(|_| self.mesh.is_none())
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let invalid = |flag, expected: &str, found: &str| {
            Err(ConfigError::InvalidFlag { flag, expected: expected.to_owned(), found: found.to_owned() })
        };
        let counts = [
            ("mesh", self.mesh.is_some_and(|mesh| mesh.into_array().contains(&0))),
            ("seq-len", self.seq_len == Some(0)),
            ("steps", self.steps == Some(0)),
            ("epochs", self.epochs == Some(0)),
            ("threads-per-rank", self.threads_per_rank == Some(0)),
        ];
        if let Some((flag, _)) = counts.into_iter().find(|(_, is_zero)| *is_zero) {
            return invalid(flag, "at least 1", "0");
        }
        if self.steps.is_some() && self.epochs.is_some() {
            return invalid("epochs", "either --steps or --epochs", "both");
        }
        let is_empty = |text: &Option<String>| text.as_deref() == Some("");
        let texts = [
            ("model", is_empty(&self.model)),
            ("tokenizer", is_empty(&self.tokenizer)),
            ("output", is_empty(&self.output)),
            ("data", self.data.iter().any(|source| source.path.is_empty())),
        ];
        match texts.into_iter().find(|(_, is_empty)| *is_empty) {
            Some((flag, _)) => invalid(flag, "a non-empty string", "an empty one"),
            None => Ok(()),
        }
    }
}
