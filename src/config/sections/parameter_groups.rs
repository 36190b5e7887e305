//! `ulysses.parameter_groups`: parameters with their own optimizer settings.

use crate::config_file::define::words::{flag, number, text};
use crate::config_file::define::{FieldValue, Listed, keys};
use crate::config_file::reader::Section;
use regex::{RegexSet, RegexSetBuilder};
use serde_json::Value as Json;

/// Limits on the time and memory that a hostile file can take.
const MAX_GROUPS: usize = 100;
const MAX_PATTERN_BYTES: usize = 1000;
const MAX_COMPILED_BYTES: usize = 1 << 18;

keys! {
    /// Settings that replace the optimizer's for parameters whose names match a pattern. A
    /// parameter belongs to the first group that it matches.
    #[derive(Clone, Debug, PartialEq)]
    pub struct ParameterGroup {
        /// A regular expression that matches any part of a parameter's full name.
        pub pattern: NamePattern = text().named("match").required(),
        /// Multiplies the learning rate.
        pub lr_scale: Option<f64> = number().derived("1.0"),
        /// Replaces the optimizer's `lr`; a scheduler scales both in proportion.
        pub lr: Option<f64> = number().derived("the optimizer's"),
        /// Replaces the optimizer's `weight_decay`.
        pub weight_decay: Option<f64> = number().derived("the optimizer's"),
        /// Freezes the parameters: no gradient, no optimizer state.
        pub frozen: bool = flag(),
    }
}

impl ParameterGroup {
    /// Returns the group of the parameter `name`, or `None` if the optimizer's settings apply.
    pub fn of<'a>(groups: &'a [Self], name: &str) -> Option<&'a Self> {
        groups.iter().find(|group| group.pattern.matches(name))
    }

    /// Returns whether the parameter `name` is frozen.
    pub fn is_frozen(groups: &[Self], name: &str) -> bool {
        Self::of(groups, name).is_some_and(|group| group.frozen)
    }

    /// Returns the learning rate of the group.
    pub fn rate(&self) -> GroupRate {
        match self.lr {
            Some(lr) => GroupRate::Own(lr),
            None => GroupRate::Scaled(self.lr_scale.unwrap_or(1.0)),
        }
    }

    /// Reports group settings that contradict each other or the optimizer.
    pub(crate) fn check_all(ulysses: &Section<'_>, optimizer_lr: f64) {
        let groups = ulysses.sections("parameter_groups");
        for group in groups.iter().take(MAX_GROUPS) {
            if group.get("frozen").unwrap_or(false) {
                for key in ["lr", "lr_scale", "weight_decay"] {
                    group.contradiction(key, "no value, because `frozen` is true");
                }
            } else if group.names("lr_scale") {
                group.contradiction("lr", "either `lr` or `lr_scale`");
            } else if optimizer_lr == 0.0 {
                group.contradiction(
                    "lr",
                    "an optimizer with `lr` above 0, because the schedule scales both in proportion",
                );
            }
        }
    }
}

impl Listed for ParameterGroup {
    const MAX_LEN: usize = MAX_GROUPS;
    const NAME: &'static str = "groups";
}

/// The learning rate of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GroupRate {
    /// A factor of the optimizer's rate.
    Scaled(f64),
    /// A rate that replaces the optimizer's.
    Own(f64),
}

impl GroupRate {
    /// Returns the group's rate for a step with the rate `scheduled`; `optimizer_lr` is the optimizer's `lr`. The
    /// schedule scales a group's own rate in the same proportion, as PyTorch's `LambdaLR` does.
    pub fn at(self, scheduled: f64, optimizer_lr: f64) -> f64 {
        match self {
            Self::Scaled(factor) => scheduled * factor,
            Self::Own(lr) => scheduled / optimizer_lr * lr,
        }
    }
}

/// A regular expression that matches any part of a parameter's full name, or its start.
#[derive(Clone, Debug, Default)]
pub struct NamePattern {
    /// The pattern as written.
    text: String,
    /// The compiled pattern; empty, matching nothing, for an invalid one.
    set: RegexSet,
}

impl NamePattern {
    /// Returns whether the pattern matches a parameter's name.
    pub fn matches(&self, name: &str) -> bool {
        self.set.is_match(name)
    }

    /// Returns the pattern as written.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Compiles a pattern that matches names from their start on; the error says what would be valid.
    pub(super) fn from_start(pattern: &str) -> Result<Self, String> {
        let Self { text, .. } = Self::new(pattern)?;
        Ok(Self { text, ..Self::new(&format!("^(?:{pattern})"))? })
    }

    /// Compiles a pattern; the error says what would be valid.
    fn new(pattern: &str) -> Result<Self, String> {
        if pattern.len() > MAX_PATTERN_BYTES {
            return Err(format!("a regular expression of at most {MAX_PATTERN_BYTES} bytes"));
        }
        let expected = |error: regex::Error| {
            // The lines before the last draw a marker beneath the pattern.
            let error = error.to_string();
            let reason = error.lines().last().unwrap_or_default();
            format!("a regular expression ({})", reason.trim_start_matches("error: "))
        };
        let set = RegexSetBuilder::new([pattern]).size_limit(MAX_COMPILED_BYTES).build().map_err(expected)?;
        Ok(Self { text: pattern.to_owned(), set })
    }
}

impl PartialEq for NamePattern {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str()
    }
}

impl FieldValue for NamePattern {
    fn read(section: &Section<'_>, name: &str) -> Self {
        section.parse(name, Self::new)
    }

    fn written(&self) -> Option<Json> {
        Some(self.as_str().into())
    }
}
