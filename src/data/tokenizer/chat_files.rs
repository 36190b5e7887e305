//! Reads chat templates and special tokens from a tokenizer's directory, as `transformers` does.

use crate::data::DataError;
use crate::regular_file;
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;
use ulysses_chat::{Chat, ChatDate, ChatTemplate};

/// The template of conversations with tools, if a tokenizer has several.
const TOOL_USE: &str = "tool_use";

/// The names of the files.
const CONFIG: &str = "tokenizer_config.json";
const SPECIAL_TOKENS: &str = "special_tokens_map.json";
const TEMPLATE: &str = "chat_template.jinja";
const MORE_TEMPLATES: &str = "additional_chat_templates";

/// The chat templates and special tokens of a tokenizer.
#[derive(Debug, Clone, Default)]
pub(in crate::data) struct ChatFiles {
    /// By name; a single one is the `default`.
    templates: BTreeMap<String, ChatTemplate>,
    sources: BTreeMap<String, Source>,
    special_tokens: BTreeMap<String, String>,
    date: ChatDate,
}

/// The text of a template, and the file that it is from.
#[derive(Debug, Clone)]
struct Source {
    text: String,
    file: String,
}

impl ChatFiles {
    /// Reads the files next to `tokenizer`.
    ///
    /// `date` is what templates print.
    pub(in crate::data) fn read(tokenizer: &Path, date: ChatDate) -> Result<Self, DataError> {
        let settings = read_json(tokenizer, CONFIG)?;
        let mut special_tokens = special_tokens(&settings);
        if settings.get("added_tokens_decoder").is_none() {
            special_tokens.extend(self::special_tokens(&read_json(tokenizer, SPECIAL_TOKENS)?));
        }
        let mut sources = template_files(tokenizer)?;
        if sources.is_empty() {
            sources = named_templates(&settings["chat_template"]);
        }
        let compiled = sources.iter().map(|(name, source)| {
            let template = ChatTemplate::new(&source.text, special_tokens.clone(), date);
            Ok((name.clone(), template.map_err(|error| file_error(tokenizer, &source.file, error))?))
        });
        let templates = compiled.collect::<Result<_, DataError>>()?;
        Ok(Self { templates, sources, special_tokens, date })
    }

    /// Returns the template of a conversation: `tool_use` if it has tools and there is one, else `default`.
    pub(in crate::data) fn template(&self, chat: &Chat) -> Option<&ChatTemplate> {
        let has_tools = chat.variables.get("tools").is_some_and(|tools| !tools.is_null());
        let tool_use = self.templates.get(TOOL_USE).filter(|_| has_tools);
        tool_use.or_else(|| self.templates.get("default"))
    }

    /// Returns the names of all templates.
    pub(in crate::data) fn names(&self) -> Vec<&str> {
        self.templates.keys().map(String::as_str).collect()
    }

    /// Returns the text of the token `name`, such as `eos_token`.
    pub(in crate::data) fn special_token(&self, name: &str) -> Option<&str> {
        self.special_tokens.get(name).map(String::as_str)
    }

    /// Returns everything that affects the text of a conversation.
    pub(in crate::data) fn fingerprint(&self) -> Json {
        let single = match self.sources.get("default") {
            Some(source) if self.sources.len() == 1 => Json::from(source.text.as_str()),
            None if self.sources.is_empty() => Json::Null,
            _ => self.sources.iter().map(|(name, source)| [name.as_str(), &source.text]).collect(),
        };
        let uses_date = self.templates.values().any(ChatTemplate::uses_date);
        let date = uses_date.then(|| self.date.to_string());
        let special_tokens = &self.special_tokens;
        match date {
            Some(date) => serde_json::json!([single, special_tokens, date]),
            None => serde_json::json!([single, special_tokens]),
        }
    }
}

/// Returns the templates in files of their own.
fn template_files(tokenizer: &Path) -> Result<BTreeMap<String, Source>, DataError> {
    let mut names = vec![("default".to_owned(), TEMPLATE.to_owned())];
    let failed = |error| file_error(tokenizer, MORE_TEMPLATES, error);
    match std::fs::read_dir(tokenizer.with_file_name(MORE_TEMPLATES)) {
        Ok(entries) => {
            for entry in entries {
                let file = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
                if let Some(name) = file.strip_suffix(".jinja") {
                    names.push((name.to_owned(), format!("{MORE_TEMPLATES}/{file}")));
                }
            }
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    let mut sources = BTreeMap::new();
    for (name, file) in names {
        if let Some(text) = read_text(tokenizer, &file)? {
            sources.insert(name, Source { text, file });
        }
    }
    Ok(sources)
}

/// Returns the templates of `chat_template`, which is a template or a list of named ones.
fn named_templates(templates: &Json) -> BTreeMap<String, Source> {
    let source = |text: &str| Source { text: text.to_owned(), file: CONFIG.to_owned() };
    let named = templates.as_array().into_iter().flatten();
    let named = named.filter_map(|template| {
        Some((template["name"].as_str()?.to_owned(), source(template["template"].as_str()?)))
    });
    named.chain(templates.as_str().map(|text| ("default".to_owned(), source(text)))).collect()
}

/// Returns the special tokens (`bos_token` and others), which are strings or objects with `content`.
fn special_tokens(settings: &Json) -> BTreeMap<String, String> {
    let entries = settings.as_object().into_iter().flatten().filter(|(name, _)| name.ends_with("_token"));
    let text = |token: &Json| token.as_str().or_else(|| token["content"].as_str()).map(str::to_owned);
    entries.filter_map(|(name, token)| Some((name.clone(), text(token)?))).collect()
}

/// Reads a JSON file next to the tokenizer's; null if there is none.
fn read_json(tokenizer: &Path, name: &str) -> Result<Json, DataError> {
    let Some(text) = read_text(tokenizer, name)? else { return Ok(Json::Null) };
    serde_json::from_str(&text).map_err(|error| file_error(tokenizer, name, error))
}

/// Reads a file next to the tokenizer's, if there is one.
fn read_text(tokenizer: &Path, name: &str) -> Result<Option<String>, DataError> {
    match regular_file::read_to_string(&tokenizer.with_file_name(name)) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(file_error(tokenizer, name, error)),
    }
}

fn file_error(
    tokenizer: &Path,
    name: &str,
    source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
) -> DataError {
    DataError::TokenizerSettings { path: tokenizer.with_file_name(name), source: source.into() }
}
