//! [`Contents`]: what was found in the files of a corpus.

use super::source::DocumentKind;
use std::fmt;
use std::path::PathBuf;

/// The documents of a corpus by kind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Contents {
    /// Documents of text.
    pub texts: usize,
    /// Lines with `input_ids`.
    pub token_lines: usize,
    /// Lines with `prompt` and `completion`.
    pub completions: usize,
    /// Conversations.
    pub conversations: usize,
    /// Documents of token files.
    pub in_token_files: usize,
    /// Number of files that were read.
    pub num_files: usize,
    /// The first of them.
    pub first_file: Option<PathBuf>,
}

impl Contents {
    /// Returns whether a tokenizer made the tokens of any document.
    pub fn has_text(&self) -> bool {
        self.texts + self.completions + self.conversations > 0
    }

    pub(super) fn add_file(&mut self, path: PathBuf) {
        self.num_files += 1;
        self.first_file.get_or_insert(path);
    }

    pub(super) fn add(&mut self, kind: DocumentKind) {
        *match kind {
            DocumentKind::Text => &mut self.texts,
            DocumentKind::Tokens => &mut self.token_lines,
            DocumentKind::Completion => &mut self.completions,
            DocumentKind::Chat => &mut self.conversations,
        } += 1;
    }
}

/// Such as `12 conversations, 3 documents of text in 2 files from chats/a.jsonl on`.
impl fmt::Display for Contents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kinds = [
            (self.conversations, "conversation", "s"),
            (self.completions, "prompt", "s with completions"),
            (self.texts, "document", "s of text"),
            (self.token_lines, "line", "s of `input_ids`"),
            (self.in_token_files, "document", "s of token files"),
        ];
        let kinds = kinds.into_iter().filter(|(count, ..)| *count > 0).map(|(count, one, more)| {
            let more = if count == 1 { more.strip_prefix('s').unwrap_or(more) } else { more };
            format!("{count} {one}{more}")
        });
        write!(f, "{}", kinds.collect::<Vec<_>>().join(", "))?;
        match (&self.first_file, self.num_files) {
            (Some(file), 1) => write!(f, " in {}", file.display()),
            (Some(file), files) => write!(f, " in {files} files from {} on", file.display()),
            (None, _) => Ok(()),
        }
    }
}
