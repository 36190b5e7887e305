//! `ulysses.parameter_groups`: parameters that are trained with settings of their own.

use super::reader::Section;
use regex::{Regex, RegexBuilder};
use serde::{Serialize, Serializer};

/// Limits that keep a hostile file from taking time and memory.
const MAX_GROUPS: usize = 100;
const MAX_PATTERN_BYTES: usize = 1000;
const MAX_COMPILED_BYTES: usize = 1 << 18;

/// Settings of the parameters whose names match a pattern, in place of the optimizer's. A
/// parameter is in the first group that it matches.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ParameterGroup {
    /// Which parameters.
    #[serde(rename = "match")]
    pub pattern: NamePattern,
    /// Multiplies the learning rate of every step; default 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lr_scale: Option<f64>,
    /// Takes the place of the optimizer's rate, which the schedule then scales as it does that one; never beside
    /// `lr_scale`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lr: Option<f64>,
    /// Replaces the optimizer's; default the optimizer's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
    /// The parameters stay what they are: they have no gradient and no optimizer state.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub frozen: bool,
}

impl ParameterGroup {
    /// The group of the parameter called `name`; none where the optimizer's settings apply.
    pub fn of<'a>(groups: &'a [Self], name: &str) -> Option<&'a Self> {
        groups.iter().find(|group| group.pattern.matches(name))
    }

    /// Whether the parameter called `name` is frozen.
    pub fn is_frozen(groups: &[Self], name: &str) -> bool {
        Self::of(groups, name).is_some_and(|group| group.frozen)
    }

    /// How fast the parameters are trained.
    pub fn rate(&self) -> GroupRate {
        match self.lr {
            Some(lr) => GroupRate::Own(lr),
            None => GroupRate::Scaled(self.lr_scale.unwrap_or(1.0)),
        }
    }

    pub(super) fn read_all(section: &Section<'_>, optimizer_lr: f64) -> Vec<Self> {
        let groups = section.sections("parameter_groups");
        if groups.len() > MAX_GROUPS {
            section.contradiction("parameter_groups", &format!("at most {MAX_GROUPS} groups"));
            return Vec::new();
        }
        groups.iter().filter_map(|group| Self::read(group, optimizer_lr)).collect()
    }

    fn read(group: &Section<'_>, optimizer_lr: f64) -> Option<Self> {
        let frozen = group.boolean("frozen");
        if frozen {
            let settings = ["lr", "lr_scale", "weight_decay"];
            for key in settings {
                group.contradiction(key, "no such setting of parameters that are `frozen`");
            }
        } else if group.names("lr_scale") {
            group.contradiction("lr", "either `lr` or `lr_scale`");
        } else if optimizer_lr == 0.0 {
            group.contradiction("lr", "an optimizer with a rate above 0, as the schedule scales both alike");
        }
        let pattern = NamePattern::new(&group.text("match")?);
        let pattern = pattern.map_err(|expected| group.contradiction("match", &expected)).ok()?;
        Some(Self {
            pattern,
            lr_scale: group.names("lr_scale").then(|| group.number("lr_scale")).flatten(),
            lr: group.number("lr"),
            weight_decay: group.number("weight_decay"),
            frozen,
        })
    }
}

/// The learning rate of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GroupRate {
    /// The optimizer's, times this.
    Scaled(f64),
    /// This in place of the optimizer's.
    Own(f64),
}

impl GroupRate {
    /// The rate of a step for which the schedule says `scheduled`, where the optimizer's own is `optimizer_lr`. The
    /// schedule scales a group's own rate as it does the optimizer's, as PyTorch's `LambdaLR` does.
    pub fn at(self, scheduled: f64, optimizer_lr: f64) -> f64 {
        match self {
            Self::Scaled(factor) => scheduled * factor,
            Self::Own(lr) => scheduled / optimizer_lr * lr,
        }
    }
}

/// A regular expression that is looked for anywhere in the full name of a parameter.
#[derive(Clone, Debug)]
pub struct NamePattern(Regex);

impl NamePattern {
    /// Whether the name of a parameter fits.
    pub fn matches(&self, name: &str) -> bool {
        self.0.is_match(name)
    }

    /// As it was written.
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }

    /// The error says what would be valid.
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
        RegexBuilder::new(pattern).size_limit(MAX_COMPILED_BYTES).build().map(Self).map_err(expected)
    }
}

impl PartialEq for NamePattern {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str()
    }
}

impl Serialize for NamePattern {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}
