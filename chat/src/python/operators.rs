//! Python's operators. A compiled template calls them instead of the engine's.

use super::{
    Lazy, METHODS, Method, Numbers, Py, compare, elements, equal, failed, int, numbers, percent, py,
    write_str,
};
use minijinja::value::Tuple;
use minijinja::{Error, Value};
use std::cmp::Ordering;

type Operator = fn(&[Value]) -> Result<Value, Error>;

/// The operators by their internal names, which a template cannot contain.
pub(crate) const OPERATORS: [(&str, Operator); 21] = [
    ("+", |values| add(&values[0], &values[1])),
    ("-", |values| arithmetic(&values[0], &values[1], "-", i128::checked_sub, |a, b| a - b)),
    ("*", |values| multiply(&values[0], &values[1])),
    ("/", |values| divide(&values[0], &values[1])),
    ("//", |values| floor_divide(&values[0], &values[1]).map(|[quotient, _]| quotient)),
    ("%", |values| remainder(&values[0], &values[1])),
    ("**", |values| power(&values[0], &values[1])),
    ("-x", |values| arithmetic(&Value::from(0), &values[0], "-", i128::checked_sub, |_, b| -b)),
    ("~", |values| concatenate(&values[0], &values[1])),
    ("==", |values| Ok(Value::from(equal(&values[0], &values[1], 0)?))),
    ("!=", |values| Ok(Value::from(!equal(&values[0], &values[1], 0)?))),
    ("<", |values| ordered(&values[0], &values[1], Ordering::is_lt)),
    ("<=", |values| ordered(&values[0], &values[1], Ordering::is_le)),
    (">", |values| ordered(&values[0], &values[1], Ordering::is_gt)),
    (">=", |values| ordered(&values[0], &values[1], Ordering::is_ge)),
    ("in", |values| Ok(Value::from(is_in(&values[0], &values[1])?))),
    ("not-in", |values| Ok(Value::from(!is_in(&values[0], &values[1])?))),
    ("[]", |values| get_item(&values[0], &values[1])),
    ("[:]", |values| slice(values)),
    ("for", |values| elements(&values[0]).map(Value::from)),
    ("nest", |values| super::check_nested(&values[0], 0).map(|()| values[0].clone())),
];

fn unsupported(operator: &str, left: Py<'_>, right: Py<'_>) -> Error {
    failed(format!("`{operator}` of {} and {} is not supported", left.name(), right.name()))
}

fn arithmetic(
    left: &Value,
    right: &Value,
    operator: &str,
    ints: fn(i128, i128) -> Option<i128>,
    floats: fn(f64, f64) -> f64,
) -> Result<Value, Error> {
    match numbers(py(left), py(right)) {
        Some(Numbers::Ints(left, right)) => ints(left, right).map(int).ok_or_else(too_large),
        Some(Numbers::Floats(left, right)) => Ok(Value::from(floats(left, right))),
        None => Err(unsupported(operator, py(left), py(right))),
    }
}

fn too_large() -> Error {
    failed("an int is larger than 127 bits")
}

fn add(left: &Value, right: &Value) -> Result<Value, Error> {
    match (py(left), py(right)) {
        (Py::Str(left_text), Py::Str(right_text)) if left.is_safe() || right.is_safe() => {
            let part =
                |value: &Value, text: &str| if value.is_safe() { text.to_owned() } else { escaped(text) };
            Ok(Value::from_safe_string(part(left, left_text) + &part(right, right_text)))
        }
        (Py::Str(left), Py::Str(right)) => Ok(Value::from([left, right].concat())),
        (Py::List, Py::List) => Ok(Value::from([elements(left)?, elements(right)?].concat())),
        (Py::Tuple, Py::Tuple) => Ok(Tuple::from([elements(left)?, elements(right)?].concat()).into()),
        _ => arithmetic(left, right, "+", i128::checked_add, |a, b| a + b),
    }
}

fn multiply(left: &Value, right: &Value) -> Result<Value, Error> {
    let (value, count) = match (py(left), py(right)) {
        (Py::Str(_) | Py::List | Py::Tuple, count) => (left, count),
        (count, Py::Str(_) | Py::List | Py::Tuple) => (right, count),
        _ => return arithmetic(left, right, "*", i128::checked_mul, |a, b| a * b),
    };
    let count = count.int().ok_or_else(|| unsupported("*", py(left), py(right)))?;
    let count = usize::try_from(count.max(0)).unwrap_or(usize::MAX);
    if let Py::Str(text) = py(value) {
        return Ok(Value::from(text.repeat(if text.is_empty() { 0 } else { count })));
    }
    let elements = elements(value)?;
    let count = if elements.is_empty() { 0 } else { count };
    let elements: Vec<Value> = std::iter::repeat_n(&elements, count).flatten().cloned().collect();
    Ok(if py(value) == Py::Tuple { Tuple::from(elements).into() } else { Value::from(elements) })
}

/// Exact if both ints are representable as floats.
fn divide(left: &Value, right: &Value) -> Result<Value, Error> {
    let [dividend, divisor] = match numbers(py(left), py(right)) {
        Some(Numbers::Ints(left, right)) if left.unsigned_abs().max(right.unsigned_abs()) > 1 << 53 => {
            return Err(too_large());
        }
        Some(Numbers::Ints(left, right)) => [left as f64, right as f64],
        Some(Numbers::Floats(left, right)) => [left, right],
        None => return Err(unsupported("/", py(left), py(right))),
    };
    match divisor == 0.0 {
        true => Err(failed("division by zero")),
        false => Ok(Value::from(dividend / divisor)),
    }
}

/// Returns quotient and remainder; the remainder has the sign of the divisor.
fn floor_divide(left: &Value, right: &Value) -> Result<[Value; 2], Error> {
    match numbers(py(left), py(right)) {
        Some(Numbers::Ints(_, 0)) => Err(failed("division by zero")),
        Some(Numbers::Ints(left, right)) => {
            let quotient = left.checked_div_euclid(right).ok_or_else(too_large)?;
            let remainder = left.rem_euclid(right);
            // Euclid's remainder is never negative.
            let is_below = remainder != 0 && right < 0;
            Ok(if is_below { [quotient - 1, remainder + right] } else { [quotient, remainder] }.map(int))
        }
        Some(Numbers::Floats(_, 0.0)) => Err(failed("division by zero")),
        // As `float_divmod` of CPython.
        Some(Numbers::Floats(left, right)) => {
            let mut remainder = left % right;
            let mut quotient = (left - remainder) / right;
            if remainder == 0.0 {
                remainder = 0.0_f64.copysign(right);
            } else if (remainder < 0.0) != (right < 0.0) {
                remainder += right;
                quotient -= 1.0;
            }
            let floor = quotient.floor() + f64::from(u8::from(quotient - quotient.floor() > 0.5));
            let quotient = if quotient == 0.0 { 0.0_f64.copysign(left / right) } else { floor };
            Ok([quotient, remainder].map(Value::from))
        }
        None => Err(unsupported("//", py(left), py(right))),
    }
}

fn remainder(left: &Value, right: &Value) -> Result<Value, Error> {
    match (py(left), py(right)) {
        (Py::Str(text), Py::Tuple) => percent(text, &elements(right)?),
        (Py::Str(_), Py::Dict) => Err(failed("`%` with names is not supported")),
        (Py::Str(text), _) => percent(text, std::slice::from_ref(right)),
        _ => floor_divide(left, right).map(|[_, remainder]| remainder),
    }
}

fn power(left: &Value, right: &Value) -> Result<Value, Error> {
    match numbers(py(left), py(right)) {
        Some(Numbers::Ints(base, exponent @ 0..)) => {
            let power = u32::try_from(exponent).ok().and_then(|exponent| base.checked_pow(exponent));
            power.map(int).ok_or_else(too_large)
        }
        Some(_) => Err(failed("`**` of floats or with a negative exponent is not supported")),
        None => Err(unsupported("**", py(left), py(right))),
    }
}

/// Returns what Python adds to the result of `safe`.
fn escaped(text: &str) -> String {
    let pairs = [("&", "&amp;"), (">", "&gt;"), ("<", "&lt;"), ("'", "&#39;"), ("\"", "&#34;")];
    pairs.into_iter().fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
}

fn concatenate(left: &Value, right: &Value) -> Result<Value, Error> {
    let mut text = String::new();
    write_str(left, &mut text)?;
    write_str(right, &mut text)?;
    Ok(Value::from(text))
}

fn ordered(left: &Value, right: &Value, is: fn(Ordering) -> bool) -> Result<Value, Error> {
    Ok(Value::from(compare(left, right, 0)?.is_some_and(is)))
}

/// `value in container`.
pub(crate) fn is_in(value: &Value, container: &Value) -> Result<bool, Error> {
    match (py(value), py(container)) {
        (Py::Str(part), Py::Str(text)) => Ok(text.contains(part)),
        (other, Py::Str(_)) => Err(failed(format!("{} cannot be in a str", other.name()))),
        (Py::List | Py::Dict, Py::Dict) => Err(failed("a list or dict is no key of a dict")),
        (_, Py::Dict) => Ok(container.as_object().is_some_and(|map| map.get_value(value).is_some())),
        _ => {
            for element in elements(container)? {
                if equal(value, &element, 0)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
    }
}

/// `container[key]`: undefined in Jinja where Python raises an error, and a method if there is no item.
pub(crate) fn get_item(container: &Value, key: &Value) -> Result<Value, Error> {
    let found = match (py(container), py(key)) {
        (Py::Undefined, key) => {
            let key = if let Py::Str(key) = key { format!("`{key}`") } else { "an item".to_owned() };
            return Err(failed(format!("{key} of an undefined value is asked for")));
        }
        (Py::Lazy(_), _) => {
            return Err(failed("an item of an iterator is asked for; `| list` makes a list of it"));
        }
        (Py::Str(text), key) => {
            let index = key.int().and_then(|index| from_start(index, text.chars().count()));
            index.and_then(|index| text.chars().nth(index)).map(|found| Value::from(found.to_string()))
        }
        (Py::List | Py::Tuple, key) => {
            let index = key.int().and_then(|index| from_start(index, container.len().unwrap_or(0)));
            index.and_then(|index| container.get_item_by_index(index).ok())
        }
        (Py::Dict, Py::List | Py::Dict) => None,
        (Py::Dict | Py::Other, _) => container.as_object().and_then(|map| map.get_value(key)),
        _ => None,
    };
    let method = || {
        let name = METHODS.iter().find(|method| key.as_str() == Some(method.name))?;
        Method::of(container, name.name)
    };
    Ok(found.or_else(method).unwrap_or(Value::UNDEFINED))
}

fn from_start(index: i128, len: usize) -> Option<usize> {
    let index = if index < 0 { index + len as i128 } else { index };
    usize::try_from(index).ok().filter(|index| *index < len)
}

/// `value[start:stop:step]`.
fn slice(values: &[Value]) -> Result<Value, Error> {
    let [value, start, stop, step] = values else {
        return Err(failed("a slice has a start, a stop and a step"));
    };
    let items: Vec<Value> = match py(value) {
        Py::Undefined => return Err(failed("a slice of an undefined value is asked for")),
        Py::Str(_) | Py::List | Py::Tuple => elements(value)?,
        Py::Lazy(_) => {
            return Err(failed("a slice of an iterator is asked for; `| list` makes a list of it"));
        }
        _ => return Ok(Value::UNDEFINED),
    };
    let bound = |value: &Value| match py(value) {
        Py::None => Ok(None),
        other => {
            other.int().map(Some).ok_or_else(|| failed(format!("{} is no bound of a slice", other.name())))
        }
    };
    let (start, stop, step) = (bound(start)?, bound(stop)?, bound(step)?.unwrap_or(1));
    let len = items.len() as i128;
    // As `slice.indices` of Python.
    let (low, high) = if step < 0 { (-1, len - 1) } else { (0, len) };
    let clamp = |index: i128| (if index < 0 { index.saturating_add(len) } else { index }).clamp(low, high);
    let (start, stop) = match step {
        0 => return Err(failed("a slice has the step 0")),
        1.. => (start.map_or(low, clamp), stop.map_or(high, clamp)),
        _ => (start.map_or(high, clamp), stop.map_or(low, clamp)),
    };
    let mut found = Vec::new();
    let mut at = start;
    while if step > 0 { at < stop } else { at > stop } {
        found.extend(usize::try_from(at).ok().and_then(|at| items.get(at)).cloned());
        at = at.saturating_add(step);
    }
    Ok(match py(value) {
        Py::Str(_) => Value::from(found.iter().filter_map(Value::as_str).collect::<String>()),
        Py::Tuple => Tuple::from(found).into(),
        _ => Value::from(found),
    })
}

/// `range(…)`.
impl Lazy {
    pub(crate) fn range(bounds: &[Value]) -> Result<Value, Error> {
        let is_small = |value: &i128| value.unsigned_abs() < 1 << 62;
        let bounds: Option<Vec<i128>> = bounds.iter().map(|value| py(value).int().filter(is_small)).collect();
        let (start, stop, step) = match bounds.as_deref() {
            Some([stop]) => (0, *stop, 1),
            Some([start, stop]) => (*start, *stop, 1),
            Some([start, stop, step]) if *step != 0 => (*start, *stop, *step),
            _ => return Err(failed("`range` takes one to three ints, the last of them not 0")),
        };
        let distance = if step > 0 { stop.saturating_sub(start) } else { start.saturating_sub(stop) };
        let count = distance.max(0).div_euclid(step.saturating_abs())
            + i128::from(distance.max(0) % step.saturating_abs() != 0);
        // The limit of Jinja.
        let count = usize::try_from(count).ok().filter(|count| *count <= 100_000);
        let count = count.ok_or_else(|| failed("`range` has more than 100000 numbers"))?;
        Ok(Self::view((0..count as i128).map(|index| int(start + index * step)).collect()))
    }
}
