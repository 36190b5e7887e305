//! [`CopiedBytes`]: the host memory of copies of checkpoints (`checkpoint.memory_interval`).

use super::Workload;
use crate::engine::EngineError;
use crate::zero::CheckpointPart;
use serde::Serialize;

/// Host memory of the copies of checkpoints, without the headers of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct CopiedBytes {
    /// Bytes that a rank writes; the largest of all ranks.
    pub per_rank: u64,
    /// Bytes on a node between copies: those of its own ranks, and those of the ranks of the node before; the largest of
    /// all nodes.
    pub per_node: u64,
    /// The part of `per_node` that belongs to the ranks of the node before: none on one node.
    pub of_node_before: u64,
    /// Bytes on a node while a copy is made: the one before is still there.
    pub peak_per_node: u64,
}

impl Workload {
    /// Returns the host memory of the copies of checkpoints; `None` if the config wants no copies.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn copied_bytes(&self) -> Result<Option<CopiedBytes>, EngineError> {
        let checkpoint = self.config.checkpoint.as_ref();
        if checkpoint.and_then(|checkpoint| checkpoint.memory_interval).is_none() {
            return Ok(None);
        }
        let mesh = self.mesh()?;
        let saved = self.saved_bytes(&mesh)?;
        let written = self.written_parts(&mesh)?;
        let of_rank =
            |part: &Option<CheckpointPart>| part.map_or(0, |part| saved[part.tp_rank][part.partition]);
        let of_ranks: Vec<u64> = written.iter().map(of_rank).collect();
        let of_nodes: Vec<u64> =
            of_ranks.chunks(self.ranks_per_node).map(|ranks| ranks.iter().sum()).collect();
        let num_nodes = of_nodes.len();
        let before =
            |node: usize| if num_nodes > 1 { of_nodes[(node + num_nodes - 1) % num_nodes] } else { 0 };
        let nodes = (0..num_nodes).map(|node| (of_nodes[node] + before(node), before(node)));
        let (per_node, of_node_before) = nodes.max().unwrap_or_default();
        let per_rank = of_ranks.into_iter().max().unwrap_or(0);
        Ok(Some(CopiedBytes { per_rank, per_node, of_node_before, peak_per_node: 2 * per_node }))
    }
}
