//! The filters of Jinja that published templates use.

mod lists;

use super::arguments::Arguments;
use super::python::{
    Py, capitalize, elements, failed, float_repr, int, percent, py, replace, split_lines, strip, to_json,
    to_str,
};
use lists::{
    batch, dict_sort, extreme, first, items, joined, last, length, map, reverse, select, slices, sort, sum,
    unique,
};
use minijinja::{Error, State, Value};

type Filter = fn(&mut State<'_, '_>, Arguments) -> Result<Value, Error>;

pub(super) const FILTERS: [(&str, Filter); 38] = [
    ("abs", |_, arguments| abs(arguments)),
    ("batch", |_, arguments| batch(arguments)),
    ("capitalize", |_, arguments| capitalize(&text(arguments)?).map(Value::from)),
    ("count", |_, arguments| length(arguments)),
    ("d", |_, arguments| default(arguments)),
    ("default", |_, arguments| default(arguments)),
    ("dictsort", |_, arguments| dict_sort(arguments)),
    ("first", |_, arguments| first(arguments)),
    ("float", |_, arguments| float(arguments)),
    ("format", |_, arguments| format(arguments)),
    ("indent", |_, arguments| indent(arguments)),
    ("int", |_, arguments| to_int(arguments)),
    ("items", |_, arguments| items(arguments)),
    ("join", |_, arguments| joined(arguments)),
    ("last", |_, arguments| last(arguments)),
    ("length", |_, arguments| length(arguments)),
    ("list", |_, arguments| elements(&one(arguments)?).map(Value::from)),
    ("lower", |_, arguments| Ok(Value::from(text(arguments)?.to_lowercase()))),
    ("map", map),
    ("max", |_, arguments| extreme(arguments, std::cmp::Ordering::is_gt)),
    ("min", |_, arguments| extreme(arguments, std::cmp::Ordering::is_lt)),
    ("reject", |state, arguments| select(state, arguments, false, false)),
    ("rejectattr", |state, arguments| select(state, arguments, true, false)),
    ("replace", |_, arguments| replaced(arguments)),
    ("reverse", |_, arguments| reverse(arguments)),
    ("round", |_, arguments| round(arguments)),
    ("safe", |_, arguments| text(arguments).map(Value::from_safe_string)),
    ("select", |state, arguments| select(state, arguments, false, true)),
    ("selectattr", |state, arguments| select(state, arguments, true, true)),
    ("slice", |_, arguments| slices(arguments)),
    ("sort", |_, arguments| sort(arguments)),
    ("string", |_, arguments| text(arguments).map(Value::from)),
    ("sum", |_, arguments| sum(arguments)),
    ("title", |_, arguments| title(&text(arguments)?).map(Value::from)),
    ("tojson", |_, arguments| to_json(arguments)),
    ("trim", |_, arguments| trim(arguments)),
    ("unique", |_, arguments| unique(arguments)),
    ("upper", |_, arguments| Ok(Value::from(text(arguments)?.to_uppercase()))),
];

/// Returns the value of a filter without parameters.
fn one(arguments: Arguments) -> Result<Value, Error> {
    let [value] = arguments.bind(["value"])?;
    Ok(value.unwrap_or(Value::UNDEFINED))
}

fn text(arguments: Arguments) -> Result<String, Error> {
    to_str(&one(arguments)?)
}

fn is_true(value: Option<Value>) -> bool {
    value.is_some_and(|value| value.is_true())
}

/// Returns an int parameter, which must be small.
fn count(value: Option<Value>, default: usize, name: &str) -> Result<usize, Error> {
    let Some(value) = value else { return Ok(default) };
    let count = py(&value).int().and_then(|count| usize::try_from(count).ok());
    count.ok_or_else(|| {
        failed(format!("`{name}` takes an int that is not negative, not {}", py(&value).name()))
    })
}

fn abs(arguments: Arguments) -> Result<Value, Error> {
    let value = one(arguments)?;
    match py(&value) {
        Py::Float(value) => Ok(Value::from(value.abs())),
        other => {
            other.int().and_then(i128::checked_abs).map(int).ok_or_else(|| failed("`abs` takes a number"))
        }
    }
}

fn default(arguments: Arguments) -> Result<Value, Error> {
    let [value, default, boolean] = arguments.bind(["value", "default_value", "boolean"])?;
    let value = value.unwrap_or_default();
    let is_replaced = value.is_undefined() || (is_true(boolean) && !value.is_true());
    Ok(if is_replaced { default.unwrap_or_else(|| Value::from("")) } else { value })
}

fn float(arguments: Arguments) -> Result<Value, Error> {
    let [value, default] = arguments.bind(["value", "default"])?;
    let value = value.unwrap_or_default();
    let number = match py(&value) {
        Py::Str(text) => parsed_float(text),
        other => other.float(),
    };
    Ok(number.map_or_else(|| default.unwrap_or_else(|| Value::from(0.0)), Value::from))
}

/// `float(text)`, without words and underscores, which Python accepts too.
fn parsed_float(text: &str) -> Option<f64> {
    let text = strip(text, None, [true, true]);
    let is_number =
        |character: char| character.is_ascii_digit() || matches!(character, '+' | '-' | '.' | 'e' | 'E');
    text.chars().all(is_number).then(|| text.parse().ok()).flatten()
}

fn to_int(arguments: Arguments) -> Result<Value, Error> {
    let [value, default, base] = arguments.bind(["value", "default", "base"])?;
    if base.is_some_and(|base| py(&base).int() != Some(10)) {
        return Err(failed("`int` with another base than 10 is not supported"));
    }
    let value = value.unwrap_or_default();
    let truncated = |value: f64| (value.abs() < 1e30).then_some(value.trunc() as i128);
    let number = match py(&value) {
        Py::Str(text) => {
            let text = strip(text, None, [true, true]);
            text.parse().ok().or_else(|| truncated(parsed_float(text)?))
        }
        Py::Float(value) => truncated(value),
        other => other.int(),
    };
    Ok(number.map_or_else(|| default.unwrap_or_else(|| Value::from(0)), int))
}

fn format(arguments: Arguments) -> Result<Value, Error> {
    let values = arguments.positional()?;
    let (format, values) = values.split_first().ok_or_else(|| failed("`format` has nothing to format"))?;
    percent(&to_str(format)?, values)
}

fn indent(arguments: Arguments) -> Result<Value, Error> {
    let [value, width, first, blank] = arguments.bind(["s", "width", "first", "blank"])?;
    let value = value.unwrap_or_default();
    let Py::Str(text) = py(&value) else {
        return Err(failed(format!("`indent` takes a str, not {}", py(&value).name())));
    };
    let (first, blank) = (is_true(first), is_true(blank));
    let indention = match width.as_ref().map(py) {
        Some(Py::Str(text)) => text.to_owned(),
        _ => " ".repeat(count(width, 4, "indent")?),
    };
    // Jinja adds the line break so that an empty last line is kept.
    let text = format!("{text}\n");
    let lines = split_lines(&text, false);
    let mut indented = if first { indention.clone() } else { String::new() };
    for (index, line) in lines.iter().enumerate() {
        if index > 0 {
            indented.push('\n');
            indented.push_str(if blank || !line.is_empty() { &indention } else { "" });
        }
        indented.push_str(line);
    }
    Ok(Value::from(indented))
}

fn replaced(arguments: Arguments) -> Result<Value, Error> {
    let [value, old, new, how_often] = arguments.bind(["s", "old", "new", "count"])?;
    let [value, old, new] = [value, old, new].map(|value| to_str(&value.unwrap_or_default()));
    let how_often = how_often.filter(|value| !value.is_none());
    let how_often = how_often.map(|value| count(Some(value), 0, "replace")).transpose()?;
    Ok(replace(&value?, &old?, &new?, how_often).into())
}

fn round(arguments: Arguments) -> Result<Value, Error> {
    let [value, precision, method] = arguments.bind(["value", "precision", "method"])?;
    let (value, precision) = (value.unwrap_or_default(), count(precision, 0, "round")?.min(400));
    if method.is_some_and(|method| method.as_str() != Some("common")) {
        return Err(failed("`round` with another method than 'common' is not supported"));
    }
    match py(&value) {
        Py::Float(value) if value.is_finite() => {
            // Both languages round exact digits, half to even.
            let rounded = format!("{value:.precision$}").parse::<f64>();
            rounded.map(Value::from).map_err(|_| failed(format!("{} cannot be rounded", float_repr(value))))
        }
        other => other
            .int()
            .map(int)
            .ok_or_else(|| failed(format!("`round` takes a number, not {}", other.name()))),
    }
}

/// Words start after white space, a hyphen or an opening bracket.
fn title(text: &str) -> Result<String, Error> {
    let (mut titled, mut is_inside) = (String::with_capacity(text.len()), false);
    for character in text.chars() {
        match is_inside {
            true => titled.extend(character.to_lowercase()),
            false => titled.extend(character.to_uppercase()),
        }
        is_inside = !(super::python::is_space(character) || "-({[<".contains(character));
    }
    Ok(titled)
}

fn trim(arguments: Arguments) -> Result<Value, Error> {
    let [value, chars] = arguments.bind(["value", "chars"])?;
    let text = to_str(&value.unwrap_or_default())?;
    let chars = chars.filter(|chars| !chars.is_none()).map(|chars| to_str(&chars)).transpose()?;
    Ok(Value::from(strip(&text, chars.as_deref(), [true, true])))
}
