//! What a machine does in a second: the file that a plan's times go by.

use super::define::words::{count, integer, key, number, positive, section, text};
use super::define::{Keys, keys, section_keys};
use super::error::ConfigError;
use super::reader::{Report, Section, check, parse_file, read};
use super::sections::precision::Precision;
use super::vocabulary::{Key, Value};
use std::path::Path;
use std::sync::LazyLock;

static KEYS: LazyLock<&'static [Key]> =
    LazyLock::new(|| section_keys::<ProfileFile>("machine profile", None));

keys! {
    struct ProfileFile {
        /// The version of this format.
        version: u32 = integer(1, 1).required(),
        /// What it says.
        profile: MachineProfile,
    }
}

keys! {
    /// A machine's rates, all of one rank while the others of its node work too. `docs/planning.md` has the file,
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
        /// What the machine is called.
        pub name: String = text().required(),
        /// Where the numbers come from: how they were measured, or assumed.
        pub origin: String = text().required(),
        /// Ranks that share a node, and were at work at once.
        pub ranks_per_node: usize = count().required(),
        /// What a rank computes while all of its node do, by the format of the numbers.
        pub rates: RatesByFormat = section().required(),
        /// Bytes that the optimizer's update reads and writes, f32.
        pub update_bytes_per_second: f64 = positive().required(),
        /// Bytes to and from the files of offloaded tensors.
        pub file_bytes_per_second: Option<f64> = positive().or_null(),
        /// Bytes from a GPU to the host's memory and back.
        pub host_bytes_per_second: Option<f64> = positive().or_null(),
        /// Whether collectives go on while the rank computes.
        pub overlaps_communication: bool = key(Value::Boolean).required(),
        /// What a rank sends.
        pub links: Links = section().required(),
    }
}

keys! {
    /// Rates by the format of parameters and activations; none where it is not known.
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
    /// What a rank computes in a second.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct Rates {
        /// What a share of the peak (MFU) is a share of.
        pub peak_flops_per_second: f64 = positive().required(),
        /// Matrix products of a model's sizes, forward and backward.
        pub product_flops_per_second: f64 = positive().required(),
        /// Attention, visible pairs only: 4 per pair and head element.
        pub attention_forward_flops_per_second: f64 = positive().required(),
        /// Its backward, at 8 per pair and head element, whatever is computed again.
        pub attention_backward_flops_per_second: f64 = positive().required(),
        /// Bytes that norms, SwiGLU and their like read and write.
        pub elementwise_bytes_per_second: f64 = positive().required(),
    }
}

keys! {
    /// What a rank sends in a second; none where there are no such peers, or nobody has measured it.
    #[derive(Clone, Copy, Debug, Default, PartialEq)]
    pub struct Links {
        /// To ranks of the same node.
        pub intra_node: Option<LinkRates> = section().or_null(),
        /// To ranks of other nodes.
        pub inter_node: Option<LinkRates> = section().or_null(),
    }
}

keys! {
    /// A link: time of the smallest collective, and bus bandwidths as nccl-tests defines them.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct LinkRates {
        /// Time of a collective that moves next to nothing.
        pub latency_seconds: f64 = number().required(),
        /// Bus bandwidth of an all-to-all, as nccl-tests defines it.
        pub all_to_all_bytes_per_second: f64 = positive().required(),
        /// That of an all-reduce.
        pub all_reduce_bytes_per_second: f64 = positive().required(),
        /// That of a reduce-scatter.
        pub reduce_scatter_bytes_per_second: f64 = positive().required(),
        /// That of an all-gather.
        pub all_gather_bytes_per_second: f64 = positive().required(),
    }
}

impl MachineProfile {
    /// Reads and checks a file of at most 16 MiB.
    ///
    /// # Errors
    /// When the file cannot be read, is too large, or has faults: unknown or missing keys, values out of range.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let path = path.as_ref();
        Self::from_json_str(&read("machine profile", path)?, &path.display().to_string())
    }

    /// Checks the text of a profile; `file` is what error messages call it.
    ///
    /// # Errors
    /// As [`from_file`](Self::from_file); all faults are in the one error.
    pub fn from_json_str(text: &str, file: &str) -> Result<Self, ConfigError> {
        let tree = parse_file(text, file)?;
        let report = Report::new(text, *KEYS);
        check(&report, &tree, *KEYS);
        let read = ProfileFile::from_section(&Section::root(&report, &tree, *KEYS));
        report.finish(file)?;
        Ok(read.profile)
    }

    /// As a file has it.
    pub fn to_json(&self) -> serde_json::Value {
        let mut object = serde_json::Map::new();
        ProfileFile { version: 1, profile: self.clone() }.write_into(&mut object);
        object.into()
    }

    /// The rates of a format, if they are known.
    pub fn rates_of(&self, precision: Precision) -> Option<Rates> {
        match precision {
            Precision::F32 => self.rates.f32,
            Precision::Bf16 { .. } => self.rates.bf16,
            Precision::Fp16 { .. } => self.rates.fp16,
        }
    }
}
