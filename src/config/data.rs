//! `ulysses.data` and `ulysses.validation`: what a run is trained and judged on.

use super::reader::Section;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

/// Most sources of one run; limits what a hostile file takes.
const MAX_SOURCES: usize = 10_000;

/// One path of the data.
#[derive(Clone, Debug, PartialEq)]
pub struct DataSource {
    /// A file of text, JSONL or tokens, a directory, or a pattern.
    pub path: String,
    /// Its share of the samples, relative to the other sources' weights. All sources of a run have one, or none
    /// has: then they are read one after the other.
    pub weight: Option<f64>,
}

impl<T: Into<String>> From<T> for DataSource {
    fn from(path: T) -> Self {
        Self { path: path.into(), weight: None }
    }
}

impl Serialize for DataSource {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Some(weight) = self.weight else { return serializer.serialize_str(&self.path) };
        let mut object = serializer.serialize_map(Some(2))?;
        object.serialize_entry("path", &self.path)?;
        object.serialize_entry("weight", &weight)?;
        object.end()
    }
}

impl DataSource {
    pub(super) fn read_all(section: &Section<'_>) -> Vec<Self> {
        if let Some(path) = section.text("data") {
            return vec![path.into()];
        }
        let sources: Vec<Self> = section
            .texts("data")
            .into_iter()
            .zip(section.sections("data"))
            .filter_map(|(text, object)| match text {
                Some(path) => Some(path.into()),
                None => Some(Self { path: object.text("path")?, weight: object.number("weight") }),
            })
            .collect();
        let num_weights = sources.iter().filter(|source| source.weight.is_some()).count();
        if sources.len() > MAX_SOURCES {
            section.contradiction("data", &format!("at most {MAX_SOURCES} sources"));
        } else if num_weights > 0 && num_weights < sources.len() {
            section.contradiction("data", "a weight for every source, or for none");
        }
        sources
    }

    /// As it is written: a single path by itself.
    pub(super) fn write_all<S: Serializer>(sources: &[Self], serializer: S) -> Result<S::Ok, S::Error> {
        match sources {
            [only @ Self { weight: None, .. }] => only.serialize(serializer),
            sources => sources.serialize(serializer),
        }
    }
}

/// How documents come to be rows; `data::Packing` explains each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Packing {
    /// Documents that fit into a row are not cut.
    #[default]
    Greedy,
    /// Documents are laid end to end and cut where rows end.
    Cut,
    /// The same, and attention reaches across documents.
    Concat,
}

impl Packing {
    /// By their names.
    pub const CHOICES: &[(&str, Self)] =
        &[("greedy", Self::Greedy), ("cut", Self::Cut), ("concat", Self::Concat)];
}

/// Data that is held out, and when its loss is computed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ValidationConfig {
    /// What is held out.
    #[serde(flatten)]
    pub data: HeldOut,
    /// Steps between two evaluations; without it only the last step is evaluated.
    #[serde(rename = "eval_interval", skip_serializing_if = "Option::is_none")]
    pub interval: Option<u64>,
    /// Batches of `train_batch_size` rows that are evaluated; without it all.
    #[serde(rename = "eval_batches", skip_serializing_if = "Option::is_none")]
    pub batches: Option<u64>,
    /// Evaluates before the first step too; default false.
    pub eval_on_start: bool,
    /// Evaluations without improvement after which a run ends; without it none does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub early_stopping_patience: Option<u64>,
    /// The least improvement of the loss that counts; default 0.
    pub early_stopping_threshold: f64,
}

/// Where held-out data is from.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub enum HeldOut {
    /// Data of its own.
    #[serde(rename = "data")]
    Path(String),
    /// This share of the documents of each source.
    #[serde(rename = "fraction")]
    Fraction(f64),
}

impl ValidationConfig {
    pub(super) fn read(ulysses: &Section<'_>) -> Option<Self> {
        let section = ulysses.section("validation");
        if !section.is_present() {
            return None;
        }
        let is_given = |key| section.names(key) && !section.is_auto(key);
        if is_given("data") == is_given("fraction") {
            ulysses.contradiction("validation", "either `data` or `fraction` in it");
            return None;
        }
        // One that is faulty has been reported, and reads as absent.
        let data = section.text("data").map(HeldOut::Path);
        Some(Self {
            data: data.or_else(|| section.number("fraction").map(HeldOut::Fraction))?,
            interval: section.integer("eval_interval"),
            batches: section.integer("eval_batches"),
            eval_on_start: section.boolean("eval_on_start"),
            early_stopping_patience: section.integer("early_stopping_patience"),
            early_stopping_threshold: section.number("early_stopping_threshold").unwrap_or(0.0),
        })
    }
}

/// A later length of the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeqLenChange {
    /// Steps that are done before.
    pub step: u64,
    /// Tokens per row from then on.
    pub seq_len: usize,
}

impl Serialize for SeqLenChange {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        (self.step, self.seq_len).serialize(serializer)
    }
}

impl SeqLenChange {
    pub(super) fn read_all(section: &Section<'_>) -> Vec<Self> {
        let change = |[step, seq_len]: [u64; 2]| {
            Some(Self {
                step,
                seq_len: usize::try_from(seq_len).ok().filter(|&len| u32::try_from(len).is_ok())?,
            })
        };
        let pairs = section.pairs("seq_len_schedule");
        let changes: Vec<Self> = pairs.iter().copied().filter_map(change).collect();
        if changes.len() < pairs.len() {
            section.contradiction("seq_len_schedule", &format!("lengths up to {}", u32::MAX));
        } else if changes.windows(2).any(|pair| pair[0].step >= pair[1].step) {
            section.contradiction("seq_len_schedule", "steps in ascending order");
        }
        changes
    }
}
