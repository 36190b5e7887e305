//! Parses the lines of a JSONL file.

use super::document::TextOptions;
use super::layout::{self, Alpaca};
use crate::data::notes::Note;
use crate::data::{DataError, FileError, IGNORED_LABEL};
use serde::Deserialize;
use serde_json::Value as Json;
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::path::Path;
use ulysses_chat::Chat;

/// Fields with a 0 for each token without a label.
const TOKEN_MASKS: [&str; 3] = ["loss_mask", "completion_mask", "assistant_masks"];

/// The fields of a line with `messages`, or with `prompt` and `completion` as messages. Others have no effect.
const CONVERSATION_FIELDS: [&str; 7] =
    ["messages", "prompt", "completion", "tools", "documents", "chat_template_kwargs", "system"];

/// The fields of a line with `input_ids`. Others have no effect.
const TOKEN_FIELDS: [&str; 6] =
    ["input_ids", "labels", "attention_mask", TOKEN_MASKS[0], TOKEN_MASKS[1], TOKEN_MASKS[2]];

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
    Chat(Chat),
}

/// The unparsed fields of a line. Only used fields are parsed, so a value takes no more memory than its text.
pub(super) struct Fields<'a> {
    fields: BTreeMap<String, &'a RawValue>,
    pub(super) path: &'a Path,
    pub(super) line: u64,
}

type FieldNames = &'static [&'static str];

/// Reads a line: `input_ids`, `messages`, `prompt` with `completion`, or the field of the text, in this order. Notes the
/// fields that have no effect.
pub(super) fn parse(
    bytes: &[u8],
    options: TextOptions<'_>,
    path: &Path,
    line: u64,
) -> Result<(Line, Vec<Note>), DataError> {
    let TextOptions { text_field, vocab_size, .. } = options;
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
        return Ok((fields.tokens(tokens, vocab_size)?, fields.unused(&TOKEN_FIELDS)));
    }
    if let Some(messages) = fields.get("messages")? {
        fields.check_numbers("messages")?;
        fields.check_meaning()?;
        return Ok((Line::Chat(fields.chat(messages, 0)?), fields.unused(&CONVERSATION_FIELDS)));
    }
    if let (Some(prompt), Some(completion)) = (fields.get("prompt")?, fields.get("completion")?) {
        fields.check_meaning()?;
        return fields.completion(prompt, completion);
    }
    match fields.fields.get(text_field) {
        Some(text) => Ok((Line::Text(fields.read(text_field, text)?), fields.unused(&[text_field]))),
        None => {
            if let Some((messages, layout)) = fields.other_layout()? {
                fields.check_meaning()?;
                let used = [&CONVERSATION_FIELDS[..], layout].concat();
                return Ok((Line::Chat(fields.chat(messages, 0)?), fields.unused(&used)));
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
    /// Returns whether a field is present and not null.
    pub(super) fn is_given(&self, name: &str) -> bool {
        self.fields.get(name).is_some_and(|raw| raw.get() != "null")
    }

    /// Notes the fields other than `used`.
    fn unused(&self, used: &[&str]) -> Vec<Note> {
        let unused = self.fields.keys().filter(|name| !used.contains(&name.as_str()) && self.is_given(name));
        unused.cloned().map(Note::UnusedField).collect()
    }

    /// Reads `prompt` and `completion`, both texts or both messages.
    fn completion(&self, prompt: Json, completion: Json) -> Result<(Line, Vec<Note>), DataError> {
        match (prompt, completion) {
            (Json::String(prompt), Json::String(completion)) => {
                Ok((Line::Completion { prompt, completion }, self.unused(&["prompt", "completion"])))
            }
            (Json::Array(mut messages), Json::Array(completion)) => {
                self.check_numbers("prompt")?;
                self.check_numbers("completion")?;
                let first_answer = messages.len();
                messages.extend(completion);
                Ok((Line::Chat(self.chat(messages, first_answer)?), self.unused(&CONVERSATION_FIELDS)))
            }
            _ => Err(self.error(
                "expected `prompt` and `completion` as two strings, or as two lists of messages; or give `messages`"
                    .to_owned(),
            )),
        }
    }

    /// Parses a field, unless it is absent or null.
    pub(super) fn get<'b, T: Deserialize<'b>>(&'b self, name: &str) -> Result<Option<T>, DataError> {
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
    pub(super) fn check_numbers(&self, name: &str) -> Result<(), DataError> {
        let Some(number) = self.fields.get(name).and_then(|raw| inexact_number(raw.get())) else {
            return Ok(());
        };
        Err(self.error(format!("`{name}` contains {number}; integers must fit 64 bits")))
    }

    fn tokens(&self, tokens: Vec<u32>, vocab_size: usize) -> Result<Line, DataError> {
        let mut labels: Option<Vec<i64>> = self.get("labels")?;
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
        for name in TOKEN_MASKS {
            let Some(mask) = self.mask(name, tokens.len())? else { continue };
            let labels = labels.get_or_insert_with(|| tokens.iter().map(|&id| id.into()).collect());
            for (label, _) in labels.iter_mut().zip(mask).filter(|(_, has_label)| !has_label) {
                *label = IGNORED_LABEL;
            }
        }
        if self.mask("attention_mask", tokens.len())?.is_some_and(|mask| mask.contains(&false)) {
            return Err(self.error("`attention_mask` has a 0; remove the padding from the line".to_owned()));
        }
        Ok(Line::Tokens { tokens, labels })
    }

    /// Reads a list of one 0 or 1 per token.
    fn mask(&self, name: &str, num_tokens: usize) -> Result<Option<Vec<bool>>, DataError> {
        let Some(values) = self.get::<Vec<Json>>(name)? else { return Ok(None) };
        let value =
            |value: &Json| value.as_bool().or_else(|| [false, true].get(value.as_u64()? as usize).copied());
        let mask: Option<Vec<bool>> = values.iter().map(value).collect();
        let mask = mask.filter(|mask| mask.len() == num_tokens);
        mask.map(Some).ok_or_else(|| {
            self.error(format!("`{name}` needs one 0 or 1 for each of the {num_tokens} `input_ids`"))
        })
    }

    /// Reads the layouts of ShareGPT and Alpaca as messages, and names the fields that these have.
    fn other_layout(&self) -> Result<Option<(Vec<Json>, FieldNames)>, DataError> {
        self.check_numbers("conversations")?;
        if let Some(turns) = self.get("conversations")? {
            let messages = layout::from_share_gpt(turns).map_err(|speaker| {
                self.error(format!(
                    "`conversations` has a turn of {speaker:?}; known are {}",
                    layout::speakers()
                ))
            })?;
            return Ok(Some((messages, &["conversations"])));
        }
        let (Some(instruction), Some(output)) = (self.get("instruction")?, self.get("output")?) else {
            return Ok(None);
        };
        let (input, history) = (self.get("input")?, self.get("history")?);
        let messages = layout::from_alpaca(Alpaca { instruction, input, output, history });
        Ok(Some((messages, &["instruction", "input", "output", "history"])))
    }

    pub(super) fn error(&self, problem: String) -> DataError {
        FileError::Line { path: self.path.to_owned(), line: self.line, problem }.into()
    }
}

/// Returns the first integer of a JSON text that does not fit 64 bits.
pub(super) fn inexact_number(mut rest: &str) -> Option<&str> {
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
            return Some(number);
        }
        rest = behind;
    }
    None
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
    let message = message.strip_suffix(&place).unwrap_or(&message);
    match message {
        "unexpected end of hex escape" | "lone leading surrogate in hex escape" => {
            format!("an unpaired surrogate such as \\ud83d, which is no text ({message})")
        }
        _ => message.to_owned(),
    }
}
