//! What a machine does in a second: the file that a plan's times go by.

use super::check::check;
use super::document;
use super::error::ConfigError;
use super::precision::Precision;
use super::reader::Section;
use super::report::Report;
use super::vocabulary::MACHINE;
use serde::Serialize;
use std::path::Path;

/// The version of the format that is written.
const VERSION: u32 = 1;

/// A machine's rates, all of one rank while the others of its node work too. `docs/planning.md` has the file,
/// key by key.
///
/// ```
/// use ulysses::config::MachineProfile;
///
/// let error = MachineProfile::from_json_str(r#"{ "version": 2 }"#, "machine.json").unwrap_err();
/// assert!(error.to_string().contains("`version`: expected an integer from 1 to 1, found 2"));
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MachineProfile {
    /// What the machine is called.
    pub name: String,
    /// Where the numbers come from.
    pub origin: String,
    /// Ranks that share a node.
    pub ranks_per_node: usize,
    /// Arithmetic and memory.
    pub rates: RatesByFormat,
    /// Bytes that the optimizer's update reads and writes, per second.
    pub update_bytes_per_second: f64,
    /// Bytes to and from files per second; none where nobody has measured it.
    pub file_bytes_per_second: Option<f64>,
    /// Bytes from a GPU to the host's memory and back per second; none where nobody has measured it.
    pub host_bytes_per_second: Option<f64>,
    /// Whether collectives that have been started go on while the rank computes.
    pub overlaps_communication: bool,
    /// Communication.
    pub links: Links,
}

/// Rates by the format of parameters and activations; none where it is not known.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RatesByFormat {
    /// Training in f32.
    pub f32: Option<Rates>,
    /// Training in bf16.
    pub bf16: Option<Rates>,
    /// Training in fp16.
    pub fp16: Option<Rates>,
}

/// What a rank computes in a second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Rates {
    /// What shares of the peak are shares of.
    pub peak_flops_per_second: f64,
    /// Matrix products of a model's sizes.
    pub product_flops_per_second: f64,
    /// Attention: 4 FLOP for each visible pair and element of a head.
    pub attention_forward_flops_per_second: f64,
    /// Its backward: 8 of these, though kernels compute the scores once more.
    pub attention_backward_flops_per_second: f64,
    /// Bytes that operations on single elements read and write.
    pub elementwise_bytes_per_second: f64,
}

/// What a rank sends in a second; none where there are no such peers, or nobody has measured it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Links {
    /// To ranks of its node.
    pub intra_node: Option<LinkRates>,
    /// To ranks of other nodes.
    pub inter_node: Option<LinkRates>,
}

/// A link: time of the smallest collective, and bus bandwidths as nccl-tests defines them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LinkRates {
    /// Of a collective that moves next to nothing.
    pub latency_seconds: f64,
    /// All-to-all.
    pub all_to_all_bytes_per_second: f64,
    /// All-reduce.
    pub all_reduce_bytes_per_second: f64,
    /// Reduce-scatter.
    pub reduce_scatter_bytes_per_second: f64,
    /// All-gather.
    pub all_gather_bytes_per_second: f64,
}

impl MachineProfile {
    /// Reads and checks a file of at most 16 MiB.
    ///
    /// # Errors
    /// When the file cannot be read, is too large, or has faults: unknown or missing keys, values out of range.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let path = path.as_ref();
        Self::from_json_str(&document::read("machine profile", path)?, &path.display().to_string())
    }

    /// Checks the text of a profile; `file` is what error messages call it.
    ///
    /// # Errors
    /// As [`from_file`](Self::from_file); all faults are in the one error.
    pub fn from_json_str(text: &str, file: &str) -> Result<Self, ConfigError> {
        let root = document::parse_file(text, file)?;
        let report = Report::new(text, MACHINE);
        check(&report, &root, MACHINE);
        let profile = Self::read(&Section::root(&report, &root, MACHINE));
        report.finish(file)?;
        Ok(profile)
    }

    /// As a file has it.
    pub fn to_json(&self) -> serde_json::Value {
        /// The format's version, then the profile.
        #[derive(Serialize)]
        struct Written<'a> {
            version: u32,
            #[serde(flatten)]
            profile: &'a MachineProfile,
        }
        // Numbers, texts and objects with text keys: there is nothing that JSON cannot say.
        serde_json::to_value(Written { version: VERSION, profile: self }).unwrap_or_default()
    }

    /// The rates of a format, if they are known.
    pub fn rates_of(&self, precision: Precision) -> Option<Rates> {
        match precision {
            Precision::F32 => self.rates.f32,
            Precision::Bf16 { .. } => self.rates.bf16,
            Precision::Fp16 { .. } => self.rates.fp16,
        }
    }

    /// What stands in for a faulty or missing value is never used: it has been reported.
    fn read(root: &Section<'_>) -> Self {
        let (rates, links) = (root.section("rates"), root.section("links"));
        Self {
            name: root.text("name").unwrap_or_default(),
            origin: root.text("origin").unwrap_or_default(),
            ranks_per_node: root.count("ranks_per_node").unwrap_or(1),
            rates: RatesByFormat {
                f32: Rates::read(&rates.section("f32")),
                bf16: Rates::read(&rates.section("bf16")),
                fp16: Rates::read(&rates.section("fp16")),
            },
            update_bytes_per_second: root.number("update_bytes_per_second").unwrap_or_default(),
            file_bytes_per_second: root.number("file_bytes_per_second"),
            host_bytes_per_second: root.number("host_bytes_per_second"),
            overlaps_communication: root.boolean("overlaps_communication"),
            links: Links {
                intra_node: LinkRates::read(&links.section("intra_node")),
                inter_node: LinkRates::read(&links.section("inter_node")),
            },
        }
    }
}

impl Rates {
    fn read(section: &Section<'_>) -> Option<Self> {
        let number = |key| section.number(key).unwrap_or_default();
        section.is_present().then(|| Self {
            peak_flops_per_second: number("peak_flops_per_second"),
            product_flops_per_second: number("product_flops_per_second"),
            attention_forward_flops_per_second: number("attention_forward_flops_per_second"),
            attention_backward_flops_per_second: number("attention_backward_flops_per_second"),
            elementwise_bytes_per_second: number("elementwise_bytes_per_second"),
        })
    }
}

impl LinkRates {
    fn read(section: &Section<'_>) -> Option<Self> {
        let number = |key| section.number(key).unwrap_or_default();
        section.is_present().then(|| Self {
            latency_seconds: number("latency_seconds"),
            all_to_all_bytes_per_second: number("all_to_all_bytes_per_second"),
            all_reduce_bytes_per_second: number("all_reduce_bytes_per_second"),
            reduce_scatter_bytes_per_second: number("reduce_scatter_bytes_per_second"),
            all_gather_bytes_per_second: number("all_gather_bytes_per_second"),
        })
    }
}
