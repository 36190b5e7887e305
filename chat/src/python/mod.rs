//! Python's values as templates see them: printing, comparison and access.
//!
//! `transformers` renders a template with Jinja in Python, and models are trained on that text. Every operation of a
//! template therefore gives the same text here, or is an error.

mod format;
mod json;
mod lazy;
mod methods;
mod operators;
mod strings;

pub(super) use format::percent;
pub(super) use json::to_json;
pub(super) use lazy::Lazy;
pub(super) use methods::{METHODS, Method, method};
pub(super) use operators::{OPERATORS, get_item, is_in};
pub(super) use strings::{capitalize, is_space, replace, split_lines, strip};

pub(super) use super::failed;
use super::limits::MAX_DEPTH;
use minijinja::value::ValueKind;
use minijinja::{Error, Value};
use std::cmp::Ordering;

/// A value by its Python type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Py<'a> {
    Undefined,
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(&'a str),
    List,
    Tuple,
    Dict,
    /// A generator, or a view of a dictionary or range.
    Lazy(&'a Lazy),
    /// A namespace, a macro, `loop`.
    Other,
}

/// Two numbers, both floats if one is a float.
pub(super) enum Numbers {
    Ints(i128, i128),
    Floats(f64, f64),
}

pub(super) fn py(value: &Value) -> Py<'_> {
    match value.kind() {
        ValueKind::Undefined => Py::Undefined,
        ValueKind::None => Py::None,
        ValueKind::Bool => Py::Bool(value.is_true()),
        ValueKind::Number if value.is_integer() => i128::try_from(value.clone()).map_or(Py::Other, Py::Int),
        ValueKind::Number => f64::try_from(value.clone()).map_or(Py::Other, Py::Float),
        ValueKind::String => value.as_str().map_or(Py::Other, Py::Str),
        ValueKind::Seq | ValueKind::Iterable => match value.downcast_object_ref::<Lazy>() {
            Some(lazy) => Py::Lazy(lazy),
            None if value.is_tuple() => Py::Tuple,
            None => Py::List,
        },
        // A namespace is a map for the engine, but not a dict in Python.
        ValueKind::Map if !is_namespace(value) && !is_loop(value) => Py::Dict,
        _ => Py::Other,
    }
}

fn has_type(value: &Value, name: &str) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with(name))
}

pub(super) fn is_namespace(value: &Value) -> bool {
    has_type(value, "::Namespace")
}

fn is_loop(value: &Value) -> bool {
    has_type(value, "::Loop")
}

impl Py<'_> {
    /// Returns Python's name of the type, for errors.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Undefined => "an undefined value",
            Self::None => "None",
            Self::Bool(_) => "a bool",
            Self::Int(_) => "an int",
            Self::Float(_) => "a float",
            Self::Str(_) => "a str",
            Self::List => "a list",
            Self::Tuple => "a tuple",
            Self::Dict => "a dict",
            Self::Lazy(_) => "an iterator",
            Self::Other => "an object",
        }
    }

    /// Returns an int; a bool is an int too.
    pub(super) fn int(self) -> Option<i128> {
        match self {
            Self::Int(value) => Some(value),
            Self::Bool(value) => Some(value.into()),
            _ => None,
        }
    }

    pub(super) fn float(self) -> Option<f64> {
        match self {
            Self::Float(value) => Some(value),
            other => other.int().map(|value| value as f64),
        }
    }
}

pub(super) fn numbers(left: Py<'_>, right: Py<'_>) -> Option<Numbers> {
    match (left.int(), right.int()) {
        (Some(left), Some(right)) => Some(Numbers::Ints(left, right)),
        _ => Some(Numbers::Floats(left.float()?, right.float()?)),
    }
}

/// Returns an int as a value.
pub(super) fn int(value: i128) -> Value {
    i64::try_from(value).map_or_else(|_| Value::from(value), Value::from)
}

/// Returns the elements of Python's `iter`.
pub(super) fn elements(value: &Value) -> Result<Vec<Value>, Error> {
    match py(value) {
        Py::Undefined => Ok(Vec::new()),
        Py::Lazy(lazy) => Ok(lazy.take()),
        Py::Str(_) | Py::List | Py::Tuple | Py::Dict => value.try_iter()?.checked().collect(),
        other => Err(failed(format!("{} cannot be iterated over", other.name()))),
    }
}

/// Returns the keys and values of a dict, in order.
pub(super) fn pairs(value: &Value) -> Result<Vec<(Value, Value)>, Error> {
    let pairs = value.as_object().filter(|_| py(value) == Py::Dict).and_then(|map| map.try_iter_pairs());
    let pairs = pairs.ok_or_else(|| failed(format!("{} has no items", py(value).name())))?;
    Ok(pairs.collect())
}

/// `str(value)`.
pub(super) fn to_str(value: &Value) -> Result<String, Error> {
    let mut text = String::new();
    write_str(value, &mut text)?;
    Ok(text)
}

/// Appends `str(value)`.
pub(super) fn write_str(value: &Value, text: &mut String) -> Result<(), Error> {
    match py(value) {
        Py::Undefined => Ok(()),
        Py::Str(string) => {
            text.push_str(string);
            Ok(())
        }
        _ => write_repr(value, text, 0),
    }
}

/// Appends `repr(value)`.
pub(super) fn write_repr(value: &Value, text: &mut String, depth: usize) -> Result<(), Error> {
    check_depth(depth)?;
    match py(value) {
        Py::Undefined => text.push_str("Undefined"),
        Py::None => text.push_str("None"),
        Py::Bool(value) => text.push_str(if value { "True" } else { "False" }),
        Py::Int(value) => text.push_str(&value.to_string()),
        Py::Float(value) => text.push_str(&float_repr(value)),
        Py::Str(string) => strings::write_repr(string, text),
        Py::List => write_list(value, text, ["[", "]"], depth)?,
        Py::Tuple => write_list(value, text, ["(", if value.len() == Some(1) { ",)" } else { ")" }], depth)?,
        Py::Dict => {
            text.push('{');
            for (index, (key, value)) in pairs(value)?.iter().enumerate() {
                text.push_str(if index > 0 { ", " } else { "" });
                write_repr(key, text, depth + 1)?;
                text.push_str(": ");
                write_repr(value, text, depth + 1)?;
            }
            text.push('}');
        }
        other @ (Py::Lazy(_) | Py::Other) => {
            return Err(failed(format!("printing {} is not supported", other.name())));
        }
    }
    Ok(())
}

fn write_list(value: &Value, text: &mut String, [open, close]: [&str; 2], depth: usize) -> Result<(), Error> {
    text.push_str(open);
    for (index, element) in elements(value)?.iter().enumerate() {
        text.push_str(if index > 0 { ", " } else { "" });
        write_repr(element, text, depth + 1)?;
    }
    text.push_str(close);
    Ok(())
}

fn check_depth(depth: usize) -> Result<(), Error> {
    match depth <= MAX_DEPTH {
        true => Ok(()),
        false => Err(failed(format!("values are nested more than {MAX_DEPTH} levels deep"))),
    }
}

/// Checks a value that is stored in another one: its depth, and that no namespace contains itself.
pub(super) fn check_nested(value: &Value, depth: usize) -> Result<(), Error> {
    check_depth(depth)?;
    match py(value) {
        Py::List | Py::Tuple => value.try_iter()?.try_for_each(|value| check_nested(&value, depth + 1)),
        Py::Dict => pairs(value)?.iter().try_for_each(|(key, value)| match py(key) {
            // In Python, `true` and `1.0` equal the key `1`.
            Py::Bool(_) => Err(failed("true and false as keys of a dict are not supported")),
            _ => check_nested(value, depth + 1),
        }),
        Py::Lazy(lazy) => lazy.peek().iter().try_for_each(|value| check_nested(value, depth + 1)),
        Py::Other if is_namespace(value) => {
            Err(failed("a namespace inside of another value is not supported"))
        }
        _ => Ok(()),
    }
}

/// `repr(value)` of a float: the shortest digits that read back as it.
pub(super) fn float_repr(value: f64) -> String {
    if !value.is_finite() {
        return if value.is_nan() {
            "nan"
        } else if value > 0.0 {
            "inf"
        } else {
            "-inf"
        }
        .to_owned();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let text = value.to_string();
        return if text.contains('.') { text } else { text + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// `left == right`.
pub(super) fn equal(left: &Value, right: &Value, depth: usize) -> Result<bool, Error> {
    check_depth(depth)?;
    Ok(match (py(left), py(right)) {
        (Py::Undefined, Py::Undefined) | (Py::None, Py::None) => true,
        (Py::Str(left), Py::Str(right)) => left == right,
        (Py::List, Py::List) | (Py::Tuple, Py::Tuple) => {
            let (left, right) = (elements(left)?, elements(right)?);
            left.len() == right.len() && all_equal(left.iter().zip(&right), depth)?
        }
        (Py::Dict, Py::Dict) => {
            let (left, right) = (pairs(left)?, right.as_object());
            let other = |key: &Value| right.and_then(|right| right.get_value(key));
            let other: Option<Vec<_>> = left.iter().map(|(key, _)| other(key)).collect();
            let same_len = right.and_then(|right| right.enumerator_len()) == Some(left.len());
            match other.filter(|_| same_len) {
                Some(other) => all_equal(left.iter().map(|(_, value)| value).zip(&other), depth)?,
                None => false,
            }
        }
        (Py::Lazy(_) | Py::Other, _) | (_, Py::Lazy(_) | Py::Other) => {
            return Err(failed("iterators, namespaces and macros cannot be compared"));
        }
        (left, right) => compare_numbers(left, right) == Some(Some(Ordering::Equal)),
    })
}

fn all_equal<'a>(
    mut pairs: impl Iterator<Item = (&'a Value, &'a Value)>,
    depth: usize,
) -> Result<bool, Error> {
    let different = |(left, right)| {
        equal(left, right, depth + 1)
            .map_or_else(|error| Some(Err(error)), |is_equal| (!is_equal).then_some(Ok(false)))
    };
    pairs.find_map(different).unwrap_or(Ok(true))
}

/// Compares two numbers; `None` if one is NaN.
fn compare_numbers(left: Py<'_>, right: Py<'_>) -> Option<Option<Ordering>> {
    Some(match numbers(left, right)? {
        Numbers::Ints(left, right) => Some(left.cmp(&right)),
        Numbers::Floats(left, right) => left.partial_cmp(&right),
    })
}

/// Compares two values by `<`; `None` if one is NaN.
pub(super) fn compare(left: &Value, right: &Value, depth: usize) -> Result<Option<Ordering>, Error> {
    check_depth(depth)?;
    match (py(left), py(right)) {
        (Py::Str(left), Py::Str(right)) => Ok(Some(left.cmp(right))),
        (Py::List, Py::List) | (Py::Tuple, Py::Tuple) => {
            let (left, right) = (elements(left)?, elements(right)?);
            for (left, right) in left.iter().zip(&right) {
                if !equal(left, right, depth + 1)? {
                    return compare(left, right, depth + 1);
                }
            }
            Ok(Some(left.len().cmp(&right.len())))
        }
        (left, right) => compare_numbers(left, right)
            .ok_or_else(|| failed(format!("{} and {} have no order", left.name(), right.name()))),
    }
}
