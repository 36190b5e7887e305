//! `ulysses.data` and `ulysses.validation`: what a run is trained and judged on.

use crate::config::define::words::{count, flag, inside_0_1, number, positive, text};
use crate::config::define::{Keys, Setting, choices, keys, section_keys};
use crate::config::reader::Section;
use crate::config::vocabulary::{Key, Value};
use serde_json::{Map, Value as Json, json};

/// Most sources of one run; limits what a hostile file takes.
const MAX_SOURCES: usize = 10_000;

keys! {
    /// One path of the data.
    #[derive(Clone, Debug, PartialEq)]
    pub struct DataSource {
        /// A file of text, JSONL or tokens, a directory, or a pattern.
        pub path: String = text().required(),
        /// Its share of the samples, relative to the other weights. All sources have one, or none.
        pub weight: Option<f64> = positive(),
    }
}

impl<T: Into<String>> From<T> for DataSource {
    fn from(path: T) -> Self {
        Self { path: path.into(), weight: None }
    }
}

/// A path, or an array of paths and of objects.
impl Setting for Vec<DataSource> {
    fn complete(key: Key, path: &str) -> Key {
        Key { value: Value::TextOrSections(section_keys::<DataSource>(path, None)), ..key }
    }

    fn find(section: &Section<'_>, name: &'static str) -> Option<Self> {
        if let Some(path) = section.text(name) {
            return Some(vec![path.into()]);
        }
        let elements = section.texts(name).into_iter().zip(section.sections(name));
        let source = |(text, object): (Option<String>, _)| {
            text.map_or_else(|| DataSource::from_section(&object), DataSource::from)
        };
        let sources: Self = elements.map(source).collect();
        let num_weights = sources.iter().filter(|source| source.weight.is_some()).count();
        if sources.len() > MAX_SOURCES {
            section.contradiction(name, &format!("at most {MAX_SOURCES} sources"));
        } else if num_weights > 0 && num_weights < sources.len() {
            section.contradiction(name, "a weight for every source, or for none");
        }
        Some(sources)
    }

    fn read(section: &Section<'_>, name: &'static str) -> Self {
        Self::find(section, name).unwrap_or_default()
    }

    /// A path without a weight by itself.
    fn written(&self) -> Option<Json> {
        let source = |source: &DataSource| match source.weight {
            None => Some(Json::from(source.path.as_str())),
            Some(_) => Setting::written(source),
        };
        match self.as_slice() {
            [] => None,
            [only @ DataSource { weight: None, .. }] => source(only),
            sources => Some(sources.iter().filter_map(source).collect()),
        }
    }
}

choices! {
    /// How documents come to be rows. A corpus of one document gives the same rows each way.
    ///
    /// Nothing is dropped: every token is in one row, whichever the packing.
    pub enum Packing {
        /// Documents that fit into a row are not cut, and share rows so that little is left empty. Longer ones are
        /// cut into rows of their own; what is left of one shares a row. Attention stays inside a document.
        #[default]
        Greedy = "greedy",
        /// Documents are laid end to end and cut where rows end. Attention stays inside a document.
        Cut = "cut",
        /// Documents are laid end to end, and the rows know nothing of them, as in nanoGPT: attention reaches across
        /// borders, and the last token of a document is to predict the first of the next.
        Concat = "concat",
    }
}

keys! {
    /// Data that is held out, and when its loss is computed.
    #[derive(Clone, Debug, PartialEq)]
    pub struct ValidationConfig {
        /// What is held out.
        pub data: HeldOut,
        /// Steps between two evaluations.
        pub interval: Option<u64> = count().named("eval_interval").derived("the last step only"),
        /// Batches of `train_batch_size` rows that are evaluated.
        pub batches: Option<u64> = count().named("eval_batches").derived("all rows"),
        /// Evaluates before the first step too.
        pub eval_on_start: bool = flag(),
        /// Ends the run after so many evaluations in a row without improvement of the loss.
        pub early_stopping_patience: Option<u64> = count().derived("never"),
        /// What an improvement on the lowest loss must exceed to count for `early_stopping_patience`, in nats per token.
        pub early_stopping_threshold: f64 = number().number(0.0),
    }
}

/// Where held-out data is from.
#[derive(Clone, Debug, PartialEq)]
pub enum HeldOut {
    /// Data of its own.
    Path(String),
    /// This share of the documents of each source.
    Fraction(f64),
}

keys! {
    struct HeldOutKeys {
        /// A file of text, JSONL or tokens, a directory, or a pattern.
        data: Option<String> = text(),
        /// Instead of `data`: the share of each source's documents that is held out.
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
    /// Reports a section in `ulysses` that has no data or too much.
    pub(crate) fn check(ulysses: &Section<'_>) {
        let section = ulysses.section("validation");
        let is_given = |key| section.names(key) && !section.is_auto(key);
        if section.is_present() && is_given("data") == is_given("fraction") {
            ulysses.contradiction("validation", "either `data` or `fraction` in it");
        }
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

impl Setting for Vec<SeqLenChange> {
    fn complete(key: Key, _path: &str) -> Key {
        Key { value: Value::Pairs("two integers ≥ 1, [step, seq_len]"), ..key }
    }

    fn find(section: &Section<'_>, name: &'static str) -> Option<Self> {
        let change = |[step, seq_len]: [u64; 2]| {
            let seq_len = usize::try_from(seq_len).ok().filter(|&len| u32::try_from(len).is_ok())?;
            Some(SeqLenChange { step, seq_len })
        };
        let pairs = section.pairs(name);
        let changes: Self = pairs.iter().copied().filter_map(change).collect();
        if changes.len() < pairs.len() {
            section.contradiction(name, &format!("lengths up to {}", u32::MAX));
        } else if changes.windows(2).any(|pair| pair[0].step >= pair[1].step) {
            section.contradiction(name, "steps in ascending order");
        }
        Some(changes)
    }

    fn read(section: &Section<'_>, name: &'static str) -> Self {
        Self::find(section, name).unwrap_or_default()
    }

    fn written(&self) -> Option<Json> {
        let pair = |change: &SeqLenChange| json!([change.step, change.seq_len]);
        (!self.is_empty()).then(|| self.iter().map(pair).collect())
    }
}
