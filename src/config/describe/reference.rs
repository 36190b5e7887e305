//! `docs/config.md`, generated from the vocabulary.

use super::explain::effect_text;
use crate::config::config::entries;
use crate::config_file::vocabulary::{DEEPSPEED_VERSION, Effect, Entry};
use std::fmt::Write;

/// Returns the reference of all keys, in Markdown. `docs/config.md` is this text, as a test checks;
/// `ulysses config reference > docs/config.md` regenerates it.
pub fn reference_markdown() -> String {
    let preface = include_str!("reference_preface.md").replace("{version}", DEEPSPEED_VERSION);
    let entries = entries();
    let mut text = preface + &counts(&entries);
    for Table { title, rows } in tables(&entries) {
        let _ = write!(
            text,
            "\n## {title}\n\n| key | value | default | what it sets | here |\n|---|---|---|---|---|\n{rows}"
        );
    }
    text
}

struct Table {
    title: String,
    rows: String,
}

/// Returns the tables, in the order of their first keys.
fn tables(entries: &[Entry]) -> Vec<Table> {
    let mut tables: Vec<Table> = Vec::new();
    for entry in entries.iter().filter(|entry| !is_section(entry)) {
        let title = title(entry);
        match tables.iter_mut().find(|table| table.title == title) {
            Some(table) => table.rows.push_str(&row(entry)),
            None => tables.push(Table { title, rows: row(entry) }),
        }
    }
    tables
}

fn is_section(entry: &Entry) -> bool {
    let is_renamed = matches!(entry.key.effect, Effect::Renamed(_));
    entry.key.value.is_section() && !is_renamed
}

fn counts(entries: &[Entry]) -> String {
    let count =
        |is: fn(Effect) -> bool| entries.iter().filter(|e| !is_section(e) && is(e.key.effect)).count();
    format!(
        "Of {} keys, {} are supported, {} have no effect, {} are refused unless they are off, {} are read only by \
         refused features, and {} are aliases.\n",
        entries.iter().filter(|entry| !is_section(entry)).count(),
        count(|effect| matches!(effect, Effect::Supported)),
        count(|effect| matches!(effect, Effect::Ignored(_))),
        count(|effect| matches!(effect, Effect::Refused { .. })),
        count(|effect| matches!(effect, Effect::Idle)),
        count(|effect| matches!(effect, Effect::Renamed(_))),
    )
}

fn title(entry: &Entry) -> String {
    match (entry.path.rsplit_once('.'), entry.variant) {
        (None, _) => "Top of the file".to_owned(),
        (Some((section, _)), None) => format!("`{section}`"),
        (Some((section, _)), Some(variant)) => format!("`{section}` of {variant}"),
    }
}

fn row(entry: &Entry) -> String {
    let default = match entry.key.auto {
        Some(auto) => format!("{}; \"auto\": {auto}", entry.key.default),
        None => entry.key.default.to_string(),
    };
    let cells = [entry.key.value.to_string(), default, entry.key.about.to_owned(), effect_text(entry.key)];
    let cells = cells.map(|cell| cell.replace('|', "\\|").replace('<', "&lt;"));
    format!("| `{}` | {} |\n", entry.key.name, cells.join(" | "))
}
