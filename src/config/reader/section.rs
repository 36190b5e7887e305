//! Typed access to the sections of a file that has been [checked](super::check).
//!
//! A getter gives what the file says, else what `"auto"` or the absence of the key stands for by
//! the [`vocabulary`](crate::config::vocabulary): defaults are written there and nowhere else. A faulty
//! value reads as if it were absent; it has been reported, so the config never comes to be.

use super::check::{is_auto, variant_beside};
use super::diagnostic::{Position, Problem};
use super::document::describe;
use super::note::Note;
use super::report::Report;
use crate::config::vocabulary::{Auto, Default, Effect, Key, Literal, Value as Kind, find, join};
use jsonc_parser::ast::{Object, ObjectProp, Value};
use jsonc_parser::common::{Range, Ranged};

/// One object of the file, or an absent one, which reads like an empty one.
pub(crate) struct Section<'a> {
    report: &'a Report<'a>,
    path: String,
    object: Option<&'a Object<'a>>,
    keys: &'static [Key],
    /// Whether the file has `true` in its place.
    is_switched_on: bool,
}

/// What stands for a key.
enum Found<'a> {
    Given(&'a Value<'a>),
    Known(Literal),
}

impl<'a> Section<'a> {
    pub(crate) fn root(report: &'a Report<'a>, object: &'a Object<'a>, keys: &'static [Key]) -> Self {
        Self { object: Some(object), ..Self::absent(report, keys) }
    }

    /// A section that is not there, with these keys.
    pub(crate) fn absent(report: &'a Report<'a>, keys: &'static [Key]) -> Self {
        Self { report, path: String::new(), object: None, keys, is_switched_on: false }
    }

    /// The section at `name`.
    pub(crate) fn section(&self, name: &'static str) -> Section<'a> {
        let (object, is_switched_on) = match self.property(name).map(|property| &property.value) {
            Some(Value::Object(object)) => (Some(object), false),
            Some(Value::BooleanLit(switch)) => (None, switch.value),
            _ => (None, false),
        };
        let keys = match find(self.keys, name).map(|key| key.value) {
            Some(Kind::Section(keys) | Kind::SwitchOrSection(keys)) => keys,
            Some(Kind::Params(variants)) => {
                let beside = self.object.map_or(&[][..], |object| &object.properties);
                variant_beside(beside, variants).map_or(&[][..], |variant| variant.params)
            }
            _ => &[],
        };
        Section { report: self.report, path: join(&self.path, name), object, keys, is_switched_on }
    }

    /// The sections of the array at `name`; what is no object has been reported, or is a text.
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

    /// The texts of the array at `name`, in the places of [`sections`](Self::sections); none where a section stands.
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

    /// The pairs of the array at `name`; what is none has been reported.
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

    /// The pairs of a pattern and a mesh of the array at `name`, each with its index; what is none has been reported.
    pub(crate) fn rules(&self, name: &'static str) -> Vec<(usize, String, Option<String>)> {
        let rule = |(index, value): (usize, &Value<'_>)| match value {
            Value::Array(array) => match array.elements.as_slice() {
                [Value::StringLit(pattern), Value::StringLit(mesh)] => {
                    Some((index, pattern.value.to_string(), Some(mesh.value.to_string())))
                }
                [Value::StringLit(pattern), Value::NullKeyword(_)] => {
                    Some((index, pattern.value.to_string(), None))
                }
                _ => None,
            },
            _ => None,
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

    /// The names of the keys that the file gives.
    pub(crate) fn given(&self) -> impl Iterator<Item = &'a str> {
        let properties = self.object.map_or(&[][..], |object| &object.properties);
        properties.iter().map(|property| property.name.as_str())
    }

    /// Whether the file has `true` in the place of the section.
    pub(crate) fn is_switched_on(&self) -> bool {
        self.is_switched_on
    }

    /// Whether the file names the key, be it as `"auto"`.
    pub(crate) fn names(&self, name: &str) -> bool {
        self.property(name).is_some()
    }

    /// Whether the key is left to be filled in.
    pub(crate) fn is_auto(&self, name: &str) -> bool {
        let Some(key) = find(self.keys, name) else { return false };
        self.property(name).is_some_and(|property| is_auto(&property.value, key))
    }

    /// Where the value of the key stands.
    pub(crate) fn range(&self, name: &str) -> Option<Range> {
        Some(self.property(name)?.value.range())
    }

    pub(crate) fn position(&self, range: Range) -> Position {
        self.report.position(range.start)
    }

    pub(crate) fn boolean(&self, name: &'static str) -> bool {
        match self.find(name) {
            Some(Found::Given(Value::BooleanLit(boolean))) => boolean.value,
            Some(Found::Known(Literal::Boolean(boolean))) => boolean,
            _ => false,
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

    /// What the named choice stands for.
    pub(crate) fn choice<T: Copy>(&self, name: &'static str, choices: &[(&str, T)]) -> Option<T> {
        let chosen = self.text(name)?;
        choices.iter().find(|(choice, _)| chosen.eq_ignore_ascii_case(choice)).map(|(_, value)| *value)
    }

    /// The name, as the vocabulary spells it, of the optimizer or scheduler that the section is.
    pub(crate) fn variant(&self) -> Option<&'static str> {
        let Kind::Variant { variants, .. } = find(self.keys, "type")?.value else { return None };
        variant_beside(&self.object?.properties, variants).map(|variant| variant.name)
    }

    /// Two counts, each with its position.
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

    /// Adds something the user may want to know: the run does what the file asks for.
    pub(crate) fn note(&self, note: String) {
        self.report.note(Note::info(note));
    }

    /// Adds something the user must know: the run differs from what the file asks for, or from DeepSpeed's.
    pub(crate) fn warn(&self, note: String) {
        self.report.note(Note::warning(note));
    }

    /// Reports that the value of `name`, right by itself, does not fit the rest of the file.
    pub(crate) fn contradiction(&self, name: &str, expected: &str) {
        self.contradiction_within(name, &[], expected);
    }

    /// The same of an element of the arrays at `name`: at `[2, 0]` is the first one of the third.
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
                Auto::Is(literal) => Some(Found::Known(literal)),
                Auto::AsDefault => default_of(key),
                Auto::Derived(_) => None,
            },
            None | Some(Value::NullKeyword(_)) => default_of(key),
            Some(value) => Some(Found::Given(value)),
        }
    }

    /// The property called `name`, or by another name of it.
    fn property(&self, name: &str) -> Option<&'a ObjectProp<'a>> {
        let object = self.object?;
        let renamed = |key: &&Key| matches!(key.effect, Effect::Renamed(to) if to == name);
        let other_names = || self.keys.iter().filter(renamed).find_map(|key| object.get(key.name));
        object.get(name).or_else(other_names)
    }
}

fn default_of<'a>(key: &Key) -> Option<Found<'a>> {
    match key.default {
        Default::Is(literal) => Some(Found::Known(literal)),
        Default::Derived(_) | Default::Required => None,
    }
}

fn integer_in(value: &Value<'_>) -> Option<u64> {
    match value {
        Value::NumberLit(number) => number.value.parse().ok(),
        _ => None,
    }
}

fn number_in(value: &Value<'_>) -> Option<f64> {
    match value {
        Value::NumberLit(number) => number.value.parse().ok(),
        _ => None,
    }
}
