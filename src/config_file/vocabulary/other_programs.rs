//! Names in other programs: `other_programs.txt`, whose first lines explain its columns.

use super::deepspeed::{Section, parse};
use std::sync::LazyLock;

static TABLE: LazyLock<Vec<Section>> = LazyLock::new(|| parse(include_str!("other_programs.txt")));

/// A name that is not a key, and the key that does the same.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Synonym {
    pub(crate) name: &'static str,
    /// The path of the key.
    pub(crate) key: &'static str,
    /// How its value differs; empty if it does not.
    pub(crate) remark: &'static str,
}

pub(crate) fn synonyms() -> impl Iterator<Item = Synonym> {
    lines("synonyms").map(|line| {
        let (name, key) = line.split_once(" | ").unwrap_or((line, ""));
        let (key, remark) = key.split_once(" | ").unwrap_or((key, ""));
        Synonym { name, key, remark }
    })
}

/// Returns our key for `name`.
pub(crate) fn synonym_of(name: &str) -> Option<Synonym> {
    synonyms().find(|synonym| synonym.name == name)
}

/// Returns the alternatives to a feature that does not exist here.
pub(crate) fn absent(name: &str) -> Option<&'static str> {
    let mut features = lines("absent").filter_map(|line| line.split_once(" | "));
    features.find(|(names, _)| names.split(", ").any(|known| known == name)).map(|(_, answer)| answer)
}

fn lines(section: &str) -> impl Iterator<Item = &'static str> {
    let sections = TABLE.iter().filter(move |of_table| of_table.path == section);
    sections.flat_map(|section| section.lines.iter().copied())
}
