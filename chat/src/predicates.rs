//! Jinja's tests, the right-hand side of `is`.

use super::arguments::Arguments;
use super::python::{Py, compare, equal, failed, is_in, py};
use minijinja::{Error, Value};
use std::cmp::Ordering;

type Predicate = fn(&Value, &[Value]) -> Result<bool, Error>;

pub(super) const PREDICATES: [(&str, Predicate); 34] = [
    ("!=", |value, others| equal(value, other(others)?, 0).map(|is_equal| !is_equal)),
    ("<", |value, others| ordered(value, others, Ordering::is_lt)),
    ("<=", |value, others| ordered(value, others, Ordering::is_le)),
    ("==", |value, others| equal(value, other(others)?, 0)),
    (">", |value, others| ordered(value, others, Ordering::is_gt)),
    (">=", |value, others| ordered(value, others, Ordering::is_ge)),
    ("boolean", |value, _| Ok(matches!(py(value), Py::Bool(_)))),
    ("defined", |value, _| Ok(!value.is_undefined())),
    ("divisibleby", |value, others| Ok(remainder(value, other(others)?)? == 0)),
    ("eq", |value, others| equal(value, other(others)?, 0)),
    ("equalto", |value, others| equal(value, other(others)?, 0)),
    ("even", |value, _| Ok(remainder(value, &Value::from(2))? == 0)),
    ("false", |value, _| Ok(py(value) == Py::Bool(false))),
    ("float", |value, _| Ok(matches!(py(value), Py::Float(_)))),
    ("ge", |value, others| ordered(value, others, Ordering::is_ge)),
    ("greaterthan", |value, others| ordered(value, others, Ordering::is_gt)),
    ("gt", |value, others| ordered(value, others, Ordering::is_gt)),
    ("in", |value, others| is_in(value, other(others)?)),
    ("integer", |value, _| Ok(matches!(py(value), Py::Int(_)))),
    ("iterable", |value, _| {
        Ok(matches!(py(value), Py::Undefined | Py::Str(_) | Py::List | Py::Tuple | Py::Dict | Py::Lazy(_)))
    }),
    ("le", |value, others| ordered(value, others, Ordering::is_le)),
    ("lessthan", |value, others| ordered(value, others, Ordering::is_lt)),
    ("lt", |value, others| ordered(value, others, Ordering::is_lt)),
    ("mapping", |value, _| Ok(py(value) == Py::Dict)),
    ("ne", |value, others| equal(value, other(others)?, 0).map(|is_equal| !is_equal)),
    ("none", |value, _| Ok(value.is_none())),
    ("number", |value, _| Ok(py(value).float().is_some())),
    ("odd", |value, _| Ok(remainder(value, &Value::from(2))? == 1)),
    // Any value with a length and items.
    ("sequence", |value, _| match py(value) {
        Py::Lazy(_) => Err(failed("`is sequence` of an iterator is not supported")),
        other => Ok(matches!(other, Py::Undefined | Py::Str(_) | Py::List | Py::Tuple | Py::Dict)),
    }),
    ("sameas", |value, others| match (py(value), py(other(others)?)) {
        (Py::None, Py::None) => Ok(true),
        (Py::Bool(left), Py::Bool(right)) => Ok(left == right),
        (Py::None | Py::Bool(_), _) | (_, Py::None | Py::Bool(_)) => Ok(false),
        _ => Err(failed("`is sameas` of other values than none, true and false is not supported")),
    }),
    ("string", |value, _| Ok(matches!(py(value), Py::Str(_)))),
    ("true", |value, _| Ok(py(value) == Py::Bool(true))),
    ("undefined", |value, _| Ok(value.is_undefined())),
    ("callable", |value, _| match py(value) {
        Py::Other => Err(failed("`is callable` of an object is not supported")),
        _ => Ok(false),
    }),
];

/// Applies a test to its arguments.
pub(super) fn test(predicate: Predicate, arguments: Arguments) -> Result<bool, Error> {
    let values = arguments.positional()?;
    let (value, others) = values.split_first().ok_or_else(|| failed("a test has no value"))?;
    predicate(value, others)
}

fn other(others: &[Value]) -> Result<&Value, Error> {
    others.first().ok_or_else(|| failed("a test has no value to compare with"))
}

fn ordered(value: &Value, others: &[Value], is: fn(Ordering) -> bool) -> Result<bool, Error> {
    Ok(compare(value, other(others)?, 0)?.is_some_and(is))
}

fn remainder(value: &Value, divisor: &Value) -> Result<i128, Error> {
    let (value, divisor) = (py(value).int(), py(divisor).int().filter(|divisor| *divisor > 0));
    let remainder = value.zip(divisor).map(|(value, divisor)| value.rem_euclid(divisor));
    remainder.ok_or_else(|| failed("the test takes ints, and a divisor above 0"))
}
