//! `manifest.json`: what a checkpoint is, and the hash of every file of it.

use super::{CheckpointError, EvaluationSummary};
use crate::model::HfSource;
use crate::regular_file;
use crate::zero::FlatLayout;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::HashSet;
use std::io::Read;
use std::path::Path;

/// The version of the format that is written, and the latest that is read.
pub const FORMAT_VERSION: u64 = 1;

/// Name of the manifest within a checkpoint's directory.
pub const MANIFEST: &str = "manifest.json";

/// The largest manifest that is read.
const MAX_MANIFEST_BYTES: u64 = 64 << 20;

/// What begins the manifest's last line, which holds the hash of everything before it.
const HASH_LINE: &str = ",\n  \"blake3\": \"";

/// Everything about a checkpoint except the tensors themselves.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of the format: [`FORMAT_VERSION`] when it was written by this version.
    pub format_version: u64,
    /// The run, from its first step through all that resume it.
    pub run_id: String,
    /// When it was saved, in seconds since 1970.
    pub saved_unix_seconds: u64,
    /// The mesh that saved it.
    pub mesh: MeshSizes,
    /// The ZeRO stage that saved it.
    pub zero_stage: u8,
    /// Parts that the flat buffers were cut into.
    pub num_partitions: usize,
    /// Where training stands.
    pub progress: TrainingProgress,
    /// The resolved config.
    pub config: Value,
    /// The model in the vocabulary of Hugging Face's `config.json`; null for models that have
    /// no such description.
    #[serde(default)]
    pub model: Value,
    /// The files that an export keeps, if the run started from a model directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<HfSource>,
    /// What is kept of every element, f32 each: `parameters`, then the optimizer's own kinds.
    pub kinds: Vec<String>,
    /// The parameter table.
    pub units: Vec<UnitEntry>,
    /// Every file: one per partition and kind.
    pub files: Vec<FileEntry>,
}

/// The sizes of the mesh's axes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeshSizes {
    /// Data-parallel ranks.
    pub dp: usize,
    /// Sequence-parallel ranks.
    pub sp: usize,
}

/// Where training stands: what a run needs to go on beside its tensors.
///
/// There is no state of a random generator: initial weights and the order of the data are
/// functions of the seed and of the cursor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainingProgress {
    /// Steps done, skipped ones included: the number in the directory's name.
    pub step: u64,
    /// Updates done: what Adam's bias correction counts.
    pub optimizer_step: u64,
    /// Position of the learning-rate schedule.
    pub scheduler_step: u64,
    /// The data consumed.
    pub data: DataCursor,
    /// The numbers that the forward and backward pass compute in; f32 where it is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub precision: Option<String>,
    /// The dynamic loss scale, in precisions that need one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scaler: Option<LossScalerState>,
    /// Overflows in a row up to here: after too many of them a run ends.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub consecutive_skips: u64,
    /// The evaluations up to here.
    #[serde(default, skip_serializing_if = "EvaluationSummary::is_empty")]
    pub evaluations: EvaluationSummary,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// The data that was consumed. It does not know the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataCursor {
    /// Samples of all whole steps since the rows have had this length, over all ranks; masked rows that filled a step
    /// at the end of the last epoch are none.
    pub samples_consumed: u64,
    /// Seed of the order of the samples.
    pub seed: u64,
    /// Tokens of a sample.
    pub seq_len: usize,
    /// Samples of an epoch.
    #[serde(rename = "num_rows")]
    pub num_sequences: usize,
    /// Hash of a sample of the data, its packing and the weights of its sources.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_hash: Option<u64>,
}

/// A dynamic loss scale.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LossScalerState {
    /// Factor on the loss: a power of two.
    pub scale: f64,
    /// Steps without an overflow since the last one, or since the start.
    pub good_steps: u64,
    /// Overflows that are still tolerated before the scale is lowered.
    pub hysteresis: u64,
}

/// A unit: parameters one after another in one flat buffer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnitEntry {
    /// Its name, and that of its tensor in every file.
    pub name: String,
    /// Its parameters in order.
    pub parameters: Vec<ParameterEntry>,
    /// Whether they are frozen: of the kinds there is only the first.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub frozen: bool,
}

/// A parameter within its unit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParameterEntry {
    /// Full name.
    pub name: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// First element within the unit's flat buffer.
    pub offset: usize,
}

/// A file of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Its name within the checkpoint's directory: [`file_name`].
    pub name: String,
    /// The kind that it holds.
    pub kind: String,
    /// The partition that it holds.
    pub partition: usize,
    /// Its size.
    pub bytes: u64,
    /// BLAKE3 of its content, in lower-case hexadecimal.
    pub blake3: String,
}

/// Name of the file that holds one kind of one partition.
pub fn file_name(kind: &str, partition: usize, num_partitions: usize) -> String {
    format!("{kind}.{partition:05}-of-{num_partitions:05}.safetensors")
}

impl UnitEntry {
    /// The entry of a unit.
    pub fn of(layout: &FlatLayout) -> Self {
        let entry = |p: &crate::zero::FlatParameter| ParameterEntry {
            name: p.name.clone(),
            shape: p.shape.clone(),
            offset: p.offset,
        };
        let (name, frozen) = (layout.name().to_owned(), layout.is_frozen());
        Self { name, parameters: layout.parameters().iter().map(entry).collect(), frozen }
    }
}

impl Manifest {
    /// Reads and checks a checkpoint's manifest; the files that it names are not looked at.
    ///
    /// # Errors
    /// A manifest that is missing, damaged, of a newer format, or in contradiction with itself.
    pub fn read(dir: &Path) -> Result<Self, CheckpointError> {
        let path = dir.join(MANIFEST);
        let io = |operation| CheckpointError::io(operation, &path);
        let (file, size) = regular_file::open(&path).map_err(io("open"))?;
        let invalid = |reason: String| CheckpointError::Manifest { path: path.clone(), reason };
        if size > MAX_MANIFEST_BYTES {
            return Err(invalid(format!("{size} bytes, a manifest has at most {MAX_MANIFEST_BYTES}")));
        }
        let mut text = String::new();
        file.take(size).read_to_string(&mut text).map_err(io("read"))?;
        // First: a newer format may do everything below in another way.
        let version = serde_json::from_str::<FormatVersion>(&text)
            .map_err(|error| invalid(format!("not a manifest: {error}")))?
            .format_version;
        if version > FORMAT_VERSION {
            return Err(CheckpointError::NewerFormat { path, found: version, supported: FORMAT_VERSION });
        }
        check_own_hash(&text).map_err(invalid)?;
        let manifest: Self =
            serde_json::from_str(&text).map_err(|error| invalid(format!("not a manifest: {error}")))?;
        manifest.check().map_err(invalid)?;
        Ok(manifest)
    }

    /// The text of the file: JSON whose last line is the hash of all lines before it.
    ///
    /// # Errors
    /// A config or model that is not JSON.
    pub fn to_text(&self) -> serde_json::Result<String> {
        let text = serde_json::to_string_pretty(self)?;
        let body = text.strip_suffix("\n}").unwrap_or(&text);
        Ok(format!("{body}{HASH_LINE}{}\"\n}}\n", blake3::hash(body.as_bytes()).to_hex()))
    }

    /// The units' layouts in the partitions of this checkpoint.
    pub fn layouts(&self) -> Vec<FlatLayout> {
        let layout = |unit: &UnitEntry| {
            let parameters = unit.parameters.iter().map(|p| (p.name.clone(), p.shape.clone()));
            let layout = FlatLayout::new(unit.name.clone(), parameters, self.num_partitions);
            if unit.frozen { layout.frozen() } else { layout }
        };
        self.units.iter().map(layout).collect()
    }

    /// Whether something of `kind` is kept of the parameters of `layout`: of frozen ones, only they themselves.
    pub(super) fn has(&self, layout: &FlatLayout, kind: &str) -> bool {
        !layout.is_frozen() || self.kinds.first().is_some_and(|parameters| parameters == kind)
    }

    /// Bytes of all files but the manifest.
    pub fn total_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// Whether it says the same thing everywhere. What follows relies on it.
    fn check(&self) -> Result<(), String> {
        if !(1..=crate::mesh::MAX_RANKS).contains(&self.num_partitions) {
            return Err(format!("num_partitions is {}, it must be at least 1", self.num_partitions));
        }
        let is_plain = |kind: &String| kind.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'_');
        if self.kinds.first().is_none_or(|kind| kind != "parameters") || !self.kinds.iter().all(is_plain) {
            return Err(format!("kinds are {:?}, they must begin with \"parameters\"", self.kinds));
        }
        all_different("kind", self.kinds.iter())?;
        all_different("unit", self.units.iter().map(|unit| &unit.name))?;
        all_different("parameter", self.units.iter().flat_map(|u| &u.parameters).map(|p| &p.name))?;
        self.units.iter().try_for_each(UnitEntry::check)?;
        self.check_files()
    }

    /// One file for each partition and kind, and no other.
    fn check_files(&self) -> Result<(), String> {
        let found: HashSet<_> = self.files.iter().map(|file| (&file.kind, file.partition)).collect();
        let of_partition = |partition| self.kinds.iter().map(move |kind| (kind, partition));
        let mut called_for = (0..self.num_partitions).flat_map(of_partition);
        if let Some((kind, partition)) = called_for.find(|file| !found.contains(file)) {
            return Err(format!("no file holds {kind} of partition {partition}"));
        }
        for file in &self.files {
            let exists = self.kinds.contains(&file.kind) && file.partition < self.num_partitions;
            if !exists || file.name != file_name(&file.kind, file.partition, self.num_partitions) {
                return Err(format!("{}: no such file is called for", file.name));
            }
        }
        all_different("file", self.files.iter().map(|file| &file.name))
    }
}

impl UnitEntry {
    /// Offsets follow one another, and nothing overflows.
    fn check(&self) -> Result<(), String> {
        let mut offset = 0_usize;
        for parameter in &self.parameters {
            if parameter.offset != offset {
                let (name, found) = (&parameter.name, parameter.offset);
                return Err(format!("parameter {name} has the offset {found}, it must be {offset}"));
            }
            let numel = parameter.shape.iter().try_fold(1, |numel: usize, dim| numel.checked_mul(*dim));
            offset = numel
                .and_then(|numel| offset.checked_add(numel))
                .filter(|&end| end < usize::MAX / 64)
                .ok_or_else(|| {
                format!("parameter {} is too large: {:?}", parameter.name, parameter.shape)
            })?;
        }
        Ok(())
    }
}

#[derive(Deserialize)]
struct FormatVersion {
    format_version: u64,
}

fn check_own_hash(text: &str) -> Result<(), String> {
    let (body, rest) = text.rsplit_once(HASH_LINE).ok_or("damaged: its last line is not its hash")?;
    let expected = blake3::hash(body.as_bytes()).to_hex();
    if rest == format!("{expected}\"\n}}\n") { Ok(()) } else { Err("damaged: its hash is wrong".into()) }
}

fn all_different<'a>(what: &str, names: impl Iterator<Item = &'a String>) -> Result<(), String> {
    let mut seen = HashSet::new();
    let mut names = names;
    match names.find(|name| !seen.insert(name.as_str())) {
        Some(twice) => Err(format!("{what} {twice} is there twice")),
        None => Ok(()),
    }
}
