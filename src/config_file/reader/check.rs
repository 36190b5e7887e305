//! Checks a file against the [`vocabulary`](crate::config_file::vocabulary): unknown and duplicate keys, types and
//! ranges, refused keys, and keys that cause a note.
//!
//! After the check, every value is valid or has been reported.

use super::diagnostic::Problem;
use super::document::{abbreviated, describe, integer_of, mesh_text};
use super::note::Note;
use super::report::{Auto, Report};
use crate::config_file::vocabulary::{
    Array, DefaultValue, Effect, Harmless, Key, Literal, Refused, Value as Kind, Variant, entries_of, find,
    is_comment, join, nearest, refused_name,
};
use jsonc_parser::ast::{Object, ObjectProp, Value};
use jsonc_parser::common::{Range, Ranged};
use std::collections::HashMap;

/// Reports every error of `object`, whose keys are `keys`, and of its contents.
pub(crate) fn check(report: &Report<'_>, object: &Object<'_>, keys: &'static [Key]) {
    Checker { report }.section("", Some(object), first_byte(object.range), keys);
}

struct Checker<'r, 't> {
    report: &'r Report<'t>,
}

impl Checker<'_, '_> {
    /// Checks a section. Required keys of an absent one (`None`) are reported at `anchor`.
    fn section(&self, path: &str, object: Option<&Object<'_>>, anchor: Range, keys: &'static [Key]) {
        let properties = object.map_or(&[][..], |object| &object.properties);
        let mut first_seen = HashMap::new();
        for property in properties {
            let name = property.name.as_str();
            if is_comment(name) {
                continue;
            }
            if let Some(&first) = first_seen.get(name) {
                let problem = || Problem::DuplicateKey { first: self.report.position(first) };
                self.report.add(property.name.range(), join(path, &abbreviated(name)), problem);
                continue;
            }
            first_seen.insert(name, property.range.start);
            match find(keys, name) {
                Some(key) => self.property(path, key, property, properties),
                None => self.report.add_unknown_key(property.name.range(), path, name, keys),
            }
        }
        for key in keys.iter().filter(|key| !first_seen.contains_key(key.name)) {
            let path = join(path, key.name);
            match (key.default, key.value) {
                (DefaultValue::Required, kind) => {
                    self.report.add(anchor, path, || Problem::MissingKey { expected: kind.to_string() });
                }
                (_, Kind::Params(variants)) => {
                    if let Some(variant) = variant_of_siblings(properties, variants) {
                        self.section(&path, None, anchor, variant.params);
                    }
                }
                _ => {}
            }
        }
    }

    fn property(
        &self,
        section: &str,
        key: &'static Key,
        property: &ObjectProp<'_>,
        siblings: &[ObjectProp<'_>],
    ) {
        let (path, value) = (join(section, key.name), &property.value);
        if let Effect::Renamed(to) = key.effect {
            let target = join(section, to);
            if siblings.iter().any(|other| other.name.as_str() == to) {
                let reason = format!("an alias of `{target}`, which is also set: remove one of them");
                return self.report.add(property.name.range(), path, || Problem::Unsupported { reason });
            }
            let note = format!("`{path}` is an alias of `{target}`: use `{target}`");
            self.report.note(Note::info(note));
            self.note_effect_of_target(section, to, key, value);
        }
        if key.or_null && matches!(value, Value::NullKeyword(_)) {
            return;
        }
        if is_auto(value, key) {
            self.report.add_auto(Auto { path: path.clone(), key });
            if matches!(key.auto_value(), DefaultValue::Required) {
                let expected = format!("{}; \"auto\" has no value for this key", key.value);
                self.invalid(&path, value, value.range(), expected);
            }
            return self.note_no_effect(&path, key, None);
        }
        if self.value(&path, key.value, value, siblings) {
            self.effect(&path, key, value);
        }
    }

    /// Reports a value of the wrong type or out of range; returns whether it is valid.
    fn value(&self, path: &str, kind: Kind, value: &Value<'_>, siblings: &[ObjectProp<'_>]) -> bool {
        let range = value.range();
        match (kind, value) {
            (Kind::Section(keys) | Kind::SwitchOrSection(keys), Value::Object(object)) => {
                self.section(path, Some(object), first_byte(range), keys);
                return true;
            }
            (Kind::Array(Array { element, min_len, max_len, .. }), Value::Array(array))
                if (min_len..=max_len).contains(&array.elements.len()) =>
            {
                return self.elements(path, &array.elements, |_| *element);
            }
            (Kind::TextOrSections(keys), Value::Array(array)) if !array.elements.is_empty() => {
                return self.elements(path, &array.elements, |element| match element {
                    Value::Object(_) => Kind::Section(keys),
                    _ => Kind::Text,
                });
            }
            (Kind::Names(known), Value::Array(array)) if array.elements.iter().all(is_text) => {
                return self.names(path, &array.elements, known);
            }
            (Kind::SwitchOrSection(_), Value::BooleanLit(_)) => {
                let note = format!("`{path}` as a boolean is deprecated: set `{path}.stage`");
                self.report.note(Note::info(note));
                return true;
            }
            (Kind::Params(variants), Value::Object(object)) => {
                // Without a type, the valid keys are unknown.
                if let Some(variant) = variant_of_siblings(siblings, variants) {
                    self.section(path, Some(object), first_byte(range), variant.params);
                }
                return true;
            }
            (Kind::Variant { .. } | Kind::Choice(_), Value::StringLit(name)) => {
                let refused = match kind {
                    Kind::Variant { refused, .. } => {
                        refused.iter().find(|refused| refused.name.eq_ignore_ascii_case(&name.value)).copied()
                    }
                    _ => refused_name(path, &name.value),
                };
                if let Some(refused) = refused {
                    self.refused(path.to_owned(), range, &refused);
                    return false;
                }
                if let Kind::Variant { variants, .. } = kind
                    && let Some(variant) = variant_named(&name.value, variants)
                    && !variant.name.eq_ignore_ascii_case(&name.value)
                {
                    let note = format!("`{path}` \"{}\" is another name of \"{}\"", name.value, variant.name);
                    self.report.note(Note::info(note));
                }
            }
            _ => {}
        }
        let valid = is_valid(kind, value);
        if !valid {
            let has_more_sizes =
                path == "mesh_param" && matches!(value, Value::Array(array) if array.elements.len() > 2);
            let hint = match has_more_sizes {
                true => "; other axes are `tensor_parallel_size` and `pipeline_parallel_size`",
                false => "",
            };
            self.invalid(path, value, range, format!("{kind}{hint}"));
        }
        valid
    }

    fn elements(&self, path: &str, elements: &[Value<'_>], kind: impl Fn(&Value<'_>) -> Kind) -> bool {
        let mut valid = true;
        for (index, element) in elements.iter().enumerate() {
            valid &= self.value(&format!("{path}[{index}]"), kind(element), element, &[]);
        }
        valid
    }

    /// Reports names that are not `known`; returns whether all are.
    fn names(&self, path: &str, elements: &[Value<'_>], known: &'static [&'static str]) -> bool {
        let mut valid = true;
        for (index, element) in elements.iter().enumerate() {
            let Value::StringLit(name) = element else { continue };
            if !known.iter().any(|known| known.eq_ignore_ascii_case(&name.value)) {
                let element = format!("{path}[{index}]");
                match refused_name(path, &name.value) {
                    Some(refused) => self.refused(element, name.range, &refused),
                    None => self.report.add(name.range, element, || Problem::UnknownName {
                        name: abbreviated(&name.value),
                        suggestion: nearest(&name.value, known.iter().copied()),
                        known,
                    }),
                }
                valid = false;
            }
        }
        valid
    }

    fn refused(&self, path: String, range: Range, Refused { name, reason }: &Refused) {
        let reason = format!("\"{name}\": {reason}");
        self.report.add(range, path, || Problem::Unsupported { reason });
    }

    fn effect(&self, path: &str, key: &'static Key, value: &Value<'_>) {
        let Effect::Refused { harmless, reason } = key.effect else {
            return self.note_no_effect(path, key, Some(value));
        };
        let is_harmless = match harmless {
            Harmless::Values(values) => values.iter().any(|literal| equals(value, *literal)),
            Harmless::NothingEnabled => !enables_something(value),
        };
        if !is_harmless {
            let reason = reason.to_owned();
            self.report.add(value.range(), path.to_owned(), || Problem::Unsupported { reason });
        }
    }

    /// Notes a key without effect. `value` is the value in the file, `None` for `"auto"`.
    fn note_no_effect(&self, path: &str, key: &'static Key, value: Option<&Value<'_>>) {
        let Effect::Ignored(why) = key.effect else { return };
        let text = format!("`{path}` has no effect: {why}");
        let is_default = |value| matches!(key.default, DefaultValue::Is(literal) if equals(value, literal));
        let asks_for_another = value.is_some_and(|value| !is_default(value));
        let is_missed = key.is_missed && asks_for_another;
        self.report.note(if is_missed { Note::warning(text) } else { Note::info(text) });
    }

    /// Notes an alias whose target has no effect.
    fn note_effect_of_target(&self, section: &str, to: &'static str, old: &'static Key, value: &Value<'_>) {
        let (entries, target) = (entries_of(self.report.root), join(section, to));
        let new = entries.iter().find(|entry| entry.path == target && !std::ptr::eq(entry.key, old));
        if let Some(new) = new {
            self.note_no_effect(&target, new.key, Some(value));
        }
    }

    fn invalid(&self, path: &str, value: &Value<'_>, range: Range, expected: String) {
        self.report
            .add(range, path.to_owned(), || Problem::InvalidValue { expected, found: describe(value) });
    }
}

/// Returns the variant that the key `type` names.
pub(crate) fn variant_of_siblings(
    properties: &[ObjectProp<'_>],
    variants: &'static [Variant],
) -> Option<&'static Variant> {
    let property = properties.iter().find(|property| property.name.as_str() == "type")?;
    match &property.value {
        Value::StringLit(name) => variant_named(&name.value, variants),
        _ => None,
    }
}

fn variant_named(name: &str, variants: &'static [Variant]) -> Option<&'static Variant> {
    variants.iter().find(|variant| variant.names().any(|known| known.eq_ignore_ascii_case(name)))
}

/// Returns whether `value` is `"auto"`, and the key accepts it.
pub(crate) fn is_auto(value: &Value<'_>, key: &Key) -> bool {
    key.value.takes_auto() && matches!(value, Value::StringLit(text) if text.value == "auto")
}

fn is_valid(kind: Kind, value: &Value<'_>) -> bool {
    match (kind, value) {
        (Kind::Anything, _)
        | (Kind::Boolean, Value::BooleanLit(_))
        | (Kind::AnyText, Value::StringLit(_)) => true,
        (Kind::Integer { min, max }, Value::NumberLit(number)) => {
            integer_of(number.value).is_some_and(|integer| (min.into()..=max.into()).contains(&integer))
        }
        (Kind::Signed, Value::NumberLit(number)) => {
            integer_of(number.value).is_some_and(|integer| i64::try_from(integer).is_ok())
        }
        (Kind::Number(range), Value::NumberLit(number)) => {
            number.value.parse::<f64>().is_ok_and(|number| range.contains(number))
        }
        (Kind::Text | Kind::TextOrSections(_), Value::StringLit(text)) => !text.value.is_empty(),
        (Kind::Choice(names), Value::StringLit(text)) => {
            names.iter().any(|name| name.eq_ignore_ascii_case(&text.value))
        }
        (Kind::Mesh, value) => mesh_text(value).is_some_and(|text| !text.is_empty()),
        (Kind::Rule, Value::Array(array)) => match array.elements.as_slice() {
            [pattern, mesh] | [pattern, mesh, Value::Object(_)] => {
                let is_mesh = matches!(mesh, Value::NullKeyword(_)) || is_valid(Kind::Mesh, mesh);
                is_valid(Kind::Text, pattern) && is_mesh
            }
            _ => false,
        },
        (Kind::Variant { variants, .. }, Value::StringLit(text)) => {
            variant_named(&text.value, variants).is_some()
        }
        _ => false,
    }
}

fn equals(value: &Value<'_>, literal: Literal) -> bool {
    match (value, literal) {
        (Value::NullKeyword(_), Literal::Null) => true,
        (Value::BooleanLit(value), Literal::Boolean(literal)) => value.value == literal,
        (Value::NumberLit(value), Literal::Integer(literal)) => {
            integer_of(value.value) == Some(literal.into())
        }
        (Value::NumberLit(value), Literal::Number(literal)) => value.value.parse() == Ok(literal),
        (Value::StringLit(value), Literal::Text(literal)) => value.value.eq_ignore_ascii_case(literal),
        _ => false,
    }
}

/// Returns whether any nested `enabled` is true.
fn enables_something(value: &Value<'_>) -> bool {
    match value {
        Value::Object(object) => object.properties.iter().any(|property| match &property.value {
            Value::BooleanLit(enabled) if property.name.as_str() == "enabled" => enabled.value,
            other => enables_something(other),
        }),
        Value::Array(array) => array.elements.iter().any(enables_something),
        _ => false,
    }
}

fn is_text(value: &Value<'_>) -> bool {
    matches!(value, Value::StringLit(_))
}

/// Returns the range where errors of a whole section are shown: its opening brace.
fn first_byte(range: Range) -> Range {
    Range { start: range.start, end: range.start + 1 }
}
