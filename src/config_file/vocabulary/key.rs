//! The definition of a key.

use std::fmt;

/// A key of the config file, defined by a field of a section or a row of DeepSpeed's table. The reader, the
/// diagnostics, `config explain`, the reference in `docs/` and the JSON Schema are derived from it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Key {
    pub(crate) name: &'static str,
    pub(crate) value: Value,
    /// The documentation: what the key sets.
    pub(crate) about: &'static str,
    pub(crate) default: DefaultValue,
    pub(crate) auto: AutoValue,
    pub(crate) effect: Effect,
    /// Whether `null` means an absent key, as for DeepSpeed's default `None`.
    pub(crate) or_null: bool,
    /// Whether ignoring the key changes memory, results or files, which is a warning.
    pub(crate) is_missed: bool,
    /// For a section: a key in it with a changed default.
    pub(crate) changed_default: Option<(&'static str, &'static str)>,
}

impl Key {
    /// Creates a supported key without name and default.
    pub(crate) const fn new(value: Value) -> Self {
        Self {
            name: "",
            value,
            about: "",
            default: DefaultValue::Derived("not set"),
            auto: AutoValue::AsDefault,
            effect: Effect::Supported,
            or_null: false,
            is_missed: false,
            changed_default: None,
        }
    }
}

/// The type and range of a value.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Value {
    Boolean,
    Integer {
        min: u64,
        /// `u64::MAX` for no limit.
        max: u64,
    },
    /// An integer that may be negative.
    Signed,
    Number(Range),
    Text,
    /// A string that may be empty.
    AnyText,
    /// One of the names (case-insensitive).
    Choice(&'static [&'static str]),
    /// Two integers ≥ 1, described by the text.
    TwoCounts(&'static str),
    /// An array of integers ≥ 1.
    Counts,
    TwoNumbers(Range),
    List,
    /// An array of names (case-insensitive).
    Names(&'static [&'static str]),
    Section(&'static [Key]),
    /// An array of sections.
    Sections(&'static [Key]),
    /// A string, or an array of strings and sections.
    TextOrSections(&'static [Key]),
    /// An array of pairs of integers ≥ 1, described by the text.
    Pairs(&'static str),
    /// A mesh: a string, or an object with the sizes within a node and between nodes.
    Mesh,
    /// An array of rules.
    Rules,
    /// A pattern, a mesh or null, and possibly keys of the file.
    Rule,
    /// A section, or a boolean (deprecated).
    SwitchOrSection(&'static [Key]),
    /// The name of a variant (case-insensitive); `refused` names are errors with a reason.
    Variant {
        variants: &'static [Variant],
        refused: &'static [Refused],
    },
    /// A section with the keys of the variant that the adjacent `type` names.
    Params(&'static [Variant]),
    /// Any value; not checked.
    Anything,
}

/// An optimizer or a scheduler with its parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Variant {
    pub(crate) name: &'static str,
    /// Names that mean the same in a file, such as DeepSpeed's classes.
    pub(crate) other_names: &'static [&'static str],
    pub(crate) params: &'static [Key],
}

impl Variant {
    /// Returns all names, the first of which is written.
    pub(crate) fn names(&self) -> impl Iterator<Item = &'static str> {
        std::iter::once(self.name).chain(self.other_names.iter().copied())
    }
}

/// A name that DeepSpeed or PyTorch has, and that is not supported.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Refused {
    pub(crate) name: &'static str,
    pub(crate) reason: &'static str,
}

/// Finite numbers that `f32` can represent, from `min` to `max`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Range {
    pub(crate) min: f64,
    pub(crate) max: Max,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Max {
    Unbounded,
    AtMost(f64),
    Below(f64),
}

/// The default of a key.
#[derive(Clone, Copy, Debug)]
pub(crate) enum DefaultValue {
    Is(Literal),
    /// The default follows from what the text names.
    Derived(&'static str),
    /// None: the key is required if its section is present.
    Required,
}

/// The value of `"auto"`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum AutoValue {
    /// The default: DeepSpeed drops `"auto"` values.
    AsDefault,
    /// The default of the argument that Hugging Face's Trainer fills in.
    Is(Literal),
    /// The value follows from what the text names.
    Derived(&'static str),
}

/// The effect of a key.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Effect {
    Supported,
    /// Accepted, with a note that gives the reason.
    Ignored(&'static str),
    /// Read only by a feature that is refused when enabled.
    Idle,
    /// Refused, except for harmless values.
    Refused {
        harmless: Harmless,
        reason: &'static str,
    },
    /// An alias of the key with this name in the same section.
    Renamed(&'static str),
}

/// The values of a refused key that disable the feature.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Harmless {
    Values(&'static [Literal]),
    /// Objects without `"enabled": true`.
    NothingEnabled,
}

/// A JSON value that can be a constant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Literal {
    Null,
    Boolean(bool),
    Integer(i64),
    Number(f64),
    Text(&'static str),
    TwoNumbers([f64; 2]),
}

impl Value {
    /// Returns whether the key accepts `"auto"`. Where any string is valid, it is a string; sections,
    /// types and meshes have no automatic value.
    pub(crate) fn takes_auto(self) -> bool {
        matches!(
            self,
            Self::Boolean
                | Self::Integer { .. }
                | Self::Signed
                | Self::Number(_)
                | Self::Choice(_)
                | Self::TwoNumbers(_)
                | Self::List
                | Self::Names(_)
        )
    }

    /// Returns the keys of a section, for each variant.
    pub(crate) fn sections(self) -> Vec<(Option<&'static str>, &'static [Key])> {
        match self {
            Self::Section(keys)
            | Self::Sections(keys)
            | Self::TextOrSections(keys)
            | Self::SwitchOrSection(keys) => {
                vec![(None, keys)]
            }
            Self::Params(variants) => variants.iter().map(|v| (Some(v.name), v.params)).collect(),
            _ => Vec::new(),
        }
    }
}

impl Literal {
    pub(crate) fn to_json(self) -> serde_json::Value {
        match self {
            Self::Null => serde_json::Value::Null,
            Self::Boolean(value) => value.into(),
            Self::Integer(value) => value.into(),
            Self::Number(value) => value.into(),
            Self::Text(value) => value.into(),
            Self::TwoNumbers(values) => values.to_vec().into(),
        }
    }
}

impl fmt::Display for Literal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.to_json())
    }
}

impl Range {
    pub(crate) fn contains(self, number: f64) -> bool {
        let below_max = match self.max {
            Max::Unbounded => true,
            Max::AtMost(max) => number <= max,
            Max::Below(max) => number < max,
        };
        number >= self.min && below_max && number.abs() <= f64::from(f32::MAX)
    }
}

/// Prints the range, such as "≥ 0 and < 1".
impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.min {
            min if min == 0.0 || min.abs() >= 1e-4 => write!(f, "≥ {min}")?,
            min => write!(f, "≥ {min:e}")?,
        }
        match self.max {
            Max::Unbounded => write!(f, " that f32 can represent"),
            Max::AtMost(max) => write!(f, " and ≤ {max}"),
            Max::Below(max) => write!(f, " and < {max}"),
        }
    }
}

/// Prints the valid values.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Boolean => f.write_str("true or false"),
            Self::Integer { min, max: u64::MAX } => write!(f, "an integer ≥ {min} and < 2^64"),
            Self::Integer { min, max } => write!(f, "an integer from {min} to {max}"),
            Self::Signed => f.write_str("an integer"),
            Self::Number(range) => write!(f, "a number {range}"),
            Self::Text => f.write_str("a non-empty string"),
            Self::AnyText => f.write_str("a string"),
            Self::Choice(names) => write_one_of(f, names),
            Self::TwoCounts(what) => write!(f, "an array of {what}"),
            Self::Counts => f.write_str("an array of integers ≥ 1"),
            Self::TwoNumbers(_) => f.write_str("an array of two numbers"),
            Self::List => f.write_str("an array"),
            Self::Names(names) => write!(f, "an array of names from \"{}\"", names.join("\", \"")),
            Self::Sections(_) => f.write_str("an array of objects"),
            Self::TextOrSections(_) => {
                f.write_str("a non-empty string, or an array of such strings and objects")
            }
            Self::Pairs(_) => f.write_str("an array of pairs of integers ≥ 1"),
            Self::Mesh => f.write_str(
                "a mesh such as \"2x4\", or an object such as {\"intra\": {\"sp\": 4}, \"inter\": {\"dp\": 2}}",
            ),
            Self::Rules => f.write_str("an array of rules [pattern, mesh] or [pattern, mesh, keys]"),
            Self::Rule => f.write_str(
                "an array of a pattern, a mesh such as \"2x4\" or null, and possibly an object of keys",
            ),
            Self::Section(_) | Self::SwitchOrSection(_) | Self::Params(_) => f.write_str("an object"),
            Self::Variant { variants, .. } => {
                write_one_of(f, &variants.iter().map(|variant| variant.name).collect::<Vec<_>>())
            }
            Self::Anything => f.write_str("any value"),
        }
    }
}

fn write_one_of(f: &mut fmt::Formatter<'_>, names: &[&str]) -> fmt::Result {
    match names {
        [only] => write!(f, "\"{only}\""),
        names => write!(f, "one of \"{}\"", names.join("\", \"")),
    }
}
