//! Available memory of this machine and of this process.

use crate::kernels::device::gpu;
use std::fmt;
use std::path::Path;

/// The memory of a GPU that is not for tensors, unless the user says otherwise.
pub const GPU_RESERVE_BYTES: u64 = 4 << 30;

/// Bytes that can still be allocated, and the limit that applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Available {
    pub(super) bytes: u64,
    pub(super) limit: Limit,
}

/// A limit on memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Limit {
    /// `MemAvailable` of the machine.
    Machine,
    /// The cgroup of the process, for example of a container or a batch job.
    ControlGroup,
    /// The address space of a process (`ulimit -v`).
    AddressSpace,
    /// The memory of a GPU, without the usual reserve.
    Gpu,
}

impl Limit {
    /// Returns the memory that it limits.
    pub(super) fn memory(self) -> &'static str {
        if self == Self::Gpu { "GPU memory" } else { "host memory" }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Machine => "MemAvailable",
            Self::ControlGroup => "cgroup limit",
            Self::AddressSpace => "ulimit -v",
            Self::Gpu => "total less 4 GiB for the CUDA context and libraries",
        })
    }
}

/// Reads a system file.
type Read<'a> = &'a dyn Fn(&Path) -> Option<String>;

fn read(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

/// Returns the bytes of a line of a file of `/proc`, such as `MemTotal:`; `None` on systems without it.
pub fn proc_bytes(path: &str, label: &str) -> Option<u64> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(label))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok().map(|kib: u64| kib * 1024)
}

/// Reads a line of `/proc/meminfo`.
pub fn meminfo_bytes(label: &str) -> Option<f64> {
    proc_bytes("/proc/meminfo", label).map(|bytes| bytes as f64)
}

/// Returns the memory that all processes of this machine can still allocate, if the system reports it.
pub(super) fn on_machine() -> Option<Available> {
    let machine = proc_bytes("/proc/meminfo", "MemAvailable:").map(|bytes| (bytes, Limit::Machine));
    let group = left_in_groups(&read).map(|bytes| (bytes, Limit::ControlGroup));
    least(machine.into_iter().chain(group))
}

/// Returns the memory that this process can still allocate, if it has its own limit.
pub(super) fn in_process() -> Option<Available> {
    let limit = address_space(&read(Path::new("/proc/self/limits"))?)?;
    let mapped = proc_bytes("/proc/self/status", "VmSize:").unwrap_or(0);
    least([(limit.saturating_sub(mapped), Limit::AddressSpace)])
}

/// Returns the memory of a GPU of this machine for tensors, if there is one.
pub(super) fn on_gpu() -> Option<Available> {
    let bytes = gpu(0).ok()?.total_bytes.saturating_sub(GPU_RESERVE_BYTES);
    Some(Available { bytes, limit: Limit::Gpu })
}

fn least(limits: impl IntoIterator<Item = (u64, Limit)>) -> Option<Available> {
    limits
        .into_iter()
        .map(|(bytes, limit)| Available { bytes, limit })
        .min_by_key(|available| available.bytes)
}

/// Parses the soft limit of the address space in `/proc/self/limits`; `None` if unlimited.
fn address_space(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// The files of a memory controller.
struct Controller {
    root: &'static str,
    limit: &'static str,
    used: &'static str,
    /// Key of the reclaimable page cache in `memory.stat`.
    cache: &'static str,
}

const VERSION_1: Controller = Controller {
    root: "/sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cache: "total_inactive_file",
};

const VERSION_2: Controller = Controller {
    root: "/sys/fs/cgroup",
    limit: "memory.max",
    used: "memory.current",
    cache: "inactive_file",
};

/// Returns the bytes that the limits of this process's cgroups leave.
fn left_in_groups(read: Read<'_>) -> Option<u64> {
    let groups = read(Path::new("/proc/self/cgroup"))?;
    let left = |line: &str| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let controller = match controllers {
            "" => VERSION_2,
            _ if controllers.split(',').any(|name| name == "memory") => VERSION_1,
            _ => return None,
        };
        // Limits of parent groups apply too. In a container the group's own path may be invisible, the root is not.
        Path::new(path).ancestors().filter_map(|group| controller.left_in(group, read)).min()
    };
    groups.lines().filter_map(left).min()
}

impl Controller {
    fn left_in(&self, group: &Path, read: Read<'_>) -> Option<u64> {
        let folder = Path::new(self.root).join(group.strip_prefix("/").ok()?);
        let number = |name: &str| read(&folder.join(name))?.trim().parse::<u64>().ok();
        let (limit, used) = (number(self.limit)?, number(self.used)?);
        let stat = read(&folder.join("memory.stat")).unwrap_or_default();
        let cache = stat.lines().find_map(|line| line.strip_prefix(self.cache)?.trim().parse::<u64>().ok());
        Some(limit.saturating_sub(used.saturating_sub(cache.unwrap_or(0))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the bytes left by cgroups with these files.
    fn left(files: &[(&str, &str)]) -> Option<u64> {
        left_in_groups(&|path| {
            let (_, text) = files.iter().find(|(name, _)| Path::new(name) == path)?;
            Some((*text).to_owned())
        })
    }

    #[test]
    fn the_tightest_group_of_version_2_counts_without_its_page_cache() {
        let files = [
            ("/proc/self/cgroup", "0::/jobs/one\n"),
            ("/sys/fs/cgroup/jobs/one/memory.max", "max\n"),
            ("/sys/fs/cgroup/jobs/one/memory.current", "100\n"),
            ("/sys/fs/cgroup/jobs/memory.max", "5000\n"),
            ("/sys/fs/cgroup/jobs/memory.current", "1000\n"),
            ("/sys/fs/cgroup/jobs/memory.stat", "anon 7\ninactive_file 300\n"),
        ];
        assert_eq!(left(&files), Some(4300));
    }

    #[test]
    fn the_group_of_version_1_in_a_container_is_the_root() {
        let files = [
            ("/proc/self/cgroup", "3:cpu:/docker/a\n2:memory:/docker/a\n0::/docker/a\n"),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "2000\n"),
            ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "2500\n"),
            ("/sys/fs/cgroup/memory/memory.stat", "inactive_file 9\ntotal_inactive_file 1000\n"),
        ];
        assert_eq!(left(&files), Some(500));
        assert_eq!(left(&files[..1]), None, "no limit is visible");
        assert_eq!(left(&[]), None);
    }

    #[test]
    fn the_soft_limit_of_the_address_space_counts() {
        let of = |soft: &str| {
            address_space(&format!(
                "Limit  Soft Limit\nMax address space         {soft}   unlimited   bytes\n"
            ))
        };
        assert_eq!((of("4096"), of("unlimited")), (Some(4096), None));
    }
}
