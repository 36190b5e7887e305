//! The errors of the config.

use super::batch::BatchError;
use super::mesh_shape::MeshShapeError;
use crate::config_file::ConfigFileError;
use crate::config_file::reader::{Diagnostic, Place};
use crate::mesh::MeshError;

/// An invalid config, or one that cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read or is invalid.
    #[error(transparent)]
    File(#[from] ConfigFileError),
    /// The mesh sizes of file and flags do not agree.
    #[error("{file}: {reason}")]
    Mesh {
        /// The file.
        file: String,
        /// The sizes that do not agree.
        reason: Box<MeshShapeError>,
    },
    /// The mesh of the file, or of the rule that applies, is invalid, or does not fit the number of ranks.
    #[error("{file}: the mesh `{mesh}` of {origin} is invalid: {source}")]
    StatedMesh {
        /// The file.
        file: String,
        /// The key, or the rule.
        origin: String,
        /// The mesh.
        mesh: String,
        /// The cause.
        source: Box<MeshError>,
    },
    /// The file is invalid with the keys of a rule.
    #[error("{source}\n(with the keys of rule {index} of `ulysses.mesh_rules`)")]
    RuleKeys {
        /// The index of the rule.
        index: usize,
        /// The errors.
        source: Box<Self>,
    },
    /// The mesh is a preset for another ZeRO stage.
    #[error(
        "{file}: {source_of_mesh} is data parallelism at ZeRO stage {wanted}, but `zero_optimization.stage` is {stage}: \
         set it to {wanted}, or give the mesh sizes as DPxSP"
    )]
    PresetStage {
        /// The file.
        file: String,
        /// Place that names the preset.
        source_of_mesh: String,
        /// The stage of the preset.
        wanted: u8,
        /// The stage of the config.
        stage: u8,
    },
    /// The batch sizes do not agree.
    #[error("{}: {reason}{}", shown_place(file, place.as_deref()), below(place.as_deref()))]
    Batch {
        /// The file.
        file: String,
        /// The position of the first batch size in the file, if there is one.
        place: Option<Box<Place>>,
        /// The sizes that do not agree.
        reason: Box<BatchError>,
    },
    /// A key is `"auto"`, and the value that it resolves to is not set.
    #[error(
        "{file}: `{key}` is \"auto\", which resolves to {source_of_value}: set that, or a number for the key"
    )]
    AutoWithoutSource {
        /// The file.
        file: String,
        /// The key.
        key: &'static str,
        /// The setting that it resolves to.
        source_of_value: &'static str,
    },
    /// The value of a flag that sets a key is invalid.
    #[error("{flag}: {fault}")]
    InvalidSetting {
        /// The flag, with its value.
        flag: String,
        /// The problem.
        fault: Box<Diagnostic>,
    },
    /// A command-line flag is out of range.
    #[error("--{flag}: expected {expected}, found {found}")]
    InvalidFlag {
        /// The flag, without dashes.
        flag: &'static str,
        /// The valid values.
        expected: String,
        /// The given value.
        found: String,
    },
    /// A required setting is not set.
    #[error("`ulysses.{key}` is not set: set it in the config file, or pass --{flag}")]
    Unset {
        /// The key in the `ulysses` section.
        key: &'static str,
        /// The flag that sets it, without dashes.
        flag: &'static str,
    },
}

fn shown_place(file: &str, place: Option<&Place>) -> String {
    place.map_or(file.to_owned(), |place| place.excerpt.place(file, place.position))
}

fn below(place: Option<&Place>) -> String {
    place.map(|place| place.excerpt.below()).unwrap_or_default()
}
