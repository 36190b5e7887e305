//! The errors of this module.

use super::batch::BatchError;
use super::mesh_shape::MeshShapeError;
use super::reader::{Diagnostic, Excerpt, Position};
use crate::mesh::MeshError;
use std::fmt;
use std::path::PathBuf;

/// Why there is no [`Config`](super::Config).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the {what} {}: {reason}", path.display())]
    Read {
        /// What it is.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What the operating system says.
        reason: std::io::Error,
    },
    /// The file is larger than any config.
    #[error("{file}: larger than {limit_bytes} bytes, the most that a config file may have")]
    TooLarge {
        /// The file.
        file: String,
        /// The largest size that is read.
        limit_bytes: usize,
    },
    /// The file has faults; all of them are listed, in the order of the file.
    #[error("{}", DiagnosticList { file, diagnostics, omitted: *omitted })]
    Invalid {
        /// The file.
        file: String,
        /// The faults.
        diagnostics: Vec<Diagnostic>,
        /// How many more were found than are listed.
        omitted: usize,
    },
    /// The file and the flags do not give one mesh.
    #[error("{file}: {reason}")]
    Mesh {
        /// The file.
        file: String,
        /// What contradicts what.
        reason: Box<MeshShapeError>,
    },
    /// The mesh of the rule that applies is none, or none for as many ranks.
    #[error("{file}: `ulysses.mesh_rules` gives `{selector}` the mesh `{mesh}`: {source}")]
    MeshRule {
        /// The file.
        file: String,
        /// What the rule matches.
        selector: String,
        /// Its mesh.
        mesh: String,
        /// What is wrong with it.
        source: Box<MeshError>,
    },
    /// The mesh is a preset's that stands for another ZeRO stage.
    #[error(
        "{file}: {source_of_mesh} is data parallelism at ZeRO stage {wanted}, but `zero_optimization.stage` is {stage}: \
         make it {wanted}, or give the sizes as DPxSP"
    )]
    PresetStage {
        /// The file.
        file: String,
        /// Who names the preset.
        source_of_mesh: String,
        /// What the preset stands for.
        wanted: u8,
        /// What the file says.
        stage: u8,
    },
    /// The batch sizes do not fit together.
    #[error("{}{reason}{}", file_and_place(file, place), below(place))]
    Batch {
        /// The file.
        file: String,
        /// Where the first of the batch sizes stands, if one is given.
        place: Option<Box<(Position, Excerpt)>>,
        /// The arithmetic.
        reason: Box<BatchError>,
    },
    /// A key is left to `"auto"`, and what it follows from is not given.
    #[error("{file}: `{key}` is \"auto\", which stands for {source_of_value}: give one of the two")]
    AutoWithoutSource {
        /// The file.
        file: String,
        /// The key.
        key: &'static str,
        /// What its value follows from.
        source_of_value: &'static str,
    },
    /// The value of a `--set` cannot be read.
    #[error("{flag}: {reason}")]
    InvalidSetting {
        /// The flag with its value.
        flag: String,
        /// The problem.
        reason: String,
    },
    /// A command-line flag is out of range.
    #[error("--{flag}: expected {expected}, found {found}")]
    InvalidFlag {
        /// The flag, without dashes.
        flag: &'static str,
        /// What would be valid.
        expected: String,
        /// What was given.
        found: String,
    },
    /// A setting without a default is needed and was not given.
    #[error("`ulysses.{key}` is not set: give it in the config file, or as --{flag}")]
    Unset {
        /// The key in the `ulysses` section.
        key: &'static str,
        /// The flag that sets it, without dashes.
        flag: &'static str,
    },
}

/// `file:line:column: message` for each fault, with its line below.
struct DiagnosticList<'a> {
    file: &'a str,
    diagnostics: &'a [Diagnostic],
    omitted: usize,
}

impl fmt::Display for DiagnosticList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, diagnostic) in self.diagnostics.iter().enumerate() {
            let separator = if index == 0 { "" } else { "\n" };
            let (place, below) =
                (diagnostic.excerpt.place(self.file, diagnostic.position), diagnostic.excerpt.below());
            write!(f, "{separator}{place}: {diagnostic}{below}")?;
        }
        if self.omitted > 0 {
            write!(f, "\n{}: {} more faults", self.file, self.omitted)?;
        }
        Ok(())
    }
}

fn file_and_place(file: &str, place: &Option<Box<(Position, Excerpt)>>) -> String {
    match place.as_deref() {
        Some((position, excerpt)) => format!("{}: ", excerpt.place(file, *position)),
        None => format!("{file}: "),
    }
}

fn below(place: &Option<Box<(Position, Excerpt)>>) -> String {
    place.as_deref().map(|(_, excerpt)| excerpt.below()).unwrap_or_default()
}
