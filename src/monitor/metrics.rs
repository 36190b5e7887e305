//! `metrics.jsonl`: one JSON object per step, evaluation and restart. `docs/monitoring.md` lists the keys.

use super::append_file::{AppendFile, read_if_there};
use crate::comm::MeshShape;
use serde::{Serialize, Serializer};
use serde_json::Value;
use std::path::Path;
use ulysses_kernels::memory::ByCategory;

/// The metrics of a step.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Metrics {
    /// Number of the step, from 1.
    pub step: u64,
    /// Loss of the global batch.
    pub loss: f64,
    /// Learning rate.
    pub lr: f64,
    /// Norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Tokens of the global batch: sequences times sequence length, including masked tokens and padding.
    pub tokens: u64,
    /// `tokens / step_seconds`.
    pub tokens_per_second: f64,
    /// Tokens of the global batch with a label.
    pub label_tokens: u64,
    /// `label_tokens / step_seconds`.
    pub label_tokens_per_second: f64,
    /// Wall time of the step, including data loading.
    pub step_seconds: f64,
    /// The part of `step_seconds` that the reporting rank waited for data.
    pub data_seconds: f64,
    /// The share of padding in the data.
    pub padding_share: f64,
    /// The rank with the longest compute time in the step, without waiting for other ranks and data; 0 for a single rank.
    pub slowest_rank: usize,
    /// Its compute time relative to the mean of all ranks; 1 for a single rank.
    pub slowest_rank_ratio: f64,
    /// Seconds that each rank, in order, had less to compute than the slowest rank: it waited for other ranks. Empty for
    /// metrics that were not compared; with a single rank, 0.
    pub idle_seconds: Vec<f64>,
    /// Sizes of the mesh, as `dp_size` and so on; those of pp and tp are left out if they are 1. They change where a run was
    /// resumed on another mesh.
    #[serde(flatten, serialize_with = "sizes")]
    pub mesh: MeshShape,
    /// Loss scale in mixed precision; 1 in f32.
    pub loss_scale: f64,
    /// Whether the update was skipped.
    pub skipped: bool,
    /// Whether it was skipped because the loss or a gradient was not finite.
    pub overflow: bool,
    /// Bytes that the reporting rank sent, over all groups.
    pub comm_bytes: u64,
    /// Memory of the reporting rank's thread after the step; 0 unless the program uses a counting allocator
    /// ([`memory`](ulysses_kernels::memory)). On a GPU, the bytes in tensors of all ranks of the process on it.
    pub memory_bytes: u64,
    /// `memory_bytes` by category.
    pub memory_by_category: ByCategory,
    /// Peak of `memory_bytes` so far.
    pub peak_memory_bytes: u64,
    /// `peak_memory_bytes` by category.
    pub peak_memory_by_category: ByCategory,
    /// The parts of the step time.
    #[serde(flatten)]
    pub time: TimeShares,
    /// FLOP/s of the model on all ranks, without recomputation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model_flops_per_second: Option<f64>,
    /// MFU: `model_flops_per_second` relative to the peak of all ranks. The peak is the dense FLOP/s of the GPU's data sheet, or
    /// the measured matmul FLOP/s of a CPU or an unknown GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gemm_share: Option<f64>,
}

impl Metrics {
    /// Returns the share of the tokens that have a label.
    pub fn label_share(&self) -> f64 {
        self.label_tokens as f64 / self.tokens.max(1) as f64
    }
}

/// The seconds of a step on the reporting rank, divided in two ways: by phase (forward, backward, update), and by activity
/// (all-to-all, other collectives, compute). With `data_seconds`, each adds up to the step time; on a GPU, whose stream
/// these are times of, to more if it computes while the host waits for data.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct TimeShares {
    /// In forward passes.
    pub forward_seconds: f64,
    /// In backward passes.
    pub backward_seconds: f64,
    /// In the update, from the gradient norm to the updated parameters.
    pub update_seconds: f64,
    /// In reductions and gathers during the backward passes.
    pub reduce_seconds: f64,
    /// In all-to-alls: the Ulysses exchange.
    pub all_to_all_seconds: f64,
    /// The part of `all_to_all_seconds` in which the rank waited for an exchange: what compute did not hide.
    pub exposed_exchange_seconds: f64,
    /// In hops of a ring.
    pub ring_seconds: f64,
    /// The part of `ring_seconds` in which the rank waited for a block or its gradients: what attention did not hide.
    pub exposed_ring_seconds: f64,
    /// Along pp: waiting for messages of other pipeline stages, and sending to them.
    pub pp_comm_seconds: f64,
    /// Along tp: gathers and sums around the modules that its ranks divide.
    pub tp_comm_seconds: f64,
    /// In other collectives along dp: ZeRO's gathers and reductions.
    pub dp_comm_seconds: f64,
    /// In other collectives along sp: sums of gradients and of single values.
    pub sp_comm_seconds: f64,
    /// In none of these: mostly compute.
    pub compute_seconds: f64,
}

impl TimeShares {
    /// Returns the time in collectives along dp and sp other than all-to-alls.
    pub fn other_comm_seconds(&self) -> f64 {
        self.dp_comm_seconds + self.sp_comm_seconds
    }
}

/// The metrics of an evaluation. The key names distinguish it from a step in the same file.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EvalMetrics {
    /// Steps before the evaluation.
    pub step: u64,
    /// Mean loss per token of the held-out data, in nats.
    pub eval_loss: f64,
    /// Perplexity: `e` to the power of the loss.
    pub eval_perplexity: f64,
    /// Tokens with a label.
    pub eval_tokens: u64,
    /// Wall time of the evaluation.
    pub eval_seconds: f64,
}

/// Writes the size of each axis that the mesh has.
fn sizes<S: Serializer>(mesh: &MeshShape, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(mesh.axes().into_iter().map(|axis| (format!("{}_size", axis.name), axis.size)))
}

/// A restart of the job by its launcher. The key `restart` distinguishes it from a step in the same file.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RestartMetrics {
    /// Steps of the checkpoint that the run was resumed from; 0 without one.
    pub step: u64,
    /// Number of the restart, from 1.
    pub restart: u32,
    /// What failed, the number of the restart and, on fewer nodes, their number and mesh.
    pub reason: String,
    /// The rank that failed first; `None` if a whole node was lost, or if it is not known.
    pub failed_rank: Option<usize>,
    /// Hosts that were lost.
    pub lost_hosts: Vec<String>,
    /// Where the checkpoint was; `None` without one: the run started at step 1.
    pub resumed_from: Option<CheckpointSource>,
    /// Number of data-parallel ranks before the restart.
    pub dp_size_before: Option<usize>,
    /// Number of sequence-parallel ranks before the restart.
    pub sp_size_before: Option<usize>,
    /// Sizes of the mesh, as in [`Metrics`].
    #[serde(flatten, serialize_with = "sizes")]
    pub mesh: MeshShape,
}

/// Where a checkpoint was stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckpointSource {
    /// A directory of checkpoints.
    Disk,
    /// A copy in the host memory of the nodes.
    Memory,
}

/// Appends metrics to a file.
#[derive(Debug)]
pub struct MetricsWriter {
    file: AppendFile,
}

impl MetricsWriter {
    /// Creates the file, or truncates it.
    ///
    /// # Errors
    /// An error of the operating system.
    pub fn create(path: &Path) -> std::io::Result<Self> {
        Ok(Self { file: AppendFile::new(crate::regular_file::create(path)?) })
    }

    /// Resumes a file after `step`: lines of later steps, except restarts, and incomplete lines are dropped. A file that does not exist is
    /// created.
    ///
    /// # Errors
    /// An error of the operating system.
    pub fn resume(path: &Path, step: u64) -> std::io::Result<Self> {
        let text = read_if_there(path)?;
        let is_kept = |line: &&str| {
            let line: Option<Value> = serde_json::from_str(line).ok();
            line.is_some_and(|line| {
                let of_line = line.get("step").and_then(Value::as_u64);
                line.get("restart").is_some() || of_line.is_some_and(|of_line| of_line <= step)
            })
        };
        Ok(Self { file: AppendFile::replacing(path, text.lines().filter(is_kept))? })
    }

    /// Writes one line of [`Metrics`], [`EvalMetrics`] or [`RestartMetrics`], which readers see immediately. If the disk is full, it is written
    /// before the next one.
    ///
    /// # Errors
    /// An error of the operating system.
    pub fn write(&mut self, metrics: &impl Serialize) -> std::io::Result<()> {
        let mut line = serde_json::to_vec(metrics)?;
        line.push(b'\n');
        self.file.append(&line)
    }

    /// Writes lines that wait for disk space.
    ///
    /// # Errors
    /// An error of the operating system.
    pub fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resuming_keeps_completed_steps_and_drops_later_ones() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let resume = |step| {
            drop(MetricsWriter::resume(&path, step).unwrap());
            std::fs::read_to_string(&path).unwrap()
        };
        assert_eq!(resume(3), "");
        std::fs::write(&path, "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n{\"st").unwrap();
        assert_eq!(resume(2), "{\"step\":1}\n{\"step\":2}\n");
        assert_eq!(resume(0), "");
        std::fs::write(&path, "{\"step\":1}\n{\"step\":2,\"restart\":1}\n{\"step\":2}\n").unwrap();
        assert_eq!(resume(1), "{\"step\":1}\n{\"step\":2,\"restart\":1}\n", "restarts have happened");
    }
}
