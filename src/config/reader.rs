//! Typed, fault-collecting access to the sections of a config file.
//!
//! A [`Section`] learns its vocabulary from the getters that are called on it:
//! what no getter asked for is an unknown key. So each key is named once, where
//! it is read. A faulty value is reported and read as absent; the fault makes
//! the whole file an error, so the default that then applies is never used.

use super::diagnostic::{Position, Problem};
use super::document::{abbreviated, describe};
use super::report::{Report, join};
use jsonc_parser::ast::{Object, ObjectProp, Value};
use jsonc_parser::common::Ranged;
use std::collections::HashMap;
use std::fmt;
use std::ops::{Bound, RangeBounds};

/// One object of the file, or an absent one, which is read like an empty one.
pub(super) struct Section<'a> {
    report: &'a Report<'a>,
    path: String,
    object: Option<&'a Object<'a>>,
    /// Where a missing key is reported.
    anchor: usize,
    asked: Vec<&'static str>,
}

impl<'a> Section<'a> {
    /// Reads the root object with `read`, then reports the keys that it did not ask for.
    pub(super) fn root<T>(
        report: &'a Report<'a>,
        object: &'a Object<'a>,
        read: impl FnOnce(&mut Self) -> T,
    ) -> T {
        let anchor = object.range.start;
        Section { report, path: String::new(), object: Some(object), anchor, asked: Vec::new() }
            .read_with(read)
    }

    /// Reads the object at `key` with `read`, then reports the keys that it did not ask for.
    pub(super) fn section<T>(&mut self, key: &'static str, read: impl FnOnce(&mut Section<'a>) -> T) -> T {
        let object = self.value(key).and_then(|value| match value {
            Value::Object(object) => Some(object),
            other => self.invalid(key, other, "an object"),
        });
        let anchor = object.map_or(self.anchor, |object| object.range.start);
        let path = join(&self.path, key);
        Section { report: self.report, path, object, anchor, asked: Vec::new() }.read_with(read)
    }

    fn read_with<T>(mut self, read: impl FnOnce(&mut Self) -> T) -> T {
        let output = read(&mut self);
        self.check_keys();
        output
    }

    pub(super) fn is_present(&self) -> bool {
        self.object.is_some()
    }

    /// Accepts `key` without looking at its value.
    pub(super) fn skip(&mut self, key: &'static str) {
        self.value(key);
    }

    /// Where the value of `key` stands.
    pub(super) fn position(&self, key: &str) -> Option<Position> {
        let property = self.property(key)?;
        Some(self.report.position(property.value.start()))
    }

    /// A whole number that is at least `min`.
    pub(super) fn integer(&mut self, key: &'static str, min: u64) -> Option<u64> {
        let value = self.value(key)?;
        integer_in(value, min).or_else(|| self.invalid(key, value, integer_range(min)))
    }

    /// A whole number that is at least 1.
    pub(super) fn count(&mut self, key: &'static str) -> Option<usize> {
        let value = self.value(key)?;
        count_in(value).or_else(|| self.invalid(key, value, integer_range(1)))
    }

    /// A finite number within `range` that `f32` can hold.
    pub(super) fn number(&mut self, key: &'static str, range: impl RangeBounds<f64>) -> Option<f64> {
        let value = self.value(key)?;
        number_in(value, &range).or_else(|| self.invalid(key, value, NumberRange(&range)))
    }

    /// `true` or `false`.
    pub(super) fn boolean(&mut self, key: &'static str) -> Option<bool> {
        match self.value(key)? {
            Value::BooleanLit(boolean) => Some(boolean.value),
            other => self.invalid(key, other, "true or false"),
        }
    }

    /// A string that is not empty.
    pub(super) fn string(&mut self, key: &'static str) -> Option<String> {
        match self.value(key)? {
            Value::StringLit(string) if !string.value.is_empty() => Some(string.value.to_string()),
            other => self.invalid(key, other, "a string that is not empty"),
        }
    }

    /// One of the named choices, in any case.
    pub(super) fn choice<T: Copy>(&mut self, key: &'static str, choices: &[(&str, T)]) -> Option<T> {
        let value = self.value(key)?;
        let chosen = match value {
            Value::StringLit(name) => {
                choices.iter().find(|(choice, _)| name.value.eq_ignore_ascii_case(choice))
            }
            _ => None,
        };
        chosen.map(|(_, choice)| *choice).or_else(|| self.invalid(key, value, one_of(choices)))
    }

    /// Like [`Self::choice`], but the key has to be there.
    pub(super) fn required_choice<T: Copy>(&mut self, key: &'static str, choices: &[(&str, T)]) -> Option<T> {
        self.require(key, one_of(choices));
        self.choice(key, choices)
    }

    /// Like [`Self::count`], but the key has to be there; the smallest count stands for a faulty one.
    pub(super) fn required_count(&mut self, key: &'static str) -> u64 {
        self.require(key, integer_range(1));
        self.integer(key, 1).unwrap_or(1)
    }

    /// Like [`Self::number`], but the key has to be there; 0 stands for a faulty one.
    pub(super) fn required_number(&mut self, key: &'static str, range: impl RangeBounds<f64>) -> f64 {
        self.require(key, NumberRange(&range));
        self.number(key, range).unwrap_or(0.0)
    }

    /// An array of two counts, with the position of each.
    pub(super) fn count_pair(&mut self, key: &'static str, names: &str) -> Option<[(usize, Position); 2]> {
        let [first, second] = self.pair(key, names)?;
        let count = |index: usize, value: &'a Value<'a>| match count_in(value) {
            Some(count) => Some((count, self.report.position(value.start()))),
            None => self.invalid_element(key, index, value, integer_range(1)),
        };
        let (first, second) = (count(0, first), count(1, second));
        Some([first?, second?])
    }

    /// An array of two numbers within `range`.
    pub(super) fn number_pair(
        &mut self,
        key: &'static str,
        range: impl RangeBounds<f64>,
    ) -> Option<[f64; 2]> {
        let [first, second] = self.pair(key, "numbers")?;
        let number = |index: usize, value: &'a Value<'a>| match number_in(value, &range) {
            Some(number) => Some(number),
            None => self.invalid_element(key, index, value, NumberRange(&range)),
        };
        let (first, second) = (number(0, first), number(1, second));
        Some([first?, second?])
    }

    /// Reports that this version cannot do what `key` asks for.
    pub(super) fn unsupported(&mut self, key: &'static str, reason: &str) {
        let offset = self.property(key).map_or(self.anchor, |property| property.value.start());
        self.report.add(offset, join(&self.path, key), || Problem::Unsupported { reason: reason.to_owned() });
    }

    /// Reports that the value of `key`, right by itself, does not fit the rest of the section.
    pub(super) fn contradiction(&mut self, key: &'static str, expected: impl fmt::Display) {
        if let Some(property) = self.property(key) {
            let _: Option<()> = self.invalid(key, &property.value, expected);
        }
    }

    fn pair(&mut self, key: &'static str, names: &str) -> Option<[&'a Value<'a>; 2]> {
        match self.value(key)? {
            Value::Array(array) if array.elements.len() == 2 => {
                Some([&array.elements[0], &array.elements[1]])
            }
            other => self.invalid(key, other, format_args!("an array of two {names}")),
        }
    }

    /// The value at `key`, which from now on is a known key.
    fn value(&mut self, key: &'static str) -> Option<&'a Value<'a>> {
        if !self.asked.contains(&key) {
            self.asked.push(key);
        }
        self.property(key).map(|property| &property.value)
    }

    fn property(&self, key: &str) -> Option<&'a ObjectProp<'a>> {
        self.object?.get(key)
    }

    fn require(&mut self, key: &'static str, expected: impl fmt::Display) {
        if self.value(key).is_none() {
            let problem = || Problem::MissingKey { expected: expected.to_string() };
            self.report.add(self.anchor, join(&self.path, key), problem);
        }
    }

    /// Reports a faulty value, which is then read as absent.
    fn invalid<T>(&self, key: &str, value: &Value<'_>, expected: impl fmt::Display) -> Option<T> {
        let problem = || Problem::InvalidValue { expected: expected.to_string(), found: describe(value) };
        self.report.add(value.start(), join(&self.path, key), problem);
        None
    }

    fn invalid_element<T>(
        &self,
        key: &str,
        index: usize,
        value: &Value<'_>,
        expected: impl fmt::Display,
    ) -> Option<T> {
        self.invalid(&format!("{key}[{index}]"), value, expected)
    }

    /// Reports the keys that are unknown or given twice.
    fn check_keys(self) {
        let properties = self.object.map_or(&[][..], |object| &object.properties);
        let mut first_seen = HashMap::new();
        for property in properties {
            let (key, offset) = (property.name.as_str(), property.range.start);
            if let Some(&first) = first_seen.get(key) {
                let problem = || Problem::DuplicateKey { first: self.report.position(first) };
                self.report.add(offset, join(&self.path, &abbreviated(key)), problem);
                continue;
            }
            first_seen.insert(key, offset);
            if !self.asked.contains(&key) {
                self.report.add_unknown_key(offset, &self.path, key);
            }
        }
        self.report.learn(&self.path, &self.asked);
    }
}

fn integer_in(value: &Value<'_>, min: u64) -> Option<u64> {
    match value {
        Value::NumberLit(number) => number.value.parse().ok().filter(|&integer| integer >= min),
        _ => None,
    }
}

fn count_in(value: &Value<'_>) -> Option<usize> {
    integer_in(value, 1).and_then(|integer| usize::try_from(integer).ok())
}

fn number_in(value: &Value<'_>, range: &impl RangeBounds<f64>) -> Option<f64> {
    match value {
        Value::NumberLit(number) => {
            let number = number.value.parse::<f64>().ok()?;
            (number.abs() <= f64::from(f32::MAX) && range.contains(&number)).then_some(number)
        }
        _ => None,
    }
}

fn integer_range(min: u64) -> impl fmt::Display {
    format!("an integer ≥ {min} and < 2^64")
}

fn one_of<T>(choices: &[(&str, T)]) -> impl fmt::Display {
    let names: Vec<_> = choices.iter().map(|(name, _)| format!("\"{name}\"")).collect();
    match names.as_slice() {
        [only] => only.clone(),
        names => format!("one of {}", names.join(", ")),
    }
}

/// "a number ≥ 0 and < 1".
struct NumberRange<'r, R>(&'r R);

impl<R: RangeBounds<f64>> fmt::Display for NumberRange<'_, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a number")?;
        match self.0.start_bound() {
            Bound::Included(min) => write!(f, " ≥ {min}")?,
            Bound::Excluded(min) => write!(f, " > {min}")?,
            Bound::Unbounded => {}
        }
        match self.0.end_bound() {
            Bound::Included(max) => write!(f, " and ≤ {max}"),
            Bound::Excluded(max) => write!(f, " and < {max}"),
            Bound::Unbounded => write!(f, " that f32 can hold"),
        }
    }
}
