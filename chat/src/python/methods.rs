//! Methods of Python's strings, dictionaries and lists that change nothing.

use super::strings::{capitalize, is_space, replace, split_at, split_lines, split_space, strip, title};
use super::{Lazy, Py, elements, equal, failed, format, pairs, py};
use crate::arguments::Arguments;
use minijinja::value::{Object, ObjectRepr, Tuple};
use minijinja::{Error, Value};
use std::sync::Arc;

/// A method: its name, and the names by which programs look it up and call it.
pub(crate) struct MethodName {
    pub(crate) name: &'static str,
    pub(crate) attribute: &'static str,
    pub(crate) call: &'static str,
    /// The types that have it: str, dict, list and tuple.
    types: [bool; 3],
}

macro_rules! methods {
    ($($types:tt: $($name:literal)*;)*) => {
        &[$($(MethodName {
            name: $name, attribute: concat!(".", $name), call: concat!(".", $name, "()"), types: $types,
        },)*)*]
    };
}

/// All methods of the three types. Calls of mutating methods are refused, as in `transformers`.
pub(crate) const METHODS: &[MethodName] = methods! {
    [true, false, false]: "capitalize" "casefold" "center" "encode" "endswith" "expandtabs" "find" "format"
        "format_map" "isalnum" "isalpha" "isascii" "isdecimal" "isdigit" "isidentifier" "islower" "isnumeric"
        "isprintable" "isspace" "istitle" "isupper" "join" "ljust" "lower" "lstrip" "maketrans" "partition"
        "removeprefix" "removesuffix" "replace" "rfind" "rindex" "rjust" "rpartition" "rsplit" "rstrip" "split"
        "splitlines" "startswith" "strip" "swapcase" "title" "translate" "upper" "zfill";
    [false, true, false]: "fromkeys" "get" "items" "keys" "popitem" "setdefault" "update" "values";
    [false, false, true]: "append" "extend" "insert" "remove" "reverse" "sort";
    [true, false, true]: "count" "index";
    [false, true, true]: "clear" "copy" "pop";
};

/// A bound method that is not called; it is true and defined.
#[derive(Debug)]
pub(crate) struct Method;

impl Object for Method {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }
}

impl Method {
    /// Returns the method of a value, if its type has it.
    pub(crate) fn of(value: &Value, name: &str) -> Option<Value> {
        has(value, name).then(|| Value::from_object(Self))
    }
}

fn has(value: &Value, name: &str) -> bool {
    let types = METHODS.iter().find(|method| method.name == name).map_or([false; 3], |method| method.types);
    match py(value) {
        Py::Str(_) => types[0],
        Py::Dict => types[1],
        Py::List => types[2],
        Py::Tuple => name == "count" || name == "index",
        _ => false,
    }
}

/// Calls a method.
pub(crate) fn method(name: &'static str, mut arguments: Arguments) -> Result<Value, Error> {
    let value = arguments.take_first();
    match py(&value) {
        Py::Undefined => Err(failed(format!("`{name}` of an undefined value is called"))),
        Py::Str(text) => on_str(text, name, arguments),
        Py::Dict => on_dict(&value, name, arguments),
        Py::List | Py::Tuple => on_list(&value, name, arguments),
        other => Err(unsupported(other, name)),
    }
}

fn unsupported(value: Py<'_>, name: &str) -> Error {
    failed(format!("{} has no method `{name}` that templates may call", value.name()))
}

fn on_dict(value: &Value, name: &'static str, arguments: Arguments) -> Result<Value, Error> {
    if name == "get" {
        let [key, default] = arguments.bind(["key", "default"])?;
        let key = key.ok_or_else(|| failed("`get` needs a key"))?;
        if matches!(py(&key), Py::List | Py::Dict) {
            return Err(failed("a list or dict is no key of a dict"));
        }
        let found = value.as_object().and_then(|map| map.get_value(&key));
        return Ok(found.or(default).unwrap_or_else(|| Value::from(())));
    }
    let [] = arguments.bind([])?;
    let pairs = pairs(value)?.into_iter();
    match name {
        "items" => Ok(Lazy::view(pairs.map(|(key, value)| Tuple::from([key, value]).into()).collect())),
        "keys" => Ok(Lazy::view(pairs.map(|(key, _)| key).collect())),
        "values" => Ok(Lazy::view(pairs.map(|(_, value)| value).collect())),
        "copy" => Ok(value.clone()),
        _ => Err(unsupported(Py::Dict, name)),
    }
}

fn on_list(value: &Value, name: &'static str, arguments: Arguments) -> Result<Value, Error> {
    if name == "copy" && py(value) == Py::List {
        let [] = arguments.bind([])?;
        return Ok(value.clone());
    }
    if name != "count" && name != "index" {
        return Err(unsupported(py(value), name));
    }
    let [what] = arguments.bind(["value"])?;
    let what = what.ok_or_else(|| failed(format!("`{name}` needs a value")))?;
    let mut found = Vec::new();
    for (index, element) in elements(value)?.iter().enumerate() {
        if equal(element, &what, 0)? {
            found.push(index);
        }
    }
    match name {
        "count" => Ok(Value::from(found.len())),
        _ => {
            found.first().map(|index| Value::from(*index)).ok_or_else(|| failed("the list does not hold it"))
        }
    }
}

fn on_str(text: &str, name: &'static str, arguments: Arguments) -> Result<Value, Error> {
    match name {
        "format" => return format::format(text, arguments),
        "split" | "rsplit" => return split(text, name == "rsplit", arguments),
        "replace" => {
            let [old, new, count] = arguments.bind(["old", "new", "count"])?;
            let (Some(old), Some(new)) = (&old, &new) else {
                return Err(failed("`replace` needs two strings"));
            };
            return Ok(replace(text, string(name, old)?, string(name, new)?, limit(count)?).into());
        }
        "splitlines" => {
            let [keep_ends] = arguments.bind(["keepends"])?;
            let lines = split_lines(text, keep_ends.is_some_and(|keep| keep.is_true()));
            return Ok(lines.into_iter().map(Value::from).collect());
        }
        _ => {}
    }
    let values = arguments.positional()?;
    match (name, values.as_slice()) {
        ("strip" | "lstrip" | "rstrip", [] | [_]) => {
            let chars = values.first().filter(|chars| !chars.is_none());
            let chars = chars.map(|chars| string(name, chars)).transpose()?;
            Ok(Value::from(strip(text, chars, [name != "rstrip", name != "lstrip"])))
        }
        (_, []) => without_arguments(text, name),
        ("zfill" | "ljust" | "rjust" | "center", [width]) => pad(text, name, width),
        ("join", [values]) => {
            let parts = elements(values)?;
            let parts: Result<Vec<&str>, Error> = parts.iter().map(|part| string(name, part)).collect();
            Ok(parts?.join(text).into())
        }
        ("startswith" | "endswith", [part]) => {
            let is_there = |part: &Value| {
                let part = string(name, part)?;
                Ok::<_, Error>(if name == "endswith" { text.ends_with(part) } else { text.starts_with(part) })
            };
            let parts = if py(part) == Py::Tuple { elements(part)? } else { vec![part.clone()] };
            let parts: Result<Vec<bool>, Error> = parts.iter().map(is_there).collect();
            Ok(Value::from(parts?.contains(&true)))
        }
        (_, [part]) => with_part(text, name, string(name, part)?),
        _ => Err(failed(format!("`{name}` of a str with {} arguments is not supported", values.len()))),
    }
}

fn string<'a>(method: &str, value: &'a Value) -> Result<&'a str, Error> {
    value.as_str().ok_or_else(|| failed(format!("`{method}` takes a str, not {}", py(value).name())))
}

/// Returns the maximum count; a negative number means no limit.
fn limit(count: Option<Value>) -> Result<Option<usize>, Error> {
    let Some(count) = count else { return Ok(None) };
    let count = py(&count).int().ok_or_else(|| failed("a count is no int"))?;
    Ok(usize::try_from(count).ok())
}

fn split(text: &str, from_end: bool, arguments: Arguments) -> Result<Value, Error> {
    let [separator, count] = arguments.bind(["sep", "maxsplit"])?;
    let count = limit(count)?;
    let parts = match separator.as_ref().map(py) {
        None | Some(Py::None) => split_space(text, count, from_end),
        Some(Py::Str("")) => return Err(failed("`split` at an empty str")),
        Some(Py::Str(separator)) => split_at(text, separator, count, from_end),
        Some(other) => return Err(failed(format!("`split` at {}", other.name()))),
    };
    Ok(parts.into_iter().map(Value::from).collect())
}

fn without_arguments(text: &str, name: &str) -> Result<Value, Error> {
    let all = |is: fn(char) -> bool| Ok(Value::from(!text.is_empty() && text.chars().all(is)));
    let [has_lower, has_upper] = [char::is_lowercase, char::is_uppercase].map(|is| text.chars().any(is));
    if matches!(name, "isdigit" | "isnumeric" | "isdecimal" | "isalnum" | "isalpha") && !text.is_ascii() {
        return Err(failed(format!("`{name}` of characters beyond ASCII is not supported")));
    }
    match name {
        "lower" => Ok(Value::from(text.to_lowercase())),
        "upper" => Ok(Value::from(text.to_uppercase())),
        "capitalize" => capitalize(text).map(Value::from),
        "title" => title(text).map(Value::from),
        "isspace" => all(is_space),
        "isascii" => Ok(Value::from(text.is_ascii())),
        "islower" => Ok(Value::from(has_lower && !has_upper)),
        "isupper" => Ok(Value::from(has_upper && !has_lower)),
        "isdigit" | "isnumeric" | "isdecimal" => all(|character| character.is_ascii_digit()),
        "isalpha" => all(|character| character.is_ascii_alphabetic()),
        "isalnum" => all(|character| character.is_ascii_alphanumeric()),
        _ => Err(unsupported(Py::Str(text), name)),
    }
}

fn pad(text: &str, name: &str, width: &Value) -> Result<Value, Error> {
    let width = py(width).int().ok_or_else(|| failed(format!("`{name}` takes an int")))?;
    let width = usize::try_from(width.max(0)).unwrap_or(usize::MAX);
    let lacking = width.saturating_sub(text.chars().count());
    Ok(Value::from(match name {
        "ljust" => text.to_owned() + &" ".repeat(lacking),
        "rjust" => " ".repeat(lacking) + text,
        "zfill" if !text.starts_with(['+', '-']) => "0".repeat(lacking) + text,
        _ => return Err(unsupported(Py::Str(text), name)),
    }))
}

fn with_part(text: &str, name: &str, part: &str) -> Result<Value, Error> {
    let chars = |at: usize| text[..at].chars().count() as i64;
    let cut = |at: Option<usize>, rest: [&str; 3]| {
        let parts = match at {
            Some(at) => [&text[..at], part, &text[at + part.len()..]],
            None => rest,
        };
        Ok(Tuple::from(parts.map(Value::from)).into())
    };
    match name {
        "find" => Ok(Value::from(text.find(part).map_or(-1, chars))),
        "rfind" => Ok(Value::from(text.rfind(part).map_or(-1, chars))),
        "index" => {
            text.find(part).map(|at| Value::from(chars(at))).ok_or_else(|| failed("`index`: not found"))
        }
        "rindex" => {
            text.rfind(part).map(|at| Value::from(chars(at))).ok_or_else(|| failed("`rindex`: not found"))
        }
        "count" if part.is_empty() => Ok(Value::from(text.chars().count() + 1)),
        "count" => Ok(Value::from(text.matches(part).count())),
        "removeprefix" => Ok(Value::from(text.strip_prefix(part).unwrap_or(text))),
        "removesuffix" => Ok(Value::from(text.strip_suffix(part).unwrap_or(text))),
        "partition" if !part.is_empty() => cut(text.find(part), [text, "", ""]),
        "rpartition" if !part.is_empty() => cut(text.rfind(part), ["", "", text]),
        _ => Err(failed(format!("`{name}` of a str with an argument is not supported"))),
    }
}
