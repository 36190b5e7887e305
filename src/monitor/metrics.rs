//! `metrics.jsonl`: one JSON object per step, and one per evaluation. `docs/monitoring.md` lists the keys.

use super::append_file::{AppendFile, read_if_there};
use serde::Serialize;
use serde_json::Value;
use std::fs::File;
use std::path::Path;
use ulysses_kernels::memory::ByCategory;

/// What is recorded of a step.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Metrics {
    /// Number of the step, from 1.
    pub step: u64,
    /// Loss of the global batch.
    pub loss: f64,
    /// Learning rate that was used.
    pub lr: f64,
    /// Norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Tokens of the global batch that were computed: its sequences times their length, masked tokens and padding
    /// included.
    pub tokens: u64,
    /// `tokens / step_seconds`.
    pub tokens_per_second: f64,
    /// Tokens of it that have a label.
    pub label_tokens: u64,
    /// `label_tokens / step_seconds`.
    pub label_tokens_per_second: f64,
    /// Wall time of the step, data included.
    pub step_seconds: f64,
    /// Part of `step_seconds` that the reporting rank waited for data.
    pub data_seconds: f64,
    /// The share of the rows that is padding, over all the data.
    pub padding_share: f64,
    /// The rank that worked longest in the step, waiting for others and data left out; 0 for a single rank.
    pub slowest_rank: usize,
    /// Its time relative to the mean of all ranks; 1 for a single rank. Where a GPU works, the time of the host.
    pub slowest_rank_ratio: f64,
    /// Factor on the loss in mixed precision; 1 in f32.
    pub loss_scale: f64,
    /// Nothing was updated.
    pub skipped: bool,
    /// It was skipped because its loss or gradient was not finite.
    pub overflow: bool,
    /// Bytes that the reporting rank sent, over all groups.
    pub comm_bytes: u64,
    /// Bytes that the reporting rank's thread holds after the step; 0 unless the program's allocator
    /// counts ([`memory`](ulysses_kernels::memory)).
    pub memory_bytes: u64,
    /// The same by what it is for.
    pub memory_by_category: ByCategory,
    /// The most bytes that the thread has held at a time so far.
    pub peak_memory_bytes: u64,
    /// What they were for.
    pub peak_memory_by_category: ByCategory,
    /// Where the rest of the time went.
    #[serde(flatten)]
    pub time: TimeShares,
    /// Floating-point operations of the model on all ranks (without recomputation), per second of the step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model_flops_per_second: Option<f64>,
    /// The same as a share of what the ranks reach together in matrix products; not on a GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gemm_share: Option<f64>,
}

/// Seconds of a step on the reporting rank, cut in two ways: by phase (forward, backward, update), and by what the
/// rank did (all-to-all, other collectives, arithmetic). With `data_seconds` each cut has all of the step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct TimeShares {
    /// In forward passes.
    pub forward_seconds: f64,
    /// In backward passes.
    pub backward_seconds: f64,
    /// From the norm to the updated parameters.
    pub update_seconds: f64,
    /// Of the backward passes, in the reduction and gathering that ran along.
    pub reduce_seconds: f64,
    /// In all-to-alls: the Ulysses exchange.
    pub all_to_all_seconds: f64,
    /// In other collectives along dp: ZeRO's gathers and reductions.
    pub dp_comm_seconds: f64,
    /// In other collectives along sp: sums of gradients, and what ranks agree on.
    pub sp_comm_seconds: f64,
    /// In none of these: arithmetic, on the whole.
    pub compute_seconds: f64,
}

impl TimeShares {
    /// Time in collectives that are not all-to-alls.
    pub fn other_comm_seconds(&self) -> f64 {
        self.dp_comm_seconds + self.sp_comm_seconds
    }
}

/// What is recorded of an evaluation, in the same file: other names tell it from a step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EvalMetrics {
    /// Steps that were done before.
    pub step: u64,
    /// Mean loss of the tokens of the held-out rows, in nats.
    pub eval_loss: f64,
    /// `e` to the power of the loss.
    pub eval_perplexity: f64,
    /// Tokens that the loss is the mean of.
    pub eval_tokens: u64,
    /// Wall time.
    pub eval_seconds: f64,
}

/// Appends metrics to a file.
#[derive(Debug)]
pub struct MetricsWriter {
    file: AppendFile,
}

impl MetricsWriter {
    /// Creates the file, or empties it.
    ///
    /// # Errors
    /// What the operating system reports.
    pub fn create(path: &Path) -> std::io::Result<Self> {
        Ok(Self { file: AppendFile::new(File::create(path)?) })
    }

    /// Goes on with a file after `step`: lines of later steps, and one that was cut off, are
    /// dropped. A file that does not exist is created.
    ///
    /// # Errors
    /// What the operating system reports.
    pub fn resume(path: &Path, step: u64) -> std::io::Result<Self> {
        let text = read_if_there(path)?;
        let is_kept = |line: &&str| {
            let line: Option<Value> = serde_json::from_str(line).ok();
            line.and_then(|line| line.get("step")?.as_u64()).is_some_and(|of_line| of_line <= step)
        };
        Ok(Self { file: AppendFile::replacing(path, text.lines().filter(is_kept))? })
    }

    /// Writes one line, of [`Metrics`] or [`EvalMetrics`], so that a reader sees every step as it ends. A line that
    /// finds no room on the disk is written before the next one.
    ///
    /// # Errors
    /// What the operating system reports.
    pub fn write(&mut self, metrics: &impl Serialize) -> std::io::Result<()> {
        let mut line = serde_json::to_vec(metrics)?;
        line.push(b'\n');
        self.file.append(&line)
    }

    /// Writes the lines that found no room.
    ///
    /// # Errors
    /// What the operating system reports.
    pub fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resuming_keeps_the_steps_that_were_done_and_drops_what_came_after() {
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
    }
}
