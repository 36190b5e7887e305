//! The errors of a file.

use super::reader::Diagnostic;
use std::path::PathBuf;

/// A file that cannot be read, or is invalid by itself.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigFileError {
    /// The file cannot be read.
    #[error("cannot read the {what} {}: {reason}", path.display())]
    Read {
        /// The kind of file.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        reason: std::io::Error,
    },
    /// The file exceeds the size limit.
    #[error("{file}: larger than {limit_bytes} bytes, the maximum size of a config file")]
    TooLarge {
        /// The file.
        file: String,
        /// The maximum size.
        limit_bytes: usize,
    },
    /// The file is invalid; all errors are listed, in the order of the file.
    #[error("{}", listed(file, diagnostics, *omitted))]
    Invalid {
        /// The file.
        file: String,
        /// The errors.
        diagnostics: Vec<Diagnostic>,
        /// Number of errors that are not listed.
        omitted: usize,
    },
}

/// Returns `file:line:column: message` for each error, followed by the line in question.
fn listed(file: &str, diagnostics: &[Diagnostic], omitted: usize) -> String {
    let line = |diagnostic: &Diagnostic| {
        let Diagnostic { excerpt, position, .. } = diagnostic;
        format!("{}: {diagnostic}{}", excerpt.place(file, *position), excerpt.below())
    };
    let more = (omitted > 0).then(|| format!("{file}: {omitted} more errors"));
    diagnostics.iter().map(line).chain(more).collect::<Vec<_>>().join("\n")
}
