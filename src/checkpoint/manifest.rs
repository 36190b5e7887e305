//! `manifest.json`: the metadata of a checkpoint, with the hash of every file.

use super::parameter_table::{UnitEntry, is_first};
use super::{CheckpointError, EvaluationSummary};
use crate::model::HfSource;
use crate::regular_file;
use crate::zero::{CheckpointPart, FlatLayout};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::HashSet;
use std::fmt;
use std::io::Read;
use std::path::Path;

/// The newest format version that can be read. A checkpoint has the oldest that describes it
/// ([`MeshSizes::format_version`]).
pub const FORMAT_VERSION: u64 = 3;

/// Name of the manifest within a checkpoint's directory.
pub const MANIFEST: &str = "manifest.json";

/// Maximum size of a manifest.
const MAX_MANIFEST_BYTES: u64 = 64 << 20;

/// Start of the manifest's last line, which has the hash of everything before it.
const HASH_LINE: &str = ",\n  \"blake3\": \"";

/// The metadata of a checkpoint: everything but the tensors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Format version, at most [`FORMAT_VERSION`].
    pub format_version: u64,
    /// Id of the run, which resumed runs share.
    pub run_id: String,
    /// Time of the save, in seconds since 1970.
    pub saved_unix_seconds: u64,
    /// The mesh that saved it.
    pub mesh: MeshSizes,
    /// The ZeRO stage that saved it.
    pub zero_stage: u8,
    /// Number of partitions of the flat buffers.
    pub num_partitions: usize,
    /// Training progress.
    pub progress: TrainingProgress,
    /// The resolved config.
    pub config: Value,
    /// The model in the format of Hugging Face's `config.json`, or null if it has no such description.
    #[serde(default)]
    pub model: Value,
    /// Files of the model directory that the run started from, if any, for exports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<HfSource>,
    /// Kinds of state per element, all f32: `parameters`, then those of the optimizer.
    pub kinds: Vec<String>,
    /// The parameter table.
    pub units: Vec<UnitEntry>,
    /// The files, one per kind, partition, rank along tp and stage of the pipeline.
    pub files: Vec<FileEntry>,
}

/// The sizes of the mesh's axes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeshSizes {
    /// Data-parallel size.
    pub dp: usize,
    /// Sequence-parallel size.
    pub sp: usize,
    /// Tensor-parallel size.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub tp: usize,
    /// Pipeline-parallel size.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub pp: usize,
}

/// More ranks of tp than any model has heads for, and of pp than any has layers for.
const MAX_DIVIDED: usize = 1 << 12;

impl MeshSizes {
    /// The format version of checkpoints of this mesh: version 2 has parameters in shards, version 3 stages.
    pub fn format_version(self) -> u64 {
        match (self.pp, self.tp) {
            (1, 1) => 1,
            (1, _) => 2,
            _ => 3,
        }
    }
}

impl fmt::Display for MeshSizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.pp > 1 {
            write!(f, "pp {} × ", self.pp)?;
        }
        write!(f, "dp {} × sp {}", self.dp, self.sp)?;
        if self.tp > 1 { write!(f, " × tp {}", self.tp) } else { Ok(()) }
    }
}

fn one() -> usize {
    1
}

fn is_one(number: &usize) -> bool {
    *number == 1
}

/// Training progress: the state besides the tensors that a run needs to resume.
///
/// There is no random-generator state: initial weights and data order are functions of the seed and the cursor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainingProgress {
    /// Number of completed steps, including skipped ones. This is the number in the directory's name.
    pub step: u64,
    /// Number of completed updates, which Adam's bias correction counts.
    pub optimizer_step: u64,
    /// Position of the learning-rate schedule.
    pub scheduler_step: u64,
    /// Position in the data.
    pub data: DataCursor,
    /// Compute precision of forward and backward; f32 if missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub precision: Option<String>,
    /// Dynamic loss scale, if the precision needs one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scaler: Option<LossScalerState>,
    /// Number of consecutive overflows so far; a run ends after too many.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub consecutive_skips: u64,
    /// Summary of the evaluations so far.
    #[serde(default, skip_serializing_if = "EvaluationSummary::is_empty")]
    pub evaluations: EvaluationSummary,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// The position in the data, independent of the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataCursor {
    /// Number of samples consumed at this `seq_len` over all ranks, without padding samples of the last epoch.
    pub samples_consumed: u64,
    /// Seed of the sample order.
    pub seed: u64,
    /// Tokens per sequence.
    pub seq_len: usize,
    /// Sequences per epoch.
    #[serde(rename = "num_rows")]
    pub num_sequences: usize,
    /// Hash of a subset of the data, of its packing and of the weights of its sources.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_hash: Option<u64>,
}

/// The state of a dynamic loss scaler.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LossScalerState {
    /// Loss scale, a power of two.
    pub scale: f64,
    /// Number of steps since the last overflow, or since the start.
    pub good_steps: u64,
    /// Number of overflows left before the scale is lowered.
    pub hysteresis: u64,
}

/// A file of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// File name: see [`Manifest::file_name`].
    pub name: String,
    /// Kind of state.
    pub kind: String,
    /// Index of the partition.
    pub partition: usize,
    /// Rank along tp.
    #[serde(default, skip_serializing_if = "is_first")]
    pub tp_rank: usize,
    /// Stage of the pipeline.
    #[serde(default, skip_serializing_if = "is_first")]
    pub stage: usize,
    /// Size in bytes.
    pub bytes: u64,
    /// BLAKE3 hash of the content, in lower-case hexadecimal.
    pub blake3: String,
}

impl FileEntry {
    /// The part of the state that it has.
    pub fn part(&self) -> CheckpointPart {
        CheckpointPart { partition: self.partition, tp_rank: self.tp_rank, stage: self.stage }
    }
}

impl Manifest {
    /// Reads and checks a checkpoint's manifest, but not its files.
    ///
    /// # Errors
    /// Fails if the manifest is missing, damaged, inconsistent or of a newer format.
    pub fn read(dir: &Path) -> Result<Self, CheckpointError> {
        let path = dir.join(MANIFEST);
        Self::parse(&read_text(&path)?, &path)
    }

    /// Parses and checks the text of the manifest at `path`.
    pub(super) fn parse(text: &str, path: &Path) -> Result<Self, CheckpointError> {
        let invalid = |reason: String| CheckpointError::Manifest { path: path.to_owned(), reason };
        // Checked first: a newer format may change everything else.
        let version = serde_json::from_str::<FormatVersion>(text)
            .map_err(|error| invalid(format!("not a manifest: {error}")))?
            .format_version;
        if version > FORMAT_VERSION {
            let path = path.to_owned();
            return Err(CheckpointError::NewerFormat { path, found: version, supported: FORMAT_VERSION });
        }
        check_own_hash(text).map_err(invalid)?;
        let manifest: Self =
            serde_json::from_str(text).map_err(|error| invalid(format!("not a manifest: {error}")))?;
        manifest.check().map_err(invalid)?;
        Ok(manifest)
    }

    /// Returns the text of the file: JSON whose last line is the hash of all previous lines.
    ///
    /// # Errors
    /// Fails if the config or the model cannot be encoded as JSON.
    pub fn to_text(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self).map(|text| with_own_hash(&text))
    }

    /// Returns the name of the file of one kind and part.
    pub fn file_name(
        &self,
        kind: &str,
        CheckpointPart { partition, tp_rank, stage }: CheckpointPart,
    ) -> String {
        let of = |axis: &str, rank: usize, size: usize| match size {
            1 => String::new(),
            size => format!(".{axis}-{rank:02}-of-{size:02}"),
        };
        let (stage, shard) = (of("pp", stage, self.mesh.pp), of("tp", tp_rank, self.mesh.tp));
        format!("{kind}.{partition:05}-of-{:05}{stage}{shard}.safetensors", self.num_partitions)
    }

    /// Returns the layouts of the units, with whole parameters.
    pub fn layouts(&self) -> Vec<FlatLayout> {
        self.units.iter().map(|unit| unit.layout(self.num_partitions)).collect()
    }

    /// Returns whether the unit has state of `kind`. Frozen units have only `parameters`.
    pub(super) fn has(&self, layout: &FlatLayout, kind: &str) -> bool {
        !layout.is_frozen() || self.kinds.first().is_some_and(|parameters| parameters == kind)
    }

    /// Returns the total bytes of all files, without the manifest.
    pub fn total_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// Checks consistency, on which all other methods rely.
    fn check(&self) -> Result<(), String> {
        if !(1..=crate::mesh::MAX_RANKS).contains(&self.num_partitions) {
            return Err(format!("num_partitions is {}; it must be at least 1", self.num_partitions));
        }
        let is_plain = |kind: &String| kind.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'_');
        if self.kinds.first().is_none_or(|kind| kind != "parameters") || !self.kinds.iter().all(is_plain) {
            return Err(format!("kinds are {:?}; the first must be \"parameters\"", self.kinds));
        }
        check_unique("kind", self.kinds.iter())?;
        check_unique("unit", self.units.iter().map(|unit| &unit.name))?;
        check_unique("parameter", self.units.iter().flat_map(|u| &u.parameters).map(|p| &p.name))?;
        for (axis, size) in [("tp", self.mesh.tp), ("pp", self.mesh.pp)] {
            if !(1..=MAX_DIVIDED).contains(&size) {
                return Err(format!("{axis} of the mesh is {size}; it must be 1 to {MAX_DIVIDED}"));
            }
        }
        if self.format_version < self.mesh.format_version() {
            let version = self.format_version;
            let (axis, size) = if self.mesh.pp > 1 { ("pp", self.mesh.pp) } else { ("tp", self.mesh.tp) };
            return Err(format!(
                "format_version is {version}, which has no {axis}, but {axis} of the mesh is {size}"
            ));
        }
        if let Some(unit) = self.units.iter().find(|unit| unit.stage >= self.mesh.pp) {
            let (name, stage, pp) = (&unit.name, unit.stage, self.mesh.pp);
            return Err(format!("unit {name} is of stage {stage}, but the mesh has pp {pp}"));
        }
        self.units.iter().try_for_each(|unit| unit.check(self.mesh.tp))?;
        self.check_files()
    }

    /// Checks that there is exactly one file per kind, partition, rank along tp and stage.
    fn check_files(&self) -> Result<(), String> {
        let found: HashSet<_> = self.files.iter().map(|file| (&file.kind, file.part())).collect();
        let (MeshSizes { tp, pp, .. }, partitions) = (self.mesh, 0..self.num_partitions);
        let parts = partitions.flat_map(|partition| {
            let ranks = (0..pp).flat_map(move |stage| (0..tp).map(move |tp_rank| (stage, tp_rank)));
            ranks.map(move |(stage, tp_rank)| CheckpointPart { partition, tp_rank, stage })
        });
        let mut expected = parts.flat_map(|part| self.kinds.iter().map(move |kind| (kind, part)));
        if let Some((kind, CheckpointPart { partition, tp_rank, stage })) =
            expected.find(|file| !found.contains(file))
        {
            let of_tp = if tp > 1 { format!(" of tp rank {tp_rank}") } else { String::new() };
            let of_stage = if pp > 1 { format!(" of stage {stage}") } else { String::new() };
            return Err(format!("no file for {kind} of partition {partition}{of_tp}{of_stage}"));
        }
        for file in &self.files {
            let exists = self.kinds.contains(&file.kind)
                && file.partition < self.num_partitions
                && file.tp_rank < tp
                && file.stage < pp;
            if !exists || file.name != self.file_name(&file.kind, file.part()) {
                return Err(format!("unexpected file {}", file.name));
            }
        }
        check_unique("file", self.files.iter().map(|file| &file.name))
    }
}

#[derive(Deserialize)]
struct FormatVersion {
    format_version: u64,
}

/// Reads the text of a manifest, without checking it.
pub(super) fn read_text(path: &Path) -> Result<String, CheckpointError> {
    let io = |operation| CheckpointError::io(operation, path);
    let (file, size) = regular_file::open(path).map_err(io("open"))?;
    if size > MAX_MANIFEST_BYTES {
        let reason = format!("manifest has {size} bytes; the maximum is {MAX_MANIFEST_BYTES}");
        return Err(CheckpointError::Manifest { path: path.to_owned(), reason });
    }
    let mut text = String::new();
    file.take(size).read_to_string(&mut text).map_err(io("read"))?;
    Ok(text)
}

/// Appends the hash of a JSON object as its last line.
pub(super) fn with_own_hash(text: &str) -> String {
    let body = text.strip_suffix("\n}").unwrap_or(text);
    format!("{body}{HASH_LINE}{}\"\n}}\n", blake3::hash(body.as_bytes()).to_hex())
}

pub(super) fn check_own_hash(text: &str) -> Result<(), String> {
    let (body, rest) = text.rsplit_once(HASH_LINE).ok_or("damaged: the last line is not the hash")?;
    let expected = blake3::hash(body.as_bytes()).to_hex();
    if rest == format!("{expected}\"\n}}\n") {
        Ok(())
    } else {
        Err("damaged: the hash does not match".into())
    }
}

fn check_unique<'a>(what: &str, names: impl Iterator<Item = &'a String>) -> Result<(), String> {
    let mut seen = HashSet::new();
    let mut names = names;
    match names.find(|name| !seen.insert(name.as_str())) {
        Some(duplicate) => Err(format!("duplicate {what} {duplicate}")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checkpoints of earlier versions have this key.
    #[test]
    fn the_number_of_sequences_keeps_its_key() {
        let json = serde_json::json!({ "samples_consumed": 3, "seed": 5, "seq_len": 64, "num_rows": 7, "data_hash": 9 });
        let cursor: DataCursor = serde_json::from_value(json.clone()).unwrap();
        assert_eq!(cursor.num_sequences, 7);
        assert_eq!(serde_json::to_value(cursor).unwrap(), json);
    }
}
