//! The vocabulary: all keys, DeepSpeed's and those of the `ulysses` section.
//!
//! Keys that do something are the fields of the [sections](crate::config::sections), in the words of [`define`](crate::config::define); all others of
//! DeepSpeed's are rows of a table ([`deepspeed`]). The list follows DeepSpeed's sources (`runtime/config.py`,
//! `runtime/constants.py`, `runtime/zero/config.py` and the configs that they include) at the version below. What an ignored
//! key would change decides what becomes of it: results, promised memory or files that somebody waits for make it an error,
//! speed makes it a note.

mod deepspeed;
mod key;
mod synonyms;

pub(crate) use deepspeed::{complete, refused_names};
pub(crate) use key::{Auto, Default, Effect, Harmless, Key, Literal, Max, Range, Refused, Value, Variant};
#[cfg(test)]
pub(crate) use synonyms::synonyms;
pub(crate) use synonyms::{Synonym, synonym_of};

/// The version of DeepSpeed whose keys the table has, next to those of earlier 0.19 versions that it has removed.
pub const DEEPSPEED_VERSION: &str = "0.19.8";

/// A key with its place in the table.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    /// The path, as in `zero_optimization.stage`.
    pub(crate) path: String,
    /// The optimizer or scheduler type that has the key, in a `params` section.
    pub(crate) variant: Option<&'static str>,
    pub(crate) key: &'static Key,
}

/// Every key of a file, sections before what is in them.
pub(crate) fn entries_of(root: &'static [Key]) -> Vec<Entry> {
    let mut entries = Vec::new();
    collect("", None, root, &mut entries);
    entries
}

fn collect(section: &str, variant: Option<&'static str>, keys: &'static [Key], entries: &mut Vec<Entry>) {
    for key in keys {
        let path = join(section, key.name);
        entries.push(Entry { path: path.clone(), variant, key });
        if matches!(key.effect, Effect::Renamed(_)) {
            continue; // its keys are those of the section that it stands for
        }
        for (own_variant, keys) in key.value.sections() {
            collect(&path, own_variant.or(variant), keys, entries);
        }
    }
}

/// The key called `name`.
pub(crate) fn find(keys: &'static [Key], name: &str) -> Option<&'static Key> {
    keys.iter().find(|key| key.name == name)
}

/// The path of a key.
pub(crate) fn join(section: &str, key: &str) -> String {
    if section.is_empty() { key.to_owned() } else { format!("{section}.{key}") }
}

/// The known name that `name` most likely meant.
pub(crate) fn nearest(name: &str, known: impl Iterator<Item = &'static str>) -> Option<&'static str> {
    const MAX_NAME_BYTES: usize = 100; // edit distance is quadratic
    const MIN_SIMILARITY: f64 = 0.6;
    if name.len() > MAX_NAME_BYTES {
        return None;
    }
    let name = name.to_ascii_lowercase();
    let similarity = |known: &str| {
        // `micro_batch_size` is meant for `train_micro_batch_size_per_gpu`.
        let is_part = name.len() >= 5 && known.contains(&name);
        f64::from(is_part) + strsim::normalized_damerau_levenshtein(&name, known)
    };
    let best = known.map(|known| (similarity(known), known)).max_by(|a, b| a.0.total_cmp(&b.0))?;
    (best.0 >= MIN_SIMILARITY).then_some(best.1)
}
