//! Conversations of a line: what each field of the line and of its messages does.

use super::lines::{Fields, inexact_number};
use crate::data::{DataError, FileError};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value as Json, json};
use ulysses_chat::Chat;

/// Fields of a message that say whether it is trained on: 1 or true, 0 or false.
const WEIGHTS: [&str; 5] = ["weight", "train", "loss", "loss_mask", "loss_weight"];

/// Fields of a line that would change the meaning of others, and what to do instead.
const REFUSED_IN_LINE: [(&str, &str); 5] = [
    ("functions", "write `tools`, a list of {\"type\": \"function\", \"function\": …}"),
    ("label", "preferences are not supported; keep the lines to train on, without `label`"),
    ("weight", "weights belong to messages; repeat or remove the line"),
    ("loss_weight", "weights belong to messages; repeat or remove the line"),
    ("rejected", "preferences are not supported; keep the answers to train on"),
];

/// Fields of a message that would change its meaning, and what to do instead.
const REFUSED_IN_MESSAGE: [(&str, &str); 2] = [
    ("function_call", "write `tool_calls`, a list of {\"type\": \"function\", \"function\": …}"),
    ("train_detail", "parts of a message are not supported; divide it, with `train` for each"),
];

/// Names that a template's variables cannot have.
const RESERVED: [&str; 8] = [
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
    "strftime_now",
];

impl Fields<'_> {
    /// Refuses fields that have a meaning for other programs, unless they are null.
    pub(super) fn check_meaning(&self) -> Result<(), DataError> {
        for (name, remedy) in REFUSED_IN_LINE {
            if self.is_given(name) {
                return Err(self.error(format!("`{name}` is not supported here: {remedy}")));
            }
        }
        Ok(())
    }

    /// Reads a conversation whose messages before `first_answer` are context.
    pub(super) fn chat(&self, mut messages: Vec<Json>, mut first_answer: usize) -> Result<Chat, DataError> {
        if let Some(system) = self.get::<String>("system")? {
            if messages.first().is_some_and(|message| message["role"] == "system") {
                return Err(self.error("`system` beside a message with the role `system`".to_owned()));
            }
            messages.insert(0, json!({ "role": "system", "content": system }));
            first_answer += 1;
        }
        let mut variables: Map<String, Json> =
            self.json("chat_template_kwargs", "an object")?.unwrap_or_default();
        if let Some(name) = RESERVED.iter().find(|name| variables.contains_key(**name)) {
            return Err(self.field_error("chat_template_kwargs", format!("`{name}` cannot be set here")));
        }
        for name in ["tools", "documents"] {
            let list: Option<Vec<Map<String, Json>>> = self.json(name, "a list of objects")?;
            variables.extend(list.map(|list| (name.to_owned(), list.into())));
        }
        let mut answers = Vec::new();
        for (index, message) in messages.iter().enumerate() {
            if self.is_trained(index, message)? && index >= first_answer {
                answers.push(index);
            }
        }
        let mut decoded = messages.clone();
        let mut has_strings = false;
        for (index, message) in decoded.iter_mut().enumerate() {
            has_strings |= self.decode_arguments(index, message)?;
        }
        let (messages, with_strings) = if has_strings { (decoded, Some(messages)) } else { (messages, None) };
        Ok(Chat { messages, with_strings, answers, variables })
    }

    /// Parses a field that is a value or a string of its JSON, as in datasets with one schema for all lines.
    fn json<T: DeserializeOwned>(&self, name: &str, expected: &str) -> Result<Option<T>, DataError> {
        let Some(mut value) = self.get::<Json>(name)? else { return Ok(None) };
        self.check_numbers(name)?;
        if let Json::String(text) = &value {
            self.check_exact(name, text)?;
            let parsed = serde_json::from_str(text);
            value = parsed.map_err(|error| {
                self.field_error(name, format!("expected {expected}, or its JSON as a string: {error}"))
            })?;
            if value.is_null() {
                return Ok(None);
            }
        }
        let parsed = serde_json::from_value(value);
        parsed.map(Some).map_err(|_| self.field_error(name, format!("expected {expected}")))
    }

    /// Returns whether a message is trained on.
    fn is_trained(&self, index: usize, message: &Json) -> Result<bool, DataError> {
        let failed = |problem: String| Err(self.error(format!("messages[{index}]: {problem}")));
        let Some(role) = message["role"].as_str() else {
            return failed("expected an object with a `role`".to_owned());
        };
        for (name, remedy) in REFUSED_IN_MESSAGE {
            if !message[name].is_null() {
                return failed(format!("`{name}` is not supported: {remedy}"));
            }
        }
        let mut stated: Option<(&str, bool)> = None;
        for name in WEIGHTS {
            let is_trained = match &message[name] {
                Json::Null => continue,
                Json::Bool(value) => Some(*value),
                value => value.as_f64().filter(|value| [0.0, 1.0].contains(value)).map(|value| value == 1.0),
            };
            let Some(is_trained) = is_trained else {
                return failed(format!("`{name}` is {}; valid are 0, 1, false and true", message[name]));
            };
            match stated {
                Some((other, stated)) if stated != is_trained => {
                    return failed(format!("`{other}` and `{name}` contradict each other"));
                }
                _ => stated = Some((name, is_trained)),
            }
        }
        match stated {
            Some((name, true)) if role != "assistant" => failed(format!(
                "`{name}` is {}, but only messages with the role `assistant` can be trained on",
                message[name]
            )),
            stated => Ok(role == "assistant" && stated.is_none_or(|(_, is_trained)| is_trained)),
        }
    }

    /// Decodes `arguments` of tool calls that are JSON strings, as servers do before they render. Returns whether there
    /// are any.
    fn decode_arguments(&self, index: usize, message: &mut Json) -> Result<bool, DataError> {
        let mut has_strings = false;
        let calls = message.get_mut("tool_calls").and_then(Json::as_array_mut).into_iter().flatten();
        for (call_index, call) in calls.enumerate() {
            let call =
                if call.get("function").is_some_and(Json::is_object) { &mut call["function"] } else { call };
            let Some(arguments) = call.get_mut("arguments") else { continue };
            let Json::String(text) = &*arguments else { continue };
            has_strings = true;
            let place = format!("messages[{index}].tool_calls[{call_index}].arguments");
            self.check_exact(&place, text)?;
            let decoded = if text.trim().is_empty() { Ok(Map::new()) } else { serde_json::from_str(text) };
            let decoded: Map<String, Json> = decoded.map_err(|error| {
                self.field_error(&place, format!("expected an object, or its JSON as a string: {error}"))
            })?;
            *arguments = decoded.into();
        }
        Ok(has_strings)
    }

    /// Checks the integers of JSON in a string.
    fn check_exact(&self, name: &str, text: &str) -> Result<(), DataError> {
        match inexact_number(text) {
            Some(number) => Err(self.field_error(name, format!("{number}: integers must fit 64 bits"))),
            None => Ok(()),
        }
    }

    fn field_error(&self, field: &str, reason: String) -> DataError {
        let (path, line, field) = (self.path.to_owned(), self.line, field.to_owned());
        FileError::LineField { path, line, field, reason }.into()
    }
}
