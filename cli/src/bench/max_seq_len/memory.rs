//! Memory of a step: planned, allocated, and mapped by the process.

use super::DOCUMENT_TOKENS;
use crate::failure::{Failure, OrFail};
use crate::plan::model;
use crate::settings::{self, WritableMemory};
use anyhow::Context;
use serde::Serialize;
use serde_json::Value;
use std::fmt::{self, Display, Formatter};
use std::io::{Read, Seek};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;
use ulysses::config::Config;
use ulysses::device::DeviceKind;
use ulysses::estimate::Workload;
use ulysses::trainer::job::launch_options;

const MIB: f64 = (1_u64 << 20) as f64;

/// Interval of reading a process's mapped memory.
const POLL: Duration = Duration::from_millis(5);

/// Returns the workload of the steps.
pub(super) fn workload(config: &Config, threads_per_rank: Option<usize>) -> Result<Workload, Failure> {
    let mut config = config.clone();
    let threads = threads_per_rank.or(config.ulysses.threads_per_rank);
    let launch = launch_options(threads, config.world_size())?;
    config.ulysses.threads_per_rank = Some(launch.threads_per_rank);
    let model = model(&config)?;
    let (ranks_per_node, document_len) = (config.world_size(), Some(DOCUMENT_TOKENS));
    Ok(Workload { config, model, document_len, ranks_per_node, device: DeviceKind::Cpu })
}

/// Bytes in a step, summed over the ranks of a process.
#[derive(Clone, Copy, Serialize)]
pub(super) struct StepMemory {
    /// The planned maximum peak per rank, times the number of ranks.
    planned: u64,
    /// The sum of the ranks' peak allocations.
    in_use: u64,
    /// The process's maximum observed memory, if observed.
    #[serde(flatten)]
    writable: Option<WritableMemory>,
    /// The part mapped before ranks started: code, runtime, data.
    #[serde(skip_serializing_if = "Option::is_none")]
    at_start: Option<u64>,
}

impl StepMemory {
    /// Returns the memory of the step that wrote `output`.
    pub(super) fn of(
        workload: &Workload,
        seq_len: usize,
        output: &Path,
        writable: Option<WritableMemory>,
    ) -> Result<Self, Failure> {
        let plan = workload.with_seq_len(seq_len).plan().or_usage()?;
        let planned = plan.peak_bytes * workload.config.world_size() as u64;
        Self::read(planned, output, writable).or_run()
    }

    /// Reads the record of the run.
    fn read(planned: u64, output: &Path, writable: Option<WritableMemory>) -> anyhow::Result<Self> {
        let path = output.join("run.json");
        let text = std::fs::read_to_string(&path);
        let text = text.with_context(|| format!("cannot read {}", path.display()))?;
        let run: Value = serde_json::from_str(&text)?;
        let peak_bytes = |rank: &Value| rank["peak_bytes"].as_u64();
        let in_use = run["ranks"].as_array().and_then(|ranks| ranks.iter().map(peak_bytes).sum());
        let in_use = in_use.with_context(|| format!("{} lacks memory fields", path.display()))?;
        // Absent if the system does not report it.
        let at_start = run["environment"]["data_bytes_at_start"].as_u64();
        Ok(Self { planned, in_use, writable, at_start })
    }

    /// Returns the bytes that were mapped but not allocated: thread stacks and allocator overhead.
    fn overhead(self) -> Option<u64> {
        Some(self.writable?.mapped.saturating_sub(self.in_use + self.at_start?))
    }
}

impl Display for StepMemory {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / MIB;
        let Self { planned, in_use, writable, at_start } = *self;
        write!(
            f,
            "memory of its step, all ranks: {:.0} MiB planned, {:.0} MiB allocated",
            mib(planned),
            mib(in_use)
        )?;
        if let Some(WritableMemory { resident, mapped }) = writable {
            write!(f, ", {:.0} MiB resident, {:.0} MiB mapped", mib(resident), mib(mapped))?;
        }
        if let (Some(at_start), Some(overhead)) = (at_start, self.overhead()) {
            let (at_start, overhead) = (mib(at_start), mib(overhead));
            write!(
                f,
                " (of which {at_start:.0} MiB before the start of ranks, {overhead:.0} MiB stacks and allocator overhead)"
            )?;
        }
        Ok(())
    }
}

/// A process that has ended.
pub(super) struct Ended {
    pub(super) status: ExitStatus,
    pub(super) stderr: String,
    /// Its maximum observed writable memory, if it ran long enough to be observed.
    pub(super) memory: Option<WritableMemory>,
}

/// Runs a command to its end.
pub(super) fn run_watched(command: &mut Command) -> std::io::Result<Ended> {
    let mut stderr = tempfile::tempfile()?;
    let mut child = command.stdout(Stdio::null()).stdin(Stdio::null()).stderr(stderr.try_clone()?).spawn()?;
    let process = child.id().to_string();
    let mut max: Option<WritableMemory> = None;
    let status = loop {
        let now = settings::writable_memory(&process);
        max = now.map(|now| now.max(max.unwrap_or_default())).or(max);
        if let Some(status) = child.try_wait()? {
            break status;
        }
        std::thread::sleep(POLL);
    };
    stderr.rewind()?;
    let mut text = Vec::new();
    stderr.read_to_end(&mut text)?;
    Ok(Ended { status, stderr: String::from_utf8_lossy(&text).into_owned(), memory: max })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mapped_memory_of_a_running_process_is_observed() {
        let mut shell = Command::new("sh");
        let ended = run_watched(shell.args(["-c", "sleep 0.2; echo said >&2; exit 3"])).unwrap();
        let memory = ended.memory.unwrap();
        assert_eq!((ended.status.code(), &*ended.stderr), (Some(3), "said\n"));
        assert!((1 << 12..1 << 30).contains(&memory.mapped), "{memory:?}");
        assert!(memory.resident <= memory.mapped, "{memory:?}");
    }

    #[test]
    fn mapped_memory_is_allocated_or_from_the_start_or_overhead() {
        let mib = |mib: u64| mib << 20;
        let memory = StepMemory {
            planned: mib(90),
            in_use: mib(100),
            writable: Some(WritableMemory { resident: mib(115), mapped: mib(130) }),
            at_start: Some(mib(10)),
        };
        assert_eq!(
            memory.to_string(),
            "memory of its step, all ranks: 90 MiB planned, 100 MiB allocated, 115 MiB resident, 130 MiB mapped (of \
             which 10 MiB before the start of ranks, 20 MiB stacks and allocator overhead)"
        );
    }

    #[test]
    fn unmeasured_values_are_absent_rather_than_zero() {
        let directory = tempfile::tempdir().unwrap();
        let unmeasured = r#"{ "environment": {}, "ranks": [{ "peak_bytes": 104857600 }] }"#;
        std::fs::write(directory.path().join("run.json"), unmeasured).unwrap();
        let memory = StepMemory::read(90 << 20, directory.path(), None).unwrap();
        assert_eq!(memory.to_string(), "memory of its step, all ranks: 90 MiB planned, 100 MiB allocated");
        let written = serde_json::to_value(memory).unwrap();
        assert_eq!(written, serde_json::json!({ "planned": 90 << 20, "in_use": 100 << 20 }));
    }
}
