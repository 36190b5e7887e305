//! Typed access to the sections of a file that has been [checked](super::check).
//!
//! A getter returns the value in the file, or else the value of `"auto"` or the default in the
//! [`vocabulary`](crate::config_file::vocabulary), the only place that defines defaults. An invalid value reads as absent; it
//! has been reported, so no config results.

use super::check::{is_auto, variant_of_siblings};
use super::diagnostic::{Position, Problem};
use super::document::{describe, integer_of, mesh_text, to_json};
use super::note::Note;
use super::report::Report;
use crate::config_file::vocabulary::{
    AutoValue, DefaultValue, Effect, Key, Literal, Value as Kind, find, is_comment, join,
};
use jsonc_parser::ast::{Object, ObjectProp, Value};
use jsonc_parser::common::{Range, Ranged};
use serde_json::Value as Json;

/// An object of the file; an absent one reads as an empty one.
pub(crate) struct Section<'a> {
    report: &'a Report<'a>,
    path: String,
    object: Option<&'a Object<'a>>,
    keys: &'static [Key],
    /// Whether the file has `true` instead of the section.
    is_switched_on: bool,
}

/// The value of a key: in the file, or the default.
enum Found<'a> {
    Given(&'a Value<'a>),
    Known(Literal),
}

impl<'a> Section<'a> {
    pub(crate) fn root(report: &'a Report<'a>, object: &'a Object<'a>, keys: &'static [Key]) -> Self {
        Self { object: Some(object), ..Self::absent(report, keys) }
    }

    /// Creates an absent section with these keys.
    pub(crate) fn absent(report: &'a Report<'a>, keys: &'static [Key]) -> Self {
        Self { report, path: String::new(), object: None, keys, is_switched_on: false }
    }

    /// Returns the section at `name`.
    pub(crate) fn section(&self, name: &'static str) -> Section<'a> {
        let (object, is_switched_on) = match self.property(name).map(|property| &property.value) {
            Some(Value::Object(object)) => (Some(object), false),
            Some(Value::BooleanLit(switch)) => (None, switch.value),
            _ => (None, false),
        };
        let keys = match find(self.keys, name).map(|key| key.value) {
            Some(Kind::Section(keys) | Kind::SwitchOrSection(keys)) => keys,
            Some(Kind::Params(variants)) => {
                let siblings = self.object.map_or(&[][..], |object| &object.properties);
                variant_of_siblings(siblings, variants).map_or(&[][..], |variant| variant.params)
            }
            _ => &[],
        };
        Section { report: self.report, path: join(&self.path, name), object, keys, is_switched_on }
    }

    /// Returns the sections of the array at `name`; elements that are strings read as empty sections.
    pub(crate) fn sections(&self, name: &'static str) -> Vec<Section<'a>> {
        let (Some(Value::Array(array)), Some(Kind::Sections(keys) | Kind::TextOrSections(keys))) =
            (self.property(name).map(|property| &property.value), find(self.keys, name).map(|key| key.value))
        else {
            return Vec::new();
        };
        let section = |(index, element): (usize, &'a Value<'a>)| {
            let path = format!("{}[{index}]", join(&self.path, name));
            let object = if let Value::Object(object) = element { Some(object) } else { None };
            Section { report: self.report, path, object, keys, is_switched_on: false }
        };
        array.elements.iter().enumerate().map(section).collect()
    }

    /// Returns the strings of the array at `name`, with `None` for sections, by the indices of
    /// [`sections`](Self::sections).
    pub(crate) fn texts(&self, name: &'static str) -> Vec<Option<String>> {
        let text = |value: &Value<'_>| match value {
            Value::StringLit(text) => Some(text.value.to_string()),
            _ => None,
        };
        match self.find(name) {
            Some(Found::Given(Value::Array(array))) => array.elements.iter().map(text).collect(),
            _ => Vec::new(),
        }
    }

    /// Returns the pairs of the array at `name`; other elements have been reported.
    pub(crate) fn pairs(&self, name: &'static str) -> Vec<[u64; 2]> {
        let pair = |value: &Value<'_>| match value {
            Value::Array(array) => match array.elements.as_slice() {
                [first, second] => Some([integer_in(first)?, integer_in(second)?]),
                _ => None,
            },
            _ => None,
        };
        match self.find(name) {
            Some(Found::Given(Value::Array(array))) => array.elements.iter().filter_map(pair).collect(),
            _ => Vec::new(),
        }
    }

    /// Returns the integers of the array at `name`, if it is given; other elements have been reported.
    pub(crate) fn counts(&self, name: &'static str) -> Option<Vec<usize>> {
        let count = |value: &Value<'_>| usize::try_from(integer_in(value)?).ok();
        match self.find(name)? {
            Found::Given(Value::Array(array)) => Some(array.elements.iter().filter_map(count).collect()),
            _ => None,
        }
    }

    /// Returns a mesh in the text notation.
    pub(crate) fn mesh(&self, name: &'static str) -> Option<String> {
        match self.find(name)? {
            Found::Given(value) => mesh_text(value),
            Found::Known(_) => None,
        }
    }

    /// Returns the rules of the array at `name`, with their indices: pattern, mesh and keys. Other elements have been
    /// reported.
    pub(crate) fn rules(&self, name: &'static str) -> Vec<(usize, String, Option<String>, Json)> {
        let rule = |(index, value): (usize, &Value<'_>)| {
            let Value::Array(array) = value else { return None };
            let [Value::StringLit(pattern), mesh, keys @ ..] = array.elements.as_slice() else { return None };
            Some((
                index,
                pattern.value.to_string(),
                mesh_text(mesh),
                keys.first().map_or(Json::Null, to_json),
            ))
        };
        match self.find(name) {
            Some(Found::Given(Value::Array(array))) => {
                array.elements.iter().enumerate().filter_map(rule).collect()
            }
            _ => Vec::new(),
        }
    }

    pub(crate) fn is_present(&self) -> bool {
        self.object.is_some()
    }

    /// Returns the names of the keys in the file, without comments.
    pub(crate) fn given(&self) -> impl Iterator<Item = &'a str> {
        let properties = self.object.map_or(&[][..], |object| &object.properties);
        properties.iter().map(|property| property.name.as_str()).filter(|name| !is_comment(name))
    }

    /// Returns whether the file has `true` instead of the section.
    pub(crate) fn is_switched_on(&self) -> bool {
        self.is_switched_on
    }

    /// Returns whether the file has the key, including as `"auto"`.
    pub(crate) fn names(&self, name: &str) -> bool {
        self.property(name).is_some()
    }

    /// Returns whether the value of the key has an error, so that it reads as absent.
    pub(crate) fn is_invalid(&self, name: &str) -> bool {
        self.report.has_error_at(&join(&self.path, name))
    }

    /// Returns whether the value of the key is `"auto"`.
    pub(crate) fn is_auto(&self, name: &str) -> bool {
        let Some(key) = find(self.keys, name) else { return false };
        self.property(name).is_some_and(|property| is_auto(&property.value, key))
    }

    /// Returns the range of the key's value.
    pub(crate) fn range(&self, name: &str) -> Option<Range> {
        Some(self.property(name)?.value.range())
    }

    pub(crate) fn position(&self, range: Range) -> Position {
        self.report.position(range.start)
    }

    pub(crate) fn boolean(&self, name: &'static str) -> Option<bool> {
        match self.find(name)? {
            Found::Given(Value::BooleanLit(boolean)) => Some(boolean.value),
            Found::Known(Literal::Boolean(boolean)) => Some(boolean),
            _ => None,
        }
    }

    pub(crate) fn integer(&self, name: &'static str) -> Option<u64> {
        match self.find(name)? {
            Found::Given(value) => integer_in(value),
            Found::Known(Literal::Integer(integer)) => u64::try_from(integer).ok(),
            Found::Known(_) => None,
        }
    }

    pub(crate) fn count(&self, name: &'static str) -> Option<usize> {
        self.integer(name).and_then(|integer| usize::try_from(integer).ok())
    }

    pub(crate) fn number(&self, name: &'static str) -> Option<f64> {
        match self.find(name)? {
            Found::Given(value) => number_in(value),
            Found::Known(Literal::Number(number)) => Some(number),
            Found::Known(Literal::Integer(integer)) => Some(integer as f64),
            Found::Known(_) => None,
        }
    }

    pub(crate) fn text(&self, name: &'static str) -> Option<String> {
        match self.find(name)? {
            Found::Given(Value::StringLit(text)) => Some(text.value.to_string()),
            Found::Known(Literal::Text(text)) => Some(text.to_owned()),
            _ => None,
        }
    }

    /// Returns the value of the named choice.
    pub(crate) fn choice<T: Copy>(&self, name: &'static str, choices: &[(&str, T)]) -> Option<T> {
        let chosen = self.text(name)?;
        choices.iter().find(|(choice, _)| chosen.eq_ignore_ascii_case(choice)).map(|(_, value)| *value)
    }

    /// Returns the `type` of an optimizer or scheduler section, as the vocabulary spells it.
    pub(crate) fn variant(&self) -> Option<&'static str> {
        let Kind::Variant { variants, .. } = find(self.keys, "type")?.value else { return None };
        variant_of_siblings(&self.object?.properties, variants).map(|variant| variant.name)
    }

    /// Returns two counts with their positions.
    pub(crate) fn two_counts(&self, name: &'static str) -> Option<[(usize, Position); 2]> {
        let count = |value: &Value<'_>| {
            let count = integer_in(value).filter(|&count| count > 0)?;
            Some((usize::try_from(count).ok()?, self.position(value.range())))
        };
        match self.find(name)? {
            Found::Given(Value::Array(array)) => match array.elements.as_slice() {
                [first, second] => Some([count(first)?, count(second)?]),
                _ => None,
            },
            _ => None,
        }
    }

    pub(crate) fn two_numbers(&self, name: &'static str) -> Option<[f64; 2]> {
        match self.find(name)? {
            Found::Given(Value::Array(array)) => match array.elements.as_slice() {
                [first, second] => Some([number_in(first)?, number_in(second)?]),
                _ => None,
            },
            Found::Known(Literal::TwoNumbers(numbers)) => Some(numbers),
            _ => None,
        }
    }

    /// Adds a note: the run does what the file asks for.
    pub(crate) fn note(&self, note: String) {
        self.report.note(Note::info(note));
    }

    /// Adds a warning: the run differs from what the file asks for, or from DeepSpeed.
    pub(crate) fn warn(&self, note: String) {
        self.report.note(Note::warning(note));
    }

    /// Reports that the value of `name`, valid by itself, contradicts the rest of the file.
    pub(crate) fn contradiction(&self, name: &str, expected: &str) {
        self.contradiction_within(name, &[], expected);
    }

    /// Reports a contradiction of an element of the arrays at `name`; `[2, 0]` is the first element of the third.
    pub(crate) fn contradiction_within(&self, name: &str, indices: &[usize], expected: &str) {
        let Some(property) = self.property(name) else { return };
        let (mut value, mut path) = (&property.value, join(&self.path, name));
        for &index in indices {
            let Value::Array(array) = value else { break };
            let Some(element) = array.elements.get(index) else { break };
            (value, path) = (element, format!("{path}[{index}]"));
        }
        let problem = || Problem::InvalidValue { expected: expected.to_owned(), found: describe(value) };
        self.report.add(value.range(), path, problem);
    }

    fn find(&self, name: &'static str) -> Option<Found<'a>> {
        let key = find(self.keys, name)?;
        match self.property(name).map(|property| &property.value) {
            Some(value) if is_auto(value, key) => match key.auto {
                AutoValue::Is(literal) => Some(Found::Known(literal)),
                AutoValue::AsDefault => default_of(key),
                AutoValue::Derived(_) => None,
            },
            None | Some(Value::NullKeyword(_)) => default_of(key),
            Some(value) => Some(Found::Given(value)),
        }
    }

    /// Returns the property `name`, or an alias of it.
    fn property(&self, name: &str) -> Option<&'a ObjectProp<'a>> {
        let object = self.object?;
        let renamed = |key: &&Key| matches!(key.effect, Effect::Renamed(to) if to == name);
        let other_names = || self.keys.iter().filter(renamed).find_map(|key| object.get(key.name));
        object.get(name).or_else(other_names)
    }
}

fn default_of<'a>(key: &Key) -> Option<Found<'a>> {
    match key.default {
        DefaultValue::Is(literal) => Some(Found::Known(literal)),
        DefaultValue::Derived(_) | DefaultValue::Required => None,
    }
}

fn integer_in(value: &Value<'_>) -> Option<u64> {
    match value {
        Value::NumberLit(number) => u64::try_from(integer_of(number.value)?).ok(),
        _ => None,
    }
}

fn number_in(value: &Value<'_>) -> Option<f64> {
    match value {
        Value::NumberLit(number) => number.value.parse().ok(),
        _ => None,
    }
}
