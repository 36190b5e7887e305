//! Typed access to the sections of a file that has been [checked](super::check).
//!
//! A value is that of the file, or else of `"auto"` or the default in the [`vocabulary`](crate::config_file::vocabulary),
//! the only place that defines defaults. An invalid value has been reported, so no config results.

use super::check::{is_auto, variant_of_siblings};
use super::diagnostic::{Position, Problem};
use super::document::{describe, mesh_text, to_json};
use super::note::Note;
use super::report::Report;
use crate::config_file::vocabulary::{Effect, Key, Value as Kind, find, is_comment, join};
use jsonc_parser::ast::{Object, Value};
use jsonc_parser::common::{Range, Ranged};
use serde::de::DeserializeOwned;
use serde_json::Value as Json;

/// An object of the file; an absent one reads as an empty one.
#[derive(Clone)]
pub(crate) struct Section<'a> {
    report: &'a Report<'a>,
    path: String,
    object: Option<&'a Object<'a>>,
    keys: &'static [Key],
}

impl<'a> Section<'a> {
    pub(crate) fn root(report: &'a Report<'a>, object: &'a Object<'a>, keys: &'static [Key]) -> Self {
        Self { object: Some(object), ..Self::absent(report, keys) }
    }

    /// Creates an absent section with these keys.
    pub(crate) fn absent(report: &'a Report<'a>, keys: &'static [Key]) -> Self {
        Self { report, path: String::new(), object: None, keys }
    }

    /// Returns the section at `name`; an empty name is that of a group of keys in this section.
    pub(crate) fn section(&self, name: &str) -> Section<'a> {
        if name.is_empty() {
            return self.clone();
        }
        let object = self.given_value(name).and_then(object_in);
        let keys = match find(self.keys, name).map(|key| key.value) {
            Some(Kind::Params(variants)) => {
                let siblings = self.object.map_or(&[][..], |object| &object.properties);
                variant_of_siblings(siblings, variants).map_or(&[][..], |variant| variant.params)
            }
            kind => kind.map_or(&[][..], Kind::keys),
        };
        Section { report: self.report, path: join(&self.path, name), object, keys }
    }

    /// Returns the sections of the array at `name`; elements that are strings read as empty sections.
    pub(crate) fn sections(&self, name: &str) -> Vec<Section<'a>> {
        let Some(Value::Array(array)) = self.given_value(name) else { return Vec::new() };
        let keys = find(self.keys, name).map_or(&[][..], |key| key.value.keys());
        let section = |(index, element): (usize, &'a Value<'a>)| {
            let path = format!("{}[{index}]", join(&self.path, name));
            Section { report: self.report, path, object: object_in(element), keys }
        };
        array.elements.iter().enumerate().map(section).collect()
    }

    /// Returns the value of the key.
    pub(crate) fn json(&self, name: &str) -> Option<Json> {
        let key = find(self.keys, name)?;
        match self.given_value(name) {
            Some(value) if is_auto(value, key) => key.auto_value().to_json(),
            None | Some(Value::NullKeyword(_)) => key.default.to_json(),
            Some(value) => Some(to_json(value)),
        }
    }

    /// Returns the value of the key as a `T`; `None` if it has none, or an invalid one.
    pub(crate) fn get<T: DeserializeOwned>(&self, name: &str) -> Option<T> {
        serde_json::from_value(self.json(name)?).ok()
    }

    /// Parses the text of the key; reports the error, which says what would be valid.
    pub(crate) fn parse<T: Default>(&self, name: &str, parse: impl Fn(&str) -> Result<T, String>) -> T {
        let text: Option<String> = self.get(name);
        let parsed = text.map_or_else(|| Ok(T::default()), |text| parse(&text));
        parsed.map_err(|expected| self.contradiction(name, &expected)).unwrap_or_default()
    }

    /// Returns the elements of the array at `name` that are `T`s; others have been reported.
    pub(crate) fn elements<T: DeserializeOwned>(&self, name: &str) -> Vec<T> {
        let elements = self.get::<Vec<Json>>(name).unwrap_or_default().into_iter();
        elements.filter_map(|element| serde_json::from_value(element).ok()).collect()
    }

    /// Returns the mesh at `name`, or at these `indices` of its arrays, in the text notation.
    pub(crate) fn mesh(&self, name: &str, indices: &[usize]) -> Option<String> {
        self.element(name, indices).and_then(mesh_text)
    }

    pub(crate) fn is_present(&self) -> bool {
        self.object.is_some()
    }

    /// Returns the names of the keys in the file, without comments.
    pub(crate) fn given(&self) -> impl Iterator<Item = &'a str> {
        let properties = self.object.map_or(&[][..], |object| &object.properties);
        properties.iter().map(|property| property.name.as_str()).filter(|name| !is_comment(name))
    }

    /// Returns whether the file has the key, including as `"auto"`.
    pub(crate) fn names(&self, name: &str) -> bool {
        self.given_value(name).is_some()
    }

    /// Returns whether the file has the key, with another value than `"auto"`.
    pub(crate) fn states(&self, name: &str) -> bool {
        self.names(name) && !self.is_auto(name)
    }

    /// Returns whether the value of the key has an error.
    pub(crate) fn is_invalid(&self, name: &str) -> bool {
        self.report.has_error_at(&join(&self.path, name))
    }

    /// Returns whether the value of the key is `"auto"`.
    pub(crate) fn is_auto(&self, name: &str) -> bool {
        let Some(key) = find(self.keys, name) else { return false };
        self.given_value(name).is_some_and(|value| is_auto(value, key))
    }

    /// Returns the range of the key's value.
    pub(crate) fn range(&self, name: &str) -> Option<Range> {
        self.given_value(name).map(Ranged::range)
    }

    /// Returns the position of the key's value, or of the element at these `indices` of its arrays.
    pub(crate) fn position(&self, name: &str, indices: &[usize]) -> Option<Position> {
        self.element(name, indices).map(|value| self.report.position(value.start()))
    }

    /// Returns the `type` of an optimizer or scheduler section, as the vocabulary spells it.
    pub(crate) fn variant(&self) -> Option<&'static str> {
        let Kind::Variant { variants, .. } = find(self.keys, "type")?.value else { return None };
        variant_of_siblings(&self.object?.properties, variants).map(|variant| variant.name)
    }

    /// Adds a note: the run does what the file asks for.
    pub(crate) fn note(&self, note: impl Into<String>) {
        self.report.note(Note::info(note));
    }

    /// Adds a warning: the run differs from what the file asks for, or from DeepSpeed.
    pub(crate) fn warn(&self, note: impl Into<String>) {
        self.report.note(Note::warning(note));
    }

    /// Reports that the value of `name`, valid by itself, contradicts the rest of the file.
    pub(crate) fn contradiction(&self, name: &str, expected: &str) {
        self.contradiction_within(name, &[], expected);
    }

    /// Reports a contradiction of an element of the arrays at `name`; `[2, 0]` is the first element of the third.
    pub(crate) fn contradiction_within(&self, name: &str, indices: &[usize], expected: &str) {
        let Some(value) = self.element(name, indices) else { return };
        let indices: String = indices.iter().map(|index| format!("[{index}]")).collect();
        let problem = || Problem::InvalidValue { expected: expected.to_owned(), found: describe(value) };
        self.report.add(value.range(), join(&self.path, name) + &indices, problem);
    }

    /// Returns the value in the file, of the key `name` or of an alias.
    fn given_value(&self, name: &str) -> Option<&'a Value<'a>> {
        let object = self.object?;
        let renamed = |key: &&Key| matches!(key.effect, Effect::Renamed(to) if to == name);
        let other_names = || self.keys.iter().filter(renamed).find_map(|key| object.get(key.name));
        object.get(name).or_else(other_names).map(|property| &property.value)
    }

    /// Returns the element at these `indices` of the arrays at `name`.
    fn element(&self, name: &str, indices: &[usize]) -> Option<&'a Value<'a>> {
        indices.iter().try_fold(self.given_value(name)?, |value, &index| match value {
            Value::Array(array) => array.elements.get(index),
            _ => None,
        })
    }
}

fn object_in<'a>(value: &'a Value<'a>) -> Option<&'a Object<'a>> {
    match value {
        Value::Object(object) => Some(object),
        _ => None,
    }
}
