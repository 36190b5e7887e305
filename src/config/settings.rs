//! Flags that change values of a config file before it is checked: `--set`, `--lr`, `--batch-size`, `--zero-stage`
//! and `--zero-partition-axes`.
//!
//! Values are merged into the parsed tree. Their offsets are after the end of the file's
//! text; [`Report`](crate::config_file::reader::Report) recognizes them by that, and names the flag instead of a line.

use super::error::ConfigError;
use super::overlay::{Merged, merge};
use super::sections::zero::PartitionAxes;
use crate::config_file::reader::{FlagOrigin, abbreviated, parse};
use jsonc_parser::ast::{Object, Value};
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
    /// Whether it applies only to a file without the section of the key.
    is_default: bool,
}

impl Setting {
    /// Returns the names in the path of the key.
    fn names(&self) -> impl Iterator<Item = &str> {
        self.key.split('.')
    }

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
        let (key, flag) = (key.trim().to_owned(), format!("--set {}", abbreviated(text)));
        Ok(Self { key, value, flag, is_default: false })
    }

    /// Creates a setting of `key`.
    pub fn new(key: &str, value: impl Into<serde_json::Value>) -> Self {
        let value = value.into();
        Self::of_flag(format!("--set {key}={value}"), key, value)
    }

    fn of_flag(flag: String, key: &str, value: impl Into<serde_json::Value>) -> Self {
        Self { key: key.to_owned(), value: value.into().to_string(), flag, is_default: false }
    }
}

/// A setting as the text of a file with only this key, preceded by spaces so that its offsets are unique.
pub(super) struct SetDocument {
    setting: Setting,
    text: String,
    /// The flag, and the first offset of its values.
    pub(super) origin: FlagOrigin,
}

impl Settings {
    /// Merges all values into the tree of the file.
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
            let file_bytes = documents.first().map_or(0, |document| document.origin.start);
            root.properties.retain(|property| {
                property.name.as_str() != "gradient_accumulation_steps"
                    || property.value.range().start >= file_bytes
            });
        }
        Ok(())
    }

    /// Returns the documents of all settings, for a file of `file_bytes` bytes.
    pub(super) fn documents(&self, file_bytes: usize) -> Vec<SetDocument> {
        let mut start = file_bytes;
        let document = |setting: Setting| {
            let names: Vec<_> =
                setting.names().map(|name| serde_json::Value::from(name).to_string()).collect();
            let (opened, closed) = (names.join(":{"), "}".repeat(names.len()));
            let text = " ".repeat(start) + &format!("{{{opened}:{}{closed}", setting.value);
            let origin = FlagOrigin { start, flag: setting.flag.clone() };
            start = text.len();
            SetDocument { setting, text, origin }
        };
        self.all().map(document).collect()
    }

    fn all(&self) -> impl Iterator<Item = Setting> {
        let lr = self.lr.map(|lr| {
            let rate = Setting::of_flag(format!("--lr {lr}"), "optimizer.params.lr", lr);
            let optimizer = Setting::of_flag(rate.flag.clone(), "optimizer.type", "AdamW");
            [Setting { is_default: true, ..optimizer }, rate]
        });
        let batch_size = self.batch_size;
        let batch_size =
            batch_size.map(|size| Setting::of_flag(format!("--batch-size {size}"), "train_batch_size", size));
        let stage = self
            .zero_stage
            .map(|stage| Setting::of_flag(format!("--zero-stage {stage}"), "zero_optimization.stage", stage));
        let axes = self.zero_partition_axes.map(|axes| {
            let flag = format!("--zero-partition-axes {}", axes.names().join(","));
            Setting::of_flag(flag, "ulysses.zero_partition_axes", axes.names())
        });
        self.set.iter().cloned().chain(lr.into_iter().flatten()).chain(batch_size).chain(stage).chain(axes)
    }
}

impl SetDocument {
    fn apply<'a>(&'a self, root: &mut Object<'a>) -> Result<(), ConfigError> {
        let invalid = |fault| ConfigError::InvalidSetting { flag: self.setting.flag.clone(), fault };
        let from = parse(&self.text).map_err(invalid)?;
        let is_present = from.properties.iter().any(|property| root.get(property.name.as_str()).is_some());
        if !(self.setting.is_default && is_present) {
            merge(root, from, Merged::Levels(self.setting.names().count()));
        }
        Ok(())
    }
}
