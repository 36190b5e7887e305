//! Flags that change values of a config file before it is checked: `--set`, `--lr`, `--batch-size`, `--zero-stage`
//! and `--zero-partition-axes`.
//!
//! Values are inserted into the parsed tree, so the same checks apply. Their offsets are after the end of the file's
//! text; [`Report`](crate::config_file::reader::Report) recognizes them by that, and names the flag instead of a line.

use super::error::ConfigError;
use super::sections::zero::PartitionAxes;
use crate::config_file::reader::{abbreviated, parse};
use jsonc_parser::ast::{Object, ObjectProp, Value};
use jsonc_parser::common::Ranged;

/// The changes, in the order in which they apply: every [`Setting`], then the other flags.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// `--set KEY=VALUE`, in order.
    pub set: Vec<Setting>,
    /// `--lr`: `optimizer.params.lr`, of AdamW if the file has no optimizer.
    pub lr: Option<f64>,
    /// `--batch-size`: `train_batch_size`. If the file sets the micro batch, accumulation follows.
    pub batch_size: Option<usize>,
    /// `--zero-stage`: `zero_optimization.stage`.
    pub zero_stage: Option<u8>,
    /// `--zero-partition-axes`: `ulysses.zero_partition_axes`.
    pub zero_partition_axes: Option<PartitionAxes>,
}

/// One `--set KEY=VALUE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    key: String,
    /// The value as JSON.
    value: String,
    /// The flag as messages show it.
    flag: String,
}

impl Setting {
    /// Parses `KEY=VALUE`: the path of a key, such as `zero_optimization.stage`, and its value as JSON. A value that is
    /// not JSON is a string.
    ///
    /// # Errors
    /// When the key or the `=` is missing; the message says what would be valid.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (key, value) = text.split_once('=').unwrap_or((text, ""));
        if !text.contains('=') || key.split('.').any(|name| name.trim().is_empty()) {
            return Err("expected KEY=VALUE, such as zero_optimization.stage=3".to_owned());
        }
        let is_json = serde_json::from_str::<serde::de::IgnoredAny>(value).is_ok();
        let value = if is_json { value.to_owned() } else { serde_json::Value::from(value).to_string() };
        Ok(Self { key: key.trim().to_owned(), value, flag: format!("--set {}", abbreviated(text)) })
    }

    /// Creates a setting of `key`.
    pub fn new(key: &str, value: impl Into<serde_json::Value>) -> Self {
        let value = value.into();
        Self::of_flag(format!("--set {key}={value}"), key, &value)
    }

    fn of_flag(flag: String, key: &str, value: &serde_json::Value) -> Self {
        Self { key: key.to_owned(), value: value.to_string(), flag }
    }
}

/// A setting as the text of a file with only this key, preceded by spaces so that its offsets are unique.
pub(super) struct SetDocument {
    text: String,
    /// Number of names in the path of the key.
    depth: usize,
    /// Whether the file's value has precedence.
    is_default: bool,
    /// The first offset of its values.
    pub(super) start: usize,
    pub(super) flag: String,
}

impl Settings {
    /// Inserts all values into the tree of the file.
    pub(super) fn apply<'a>(
        &self,
        documents: &'a [SetDocument],
        root: &mut Object<'a>,
    ) -> Result<(), ConfigError> {
        documents.iter().try_for_each(|document| document.apply(root))?;
        let is_given =
            |name| root.get(name).is_some_and(|property| matches!(property.value, Value::NumberLit(_)));
        if self.batch_size.is_some() && is_given("train_micro_batch_size_per_gpu") {
            // The file's accumulation belongs to the file's batch size; one that a flag sets must fit.
            let file_bytes = documents.first().map_or(0, |document| document.start);
            root.properties.retain(|property| {
                property.name.as_str() != "gradient_accumulation_steps"
                    || property.value.range().start >= file_bytes
            });
        }
        Ok(())
    }

    /// Returns the documents of all settings, for a file of `file_bytes` bytes.
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
        if let Some(axes) = self.zero_partition_axes {
            let flag = format!("--zero-partition-axes {}", axes.names().join(","));
            let key = "ulysses.zero_partition_axes";
            settings.push((Setting::of_flag(flag, key, &axes.names().into()), false));
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

/// Moves the only value of `from`, at depth `depth`, to the same path in `into`.
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
