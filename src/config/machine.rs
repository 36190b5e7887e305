//! Machine profiles: the rates that planned step times are computed from.

use super::error::ConfigError;
use super::sections::precision::Precision;
use crate::config_file::define::words::{count, integer, key, number, positive, section, text};
use crate::config_file::define::{Keys, keys, section_keys};
use crate::config_file::reader::{Report, Section, check, parse_file, read};
use crate::config_file::vocabulary::{Key, Value};
use std::path::Path;
use std::sync::LazyLock;

static KEYS: LazyLock<&'static [Key]> = LazyLock::new(|| section_keys::<ProfileFile>("machine profile"));

keys! {
    struct ProfileFile {
        /// The version of this format.
        version: u32 = integer(1, 1).required(),
        /// The profile.
        profile: MachineProfile,
    }
}

keys! {
    /// The rates of a machine, each of one rank while all ranks of its node work. `docs/planning.md` describes the file,
    /// key by key.
    ///
    /// ```
    /// use ulysses::config::MachineProfile;
    ///
    /// let error = MachineProfile::from_json_str(r#"{ "version": 2 }"#, "machine.json").unwrap_err();
    /// assert!(error.to_string().contains("`version`: expected an integer from 1 to 1, found 2"));
    /// ```
    #[derive(Clone, Debug, PartialEq)]
    pub struct MachineProfile {
        /// Name of the machine.
        pub name: String = text().required(),
        /// Origin of the rates: how they were measured, or that they are assumed.
        pub origin: String = text().required(),
        /// Ranks per node, all working during the measurement.
        pub ranks_per_node: usize = count().required(),
        /// Compute rates of a rank while all ranks of its node work, by dtype.
        pub rates: RatesByFormat = section().required(),
        /// Bytes that the optimizer's update reads and writes per second, f32.
        pub update_bytes_per_second: f64 = positive().required(),
        /// Bytes per second to and from offload files.
        pub file_bytes_per_second: Option<f64> = positive().or_null(),
        /// Bytes per second between GPU and host memory.
        pub host_bytes_per_second: Option<f64> = positive().or_null(),
        /// Whether collectives overlap with compute.
        pub overlaps_communication: bool = key(Value::Boolean).required(),
        /// Communication rates of a rank.
        pub links: Links = section().required(),
    }
}

keys! {
    /// Rates by the dtype of parameters and activations; `None` if not measured.
    #[derive(Clone, Debug, Default, PartialEq)]
    pub struct RatesByFormat {
        /// Training in f32.
        pub f32: Option<Rates> = section().or_null(),
        /// Training in bf16.
        pub bf16: Option<Rates> = section().or_null(),
        /// Training in fp16.
        pub fp16: Option<Rates> = section().or_null(),
    }
}

keys! {
    /// The compute rates of a rank.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct Rates {
        /// Peak FLOP/s, the denominator of the MFU.
        pub peak_flops_per_second: f64 = positive().required(),
        /// Matmul FLOP/s at a model's sizes, forward and backward.
        pub product_flops_per_second: f64 = positive().required(),
        /// Attention forward FLOP/s: 4 FLOPs per visible pair and head element.
        pub attention_forward_flops_per_second: f64 = positive().required(),
        /// Attention backward FLOP/s: 8 FLOPs per visible pair and head element, recomputation not counted.
        pub attention_backward_flops_per_second: f64 = positive().required(),
        /// Bytes that norms, SwiGLU and other element-wise ops read and write per second.
        pub elementwise_bytes_per_second: f64 = positive().required(),
    }
}

keys! {
    /// The communication rates of a rank; `None` if there are no such peers, or the link was not measured.
    #[derive(Clone, Copy, Debug, Default, PartialEq)]
    pub struct Links {
        /// To ranks of the same node.
        pub intra_node: Option<LinkRates> = section().or_null(),
        /// To ranks of other nodes.
        pub inter_node: Option<LinkRates> = section().or_null(),
    }
}

keys! {
    /// The rates of a link: latency, and bus bandwidths as defined by nccl-tests.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct LinkRates {
        /// Time of a collective on a few bytes.
        pub latency_seconds: f64 = number().required(),
        /// Bus bandwidth of an all-to-all, as defined by nccl-tests.
        pub all_to_all_bytes_per_second: f64 = positive().required(),
        /// Bus bandwidth of an all-reduce.
        pub all_reduce_bytes_per_second: f64 = positive().required(),
        /// Bus bandwidth of a reduce-scatter.
        pub reduce_scatter_bytes_per_second: f64 = positive().required(),
        /// Bus bandwidth of an all-gather.
        pub all_gather_bytes_per_second: f64 = positive().required(),
    }
}

impl MachineProfile {
    /// Reads and checks a file of at most 16 MiB.
    ///
    /// # Errors
    /// When the file cannot be read, is too large or is invalid: unknown or missing keys, values out of range.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let path = path.as_ref();
        Self::from_json_str(&read("machine profile", path)?, &path.display().to_string())
    }

    /// Checks the text of a profile; error messages call it `file`.
    ///
    /// # Errors
    /// As [`from_file`](Self::from_file); the error lists all errors of the file.
    pub fn from_json_str(text: &str, file: &str) -> Result<Self, ConfigError> {
        let tree = parse_file(text, file)?;
        let report = Report::new(text, *KEYS);
        check(&report, &tree, *KEYS);
        let read = ProfileFile::from_section(&Section::root(&report, &tree, *KEYS));
        report.finish(file)?;
        Ok(read.profile)
    }

    /// Returns the contents of the profile's file.
    pub fn to_json(&self) -> serde_json::Value {
        let mut object = serde_json::Map::new();
        ProfileFile { version: 1, profile: self.clone() }.write_into(&mut object);
        object.into()
    }

    /// Returns the compute rates of a precision, if known.
    pub fn rates_of(&self, precision: Precision) -> Option<Rates> {
        match precision {
            Precision::F32 => self.rates.f32,
            Precision::Bf16 { .. } => self.rates.bf16,
            Precision::Fp16 { .. } => self.rates.fp16,
        }
    }
}
