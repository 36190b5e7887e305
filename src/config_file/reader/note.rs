//! Notes on a valid config.

use std::fmt;
use std::ops::Deref;

/// Severity of a [`Note`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// The run does what the file asks for: the note names an old key, or one without effect.
    Info,
    /// Results, memory or files differ from what the file asks for, or from DeepSpeed's.
    Warning,
}

/// A note for the user. It dereferences to its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// The severity: warnings are shown when a run starts, other notes are counted.
    pub severity: Severity,
    /// The text, one line.
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
