//! `ulysses config explain KEY`.

use crate::config::config::entries;
use crate::config_file::vocabulary::{
    Effect, Entry, Harmless, Key, Literal, Synonym, Value, absent, nearest, synonym_of,
};
use std::fmt::{self, Write};

/// No key has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown key `{key}`{}", suggestion(.suggestions))]
pub struct UnknownKey {
    /// The name.
    pub key: String,
    /// The paths of similar keys.
    pub suggestions: Vec<String>,
}

fn suggestion(suggestions: &[String]) -> String {
    match suggestions {
        [] => String::new(),
        suggestions => format!(", did you mean `{}`?", suggestions.join("` or `")),
    }
}

/// Describes a key in a few lines of plain text. `key` is a path, the last name of a path, or the name of the setting in
/// Hugging Face's Trainer.
///
/// # Errors
/// When no key has this name.
pub fn explain(key: &str) -> Result<String, UnknownKey> {
    let entries = entries();
    let explained = |is_meant: &dyn Fn(&Entry) -> bool| {
        let texts: Vec<_> = entries.iter().filter(|entry| is_meant(entry)).map(explanation).collect();
        (!texts.is_empty()).then(|| texts.join("\n"))
    };
    explained(&|entry| entry.path == key)
        // Before last names: `block_size` more often means Hugging Face's than that of `aio`.
        .or_else(|| synonym(key, &entries))
        .or_else(|| explained(&|entry| entry.key.name == key))
        .or_else(|| name_of_type(key, &entries))
        .or_else(|| Some(format!("`{key}` does not exist here: {}\n", absent(&key.to_lowercase())?)))
        .ok_or_else(|| UnknownKey { key: key.to_owned(), suggestions: suggestions(key, &entries) })
}

/// Describes our key for another program's name.
fn synonym(name: &str, entries: &[Entry]) -> Option<String> {
    let Synonym { name, key, remark } = synonym_of(name.rsplit('.').next()?)?;
    if key.rsplit('.').next() == Some(name) {
        return None;
    }
    let remark = if remark.is_empty() { String::new() } else { format!(", {remark}") };
    let explanations = entries.iter().filter(|entry| entry.path == key).map(explanation);
    let explanations = explanations.collect::<Vec<_>>().join("\n");
    Some(format!("`{name}` is called `{key}` here{remark}\n\n{explanations}"))
}

/// Describes another name of an optimizer or a scheduler, or one that is not supported.
fn name_of_type(name: &str, entries: &[Entry]) -> Option<String> {
    entries.iter().find_map(|Entry { path, key, .. }| {
        let Value::Variant { variants, refused } = key.value else { return None };
        let is_name = |other: &str| other.eq_ignore_ascii_case(name);
        let other = variants.iter().find_map(|variant| {
            let other = variant.other_names.iter().find(|other| is_name(other))?;
            Some(format!("`{path}` \"{other}\" is another name of \"{}\"\n", variant.name))
        });
        let refused = refused.iter().find(|refused| is_name(refused.name));
        other.or(refused.map(|refused| format!("`{path}` \"{}\": {}\n", refused.name, refused.reason)))
    })
}

fn suggestions(key: &str, entries: &[Entry]) -> Vec<String> {
    let name = key.rsplit('.').next().unwrap_or(key);
    let Some(name) = nearest(name, entries.iter().map(|entry| entry.key.name)) else { return Vec::new() };
    let mut paths: Vec<_> = entries.iter().filter(|e| e.key.name == name).map(|e| e.path.clone()).collect();
    paths.dedup();
    paths.truncate(5);
    paths
}

fn explanation(entry: &Entry) -> String {
    let mut text = entry.path.clone();
    if let Some(variant) = entry.variant {
        let _ = write!(text, " (of {variant})");
    }
    let mut line = |name: &str, value: &dyn fmt::Display| {
        let _ = write!(text, "\n  {name:<8} {value}");
    };
    if !entry.key.about.is_empty() {
        line("what", &entry.key.about);
    }
    line("value", &entry.key.value);
    line("default", &entry.key.default);
    if let Some(auto) = entry.key.auto {
        line("auto", &auto);
    }
    match (entry.key.value, entry.key.effect) {
        // Its keys are supported or not, each for itself.
        (Value::Section(keys) | Value::SwitchOrSection(keys), Effect::Supported) => {
            line("keys", &keys.iter().map(|key| key.name).collect::<Vec<_>>().join(", "));
        }
        _ => line("support", &effect_text(entry.key)),
    }
    text.push('\n');
    text
}

pub(crate) fn effect_text(key: &Key) -> String {
    match key.effect {
        Effect::Supported => match key.value {
            Value::Variant { variants, refused: refused @ [_, ..] } => {
                let others = variants.iter().filter(|variant| !variant.other_names.is_empty());
                let others = others.map(|variant| {
                    format!("; other names of \"{}\": {}", variant.name, variant.other_names.join(", "))
                });
                let names: Vec<_> = refused.iter().map(|refused| refused.name).collect();
                let others: String = others.collect();
                format!("supported{others}; refused, with an alternative: {}", names.join(", "))
            }
            _ => "supported".to_owned(),
        },
        Effect::Ignored(why) => format!("no effect: {why}"),
        Effect::Idle => "read only by a feature that is refused when enabled".to_owned(),
        Effect::Refused { harmless: Harmless::NothingEnabled, reason } => {
            format!("refused with `\"enabled\": true`: {reason}")
        }
        Effect::Refused { harmless: Harmless::Values([]), reason } => format!("refused: {reason}"),
        Effect::Refused { harmless: Harmless::Values(values), reason } => {
            format!("refused, except {}: {reason}", accepted(values))
        }
        Effect::Renamed(to) => format!("alias of `{to}`"),
    }
}

fn accepted(values: &[Literal]) -> String {
    let mut values: Vec<_> = values.iter().map(ToString::to_string).collect();
    values.dedup_by(|a, b| a.trim_end_matches(".0") == b.trim_end_matches(".0"));
    values.join(" and ")
}
