//! Parses strict JSON into a tree with the position of every key and value.
//!
//! `serde_json` drops positions, so `jsonc-parser` (the parser of dprint and
//! Deno) builds the tree, with all its extensions to JSON disabled. Text that it
//! still accepts (control characters in strings, Unicode spaces) is then
//! rejected by `serde_json`.

use super::diagnostic::{Diagnostic, Excerpt, Position, Problem};
use crate::config_file::ConfigFileError;
use crate::regular_file;
use jsonc_parser::ast::{Object, ObjectProp, Value};
use jsonc_parser::common::Ranged;
use jsonc_parser::{CollectOptions, ParseOptions};
use serde_json::Value as Json;
use std::borrow::Cow;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Maximum size of a file.
const MAX_FILE_BYTES: usize = 16 << 20;

/// Maximum nesting; the vocabulary needs three levels.
const MAX_DEPTH: usize = 64;

const STRICT: ParseOptions = ParseOptions {
    allow_comments: false,
    allow_loose_object_property_names: false,
    allow_trailing_commas: false,
    allow_missing_commas: false,
    allow_single_quoted_strings: false,
    allow_hexadecimal_numbers: false,
    allow_unary_plus_numbers: false,
    allow_bare_decimal_point_numbers: false,
    allow_non_finite_numbers: false,
    allow_extended_string_escapes: false,
};

/// Reads a file of at most [`MAX_FILE_BYTES`]; errors call it `what`.
pub(crate) fn read(what: &'static str, path: &Path) -> Result<String, ConfigFileError> {
    let read_error = |reason| ConfigFileError::Read { what, path: path.to_owned(), reason };
    let mut text = String::new();
    // One byte more than allowed, to detect a file that is too large.
    // `/dev/stdin` and a shell's `<(…)` may be pipes.
    let file = if path.starts_with("/dev") {
        File::open(path)
    } else {
        regular_file::open(path).map(|(file, _)| file)
    };
    let file = file.map_err(read_error)?;
    let mut limited = file.take(MAX_FILE_BYTES as u64 + 1);
    match limited.read_to_string(&mut text) {
        Err(_) if limited.limit() == 0 => Err(too_large(&path.display().to_string())),
        Err(error) => Err(read_error(error)),
        Ok(_) => Ok(text),
    }
}

/// Parses the text of a file, whose root must be an object; errors call it `file`.
pub(crate) fn parse_file<'t>(text: &'t str, file: &str) -> Result<Object<'t>, ConfigFileError> {
    if text.len() > MAX_FILE_BYTES {
        return Err(too_large(file));
    }
    let parsed = match is_yaml(text, file) {
        true => Err(syntax(text, 0, YAML.to_owned())),
        false => parse(text),
    };
    parsed.map_err(|diagnostic| ConfigFileError::Invalid {
        file: file.to_owned(),
        diagnostics: vec![*diagnostic],
        omitted: 0,
    })
}

const YAML: &str = "this is YAML; the config is JSON, as DeepSpeed's `ds_config.json`. What a launcher or trainer keeps in \
                    YAML goes into flags of `ulysses train` and the section `ulysses`";

/// Returns whether a file that is no JSON object has a key of YAML on its first line, or is named so.
fn is_yaml(text: &str, file: &str) -> bool {
    let is_key = |line: &str| {
        line.split_once(':')
            .is_some_and(|(key, _)| key.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_'))
    };
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let first = lines.next().unwrap_or_default();
    let is_named_so = [".yaml", ".yml"].iter().any(|extension| file.ends_with(extension));
    !first.starts_with('{') && (is_named_so || first == "---" || is_key(first))
}

fn too_large(file: &str) -> ConfigFileError {
    ConfigFileError::TooLarge { file: file.to_owned(), limit_bytes: MAX_FILE_BYTES }
}

/// Parses `text`, whose root must be an object.
pub(crate) fn parse(text: &str) -> Result<Object<'_>, Box<Diagnostic>> {
    check_depth(text)?;
    let parsed = jsonc_parser::parse_to_ast(text, &CollectOptions::default(), &STRICT)
        .map_err(|error| syntax(text, error.range().start, error.kind().to_string()))?;
    let Some(root) = parsed.value else {
        return Err(fault(text, 0, expected_object("an empty file".to_owned())));
    };
    check_strictness(text)?;
    match root {
        Value::Object(root) => Ok(root),
        other => Err(fault(text, other.start(), expected_object(describe(&other)))),
    }
}

/// Returns the text with blanks for what DeepSpeed's reader (hjson) adds to JSON: comments (`//`, `#`, `/* */`) and trailing
/// commas. Offsets stay.
pub(crate) fn without_comments(text: &str) -> Cow<'_, str> {
    let mut blanked = text.as_bytes().to_vec();
    let (mut at, mut comma, mut previous) = (0, None, b'{');
    while let Some(rest) = text.as_bytes().get(at..).filter(|rest| !rest.is_empty()) {
        let comment_end = match rest {
            [b'#', ..] | [b'/', b'/', ..] => rest.iter().position(|&byte| byte == b'\n').or(Some(rest.len())),
            [b'/', b'*', ..] => text[at..].find("*/").map(|end| end + 2),
            _ => None,
        };
        let len = match (comment_end, rest[0]) {
            (Some(end), _) => {
                blanked[at..at + end].iter_mut().filter(|byte| **byte != b'\n').for_each(|byte| *byte = b' ');
                end
            }
            (None, b'"') => string_len(rest),
            _ => 1,
        };
        match (rest[0], comma) {
            _ if comment_end.is_some() || rest[0].is_ascii_whitespace() => {}
            (b'}' | b']', Some(comma)) => blanked[comma] = b' ',
            (byte, _) => comma = (byte == b',' && !b"{[,".contains(&previous)).then_some(at),
        }
        if comment_end.is_none() && !rest[0].is_ascii_whitespace() {
            previous = rest[0];
        }
        at += len;
    }
    match String::from_utf8(blanked) {
        Ok(blanked) if blanked != text => Cow::Owned(blanked),
        _ => Cow::Borrowed(text),
    }
}

/// Returns the bytes of the string at the beginning of `text`, with its quotes.
fn string_len(text: &[u8]) -> usize {
    let mut is_escaped = false;
    let end = text[1..].iter().position(|&byte| {
        let ends = byte == b'"' && !is_escaped;
        is_escaped = byte == b'\\' && !is_escaped;
        ends
    });
    end.map_or(text.len(), |end| end + 2)
}

/// Returns an integer, also in the notation of floats (`1e5`, `2.0`) if it is exact.
pub(super) fn integer_of(number: &str) -> Option<i128> {
    const EXACT: f64 = (1_u64 << 53) as f64;
    let float = || number.parse().ok().filter(|float: &f64| float.fract() == 0.0 && float.abs() <= EXACT);
    number.parse().ok().or_else(|| float().map(|float| float as i128))
}

/// Returns the line and column of a byte offset.
pub(crate) fn position_at(text: &str, offset: usize) -> Position {
    let before = &text.as_bytes()[..offset.min(text.len())];
    let line_start = before.iter().rposition(|&byte| byte == b'\n').map_or(0, |newline| newline + 1);
    let starts_char = |byte: &&u8| !(0x80..0xC0).contains(*byte); // not a UTF-8 continuation
    Position {
        line: 1 + before.iter().filter(|&&byte| byte == b'\n').count(),
        column: 1 + before[line_start..].iter().filter(starts_char).count(),
    }
}

/// Describes a value for error messages.
pub(crate) fn describe(value: &Value<'_>) -> String {
    match value {
        Value::StringLit(string) => format!("the string \"{}\"", abbreviated(&string.value)),
        Value::NumberLit(number) => abbreviated(number.value),
        Value::BooleanLit(boolean) => boolean.value.to_string(),
        Value::Object(_) => "an object".to_owned(),
        Value::Array(array) => format!("an array of {}", array.elements.len()),
        Value::NullKeyword(_) => "null".to_owned(),
    }
}

/// Returns a mesh in the notation of [`MeshSpec`](crate::mesh::MeshSpec): a string, or an object such as
/// `{"intra": {"sp": 4}, "inter": {"dp": 2}}`.
pub(super) fn mesh_text(value: &Value<'_>) -> Option<String> {
    let side = |name: &str, axes: &Value<'_>| {
        let Value::Object(axes) = axes else { return None };
        let axis = |property: &ObjectProp<'_>| match &property.value {
            Value::NumberLit(number) => {
                let size = integer_of(number.value).map_or(number.value.to_owned(), |size| size.to_string());
                Some(format!("{}={size}", property.name.as_str()))
            }
            _ => None,
        };
        let axes = axes.properties.iter().map(axis).collect::<Option<Vec<_>>>()?;
        Some(format!("{name}:{}", axes.join(",")))
    };
    match value {
        Value::StringLit(text) => Some(text.value.to_string()),
        Value::Object(sides) => {
            let sides = sides.properties.iter().map(|property| side(property.name.as_str(), &property.value));
            Some(sides.collect::<Option<Vec<_>>>()?.join("/"))
        }
        _ => None,
    }
}

/// Returns a value as JSON.
pub(super) fn to_json(value: &Value<'_>) -> Json {
    match value {
        Value::StringLit(string) => Json::from(string.value.as_ref()),
        Value::NumberLit(number) => number_to_json(number.value),
        Value::BooleanLit(boolean) => Json::from(boolean.value),
        Value::Object(object) => {
            let property =
                |property: &ObjectProp<'_>| (property.name.as_str().to_owned(), to_json(&property.value));
            object.properties.iter().map(property).collect()
        }
        Value::Array(array) => array.elements.iter().map(to_json).collect(),
        Value::NullKeyword(_) => Json::Null,
    }
}

/// Returns a number as an integer if it is one, in any notation. (`serde_json` rounds some floats differently.)
fn number_to_json(number: &str) -> Json {
    let integer = integer_of(number);
    let unsigned = integer.and_then(|integer| u64::try_from(integer).ok()).map(Json::from);
    let signed = || integer.and_then(|integer| i64::try_from(integer).ok()).map(Json::from);
    unsigned.or_else(signed).unwrap_or_else(|| number.parse::<f64>().unwrap_or_default().into())
}

/// Shortens and escapes a string of the file for a message.
pub(crate) fn abbreviated(text: &str) -> String {
    const MAX_CHARS: usize = 60;
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}…", text[..end].escape_debug()),
        None => text.escape_debug().to_string(),
    }
}

/// Rejects deep nesting before a recursive parser sees it.
fn check_depth(text: &str) -> Result<(), Box<Diagnostic>> {
    let (mut depth, mut in_string, mut escaped) = (0usize, false, false);
    for (offset, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'{' | b'[' if !in_string => depth += 1,
            b'}' | b']' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_DEPTH {
            return Err(fault(text, offset, Problem::TooDeep { limit: MAX_DEPTH }));
        }
    }
    Ok(())
}

fn check_strictness(text: &str) -> Result<(), Box<Diagnostic>> {
    serde_json::from_str::<serde::de::IgnoredAny>(text).map(drop).map_err(|error| {
        // serde_json counts columns in bytes and appends the position to its message.
        let line_start =
            text.split_inclusive('\n').take(error.line().saturating_sub(1)).map(str::len).sum::<usize>();
        let message = error.to_string();
        let message = message.rsplit_once(" at line ").map_or(message.as_str(), |(reason, _)| reason);
        syntax(text, line_start + error.column().saturating_sub(1), message.to_owned())
    })
}

fn expected_object(found: String) -> Problem {
    Problem::InvalidValue { expected: "a JSON object".to_owned(), found }
}

fn syntax(text: &str, offset: usize, message: String) -> Box<Diagnostic> {
    fault(text, offset, Problem::Syntax { message })
}

fn fault(text: &str, offset: usize, problem: Problem) -> Box<Diagnostic> {
    let position = position_at(text, offset);
    let excerpt = Excerpt::new(text, position.line, offset..offset + 1);
    Box::new(Diagnostic { position, key: String::new(), problem, excerpt })
}
