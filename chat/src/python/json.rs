//! `json.dumps`, as `transformers` gives it to templates.

use super::{Py, check_depth, elements, failed, float_repr, pairs, py, to_str};
use crate::arguments::Arguments;
use minijinja::{Error, Value};

/// `tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(crate) fn to_json(arguments: Arguments) -> Result<Value, Error> {
    let [value, ensure_ascii, indent, separators, sort_keys] =
        arguments.bind(["x", "ensure_ascii", "indent", "separators", "sort_keys"])?;
    let value = value.ok_or_else(|| failed("`tojson` has nothing to write"))?;
    let indent = match indent.as_ref().map(py) {
        None | Some(Py::None) => None,
        Some(Py::Str(text)) => Some(text.to_owned()),
        Some(number) => {
            let width = number.int().ok_or_else(|| failed("`indent` of `tojson` is no number"))?;
            let width = usize::try_from(width).unwrap_or(0);
            Some(" ".repeat(width))
        }
    };
    let [item, key] = match separators.as_ref().map(|pair| (py(pair), pair)) {
        None | Some((Py::None, _)) => [if indent.is_some() { "," } else { ", " }, ": "].map(str::to_owned),
        Some((_, pair)) => {
            let pair: Result<Vec<String>, Error> = elements(pair)?.iter().map(to_str).collect();
            pair?.try_into().map_err(|_| failed("`separators` of `tojson` are no pair"))?
        }
    };
    let is_true = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let mut writer = Writer {
        text: String::new(),
        ensure_ascii: is_true(ensure_ascii),
        sort_keys: is_true(sort_keys),
        indent,
        item,
        key,
    };
    writer.value(&value, 0)?;
    Ok(Value::from(writer.text))
}

struct Writer {
    text: String,
    ensure_ascii: bool,
    sort_keys: bool,
    /// Indentation per level, if values are on separate lines.
    indent: Option<String>,
    /// Separators between items, and between key and value.
    item: String,
    key: String,
}

impl Writer {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        check_depth(depth)?;
        match py(value) {
            Py::Str(text) => self.string(text),
            Py::List | Py::Tuple => {
                let elements = elements(value)?;
                self.text.push('[');
                for (index, element) in elements.iter().enumerate() {
                    self.before(index, depth + 1);
                    self.value(element, depth + 1)?;
                }
                self.after(elements.len(), depth);
                self.text.push(']');
            }
            Py::Dict => {
                let mut pairs = pairs(value)?;
                if self.sort_keys {
                    if pairs.iter().any(|(key, _)| key.as_str().is_none()) {
                        return Err(failed("`sort_keys` of `tojson` sorts keys that are strings"));
                    }
                    pairs.sort_by(|(left, _), (right, _)| left.as_str().cmp(&right.as_str()));
                }
                self.text.push('{');
                for (index, (key, value)) in pairs.iter().enumerate() {
                    self.before(index, depth + 1);
                    match py(key) {
                        Py::Str(text) => self.string(text),
                        other => self.string(&scalar(other)?),
                    }
                    self.text.push_str(&self.key);
                    self.value(value, depth + 1)?;
                }
                self.after(pairs.len(), depth);
                self.text.push('}');
            }
            other => self.text.push_str(&scalar(other)?),
        }
        Ok(())
    }

    /// Text before an item.
    fn before(&mut self, index: usize, depth: usize) {
        if index > 0 {
            self.text.push_str(&self.item);
        }
        self.line(depth);
    }

    /// Text after the last item.
    fn after(&mut self, num_items: usize, depth: usize) {
        if num_items > 0 {
            self.line(depth);
        }
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.text.push('\n');
            (0..depth).for_each(|_| self.text.push_str(indent));
        }
    }

    fn string(&mut self, text: &str) {
        self.text.push('"');
        for character in text.chars() {
            match character {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                '\n' => self.text.push_str("\\n"),
                '\r' => self.text.push_str("\\r"),
                '\t' => self.text.push_str("\\t"),
                '\u{8}' => self.text.push_str("\\b"),
                '\u{c}' => self.text.push_str("\\f"),
                '\0'..' ' => self.text.push_str(&format!("\\u{:04x}", u32::from(character))),
                _ if self.ensure_ascii && !(' '..='~').contains(&character) => {
                    for unit in character.encode_utf16(&mut [0; 2]) {
                        self.text.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                _ => self.text.push(character),
            }
        }
        self.text.push('"');
    }
}

fn scalar(value: Py<'_>) -> Result<String, Error> {
    Ok(match value {
        Py::None => "null".to_owned(),
        Py::Bool(value) => value.to_string(),
        Py::Int(value) => value.to_string(),
        Py::Float(value) if value.is_nan() => "NaN".to_owned(),
        Py::Float(value) if value.is_infinite() => {
            if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned()
        }
        Py::Float(value) => float_repr(value),
        other => return Err(failed(format!("{} cannot be written as JSON", other.name()))),
    })
}
