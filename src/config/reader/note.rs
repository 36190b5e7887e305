//! Notes on a valid config.

use std::fmt;
use std::ops::Deref;

/// How much a [`Note`] matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// The run does what the file asks for: the note names an old key, or one without effect.
    Info,
    /// Results, memory or files differ from what the file asks for, or from what DeepSpeed does with it.
    Warning,
}

/// Something that the user should know. It dereferences to its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// Warnings are shown when a run starts, the others are counted.
    pub severity: Severity,
    /// The note itself, a sentence or two in one line.
    pub text: String,
}

impl Note {
    pub(crate) fn info(text: impl Into<String>) -> Self {
        Self { severity: Severity::Info, text: text.into() }
    }

    pub(crate) fn warning(text: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, text: text.into() }
    }
}

impl Deref for Note {
    type Target = str;

    fn deref(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = match self.severity {
            Severity::Info => "note",
            Severity::Warning => "warning",
        };
        write!(f, "{severity}: {}", self.text)
    }
}
