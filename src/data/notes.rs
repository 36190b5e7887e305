//! [`Notes`]: what data contains beside the text that is trained on.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use ulysses_chat::Note as ChatNote;

/// Maximum number of distinct field names that are counted.
const MAX_FIELDS: usize = 16;

/// Characters of a field's name that are printed.
const MAX_NAME_CHARS: usize = 40;

/// A property of one line.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Note {
    /// A conversation without anything to train on.
    NoAnswer,
    /// A property of a rendered conversation.
    Chat(ChatNote),
    /// A field that changes nothing.
    UnusedField(String),
}

/// Properties of lines that a user should know, with the number of lines. They print as one sentence each.
///
/// # Examples
///
/// ```
/// use ulysses::data::{Corpus, Notes, Tokenizer};
///
/// let root = tempfile::tempdir()?;
/// let path = root.path().join("x.jsonl");
/// std::fs::write(&path, r#"{"text": "abc", "source": "web"}"#)?;
/// let corpus = Corpus::load(&path, &Tokenizer::bytes())?;
/// assert_eq!(corpus.notes().to_string(), "fields without effect: `source` (1 line)");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Notes {
    counts: BTreeMap<Note, u64>,
}

impl Notes {
    /// Returns whether there is nothing to say.
    pub fn is_empty(&self) -> bool {
        self.counts.is_empty()
    }

    /// Returns the text behind `start`, or nothing.
    pub(super) fn after(&self, start: &str) -> String {
        if self.is_empty() { String::new() } else { format!("{start}{self}") }
    }

    pub(super) fn add(&mut self, notes: impl IntoIterator<Item = Note>) {
        for mut note in notes {
            let num_fields = self.counts.keys().filter(|note| matches!(note, Note::UnusedField(_))).count();
            if let Note::UnusedField(name) = &mut note {
                *name = name.chars().take(MAX_NAME_CHARS).collect();
                if num_fields >= MAX_FIELDS && !self.counts.contains_key(&note) {
                    continue;
                }
            }
            *self.counts.entry(note).or_default() += 1;
        }
    }
}

impl fmt::Display for Notes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut sentences, mut fields) = (Vec::new(), Vec::new());
        for (note, count) in &self.counts {
            let s = if *count == 1 { "" } else { "s" };
            match note {
                Note::NoAnswer => sentences.push(format!("{count} conversation{s} without an answer skipped")),
                Note::Chat(ChatNote::DecodedArguments) => sentences
                    .push(format!("{count} conversation{s} with `arguments` as JSON strings, which are decoded")),
                Note::Chat(ChatNote::ContentLeftOut) => sentences.push(format!(
                    "{count} answer{s} whose content beside tool calls the chat template leaves out"
                )),
                Note::Chat(ChatNote::ReasoningLeftOut) => sentences.push(format!(
                    "{count} conversation{s} whose last reasoning the chat template leaves out"
                )),
                Note::Chat(ChatNote::NoEnd) => sentences.push(format!(
                    "{count} conversation{s} in which the chat template does not end answers with a token, so that \
                     nothing teaches the model to stop"
                )),
                Note::Chat(ChatNote::Date) => sentences.push(format!(
                    "{count} conversation{s} with a chat template that may print a date, that of `chat_date`"
                )),
                Note::UnusedField(name) => fields.push(format!("`{name}` ({count} line{s})")),
            }
        }
        if !fields.is_empty() {
            sentences.push(format!("fields without effect: {}", fields.join(", ")));
        }
        f.write_str(&sentences.join("; "))
    }
}
