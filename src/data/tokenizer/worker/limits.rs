//! The limits of the process that tokenizes.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

const MIB: u64 = 1 << 20;

/// The limits of one request. They grow with the sizes of the tokenizer file and of the request, so that large vocabularies
/// and long documents stay below them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) cpu_seconds: u64,
    /// Writable memory: data, heap and stacks.
    pub(super) memory_bytes: u64,
    pub(super) reply_bytes: u64,
}

impl Limits {
    pub(super) fn new(tokenizer_bytes: u64, request_bytes: u64) -> Self {
        let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get() as u64);
        // Loading has no request.
        let input_bytes = if request_bytes == 0 { tokenizer_bytes } else { request_bytes };
        Self {
            cpu_seconds: 5 + input_bytes / (32 << 10),
            memory_bytes: (512 + 8 * threads) * MIB + 32 * tokenizer_bytes + 128 * request_bytes,
            reply_bytes: 128 * MIB + 64 * request_bytes,
        }
    }

    /// The longest time without an answer. The other processes of the machine may leave little of it.
    pub(super) fn silence(&self) -> Duration {
        Duration::from_secs(60 + 10 * self.cpu_seconds)
    }

    /// Limits this process from now on. Where the system refuses, the limits of the parent's process remain.
    pub(super) fn hold(&self) {
        let used = clock_gettime(ClockId::ProcessCPUTime).tv_sec.unsigned_abs();
        set(Resource::Cpu, used + 1 + self.cpu_seconds);
        set(Resource::Data, self.memory_bytes);
        set(Resource::Core, 0);
    }
}

fn set(resource: Resource, limit: u64) {
    let maximum = getrlimit(resource).maximum;
    let current = Some(maximum.map_or(limit, |maximum| maximum.min(limit)));
    let _ = setrlimit(resource, Rlimit { current, maximum });
}
