//! The vocabulary: all keys, DeepSpeed's and those of the `ulysses` section.
//!
//! Supported keys are fields of the [sections](crate::config::sections), defined with [`define`](crate::config_file::define);
//! DeepSpeed's other keys are rows of a table ([`deepspeed`]). The list follows DeepSpeed's sources
//! (`runtime/config.py`, `runtime/constants.py`, `runtime/zero/config.py` and the configs that they include) at the
//! version below. A key that is not supported is an error if ignoring it would change results, memory or output files,
//! and a note if it would only change speed.

mod deepspeed;
mod key;
mod other_programs;

#[cfg(test)]
pub(crate) use deepspeed::table_paths;
pub(crate) use deepspeed::{complete, other_names, refused_name, refused_names};
pub(crate) use key::{
    Array, DefaultValue, Effect, Harmless, Key, Literal, Max, Range, Refused, Value, Variant,
};
#[cfg(test)]
pub(crate) use other_programs::synonyms;
pub(crate) use other_programs::{Synonym, absent, synonym_of};

/// The version of DeepSpeed whose keys are known, in addition to removed keys of earlier 0.19 versions.
pub const DEEPSPEED_VERSION: &str = "0.19.8";

/// A key with its path.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    /// The path, as in `zero_optimization.stage`.
    pub(crate) path: String,
    /// The optimizer or scheduler type that has the key, in a `params` section.
    pub(crate) variant: Option<&'static str>,
    pub(crate) key: &'static Key,
}

/// Returns every key of a file, sections before their contents.
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
            continue; // its keys are those of the section it is an alias of
        }
        match key.value {
            Value::Params(variants) => {
                for Variant { name, params, .. } in variants {
                    collect(&path, Some(name), params, entries);
                }
            }
            value => collect(&path, variant, value.keys(), entries),
        }
    }
}

/// Returns the key `name`.
pub(crate) fn find(keys: &'static [Key], name: &str) -> Option<&'static Key> {
    keys.iter().find(|key| key.name == name)
}

/// Returns whether a key of the file is a comment, such as `_comment`, which JSON has no other form of.
pub(crate) fn is_comment(name: &str) -> bool {
    name.starts_with('_')
}

/// Returns the path of a key.
pub(crate) fn join(section: &str, key: &str) -> String {
    if section.is_empty() { key.to_owned() } else { format!("{section}.{key}") }
}

/// Returns the known name that is most similar to `name`.
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
