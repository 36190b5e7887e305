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
    /// The value of `"auto"`, if it is not the default: that of the argument that Hugging Face's Trainer fills in, or a derived one.
    /// (DeepSpeed drops `"auto"`.)
    pub(crate) auto: Option<DefaultValue>,
    pub(crate) effect: Effect,
    /// Whether `null` means an absent key, as for DeepSpeed's default `None`.
    pub(crate) or_null: bool,
    /// Whether ignoring the key changes memory, results or files, which is a warning.
    pub(crate) is_missed: bool,
    /// For a section: a key in it with a changed default.
    pub(crate) changed_default: Option<(&'static str, &'static str)>,
}

impl Key {
    /// A group of keys in the section itself, from a field without definition.
    pub(crate) const GROUP: Self = Self::new(Value::Section(&[]));

    pub(crate) fn is_group(&self) -> bool {
        self.name.is_empty()
    }

    /// Creates a supported key without name and default.
    pub(crate) const fn new(value: Value) -> Self {
        Self {
            name: "",
            value,
            about: "",
            default: DefaultValue::Derived("not set"),
            auto: None,
            effect: Effect::Supported,
            or_null: false,
            is_missed: false,
            changed_default: None,
        }
    }

    /// Returns the value of `"auto"`.
    pub(crate) fn auto_value(&self) -> DefaultValue {
        self.auto.unwrap_or(self.default)
    }
}

impl DefaultValue {
    /// Returns the value, if it is known.
    pub(crate) fn to_json(self) -> Option<serde_json::Value> {
        match self {
            Self::Is(literal) => Some(literal.to_json()),
            Self::Derived(_) | Self::Required => None,
        }
    }
}

/// Prints the value, or its origin.
impl fmt::Display for DefaultValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Is(literal) => write!(f, "{literal}"),
            Self::Derived(from) => f.write_str(from),
            Self::Required => f.write_str("none: required"),
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
    Array(Array),
    /// An array of names (case-insensitive).
    Names(&'static [&'static str]),
    Section(&'static [Key]),
    /// A string, or an array of strings and sections.
    TextOrSections(&'static [Key]),
    /// A mesh: a string, or an object with the sizes within a node and between nodes.
    Mesh,
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

/// The type of an array.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Array {
    pub(crate) element: &'static Value,
    /// The elements, as messages call them; empty for elements of any type.
    pub(crate) what: &'static str,
    pub(crate) min_len: usize,
    pub(crate) max_len: usize,
}

impl Array {
    /// An array of any length.
    pub(crate) const fn new(element: &'static Value, what: &'static str) -> Self {
        Self { element, what, min_len: 0, max_len: usize::MAX }
    }

    pub(crate) const fn pair(element: &'static Value, what: &'static str) -> Self {
        Self { min_len: 2, max_len: 2, ..Self::new(element, what) }
    }
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
    /// An integer from 1 on.
    pub(crate) const COUNT: Self = Self::Integer { min: 1, max: u64::MAX };

    /// An array of values of any type.
    pub(crate) const LIST: Self = Self::Array(Array::new(&Self::Anything, ""));

    /// Returns whether the key accepts `"auto"`. Where any string is valid, it is a string; sections,
    /// types and meshes have no automatic value.
    pub(crate) fn takes_auto(self) -> bool {
        match self {
            Self::Boolean
            | Self::Integer { .. }
            | Self::Signed
            | Self::Number(_)
            | Self::Choice(_)
            | Self::Names(_) => true,
            Self::Array(array) => matches!(array.element, Self::Number(_) | Self::Anything),
            _ => false,
        }
    }

    /// Returns whether the value is a section, or an array of sections.
    pub(crate) fn is_section(self) -> bool {
        match self {
            Self::Section(_) | Self::SwitchOrSection(_) | Self::Params(_) => true,
            Self::Array(array) => array.element.is_section(),
            _ => false,
        }
    }

    /// Returns the keys of a section, or of the sections of an array, that has no variants.
    pub(crate) fn keys(self) -> &'static [Key] {
        match self {
            Self::Section(keys) | Self::TextOrSections(keys) | Self::SwitchOrSection(keys) => keys,
            Self::Array(array) => array.element.keys(),
            _ => &[],
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
            Self::Array(Array { what: "", .. }) => f.write_str("an array"),
            Self::Array(Array { what, .. }) => write!(f, "an array of {what}"),
            Self::Names(names) => write!(f, "an array of names from \"{}\"", names.join("\", \"")),
            Self::TextOrSections(_) => {
                f.write_str("a non-empty string, or an array of such strings and objects")
            }
            Self::Mesh => f.write_str(
                "a mesh such as \"2x4\", or an object such as {\"intra\": {\"sp\": 4}, \"inter\": {\"dp\": 2}}",
            ),
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
