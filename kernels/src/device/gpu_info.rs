//! Descriptions of GPUs.

/// A GPU, as the driver describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// Its name, such as `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// Its memory in bytes.
    pub total_bytes: u64,
    /// The ordinals of the GPUs whose memory it can access.
    pub peers: Vec<usize>,
}

/// The memory of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GpuMemory {
    /// Bytes that no process has allocated.
    pub free: u64,
    /// All bytes.
    pub total: u64,
    /// Bytes in tensors of this process: of all its ranks on this GPU.
    pub in_use: u64,
    /// Peak of `in_use`.
    pub peak: u64,
    /// Bytes that the allocator of this process has reserved for tensors, including `in_use`.
    pub reserved: u64,
}
