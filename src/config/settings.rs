//! Changes that the command line makes to a config file before it is checked: `--set`, `--lr`, `--batch-size` and
//! `--zero-stage`.
//!
//! Values are put into the parsed tree, so they meet the same checks as those of the file. Their offsets lie behind the
//! end of the file's text, by which [`Report`](super::reader::Report) knows them: a fault names the flag instead of a line.

use super::error::ConfigError;
use super::reader::{abbreviated, parse};
use jsonc_parser::ast::{Object, ObjectProp, Value};
use jsonc_parser::common::Ranged;

/// The changes, in the order in which they apply: every [`Setting`], then the flags of their own.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// `--set KEY=VALUE`, each after the ones before.
    pub set: Vec<Setting>,
    /// `--lr`: `optimizer.params.lr`, of AdamW where the file has no optimizer.
    pub lr: Option<f64>,
    /// `--batch-size`: `train_batch_size`. Next to a micro batch of the file the accumulation follows from it.
    pub batch_size: Option<usize>,
    /// `--zero-stage`: `zero_optimization.stage`.
    pub zero_stage: Option<u8>,
}

/// One `--set KEY=VALUE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    key: String,
    /// As JSON.
    value: String,
    /// As messages call it.
    flag: String,
}

impl Setting {
    /// Reads `KEY=VALUE`: the path of a key, as in `zero_optimization.stage`, and its value as JSON; what is no JSON is
    /// a string.
    ///
    /// # Errors
    /// When there is no key or no `=`; the message says what would be valid.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (key, value) = text.split_once('=').unwrap_or((text, ""));
        if !text.contains('=') || key.split('.').any(|name| name.trim().is_empty()) {
            return Err("expected KEY=VALUE, such as zero_optimization.stage=3".to_owned());
        }
        let is_json = serde_json::from_str::<serde::de::IgnoredAny>(value).is_ok();
        let value = if is_json { value.to_owned() } else { serde_json::Value::from(value).to_string() };
        Ok(Self { key: key.trim().to_owned(), value, flag: format!("--set {}", abbreviated(text)) })
    }

    /// The same without text.
    pub fn new(key: &str, value: impl Into<serde_json::Value>) -> Self {
        let value = value.into();
        Self::of_flag(format!("--set {key}={value}"), key, &value)
    }

    fn of_flag(flag: String, key: &str, value: &serde_json::Value) -> Self {
        Self { key: key.to_owned(), value: value.to_string(), flag }
    }
}

/// A setting as the text of a file that says only this, behind so many spaces that no offset is one of another text.
pub(super) struct SetDocument {
    text: String,
    /// Names that lead to the value.
    depth: usize,
    /// Whether it is left out where the file has its section.
    is_default: bool,
    /// The offset from which on its values lie.
    pub(super) start: usize,
    pub(super) flag: String,
}

impl Settings {
    /// Puts all values into the tree of the file.
    pub(super) fn apply<'a>(
        &self,
        documents: &'a [SetDocument],
        root: &mut Object<'a>,
    ) -> Result<(), ConfigError> {
        documents.iter().try_for_each(|document| document.apply(root))?;
        let is_given =
            |name| root.get(name).is_some_and(|property| matches!(property.value, Value::NumberLit(_)));
        if self.batch_size.is_some() && is_given("train_micro_batch_size_per_gpu") {
            // The file's number goes with the file's batch size; one that a flag gives has to fit.
            let file_bytes = documents.first().map_or(0, |document| document.start);
            root.properties.retain(|property| {
                property.name.as_str() != "gradient_accumulation_steps"
                    || property.value.range().start >= file_bytes
            });
        }
        Ok(())
    }

    /// The documents of all settings, for a file of so many bytes.
    pub(super) fn documents(&self, file_bytes: usize) -> Vec<SetDocument> {
        let mut settings: Vec<(Setting, bool)> = self.set.iter().map(|set| (set.clone(), false)).collect();
        if let Some(lr) = self.lr {
            let flag = || format!("--lr {lr}");
            settings.push((Setting::of_flag(flag(), "optimizer.type", &"AdamW".into()), true));
            settings.push((Setting::of_flag(flag(), "optimizer.params.lr", &lr.into()), false));
        }
        if let Some(size) = self.batch_size {
            let flag = format!("--batch-size {size}");
            settings.push((Setting::of_flag(flag, "train_batch_size", &size.into()), false));
        }
        if let Some(stage) = self.zero_stage {
            let flag = format!("--zero-stage {stage}");
            settings.push((Setting::of_flag(flag, "zero_optimization.stage", &stage.into()), false));
        }
        let mut start = file_bytes;
        let document = |(Setting { key, value, flag }, is_default)| {
            let names: Vec<_> =
                key.split('.').map(|name| serde_json::Value::from(name).to_string()).collect();
            let (opened, closed) = (names.join(":{"), "}".repeat(names.len()));
            let text = " ".repeat(start) + &format!("{{{opened}:{value}{closed}");
            let document = SetDocument { depth: names.len(), is_default, start, flag, text };
            start = document.text.len();
            document
        };
        settings.into_iter().map(document).collect()
    }
}

impl SetDocument {
    fn apply<'a>(&'a self, root: &mut Object<'a>) -> Result<(), ConfigError> {
        let invalid = |fault: Box<super::Diagnostic>| ConfigError::InvalidSetting {
            flag: self.flag.clone(),
            reason: fault.to_string(),
        };
        put(root, parse(&self.text).map_err(invalid)?, self.depth, self.is_default);
        Ok(())
    }
}

/// Puts the only value that is `depth` names deep in `from` into the same place of `into`.
fn put<'a>(into: &mut Object<'a>, mut from: Object<'a>, depth: usize, is_default: bool) {
    let Some(ObjectProp { name, value, range }) = from.properties.pop() else { return };
    let existing = into.properties.iter_mut().find(|property| property.name.as_str() == name.as_str());
    match (existing, value) {
        (Some(_), _) if is_default => {}
        (None, value) => into.properties.push(ObjectProp { name, value, range }),
        (Some(ObjectProp { value: Value::Object(into), .. }), Value::Object(from)) if depth > 1 => {
            put(into, from, depth - 1, is_default);
        }
        (Some(existing), value) => existing.value = value,
    }
}
