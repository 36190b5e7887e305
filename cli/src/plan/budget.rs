//! The memory that a plan compares with: `--memory-gib`, `--reserve-gib` and `--host-memory-gib`.

use crate::failure::Failure;
use anyhow::anyhow;
use ulysses::device::DeviceKind;
use ulysses::estimate::MemoryBudget;
use ulysses::monitor::format_bytes;
use ulysses::trainer::job::GPU_RESERVE_BYTES;

const GIB: f64 = (1_u64 << 30) as f64;

#[derive(clap::Args)]
pub(super) struct MemoryFlags {
    /// Memory per rank in GiB: reports whether the run fits, and the longest sequence that fits.
    #[arg(long, visible_alias = "gib-per-rank")]
    memory_gib: Option<f64>,
    /// Part of --memory-gib that is not for tensors: CUDA context and libraries [default: 4 on GPUs, 0 on CPUs].
    #[arg(long, requires = "memory_gib")]
    reserve_gib: Option<f64>,
    /// Available host memory per node in GiB, for what ranks on GPUs offload [default: not limited].
    #[arg(long, requires = "memory_gib")]
    host_memory_gib: Option<f64>,
}

/// The memory for tensors.
#[derive(Clone, Copy)]
pub(super) struct Available {
    pub(super) budget: MemoryBudget,
    /// The part of a rank's memory that is not for tensors.
    pub(super) reserve_bytes: u64,
}

impl MemoryFlags {
    /// Returns the memory for tensors, if `--memory-gib` is given.
    pub(super) fn available(&self, device: DeviceKind) -> Result<Option<Available>, Failure> {
        let is_positive = |gib: f64| gib.is_finite() && gib > 0.0;
        let bytes = |flag: &str, gib: Option<f64>| match gib {
            Some(gib) if !is_positive(gib) => {
                Err(Failure::Usage(anyhow!("--{flag} {gib}: expected a number above 0")))
            }
            gib => Ok(gib.map(|gib| (gib * GIB) as u64)),
        };
        let host_bytes_per_node = bytes("host-memory-gib", self.host_memory_gib)?;
        let (Some(memory_gib), Some(memory)) = (self.memory_gib, bytes("memory-gib", self.memory_gib)?)
        else {
            return Ok(None);
        };
        let reserve_gib = self.reserve_gib.unwrap_or(match device {
            DeviceKind::Cpu => 0.0,
            DeviceKind::Cuda => GPU_RESERVE_BYTES as f64 / GIB,
        });
        if !(reserve_gib.is_finite() && (0.0..memory_gib).contains(&reserve_gib)) {
            return Err(Failure::Usage(anyhow!(
                "--reserve-gib {reserve_gib}: expected at least 0 and less than --memory-gib {memory_gib}"
            )));
        }
        let reserve_bytes = (reserve_gib * GIB) as u64;
        let budget = MemoryBudget { rank_bytes: memory - reserve_bytes, host_bytes_per_node };
        Ok(Some(Available { budget, reserve_bytes }))
    }
}

impl Available {
    /// Formats the memory for tensors, and how it follows from the flags if a part is reserved.
    pub(super) fn per_rank(self) -> String {
        let size = |amount: u64| format_bytes(amount as f64);
        let Self { budget: MemoryBudget { rank_bytes, .. }, reserve_bytes } = self;
        match reserve_bytes {
            0 => format!("{} per rank", size(rank_bytes)),
            reserve => format!(
                "{} per rank ({} less {} for the CUDA context and libraries: --reserve-gib)",
                size(rank_bytes),
                size(rank_bytes.saturating_add(reserve)),
                size(reserve)
            ),
        }
    }
}
