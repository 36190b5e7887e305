//! Parses the lines of a JSONL file.

use super::document::Encoder;
use super::layout::{self, Alpaca};
use crate::data::{DataError, FileError, IGNORED_LABEL};
use serde::Deserialize;
use serde_json::Value as Json;
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::path::Path;

/// A line, by its kind.
#[derive(Debug)]
pub(super) enum Line {
    Text(String),
    /// Tokens of the user, with one label per token, each an id or ignored.
    Tokens {
        tokens: Vec<u32>,
        labels: Option<Vec<i64>>,
    },
    Completion {
        prompt: String,
        completion: String,
    },
    Chat {
        messages: Vec<Json>,
        tools: Option<Json>,
    },
}

/// The unparsed fields of a line. Only used fields are parsed, so a value takes no more memory than its text.
struct Fields<'a> {
    fields: BTreeMap<String, &'a RawValue>,
    path: &'a Path,
    line: u64,
}

/// Reads a line: `input_ids`, `messages`, `prompt` with `completion`, or the field of the text, in this order.
pub(super) fn parse(bytes: &[u8], encoder: &Encoder<'_>, path: &Path, line: u64) -> Result<Line, DataError> {
    let Encoder { text_field, vocab_size, .. } = *encoder;
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let offset = error.valid_up_to();
        FileError::LineNotUtf8 { path: path.to_owned(), line, offset }
    })?;
    // Of the file: a byte order mark.
    let text = text.strip_prefix('\u{feff}').filter(|_| line == 1).unwrap_or(text);
    if text.trim_start().starts_with('[') {
        let problem = "a JSON array; write one object per line, for example with `jq -c '.[]'`".to_owned();
        return Err(FileError::Line { path: path.to_owned(), line, problem }.into());
    }
    let fields: BTreeMap<String, &RawValue> = serde_json::from_str(text).map_err(|error| {
        let (path, column) = (path.to_owned(), error.column());
        FileError::LineNotJson { path, line, column, reason: without_place(&error) }
    })?;
    let fields = Fields { fields, path, line };
    if let Some(tokens) = fields.get("input_ids")? {
        return fields.tokens(tokens, vocab_size);
    }
    if let Some(messages) = fields.get("messages")? {
        fields.check_numbers("messages")?;
        fields.check_numbers("tools")?;
        return Ok(Line::Chat { messages, tools: fields.get("tools")? });
    }
    if let (Some(prompt), Some(completion)) = (fields.get("prompt")?, fields.get("completion")?) {
        return Ok(Line::Completion { prompt, completion });
    }
    match fields.fields.get(text_field) {
        Some(text) => Ok(Line::Text(fields.read(text_field, text)?)),
        None => {
            if let Some(messages) = fields.other_layout()? {
                return Ok(Line::Chat { messages, tools: fields.get("tools")? });
            }
            let found: Vec<_> = fields.fields.keys().take(10).map(String::as_str).collect();
            let found = found.join(", ");
            Err(fields.error(format!(
                "no field `{text_field}`, `input_ids`, `messages`, `prompt` with `completion`, `conversations`, or `instruction` \
                 with `output`; the fields are: {found}"
            )))
        }
    }
}

impl Fields<'_> {
    /// Parses a field, unless it is absent or null.
    fn get<'b, T: Deserialize<'b>>(&'b self, name: &str) -> Result<Option<T>, DataError> {
        match self.fields.get(name) {
            Some(raw) => self.read(name, raw),
            None => Ok(None),
        }
    }

    fn read<'b, T: Deserialize<'b>>(&self, name: &str, raw: &'b RawValue) -> Result<T, DataError> {
        serde_json::from_str(raw.get()).map_err(|error| {
            let (path, line, field) = (self.path.to_owned(), self.line, name.to_owned());
            FileError::LineField { path, line, field, reason: without_place(&error) }.into()
        })
    }

    /// Checks that the integers of a field fit 64 bits. A larger one would become a float and print differently.
    fn check_numbers(&self, name: &str) -> Result<(), DataError> {
        let mut rest = self.fields.get(name).map_or("", |raw| raw.get());
        while let Some(at) = rest.find(['"', '-', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9']) {
            rest = &rest[at..];
            if let Some(string) = rest.strip_prefix('"') {
                rest = behind_string(string);
                continue;
            }
            let is_part = |character: char| matches!(character, '-' | '+' | '.' | '0'..='9' | 'e' | 'E');
            let (number, behind) =
                rest.split_at(rest.find(|character| !is_part(character)).unwrap_or(rest.len()));
            let is_exact = number.contains(['.', 'e', 'E'])
                || (number != "-0" && (number.parse::<i64>().is_ok() || number.parse::<u64>().is_ok()));
            if !is_exact {
                return Err(self.error(format!("`{name}` contains {number}; integers must fit 64 bits")));
            }
            rest = behind;
        }
        Ok(())
    }

    fn tokens(&self, tokens: Vec<u32>, vocab_size: usize) -> Result<Line, DataError> {
        let labels: Option<Vec<i64>> = self.get("labels")?;
        if let Some(labels) = labels.as_ref().filter(|labels| labels.len() != tokens.len()) {
            let (labels, tokens) = (labels.len(), tokens.len());
            return Err(self
                .error(format!("{labels} `labels` for {tokens} `input_ids`; every token needs one label")));
        }
        let ids = 0..u32::try_from(vocab_size).unwrap_or(u32::MAX);
        let is_id = |id: i64| u32::try_from(id).is_ok_and(|id| ids.contains(&id));
        if let Some(at) = tokens.iter().position(|&id| !is_id(id.into())) {
            return Err(self.error(format!("`input_ids`[{at}] is {}; the vocabulary is {ids:?}", tokens[at])));
        }
        let is_label = |label: i64| label == IGNORED_LABEL || is_id(label);
        if let Some(labels) = &labels
            && let Some(at) = labels.iter().position(|&label| !is_label(label))
        {
            return Err(self
                .error(format!("`labels`[{at}] is {}; valid are {ids:?} and {IGNORED_LABEL}", labels[at])));
        }
        Ok(Line::Tokens { tokens, labels })
    }

    /// Reads the layouts of ShareGPT and Alpaca as messages.
    fn other_layout(&self) -> Result<Option<Vec<Json>>, DataError> {
        self.check_numbers("conversations")?;
        self.check_numbers("tools")?;
        let messages = if let Some(turns) = self.get("conversations")? {
            layout::from_share_gpt(turns).map_err(|speaker| {
                self.error(format!(
                    "`conversations` has a turn of {speaker:?}; known are {}",
                    layout::speakers()
                ))
            })?
        } else if let (Some(instruction), Some(output)) = (self.get("instruction")?, self.get("output")?) {
            layout::from_alpaca(Alpaca {
                instruction,
                input: self.get("input")?,
                output,
                history: self.get("history")?,
            })
        } else {
            return Ok(None);
        };
        Ok(Some(layout::with_system(messages, self.get("system")?)))
    }

    fn error(&self, problem: String) -> DataError {
        FileError::Line { path: self.path.to_owned(), line: self.line, problem }.into()
    }
}

/// Returns the rest of the source after a string whose opening quote has been read.
fn behind_string(mut string: &str) -> &str {
    while let Some(at) = string.find(['"', '\\']) {
        match string[at..].starts_with('"') {
            true => return &string[at + 1..],
            // An escaped character does not end the string, and is one byte in valid JSON.
            false => string = string.get(at + 2..).unwrap_or_default(),
        }
    }
    ""
}

/// Returns the parser's message without its position, which is relative to one line or one field.
fn without_place(error: &serde_json::Error) -> String {
    let (message, place) =
        (error.to_string(), format!(" at line {} column {}", error.line(), error.column()));
    message.strip_suffix(&place).unwrap_or(&message).to_owned()
}
