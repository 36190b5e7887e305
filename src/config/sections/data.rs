//! `ulysses.data` and `ulysses.validation`: training and held-out data.

use crate::config_file::define::words::{count, flag, inside_0_1, number, positive, text};
use crate::config_file::define::{FieldValue, Keys, choices, keys, section_keys};
use crate::config_file::reader::Section;
use crate::config_file::vocabulary::{Array, Key, Value};
use serde_json::{Map, Value as Json, json};

/// Maximum number of sources; bounds the memory that a hostile file can take.
const MAX_SOURCES: usize = 10_000;

keys! {
    /// One data source.
    #[derive(Clone, Debug, PartialEq)]
    pub struct DataSource {
        /// A text, JSONL or token file, a directory, or a glob pattern.
        pub path: String = text().required(),
        /// The source's share of the samples, relative to the other weights. Set it for all sources or for none.
        pub weight: Option<f64> = positive(),
    }
}

impl<T: Into<String>> From<T> for DataSource {
    fn from(path: T) -> Self {
        Self { path: path.into(), weight: None }
    }
}

/// A path, or an array of paths and of objects.
impl FieldValue for Vec<DataSource> {
    fn complete(key: Key, path: &str) -> Key {
        Key { value: Value::TextOrSections(section_keys::<DataSource>(path)), ..key }
    }

    fn read(section: &Section<'_>, name: &str) -> Self {
        if let Some(path) = section.get::<String>(name) {
            return vec![path.into()];
        }
        let elements = section.elements::<Json>(name).into_iter().zip(section.sections(name));
        let source = |(element, object): (Json, _)| {
            element.as_str().map_or_else(|| DataSource::from_section(&object), DataSource::from)
        };
        let sources: Self = elements.map(source).collect();
        let num_weights = sources.iter().filter(|source| source.weight.is_some()).count();
        if sources.len() > MAX_SOURCES {
            section.contradiction(name, &format!("at most {MAX_SOURCES} sources"));
        } else if num_weights > 0 && num_weights < sources.len() {
            section.contradiction(name, "a weight for every source, or for none");
        }
        sources
    }

    /// Writes a single source without weight as a plain path.
    fn written(&self) -> Option<Json> {
        let source = |source: &DataSource| match source.weight {
            None => Some(Json::from(source.path.as_str())),
            Some(_) => FieldValue::written(source),
        };
        match self.as_slice() {
            [] => None,
            [only @ DataSource { weight: None, .. }] => source(only),
            sources => Some(sources.iter().filter_map(source).collect()),
        }
    }
}

choices! {
    /// Packing of documents into sequences. A corpus of one document gives the same sequences each way.
    ///
    /// Nothing is dropped: every token is in exactly one sequence.
    pub enum Packing {
        /// Best-fit packing: documents that fit into a sequence are not cut. Longer ones fill whole sequences; the rest
        /// shares one. Attention stays within a document.
        #[default]
        Greedy = "greedy",
        /// Documents are concatenated and cut every `seq_len` tokens. Attention stays within a document.
        Cut = "cut",
        /// Documents are concatenated and their bounds ignored, as in nanoGPT: attention crosses bounds, and the last token
        /// of a document predicts the first of the next.
        Concat = "concat",
    }
}

choices! {
    /// Treatment of documents with labels (conversations, completions) that are longer than `seq_len`.
    pub enum LongConversations {
        /// They are cut at the end.
        #[default]
        Truncate = "truncate",
        /// They are left out.
        Drop = "drop",
        /// They are an error.
        Error = "error",
        /// Their rest is a document of its own.
        Split = "split",
    }
}

choices! {
    /// Treatment of an invalid line of JSONL, row of a table or element of a JSON array.
    pub enum OnBadLine {
        /// It ends the run with its file and line.
        #[default]
        Error = "error",
        /// It is skipped and counted; the first one is printed.
        Skip = "skip",
    }
}

choices! {
    /// The type of tokens in `.bin` files without header, by NumPy's names.
    pub enum TokenDtype {
        /// 16 bits.
        #[default]
        Uint16 = "uint16",
        /// 32 bits.
        Uint32 = "uint32",
    }
}

keys! {
    /// Held-out data, and when it is evaluated.
    #[derive(Clone, Debug, PartialEq)]
    pub struct ValidationConfig {
        /// The held-out data.
        pub data: HeldOut,
        /// Steps between evaluations.
        pub interval: Option<u64> = count().named("eval_interval").derived("the last step only"),
        /// Batches of `train_batch_size` sequences per evaluation.
        pub batches: Option<u64> = count().named("eval_batches").derived("all sequences"),
        /// Evaluates before the first step too.
        pub eval_on_start: bool = flag(),
        /// Ends the run after this many consecutive evaluations without an improvement of the loss.
        pub early_stopping_patience: Option<u64> = count().derived("never"),
        /// Minimum improvement of the lowest loss that counts for `early_stopping_patience`, in nats per token.
        pub early_stopping_threshold: f64 = number().number(0.0),
    }
}

/// The source of the held-out data.
#[derive(Clone, Debug, PartialEq)]
pub enum HeldOut {
    /// A separate data source.
    Path(String),
    /// This share of the documents of each training source.
    Fraction(f64),
}

keys! {
    struct HeldOutKeys {
        /// A text, JSONL or token file, a directory, or a glob pattern.
        data: Option<String> = text(),
        /// The share of each source's documents that is held out, instead of `data`.
        fraction: Option<f64> = inside_0_1(),
    }
}

impl Keys for HeldOut {
    fn declare(path: &str) -> Vec<Key> {
        HeldOutKeys::declare(path)
    }

    fn from_section(section: &Section<'_>) -> Self {
        let HeldOutKeys { data, fraction } = HeldOutKeys::from_section(section);
        data.map_or_else(|| Self::Fraction(fraction.unwrap_or_default()), Self::Path)
    }

    fn write_into(&self, object: &mut Map<String, Json>) {
        let (data, fraction) = match self {
            Self::Path(path) => (Some(path.clone()), None),
            Self::Fraction(fraction) => (None, Some(*fraction)),
        };
        HeldOutKeys { data, fraction }.write_into(object);
    }
}

impl ValidationConfig {
    /// Reports a `validation` section with neither or both of `data` and `fraction`.
    pub(crate) fn check(ulysses: &Section<'_>) {
        let section = ulysses.section("validation");
        if section.is_present() && section.states("data") == section.states("fraction") {
            ulysses.contradiction("validation", "either `data` or `fraction` in it");
        }
    }
}

/// A later sequence length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeqLenChange {
    /// Number of steps before the change.
    pub step: u64,
    /// Tokens per sequence after it.
    pub seq_len: usize,
}

impl FieldValue for Vec<SeqLenChange> {
    fn complete(key: Key, _path: &str) -> Key {
        const PAIR: Value = Value::Array(Array::pair(&Value::COUNT, "two integers ≥ 1, [step, seq_len]"));
        Key { value: Value::Array(Array::new(&PAIR, "pairs of integers ≥ 1")), ..key }
    }

    fn read(section: &Section<'_>, name: &str) -> Self {
        let change = |[step, seq_len]: [u64; 2]| {
            let seq_len = usize::try_from(seq_len).ok().filter(|&len| u32::try_from(len).is_ok())?;
            Some(SeqLenChange { step, seq_len })
        };
        let pairs = section.elements::<[u64; 2]>(name);
        let changes: Self = pairs.iter().copied().filter_map(change).collect();
        if changes.len() < pairs.len() {
            section.contradiction(name, &format!("lengths up to {}", u32::MAX));
        } else if changes.windows(2).any(|pair| pair[0].step >= pair[1].step) {
            section.contradiction(name, "steps in ascending order");
        }
        changes
    }

    fn written(&self) -> Option<Json> {
        let pair = |change: &SeqLenChange| json!([change.step, change.seq_len]);
        (!self.is_empty()).then(|| self.iter().map(pair).collect())
    }
}
