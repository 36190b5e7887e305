//! What can be wrong with a config file, and where.

use std::fmt;

/// A place in a config file; both numbers start at 1, columns count characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// The line.
    pub line: usize,
    /// The character within the line.
    pub column: usize,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}", self.line, self.column)
    }
}

/// One fault in a config file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// Where it stands.
    pub position: Position,
    /// The path of the key it belongs to (`zero_optimization.stage`); empty for the file as a whole.
    pub key: String,
    /// What is wrong.
    pub problem: Problem,
}

/// The kinds of fault.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Problem {
    /// The text is not JSON.
    Syntax {
        /// What the parser objects to.
        message: String,
    },
    /// Brackets are nested deeper than any config needs.
    TooDeep {
        /// The deepest nesting that is read.
        limit: usize,
    },
    /// The vocabulary has no such key here.
    UnknownKey {
        /// The path of the known key that was most likely meant.
        suggestion: Option<String>,
        /// The keys that this section knows.
        known: Vec<&'static str>,
    },
    /// A key appears twice in one section.
    DuplicateKey {
        /// Where it appeared first.
        first: Position,
    },
    /// A key that has no default is missing.
    MissingKey {
        /// What its value has to be.
        expected: String,
    },
    /// The value has the wrong type or is out of range.
    InvalidValue {
        /// What would be valid.
        expected: String,
        /// What is there.
        found: String,
    },
    /// The value is well-formed, but this version cannot do it.
    Unsupported {
        /// What this version does instead, and what to write.
        reason: String,
    },
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = &self.key;
        match &self.problem {
            Problem::Syntax { message } => write!(f, "not valid JSON: {message}"),
            Problem::TooDeep { limit } => write!(f, "nested too deeply: at most {limit} levels are read"),
            Problem::UnknownKey { suggestion, known } => {
                write!(f, "unknown key `{key}`")?;
                if let Some(suggestion) = suggestion {
                    write!(f, ", did you mean `{suggestion}`?")?;
                }
                match known.as_slice() {
                    [] => write!(f, " (no key is valid here)"),
                    known => write!(f, " (valid here: {})", known.join(", ")),
                }
            }
            Problem::DuplicateKey { first } => write!(f, "duplicate key `{key}`, given before at {first}"),
            Problem::MissingKey { expected } => write!(f, "missing key `{key}`: expected {expected}"),
            Problem::InvalidValue { expected, found } if key.is_empty() => {
                write!(f, "expected {expected}, found {found}")
            }
            Problem::InvalidValue { expected, found } => {
                write!(f, "`{key}`: expected {expected}, found {found}")
            }
            Problem::Unsupported { reason } => write!(f, "`{key}`: {reason}"),
        }
    }
}
