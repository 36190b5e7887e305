//! DeepSpeed's keys that are not fields of a section: `deepspeed_keys.txt`, whose first lines explain its columns.

use super::key::{Array, DefaultValue, Effect, Harmless, Key, Literal, Max, Range, Refused, Value};
use std::sync::LazyLock;

static TABLE: LazyLock<Vec<Section>> = LazyLock::new(|| parse(include_str!("deepspeed_keys.txt")));

/// The lines below a line in brackets.
pub(super) struct Section {
    pub(super) path: &'static str,
    /// The documentation of a section that is entirely DeepSpeed's.
    about: Option<&'static str>,
    pub(super) lines: Vec<&'static str>,
}

struct Row {
    /// The types that have the parameter; all if empty.
    types: Vec<&'static str>,
    key: Key,
}

/// Returns the keys of the section at `path`: `own`, then those of the table. `of_type` is the optimizer or scheduler
/// that the parameters belong to.
pub(crate) fn complete(own: Vec<Key>, path: &str, of_type: Option<&str>) -> &'static [Key] {
    let mut keys = own;
    for line in TABLE.iter().filter(|section| section.path == path).flat_map(|section| &section.lines) {
        let Some(Row { types, key }) = row(line) else { continue };
        if of_type.is_none_or(|of_type| types.is_empty() || types.contains(&of_type)) {
            keys.push(key);
        }
    }
    for section in TABLE.iter() {
        let (parent, name) = section.path.rsplit_once('.').unwrap_or(("", section.path));
        if let (Some(about), true) = (section.about, parent == path) {
            let value = Value::Section(complete(Vec::new(), section.path, None));
            keys.push(Key { name, about, ..Key::new(value) });
        }
    }
    // An alias accepts the values of its target.
    let values: Vec<_> = keys.iter().map(|key| (key.name, key.value)).collect();
    for key in &mut keys {
        if let Effect::Renamed(to) = key.effect
            && let Some((_, value)) = values.iter().find(|(name, _)| *name == to)
        {
            key.value = *value;
        }
    }
    keys.leak()
}

/// Returns `name` with the reason if the key at `path` refuses it.
pub(crate) fn refused_name(path: &str, name: &str) -> Option<Refused> {
    refused_names(path).find(|refused| refused.name.eq_ignore_ascii_case(name))
}

/// Returns the names that the key at `path` refuses, with the reasons.
pub(crate) fn refused_names(path: &str) -> impl Iterator<Item = Refused> {
    pairs("names of ", path).map(|(name, reason)| Refused { name, reason })
}

/// Returns the other names of the type `name`, in the key at `path`.
pub(crate) fn other_names(path: &str, name: &str) -> &'static [&'static str] {
    let others = pairs("other names of ", path).filter(|(_, of_type)| *of_type == name);
    others.map(|(other, _)| other).collect::<Vec<_>>().leak()
}

/// Returns the pairs of the section `kind` of the key at `path`.
fn pairs(kind: &str, path: &str) -> impl Iterator<Item = (&'static str, &'static str)> {
    let sections = TABLE.iter().filter(move |section| section.path.strip_prefix(kind) == Some(path));
    sections.flat_map(|section| &section.lines).filter_map(|line| line.split_once(" | "))
}

/// Parses a table; lines that begin with `#` are comments.
pub(super) fn parse(text: &'static str) -> Vec<Section> {
    let mut sections: Vec<Section> = Vec::new();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        match (line.strip_prefix('[').and_then(|line| line.split_once(']')), sections.last_mut()) {
            (Some((path, about)), _) => {
                let about = Some(about.trim()).filter(|about| !about.is_empty());
                sections.push(Section { path, about, lines: Vec::new() });
            }
            (None, Some(section)) => section.lines.push(line),
            (None, None) => {}
        }
    }
    sections
}

/// Parses a line into a key; `None` for an invalid line (a test checks that there are none).
fn row(line: &'static str) -> Option<Row> {
    let mut cells = line.split('|').map(str::trim);
    let mut cell = || cells.next().unwrap_or_default();
    let (names, value, default, status, reason, about) = (cell(), cell(), cell(), cell(), cell(), cell());
    let (name, types) = names.split_once(" of ").unwrap_or((names, ""));
    let types = types.split(", ").filter(|of_type| !of_type.is_empty()).collect();
    let (value, or_null) = value.strip_suffix(" or null").map_or((value, false), |value| (value, true));
    let key = Key {
        name,
        about,
        or_null,
        is_missed: status == "missed",
        default: match default {
            "" => DefaultValue::Derived("not set"),
            default => literal(default).map_or(DefaultValue::Derived(default), DefaultValue::Is),
        },
        effect: effect(status, reason)?,
        ..Key::new(kind(value)?)
    };
    Some(Row { types, key })
}

fn kind(value: &'static str) -> Option<Value> {
    let number = |max| Value::Number(Range { min: 0.0, max });
    Some(match value {
        // An alias has the value of its target.
        "any" | "" => Value::Anything,
        "flag" => Value::Boolean,
        "count" => Value::COUNT,
        "index" => Value::Integer { min: 0, max: u64::MAX },
        "signed" => Value::Signed,
        "number" => number(Max::Unbounded),
        "fraction" => number(Max::AtMost(1.0)),
        "text" => Value::Text,
        "any text" => Value::AnyText,
        "list" => Value::LIST,
        _ => match value.split_once(" of ")? {
            ("one", names) => Value::Choice(listed(names)),
            ("names", names) => Value::Names(listed(names)),
            ("array", what) => Value::Array(Array::pair(&Value::COUNT, what)),
            _ => return None,
        },
    })
}

fn listed(names: &'static str) -> &'static [&'static str] {
    names.split(", ").collect::<Vec<_>>().leak()
}

fn effect(status: &'static str, reason: &'static str) -> Option<Effect> {
    let refused = |harmless| Effect::Refused { harmless, reason };
    Some(match status {
        "no effect" | "missed" => Effect::Ignored(reason),
        "idle" => Effect::Idle,
        "renamed" => Effect::Renamed(reason),
        "supported" => Effect::Supported,
        "refused" => refused(Harmless::Values(&[])),
        "refused if enabled" => refused(Harmless::NothingEnabled),
        _ => {
            let values = status.strip_prefix("only ")?.split(", ").map(literal);
            refused(Harmless::Values(values.collect::<Option<Vec<_>>>()?.leak()))
        }
    })
}

/// Parses a JSON value.
fn literal(text: &'static str) -> Option<Literal> {
    match text {
        "null" => Some(Literal::Null),
        "true" => Some(Literal::Boolean(true)),
        "false" => Some(Literal::Boolean(false)),
        _ => match text.strip_prefix('"').and_then(|text| text.strip_suffix('"')) {
            Some(text) => Some(Literal::Text(text)),
            None => {
                let integer = text.parse().ok().map(Literal::Integer);
                integer.or_else(|| text.parse().ok().map(Literal::Number))
            }
        },
    }
}

/// The paths of the sections of the table.
#[cfg(test)]
pub(crate) fn table_paths() -> impl Iterator<Item = &'static str> {
    TABLE.iter().map(|Section { path, .. }| path.split_once("names of ").map_or(*path, |(_, key)| key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_of_the_table_is_valid() {
        for Section { path, lines, .. } in TABLE.iter() {
            for line in lines {
                let is_row =
                    if path.contains("names of ") { line.contains(" | ") } else { row(line).is_some() };
                assert!(is_row, "{line}");
            }
        }
    }
}
