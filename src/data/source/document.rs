//! Tokenizes documents.

use super::lines::{Line, parse};
use super::record::{Content, Record};
use crate::data::notes::Note;
use crate::data::tokenizer::Local;
use crate::data::{DataError, FileError, IGNORED_LABEL};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json, json};
use std::ops::Range;
use std::path::Path;
use ulysses_chat::{ANSWER_MARKS, Chat, ChatTemplate, RenderedChat};

/// A tokenized document.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::data) struct Document {
    pub(in crate::data) tokens: Vec<u32>,
    /// The label of each token, if labels differ from tokens.
    pub(in crate::data) labels: Option<Vec<i64>>,
    /// What it was made of.
    pub(in crate::data) kind: DocumentKind,
    /// What the user should know about the line.
    pub(in crate::data) notes: Vec<Note>,
}

impl Document {
    /// Returns whether the document has no token for a reason that no note says.
    pub(in crate::data) fn is_empty(&self) -> bool {
        self.tokens.is_empty() && !self.notes.contains(&Note::NoAnswer)
    }
}

/// What a document was made of.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::data) enum DocumentKind {
    #[default]
    Text,
    Tokens,
    Completion,
    Chat,
}

/// How records are read.
#[derive(Debug, Default, Clone, Copy, Serialize, Deserialize)]
pub(in crate::data) struct TextOptions<'a> {
    /// The field of a JSON line that contains its text.
    pub(in crate::data) text_field: &'a str,
    /// The exclusive limit of ids and labels in JSON lines, in addition to `u32::MAX`.
    pub(in crate::data) vocab_size: usize,
    /// Whether the end-of-text token follows every document of text.
    pub(in crate::data) append_eod: bool,
}

/// Tokenizes records in this process.
#[derive(Debug, Clone, Copy)]
pub(in crate::data) struct LocalEncoder<'a> {
    pub(in crate::data) tokenizer: &'a Local,
    pub(in crate::data) options: TextOptions<'a>,
}

/// The position of a line, for errors.
#[derive(Clone, Copy)]
struct Place<'a> {
    path: &'a Path,
    line: u64,
}

impl LocalEncoder<'_> {
    /// Tokenizes records in parallel, in order.
    pub(in crate::data) fn encode_all(&self, records: Vec<Record>) -> Vec<Result<Document, DataError>> {
        records.into_par_iter().map(|record| self.encode(record)).collect()
    }

    fn encode(&self, record: Record) -> Result<Document, DataError> {
        let path = record.path.as_path();
        let (number, bytes) = match record.content {
            Content::Text(text) => return self.text(&text, path),
            Content::Line { number, bytes } => (number, bytes),
            Content::Broken(error) => return Err(error.into()),
        };
        let place = Place { path, line: number };
        let (line, notes) = parse(&bytes, self.options, path, number)?;
        let mut document = match line {
            Line::Text(text) => self.text(&text, path),
            Line::Tokens { tokens, labels } => {
                Ok(Document { tokens, labels, kind: DocumentKind::Tokens, notes: Vec::new() })
            }
            Line::Completion { prompt, completion } => self.completion(&prompt, completion, path),
            Line::Chat(chat) => self.chat(&chat, place),
        }?;
        document.notes.extend(notes);
        Ok(document)
    }

    /// Returns the token that ends an answer of the chat template, if it is one for all answers.
    pub(in crate::data) fn end_of_turn(&self) -> Option<u32> {
        let message = |role: &str, content: &str| json!({ "role": role, "content": content });
        let place = Place { path: Path::new("end of turn"), line: 0 };
        let last = |answer| {
            let messages = vec![message("user", "a"), message("assistant", answer)];
            let chat = Chat { messages, with_strings: None, answers: vec![1], variables: Map::new() };
            let labels = self.chat(&chat, place).ok()?.labels?;
            labels.into_iter().rfind(|&label| label != IGNORED_LABEL)
        };
        let end = last("b").filter(|end| last("c") == Some(*end))?;
        u32::try_from(end).ok()
    }

    fn text(&self, text: &str, path: &Path) -> Result<Document, DataError> {
        let mut tokens = self.tokenizer.encode(text, path)?;
        let end = self.tokenizer.end_of_text_id().filter(|_| self.options.append_eod && !tokens.is_empty());
        tokens.extend(end.filter(|end| tokens.last() != Some(end)));
        Ok(Document { tokens, ..Document::default() })
    }

    /// Tokenizes prompt and completion as one text, as in generation; the end-of-text token is trained on.
    fn completion(&self, prompt: &str, completion: String, path: &Path) -> Result<Document, DataError> {
        let mut text = format!("{prompt}{completion}");
        if let Some(end) = self.tokenizer.end_of_text().filter(|end| !completion.ends_with(*end)) {
            text.push_str(end);
        }
        let answers = std::iter::once(prompt.len()..text.len()).collect();
        self.answers(RenderedChat { text, answers, notes: Vec::new() }, DocumentKind::Completion, path)
    }

    fn chat(&self, chat: &Chat, place: Place<'_>) -> Result<Document, DataError> {
        let files = self.tokenizer.chat();
        let template = files.template(chat).ok_or_else(|| {
            place.error(&match files.names().as_slice() {
                [] => "`messages` need a chat template: give the model's tokenizer.json, with tokenizer_config.json or \
                       chat_template.jinja in the same directory; without a template use `prompt` and `completion`"
                    .to_owned(),
                names => format!("no chat template has the name `default`; the names are {}", names.join(", ")),
            })
        })?;
        if chat.answers.is_empty() {
            return Ok(Document { notes: vec![Note::NoAnswer], ..Document::default() });
        }
        let rendered = self.render(template, chat, place)?;
        if rendered.answers.iter().all(Range::is_empty) {
            return Err(
                place.error("no answer to train on: the chat template adds no text for the role `assistant`")
            );
        }
        self.answers(rendered, DocumentKind::Chat, place.path)
    }

    fn render(
        &self,
        template: &ChatTemplate,
        chat: &Chat,
        place: Place<'_>,
    ) -> Result<RenderedChat, DataError> {
        let written = chat.messages.iter().chain(chat.variables.values()).map(Json::to_string);
        if written.into_iter().any(|text| text.contains(ANSWER_MARKS)) {
            return Err(place.error("the noncharacters U+FDD0 and U+FDD1 are not allowed in text"));
        }
        template.render(chat).map_err(|source| {
            FileError::ChatTemplate { path: place.path.to_owned(), line: place.line, source }.into()
        })
    }

    /// Tokenizes a text in which only the answers are trained on, including tokens that overlap an answer.
    fn answers(
        &self,
        rendered: RenderedChat,
        kind: DocumentKind,
        path: &Path,
    ) -> Result<Document, DataError> {
        // A chat template adds the special tokens.
        let special = kind != DocumentKind::Chat;
        let (mut tokens, mut places) = self.tokenizer.encode_placed(&rendered.text, special, path)?;
        // The text ends with the token that the tokenizer adds too.
        let added = places.last().is_some_and(Range::is_empty)
            && rendered.answers.last().is_some_and(|answer| answer.end == rendered.text.len());
        if added
            && let [.., end, added] = tokens[..]
            && end == added
        {
            tokens.pop();
            places.pop();
        }
        let mut answers = rendered.answers.iter().peekable();
        let mut label = |token: u32, place: &Range<usize>| {
            // Tokens and answers ascend.
            while answers.next_if(|answer| answer.end <= place.start).is_some() {}
            let is_answer = answers.peek().is_some_and(|answer| answer.start < place.end);
            if is_answer && !place.is_empty() { i64::from(token) } else { IGNORED_LABEL }
        };
        let labels = tokens.iter().zip(&places).map(|(&token, place)| label(token, place)).collect();
        let notes = rendered.notes.into_iter().map(Note::Chat).collect();
        Ok(Document { tokens, labels: Some(labels), kind, notes })
    }
}

impl Place<'_> {
    fn error(self, problem: &str) -> DataError {
        FileError::Line { path: self.path.to_owned(), line: self.line, problem: problem.to_owned() }.into()
    }
}
