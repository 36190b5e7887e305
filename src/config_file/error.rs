//! The errors of a file.

use super::reader::Diagnostic;
use std::fmt;
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
    #[error("{}", DiagnosticList { file, diagnostics, omitted: *omitted })]
    Invalid {
        /// The file.
        file: String,
        /// The errors.
        diagnostics: Vec<Diagnostic>,
        /// Number of errors that are not listed.
        omitted: usize,
    },
}

/// Prints `file:line:column: message` for each error, followed by the line in question.
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
            write!(f, "\n{}: {} more errors", self.file, self.omitted)?;
        }
        Ok(())
    }
}
