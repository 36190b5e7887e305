//! The `zero_optimization` section.

use crate::config::mesh_shape::{SizeOrigin, StatedSize};
use crate::config_file::define::words::{choice, integer, key, section, text};
use crate::config_file::define::{FieldValue, Keys, choices, keys};
use crate::config_file::reader::Section;
use crate::config_file::vocabulary::{Key, Value};
use serde::Serialize;
use serde_json::{Map, Value as Json};
use ulysses_kernels::device::DeviceKind;

keys! {
    /// Config of ZeRO: the stage, its partitions and offload.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct ZeroConfig {
        /// State that is partitioned over `ulysses.zero_partition_axes`: 0 nothing, 1 optimizer state, 2 also gradients, 3 also
        /// parameters.
        pub stage: ZeroStage = integer(0, 3).integer(0),
        /// Shard size of hybrid sharding (MiCS; PyTorch's HSDP) along dp: consecutive dp ranks that partition the state; the other
        /// groups of this size hold replicas. Uses more memory per rank; gathers and reduce-scatters involve fewer, nearby
        /// ranks. -1: one shard group of all dp ranks.
        pub mics_shard_size: Option<usize> = key(Value::Signed).integer(-1),
        /// Offloads parameters between uses; stage 3 only.
        pub offload_param: Offload = section().or_null(),
        /// Offloads optimizer state, and at stages 2 and 3 gradients, between uses; stages 1 to 3. In host memory of a GPU the host updates
        /// them, unless the optimizer is LAMB.
        pub offload_optimizer: Offload = section().or_null(),
    }
}

impl ZeroConfig {
    /// Sets the stage, and switches off the offload that the stage does not support.
    pub fn set_stage(&mut self, stage: ZeroStage) {
        self.stage = stage;
        if !stage.partitions_optimizer() {
            self.offload_optimizer = Offload::None;
        }
        if !stage.partitions_parameters() {
            self.offload_param = Offload::None;
        }
    }

    /// Applies DeepSpeed's deprecated flags of offload, and reports offload that the stage does not support.
    pub(crate) fn check(&mut self, section: &Section<'_>) {
        let is_enough = self.stage.partitions_parameters();
        check_offload(
            section,
            ["offload_param", "cpu_offload_param"],
            &mut self.offload_param,
            "3",
            is_enough,
        );
        let is_enough = self.stage.partitions_optimizer();
        let names = ["offload_optimizer", "cpu_offload"];
        check_offload(section, names, &mut self.offload_optimizer, "1, 2 or 3", is_enough);
    }
}

/// Checks one offload: its section and the flag that the section replaced. `stages` are those that support it.
fn check_offload(
    zero: &Section<'_>,
    [name, flag]: [&'static str; 2],
    offload: &mut Offload,
    stages: &str,
    is_enough: bool,
) {
    let mut by = format!("{name}.device");
    if zero.get(flag) == Some(true) {
        if zero.names(name) {
            return zero.contradiction(flag, &format!("false, as `{name}`, which replaces it, is also set"));
        }
        zero.note(format!("`zero_optimization.{flag}` is deprecated: use `zero_optimization.{by}` \"cpu\""));
        (*offload, by) = (Offload::Cpu, flag.to_owned());
    }
    if *offload == Offload::None || is_enough || zero.is_invalid("stage") {
        return;
    }
    zero.contradiction("stage", &format!("{stages} (required by `{by}`)"));
    if !zero.names("stage") {
        zero.section(name).contradiction("device", &format!("none, unless `stage` is {stages}"));
        zero.contradiction(flag, &format!("false, unless `stage` is {stages}"));
    }
}

/// The mesh axes over which ZeRO partitions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PartitionAxes {
    /// dp: all ranks of an sp group store the same partition. The ZeRO world size is dp_size.
    #[default]
    Dp,
    /// dp and sp: each rank stores a different partition. The ZeRO world size is dp_size × sp_size.
    DpSp,
}

/// The names of the axes.
pub(crate) const AXES: [&str; 2] = ["dp", "sp"];

impl PartitionAxes {
    /// Returns the names of the axes.
    pub fn names(self) -> &'static [&'static str] {
        match self {
            Self::Dp => &AXES[..1],
            Self::DpSp => &AXES,
        }
    }

    /// Returns the stage as the user reads it, such as `3 over dp × sp`; the axis dp is not named.
    pub fn with_stage(self, stage: ZeroStage) -> String {
        let stage = u8::from(stage);
        match self {
            Self::DpSp if stage > 0 => format!("{stage} over dp × sp"),
            _ => stage.to_string(),
        }
    }

    /// Returns the axes with these names, in any order and case.
    pub fn from_names<'a>(names: impl IntoIterator<Item = &'a str>) -> Option<Self> {
        let mut names: Vec<String> = names.into_iter().map(str::to_lowercase).collect();
        names.sort_unstable();
        [Self::Dp, Self::DpSp].into_iter().find(|axes| names == axes.names())
    }
}

impl Serialize for PartitionAxes {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.names().serialize(serializer)
    }
}

impl FieldValue for PartitionAxes {
    fn read(section: &Section<'_>, name: &str) -> Self {
        let names: Vec<String> = section.elements(name);
        let axes = Self::from_names(names.iter().map(String::as_str));
        if axes.is_none() && section.states(name) {
            section.contradiction(name, "[\"dp\"] or [\"dp\", \"sp\"]");
        }
        axes.unwrap_or_default()
    }

    fn written(&self) -> Option<Json> {
        Some(self.names().into())
    }
}

/// Returns every shard size that the file states. `mics_shard_size` is off below 1, `zero_hpz_partition_size` (ZeRO++)
/// at its default, 1.
pub(crate) fn stated_shard_sizes(zero: &Section<'_>) -> Vec<StatedSize> {
    let stated = |key, least| {
        let size = zero.get(key).filter(|&size: &usize| size >= least)?;
        let origin = SizeOrigin::Key { key, position: zero.position(key, &[])? };
        Some(StatedSize { size, origin })
    };
    let sizes = [stated("mics_shard_size", 1), stated("zero_hpz_partition_size", 2)];
    sizes.into_iter().flatten().collect()
}

/// Storage of state between uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Offload {
    /// Not offloaded.
    #[default]
    None,
    /// In host memory; no effect for ranks on a CPU.
    Cpu,
    /// In an unnamed file in this directory, by default `ulysses.offload_path`.
    Nvme(Option<String>),
}

keys! {
    struct OffloadSection {
        /// Storage of the state between uses: "cpu" is host memory (no effect for ranks on a CPU), "nvme" a file (ranks on a CPU only).
        device: OffloadDevice = choice().text("none"),
        /// The directory of that file; by default `ulysses.offload_path`.
        nvme_path: Option<String> = text().or_null(),
    }
}

choices! {
    enum OffloadDevice {
        #[default]
        None = "none",
        Cpu = "cpu",
        Nvme = "nvme",
    }
}

impl Keys for Offload {
    fn declare(path: &str) -> Vec<Key> {
        OffloadSection::declare(path)
    }

    fn from_section(section: &Section<'_>) -> Self {
        let OffloadSection { device, nvme_path } = OffloadSection::from_section(section);
        match device {
            OffloadDevice::None => Self::None,
            OffloadDevice::Cpu => Self::Cpu,
            OffloadDevice::Nvme => Self::Nvme(nvme_path),
        }
    }

    fn write_into(&self, object: &mut Map<String, Json>) {
        let (device, nvme_path) = match self {
            Self::None => return,
            Self::Cpu => (OffloadDevice::Cpu, None),
            Self::Nvme(path) => (OffloadDevice::Nvme, path.clone()),
        };
        OffloadSection { device, nvme_path }.write_into(object);
    }
}

impl Offload {
    /// Returns its name in a config file.
    pub fn device(&self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Cpu => "cpu",
            Self::Nvme(_) => "nvme",
        }
    }

    /// Returns whether the state is in a file.
    pub fn is_in_file(&self) -> bool {
        matches!(self, Self::Nvme(_))
    }

    /// Returns whether the state moves between uses, for ranks on `device`.
    pub fn is_moved_from(&self, device: DeviceKind) -> bool {
        match self {
            Self::None => false,
            Self::Cpu => device != DeviceKind::Cpu,
            Self::Nvme(_) => true,
        }
    }
}

impl FieldValue for ZeroStage {
    fn read(section: &Section<'_>, name: &str) -> Self {
        section.get(name).and_then(Self::from_number).unwrap_or_default()
    }

    fn written(&self) -> Option<Json> {
        Some(u8::from(*self).into())
    }
}

/// Stage of ZeRO: the state that is partitioned. Each stage includes the previous ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(into = "u8")]
pub enum ZeroStage {
    /// Stage 0: nothing; every rank stores the whole model state (DeepSpeed's default).
    #[default]
    Disabled,
    /// Stage 1: the optimizer state.
    OptimizerStates,
    /// Stage 2: the optimizer state and the gradients.
    Gradients,
    /// Stage 3: the optimizer state, the gradients and the parameters.
    Parameters,
}

impl ZeroStage {
    /// All stages, in order.
    pub const ALL: [Self; 4] = [Self::Disabled, Self::OptimizerStates, Self::Gradients, Self::Parameters];

    /// Returns the stage with this number, 0 to 3.
    pub fn from_number(number: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|&stage| u64::from(u8::from(stage)) == number)
    }

    /// Returns whether each rank stores only its partition of the optimizer state.
    pub fn partitions_optimizer(self) -> bool {
        self >= Self::OptimizerStates
    }

    /// Returns whether each rank stores only its partition of the gradients.
    pub fn partitions_gradients(self) -> bool {
        self >= Self::Gradients
    }

    /// Returns whether each rank stores only its partition of the parameters.
    pub fn partitions_parameters(self) -> bool {
        self >= Self::Parameters
    }
}

impl From<ZeroStage> for u8 {
    fn from(stage: ZeroStage) -> Self {
        stage as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stage_partitions_one_thing_more() {
        let partitioned = ZeroStage::ALL.map(|stage| {
            (stage.partitions_optimizer(), stage.partitions_gradients(), stage.partitions_parameters())
        });
        assert_eq!(
            partitioned,
            [(false, false, false), (true, false, false), (true, true, false), (true, true, true)]
        );
    }

    #[test]
    fn numbers_name_the_stages() {
        for number in 0..4 {
            assert_eq!(ZeroStage::from_number(number).map(u8::from), u8::try_from(number).ok());
        }
        assert_eq!(ZeroStage::from_number(4), None);
    }
}
