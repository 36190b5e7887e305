//! What the table says about one key.

use std::fmt;

/// A key of the config file, as a field of a section or a row of DeepSpeed's table defines it: the reader, the diagnostics,
/// `config explain`, the reference in `docs/` and the JSON Schema only repeat it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Key {
    pub(crate) name: &'static str,
    pub(crate) value: Value,
    /// What it sets, in one sentence.
    pub(crate) about: &'static str,
    pub(crate) default: Default,
    pub(crate) auto: Auto,
    pub(crate) effect: Effect,
    /// Whether `null` stands for an absent key, as where DeepSpeed's default is `None`.
    pub(crate) or_null: bool,
    /// Whether a run without its effect differs in memory, results or files from what the key asks for.
    pub(crate) is_missed: bool,
    /// Of a section: a key in it, and its default where the type of the section has another.
    pub(crate) changed_default: Option<(&'static str, &'static str)>,
}

impl Key {
    /// A supported key without a default of its own, still without a name.
    pub(crate) const fn new(value: Value) -> Self {
        Self {
            name: "",
            value,
            about: "",
            default: Default::Derived("not set"),
            auto: Auto::AsDefault,
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
    /// A text that may be empty.
    AnyText,
    /// One of the names, in any case.
    Choice(&'static [&'static str]),
    /// Two integers from 1 on, which the text names.
    TwoCounts(&'static str),
    TwoNumbers(Range),
    List,
    /// An array of names, in any case.
    Names(&'static [&'static str]),
    Section(&'static [Key]),
    /// An array of sections.
    Sections(&'static [Key]),
    /// A text, or an array of texts and sections.
    TextOrSections(&'static [Key]),
    /// An array of pairs of integers from 1 on; the text says what a pair is.
    Pairs(&'static str),
    /// An array of pairs of a pattern and a mesh or null.
    Rules,
    /// Such a pair.
    Rule,
    /// A section, or its old form: whether it is on.
    SwitchOrSection(&'static [Key]),
    /// The name of a variant, in any case; other names are refused with a reason.
    Variant {
        variants: &'static [Variant],
        refused: &'static [Refused],
    },
    /// A section whose keys the variant named by `type` beside it has.
    Params(&'static [Variant]),
    /// Not looked into.
    Anything,
}

/// An optimizer or a scheduler with its parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Variant {
    pub(crate) name: &'static str,
    pub(crate) params: &'static [Key],
}

/// A name that DeepSpeed or PyTorch knows and this version cannot do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Refused {
    pub(crate) name: &'static str,
    pub(crate) reason: &'static str,
}

/// Finite numbers that `f32` can hold, from `min` on.
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

/// What holds without the key.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Default {
    Is(Literal),
    /// It follows from something else; says from what.
    Derived(&'static str),
    /// There is none: in a section that is given, the key is required.
    Required,
}

/// What `"auto"` becomes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Auto {
    /// What holds without the key: DeepSpeed drops `"auto"` values.
    AsDefault,
    /// What the integration in Hugging Face's Trainer fills in from the defaults of its arguments.
    Is(Literal),
    /// It follows from something else; says from what.
    Derived(&'static str),
}

/// What the key does in this version.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Effect {
    Supported,
    /// Accepted with a note that says why nothing changes.
    NoEffect(&'static str),
    /// Part of a feature that is refused as soon as it is switched on; without it the key is idle.
    Idle,
    /// Only the harmless values are accepted.
    Refused {
        harmless: Harmless,
        reason: &'static str,
    },
    /// An old name, or another one, of the key with this name in the same section.
    Renamed(&'static str),
}

/// The values of a refused key that ask for nothing.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Harmless {
    Values(&'static [Literal]),
    /// Objects that nowhere say `"enabled": true`.
    NothingEnabled,
}

/// A JSON value that can stand in a constant.
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
    /// Whether `"auto"` may stand for the value. Where any text is valid it is a text, and what a
    /// section, a type or a mesh could be nobody but the user knows.
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

    /// The keys of a section, whichever its variant.
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

/// "≥ 0 and < 1".
impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.min {
            min if min == 0.0 || min.abs() >= 1e-4 => write!(f, "≥ {min}")?,
            min => write!(f, "≥ {min:e}")?,
        }
        match self.max {
            Max::Unbounded => write!(f, " that f32 can hold"),
            Max::AtMost(max) => write!(f, " and ≤ {max}"),
            Max::Below(max) => write!(f, " and < {max}"),
        }
    }
}

/// What would be valid, in words.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Boolean => f.write_str("true or false"),
            Self::Integer { min, max: u64::MAX } => write!(f, "an integer ≥ {min} and < 2^64"),
            Self::Integer { min, max } => write!(f, "an integer from {min} to {max}"),
            Self::Signed => f.write_str("an integer"),
            Self::Number(range) => write!(f, "a number {range}"),
            Self::Text => f.write_str("a string that is not empty"),
            Self::AnyText => f.write_str("a string"),
            Self::Choice(names) => write_one_of(f, names),
            Self::TwoCounts(what) => write!(f, "an array of {what}"),
            Self::TwoNumbers(_) => f.write_str("an array of two numbers"),
            Self::List => f.write_str("an array"),
            Self::Names(names) => write!(f, "an array of names out of \"{}\"", names.join("\", \"")),
            Self::Sections(_) => f.write_str("an array of objects"),
            Self::TextOrSections(_) => {
                f.write_str("a string that is not empty, or an array of such strings and objects")
            }
            Self::Pairs(_) => f.write_str("an array of pairs of integers ≥ 1"),
            Self::Rules => f.write_str("an array of pairs [pattern, mesh]"),
            Self::Rule => f.write_str("an array of two, a pattern and a mesh such as \"2x4\" or null"),
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
