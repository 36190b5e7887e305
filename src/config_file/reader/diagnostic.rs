//! The errors of a config file, with their positions.

use std::fmt;
use std::ops::Range;

/// A position in a config file, or [`Position::FLAG`]. Lines and columns count from 1, columns in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// The line.
    pub line: usize,
    /// The column.
    pub column: usize,
}

impl Position {
    /// The position of values that a flag such as `--set` gives.
    pub const FLAG: Self = Self { line: 0, column: 0 };
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::FLAG {
            return f.write_str("on the command line");
        }
        write!(f, "line {}, column {}", self.line, self.column)
    }
}

/// A place in a config file, or a flag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The position.
    pub position: Position,
    /// The line in question.
    pub excerpt: Excerpt,
}

/// An error in a config file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// The position of the error.
    pub position: Position,
    /// The path of the key (`zero_optimization.stage`); empty for the whole file.
    pub key: String,
    /// The problem.
    pub problem: Problem,
    /// The line in question.
    pub excerpt: Excerpt,
}

/// A line of the file, or part of a long one, with the error marked.
///
/// It prints as two lines of plain text, the same on a terminal, in a log and in a test. (The
/// `miette` crate prints such excerpts too, but has ten dependencies and other formats for
/// terminals and plain text.)
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excerpt {
    line: usize,
    text: String,
    /// Characters before the mark.
    indent: usize,
    width: usize,
}

impl Excerpt {
    /// Creates the excerpt of `text` around the start of `range`, in bytes, on line `line`.
    pub(crate) fn new(text: &str, line: usize, range: Range<usize>) -> Self {
        const MAX_BEFORE: usize = 60;
        const MAX_CHARS: usize = 100;
        let (start, end) = (char_boundary(text, range.start), char_boundary(text, range.end));
        let line_start = text[..start].rfind('\n').map_or(0, |newline| newline + 1);
        let mut backwards = text[line_start..start].char_indices().rev();
        let shown_start = backwards.nth(MAX_BEFORE - 1).map_or(line_start, |(offset, _)| line_start + offset);
        let indent = text[shown_start..start].chars().count();
        let on_line =
            |from: &str, max_chars| from.chars().take(max_chars).take_while(|&char| char != '\n').count();
        let shown = text[shown_start..].chars().take(on_line(&text[shown_start..], MAX_CHARS));
        // A terminal would interpret control characters.
        let shown: String = shown.map(|char| if char.is_control() { ' ' } else { char }).collect();
        let width = on_line(&text[start..end.max(start)], MAX_CHARS - indent).max(1);
        Self { line, text: shown.trim_end().to_owned(), indent, width }
    }

    /// Creates the excerpt of a flag: the flag itself.
    pub(crate) fn of_flag(flag: &str) -> Self {
        Self { line: Position::FLAG.line, text: flag.to_owned(), indent: 0, width: 0 }
    }

    /// Returns the location of an error: `file:line:column`, or the flag.
    pub(crate) fn place(&self, file: &str, position: Position) -> String {
        match position {
            Position::FLAG => self.text.clone(),
            Position { line, column } => format!("{file}:{line}:{column}"),
        }
    }

    /// Returns the excerpt to print below the message; empty for a flag, which `place` already shows.
    pub(crate) fn below(&self) -> String {
        if self.line == Position::FLAG.line { String::new() } else { format!("\n{self}") }
    }
}

/// Returns the last character boundary at or before `offset`.
fn char_boundary(text: &str, offset: usize) -> usize {
    let boundaries = (0..=offset.min(text.len())).rev();
    boundaries.into_iter().find(|&offset| text.is_char_boundary(offset)).unwrap_or(0)
}

/// Prints `  3 |   "gradient_clipping": -0.5`, with carets below.
impl fmt::Display for Excerpt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { line, text, indent, width } = self;
        write!(f, "{line:>5} | {text}\n      | {:indent$}{}", "", "^".repeat(*width))
    }
}

/// The kinds of error.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Problem {
    /// The text is not JSON.
    Syntax {
        /// The error of the parser.
        message: String,
    },
    /// Brackets are nested too deeply.
    TooDeep {
        /// The maximum depth.
        limit: usize,
    },
    /// The section has no such key.
    UnknownKey {
        /// The path of the most similar known key.
        suggestion: Option<String>,
        /// The optimizer or scheduler type, if the section has its parameters.
        variant: Option<&'static str>,
        /// The keys of the section.
        known: Vec<&'static str>,
    },
    /// A string is not one of the valid names.
    UnknownName {
        /// The string.
        name: String,
        /// The most similar valid name.
        suggestion: Option<&'static str>,
        /// The valid names.
        known: &'static [&'static str],
    },
    /// A key appears twice in one section.
    DuplicateKey {
        /// The position of the first one.
        first: Position,
    },
    /// A required key is missing.
    MissingKey {
        /// The valid values.
        expected: String,
    },
    /// The value has the wrong type or is out of range.
    InvalidValue {
        /// The valid values.
        expected: String,
        /// The value in the file.
        found: String,
    },
    /// The value is well-formed, but not supported.
    Unsupported {
        /// What is supported instead, and what to write.
        reason: String,
    },
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = &self.key;
        match &self.problem {
            Problem::Syntax { message } => write!(f, "not valid JSON: {message}"),
            Problem::TooDeep { limit } => write!(f, "nested too deeply: at most {limit} levels are allowed"),
            Problem::UnknownKey { suggestion, variant, known } => {
                write!(f, "unknown key `{key}`")?;
                match (suggestion, variant) {
                    (Some(suggestion), _) => write!(f, ", did you mean `{suggestion}`?")?,
                    (None, Some(variant)) => write!(f, ": the type \"{variant}\" has no such parameter")?,
                    (None, None) => {}
                }
                const MAX_LISTED: usize = 16;
                match known.as_slice() {
                    [] => write!(f, " (no key is valid here)"),
                    known if known.len() <= MAX_LISTED => write!(f, " (valid here: {})", known.join(", ")),
                    _ => Ok(()),
                }
            }
            Problem::UnknownName { name, suggestion, known } => {
                write!(f, "`{key}`: unknown name \"{name}\"")?;
                if let Some(suggestion) = suggestion {
                    write!(f, ", did you mean \"{suggestion}\"?")?;
                }
                write!(f, " (valid here: {})", known.join(", "))
            }
            Problem::DuplicateKey { first } => write!(f, "duplicate key `{key}`, first set at {first}"),
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
