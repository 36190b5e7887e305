//! The subset of `%` and `str.format` that templates use.

use super::{Py, failed, py, to_str, write_repr, write_str};
use crate::arguments::Arguments;
use minijinja::{Error, Value};

/// `text % values`, with `s`, `r`, `d`, `i`, `f`, `x` and `%`, a width and a precision.
pub(crate) fn percent(text: &str, values: &[Value]) -> Result<Value, Error> {
    let mut values = values.iter();
    let (mut out, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once('%') {
        out.push_str(before);
        let (spec, kind, after) = Spec::read(after)?;
        rest = after;
        if kind == '%' {
            out.push('%');
            continue;
        }
        let value = values.next().ok_or_else(|| failed("`%` has more placeholders than values"))?;
        spec.write(kind, value, &mut out)?;
    }
    if values.next().is_some() {
        return Err(failed("`%` has more values than placeholders"));
    }
    out.push_str(rest);
    Ok(Value::from(out))
}

/// Flags, width and precision between `%` and its letter.
#[derive(Default)]
struct Spec {
    left: bool,
    zeros: bool,
    width: usize,
    precision: Option<usize>,
}

impl Spec {
    fn read(text: &str) -> Result<(Self, char, &str), Error> {
        let flags = text.len() - text.trim_start_matches(['-', '0']).len();
        let (flags, text) = text.split_at(flags);
        let (width, text) = number(text)?;
        let (precision, text) = match text.strip_prefix('.') {
            Some(text) => number(text).map(|(precision, text)| (Some(precision), text))?,
            None => (None, text),
        };
        let mut chars = text.chars();
        let kind = chars.next().ok_or_else(|| failed("`%` at the end of a text"))?;
        let left = flags.contains('-');
        Ok((Self { left, zeros: flags.contains('0') && !left, width, precision }, kind, chars.as_str()))
    }

    fn write(&self, kind: char, value: &Value, out: &mut String) -> Result<(), Error> {
        let Self { left, zeros, width, precision } = *self;
        let text = match (kind, py(value)) {
            ('s', _) => cut(to_str(value)?, precision),
            ('r', _) => {
                let mut text = String::new();
                write_repr(value, &mut text, 0)?;
                cut(text, precision)
            }
            ('d' | 'i', Py::Float(value)) if precision.is_none() && value.abs() < 1e18 => {
                format!("{:.0}", value.trunc() + 0.0)
            }
            ('d' | 'i' | 'x', value) if precision.is_none() => {
                let value = value.int().ok_or_else(|| failed(format!("`%{kind}` of {}", value.name())))?;
                match kind {
                    'x' if value < 0 => return Err(failed("`%x` of a negative int is not supported")),
                    'x' => format!("{value:x}"),
                    _ => value.to_string(),
                }
            }
            ('f', value) => {
                let value = value.float().filter(|value| value.is_finite());
                let value = value.ok_or_else(|| failed("`%f` of a value that is not a finite number"))?;
                let precision = precision.unwrap_or(6);
                if precision > 1000 {
                    return Err(failed("`%f` with a precision over 1000 is not supported"));
                }
                format!("{value:.precision$}")
            }
            _ => return Err(failed(format!("`%{kind}` is not supported, or not with a precision"))),
        };
        let padding = width.saturating_sub(text.chars().count());
        match text.strip_prefix('-') {
            _ if left => out.extend([text.as_str(), &" ".repeat(padding)]),
            Some(digits) if zeros && kind != 's' && kind != 'r' => {
                out.extend(["-", &"0".repeat(padding), digits]);
            }
            None if zeros && kind != 's' && kind != 'r' => out.extend(["0".repeat(padding), text]),
            _ => out.extend([" ".repeat(padding), text]),
        }
        Ok(())
    }
}

fn cut(text: String, precision: Option<usize>) -> String {
    match precision {
        Some(precision) => text.chars().take(precision).collect(),
        None => text,
    }
}

fn number(text: &str) -> Result<(usize, &str), Error> {
    let digits = text.len() - text.trim_start_matches(|digit: char| digit.is_ascii_digit()).len();
    let (number, rest) = text.split_at(digits);
    let number = if number.is_empty() { Ok(0) } else { number.parse() };
    Ok((number.map_err(|_| failed("`%` with a width or precision that is too large"))?, rest))
}

/// `text.format(…)` with empty fields, indices or names.
pub(super) fn format(text: &str, arguments: Arguments) -> Result<Value, Error> {
    let (positional, named) = arguments.into_parts();
    let (mut out, mut rest, mut next) = (String::new(), text, 0..);
    while let Some(at) = rest.find(['{', '}']) {
        out.push_str(&rest[..at]);
        let brace = &rest[at..];
        if brace.starts_with("{{") || brace.starts_with("}}") {
            out.push_str(&brace[..1]);
            rest = &brace[2..];
            continue;
        }
        let (field, after) = brace[1..].split_once('}').ok_or_else(|| failed("`format` of a lone brace"))?;
        let value = match field {
            "" => next.next().and_then(|index| positional.get(index)),
            _ => match field.parse::<usize>() {
                Ok(index) => positional.get(index),
                Err(_) => named.iter().find(|(name, _)| name == field).map(|(_, value)| value),
            },
        };
        let value = value.filter(|_| !brace.starts_with('}'));
        let value =
            value.ok_or_else(|| failed(format!("`format` with `{{{field}}}` is not supported here")))?;
        write_str(value, &mut out)?;
        rest = after;
    }
    out.push_str(rest);
    Ok(Value::from(out))
}
