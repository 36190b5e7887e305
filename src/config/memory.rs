//! What exists at a time: recomputation, tiles, chunks of heads, offload.

use super::reader::Section;
use serde::Serialize;
use std::num::NonZero;
use ulysses_kernels::device::DeviceKind;

/// Where state is between its uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Offload {
    /// Where it is used.
    #[default]
    None,
    /// In the host's memory, which is where ranks on a CPU use it anyway.
    Cpu,
    /// In an unnamed file in this directory; without one in that of `ulysses.offload_path`.
    Nvme(Option<String>),
}

impl Offload {
    /// Its name in a file.
    pub fn device(&self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Cpu => "cpu",
            Self::Nvme(_) => "nvme",
        }
    }

    /// Whether it is in a file.
    pub fn is_in_file(&self) -> bool {
        matches!(self, Self::Nvme(_))
    }

    /// Whether it is away between its uses, from where ranks on such a device use it.
    pub fn is_moved_from(&self, device: DeviceKind) -> bool {
        match self {
            Self::None => false,
            Self::Cpu => device != DeviceKind::Cpu,
            Self::Nvme(_) => true,
        }
    }

    fn read(section: &Section<'_>) -> Self {
        let path = section.text("nvme_path");
        match section.choice("device", &[("none", Self::None.device()), ("cpu", "cpu"), ("nvme", "nvme")]) {
            Some("cpu") => Self::Cpu,
            Some("nvme") => Self::Nvme(path),
            _ => Self::None,
        }
    }
}

/// Settings that change how much memory a step takes, and nothing of its results but the order of sums.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryConfig {
    /// `ulysses.activation_checkpointing_interval`: of so many layers one is recomputed; default 1: all.
    #[serde(rename = "activation_checkpointing_interval")]
    pub checkpointing_interval: usize,
    /// `ulysses.tile_tokens`: tokens that norms, projections and the MLP work on at a time; default all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tile_tokens: Option<NonZero<usize>>,
    /// `ulysses.head_chunks`: parts in which the heads pass through attention; default 1.
    pub head_chunks: usize,
    /// `activation_checkpointing.cpu_checkpointing`: checkpoints wait in the host's memory, of ranks on a CPU in a file;
    /// default false.
    #[serde(skip)]
    pub offload_checkpoints: bool,
    /// `ulysses.offload_path`: the directory of such files; default the system's for temporary files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offload_path: Option<String>,
    /// `zero_optimization.offload_optimizer`: where optimizer state is between updates; default in memory.
    #[serde(skip)]
    pub offload_optimizer: Offload,
    /// `zero_optimization.offload_param`: where partitions of parameters are between their uses; default in memory.
    #[serde(skip)]
    pub offload_parameters: Offload,
}

impl Default for MemoryConfig {
    fn default() -> Self {
        Self {
            checkpointing_interval: 1,
            tile_tokens: None,
            head_chunks: 1,
            offload_checkpoints: false,
            offload_path: None,
            offload_optimizer: Offload::None,
            offload_parameters: Offload::None,
        }
    }
}

impl MemoryConfig {
    pub(super) fn read(root: &Section<'_>) -> Self {
        let (ulysses, checkpointing) = (root.section("ulysses"), root.section("activation_checkpointing"));
        let zero = root.section("zero_optimization");
        let offload_checkpoints = checkpointing.boolean("cpu_checkpointing");
        if offload_checkpoints && !ulysses.boolean("activation_checkpointing") {
            let expected =
                "false, unless `ulysses.activation_checkpointing` is true: there are no checkpoints";
            checkpointing.contradiction("cpu_checkpointing", expected);
        }
        let checkpointing_interval = ulysses.count("activation_checkpointing_interval").unwrap_or(1);
        if checkpointing_interval > 1 && !ulysses.boolean("activation_checkpointing") {
            let expected = "1, unless `ulysses.activation_checkpointing` is true: no layer is recomputed";
            ulysses.contradiction("activation_checkpointing_interval", expected);
        }
        Self {
            checkpointing_interval,
            tile_tokens: ulysses.count("tile_tokens").and_then(NonZero::new),
            head_chunks: ulysses.count("head_chunks").unwrap_or(1),
            offload_checkpoints,
            offload_path: ulysses.text("offload_path"),
            offload_optimizer: Offload::read(&zero.section("offload_optimizer")),
            offload_parameters: Offload::read(&zero.section("offload_param")),
        }
    }
}
