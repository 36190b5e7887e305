//! What can be wrong with a config file, and where.

use std::fmt;
use std::ops::Range;

/// A place in a config file; both numbers start at 1, columns count characters. See also [`Position::FLAG`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// The line.
    pub line: usize,
    /// The character within the line.
    pub column: usize,
}

impl Position {
    /// Of what a flag such as `--set` gives instead of the file.
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

/// One fault in a config file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// Where it stands.
    pub position: Position,
    /// The path of the key it belongs to (`zero_optimization.stage`); empty for the file as a whole.
    pub key: String,
    /// The problem.
    pub problem: Problem,
    /// The line that it stands on.
    pub excerpt: Excerpt,
}

/// A line of the file, or the part of a long one around a fault, with the fault marked.
///
/// It prints as plain text of two lines, the same on a terminal, in a log and in a test. (The
/// `miette` crate draws such excerpts too; it would bring ten crates for what is done here in
/// fifty lines, and its drawings are either for terminals or without the source.)
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excerpt {
    line: usize,
    text: String,
    /// Characters before the mark.
    indent: usize,
    width: usize,
}

impl Excerpt {
    /// The part of `text` around the beginning of `range`, in bytes, which is on line `line`.
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
        // What a terminal would act on is not passed through.
        let shown: String = shown.map(|char| if char.is_control() { ' ' } else { char }).collect();
        let width = on_line(&text[start..end.max(start)], MAX_CHARS - indent).max(1);
        Self { line, text: shown.trim_end().to_owned(), indent, width }
    }
}

impl Excerpt {
    /// A flag, which stands for itself.
    pub(crate) fn of_flag(flag: &str) -> Self {
        Self { line: Position::FLAG.line, text: flag.to_owned(), indent: 0, width: 0 }
    }

    /// The place of a fault: `file:line:column`, or the flag.
    pub(crate) fn place(&self, file: &str, position: Position) -> String {
        match position {
            Position::FLAG => self.text.clone(),
            Position { line, column } => format!("{file}:{line}:{column}"),
        }
    }

    /// The excerpt below it; empty for a flag, which `place` has shown already.
    pub(crate) fn below(&self) -> String {
        if self.line == Position::FLAG.line { String::new() } else { format!("\n{self}") }
    }
}

/// The last boundary between characters that is not after `offset`.
fn char_boundary(text: &str, offset: usize) -> usize {
    let boundaries = (0..=offset.min(text.len())).rev();
    boundaries.into_iter().find(|&offset| text.is_char_boundary(offset)).unwrap_or(0)
}

/// `  3 |   "gradient_clipping": -0.5`, and the carets below it.
impl fmt::Display for Excerpt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { line, text, indent, width } = self;
        write!(f, "{line:>5} | {text}\n      | {:indent$}{}", "", "^".repeat(*width))
    }
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
    /// A text is none of the names that are known here.
    UnknownName {
        /// What is there.
        name: String,
        /// The known name that was most likely meant.
        suggestion: Option<&'static str>,
        /// The names that would be valid.
        known: &'static [&'static str],
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
