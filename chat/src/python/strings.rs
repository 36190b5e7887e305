//! Python's methods of strings.

use super::failed;
use minijinja::Error;
use std::fmt::Write;

/// `str.isspace` of a character. Rust does not count the four separators.
pub(crate) fn is_space(character: char) -> bool {
    character.is_whitespace() || matches!(character, '\u{1c}'..='\u{1f}')
}

/// Returns whether `repr` shows a character as it is.
fn is_printable(character: char) -> bool {
    // Rust shows marks that extend another character only behind one.
    let shown = format!("a{character}").escape_debug().count();
    shown == 2 || matches!(character, '"' | '\'' | '\\')
}

/// Appends `repr(text)`.
pub(super) fn write_repr(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for character in text.chars() {
        // Writing to a string cannot fail.
        let _ = match character {
            '\\' => write!(out, "\\\\"),
            '\n' => write!(out, "\\n"),
            '\r' => write!(out, "\\r"),
            '\t' => write!(out, "\\t"),
            _ if character == quote => write!(out, "\\{quote}"),
            _ if is_printable(character) => write!(out, "{character}"),
            _ => match u32::from(character) {
                code @ ..=0xff => write!(out, "\\x{code:02x}"),
                code @ ..=0xffff => write!(out, "\\u{code:04x}"),
                code => write!(out, "\\U{code:08x}"),
            },
        };
    }
    out.push(quote);
}

/// `str.strip(chars)`, at the start, at the end or both.
pub(crate) fn strip<'a>(text: &'a str, chars: Option<&str>, [start, end]: [bool; 2]) -> &'a str {
    let is_cut =
        |character: char| chars.map_or_else(|| is_space(character), |chars| chars.contains(character));
    let text = if start { text.trim_start_matches(is_cut) } else { text };
    if end { text.trim_end_matches(is_cut) } else { text }
}

/// `str.splitlines(keepends)`.
pub(crate) fn split_lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let is_end = |character: char| {
        matches!(
            character,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let (mut lines, mut rest) = (Vec::new(), text);
    while let Some((at, end)) = rest.char_indices().find(|(_, character)| is_end(*character)) {
        let end_len = if rest[at..].starts_with("\r\n") { 2 } else { end.len_utf8() };
        lines.push(&rest[..if keep_ends { at + end_len } else { at }]);
        rest = &rest[at + end_len..];
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
}

/// The title case of a character, where it is the upper case.
fn title_case(character: char) -> Result<std::char::ToUppercase, Error> {
    let upper = character.to_uppercase();
    let is_other = upper.len() > 1
        || matches!(character, '\u{1c4}'..='\u{1cc}' | '\u{1f1}'..='\u{1f3}' | '\u{10d0}'..='\u{10ff}');
    match is_other {
        true => Err(failed(format!("the title case of {character:?} is not supported"))),
        false => Ok(upper),
    }
}

/// `str.capitalize()`.
pub(crate) fn capitalize(text: &str) -> Result<String, Error> {
    let mut chars = text.chars();
    let Some(first) = chars.next() else { return Ok(String::new()) };
    Ok(title_case(first)?.chain(chars.as_str().to_lowercase().chars()).collect())
}

/// `str.title()`.
pub(crate) fn title(text: &str) -> Result<String, Error> {
    let (mut titled, mut is_inside) = (String::with_capacity(text.len()), false);
    for character in text.chars() {
        match is_inside {
            true => titled.extend(character.to_lowercase()),
            false => titled.extend(title_case(character)?),
        }
        is_inside = character.is_lowercase() || character.is_uppercase();
    }
    Ok(titled)
}

/// `str.split()` at white space, at most `limit` times.
pub(super) fn split_space(text: &str, limit: Option<usize>, from_end: bool) -> Vec<String> {
    let mut rest = strip(text, None, [!from_end, from_end]);
    let mut parts = Vec::new();
    while !rest.is_empty() {
        let at = match from_end {
            _ if limit.is_some_and(|limit| parts.len() >= limit) => None,
            true => rest.rfind(is_space),
            false => rest.find(is_space),
        };
        let Some(at) = at else {
            // The last part keeps white space inside of it.
            parts.push(strip(rest, None, [from_end, !from_end]));
            break;
        };
        let space = rest[at..].chars().next().map_or(0, char::len_utf8);
        let (part, other) = match from_end {
            true => (&rest[at + space..], &rest[..at]),
            false => (&rest[..at], &rest[at + space..]),
        };
        parts.push(part);
        rest = strip(other, None, [!from_end, from_end]);
    }
    if from_end {
        parts.reverse();
    }
    parts.retain(|part| !part.is_empty());
    parts.into_iter().map(str::to_owned).collect()
}

/// `str.split(separator)`, at most `limit` times.
pub(super) fn split_at(text: &str, separator: &str, limit: Option<usize>, from_end: bool) -> Vec<String> {
    let mut parts: Vec<&str> = match (limit, from_end) {
        (None, _) => text.split(separator).collect(),
        (Some(limit), false) => text.splitn(limit.saturating_add(1), separator).collect(),
        (Some(limit), true) => text.rsplitn(limit.saturating_add(1), separator).collect(),
    };
    if from_end && limit.is_some() {
        parts.reverse();
    }
    parts.into_iter().map(str::to_owned).collect()
}

/// `str.replace(old, new, count)`.
pub(crate) fn replace(text: &str, old: &str, new: &str, count: Option<usize>) -> String {
    text.replacen(old, new, count.unwrap_or(usize::MAX))
}
