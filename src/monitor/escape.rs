//! Escapes control characters for terminals.

use std::borrow::Cow;
use std::fmt::Write;

/// Returns the text with control characters escaped as in JSON, so that a terminal does not interpret the names of files,
/// config keys or tensors. Newlines and tabs are kept.
///
/// ```
/// use ulysses::monitor::escaped;
///
/// assert_eq!(escaped("cannot read \u{1b}[31mdata\r\n"), "cannot read \\u001b[31mdata\\u000d\n");
/// ```
pub fn escaped(text: &str) -> Cow<'_, str> {
    let acts = |char: char| char.is_control() && !matches!(char, '\n' | '\t');
    if !text.contains(acts) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for char in text.chars() {
        match acts(char) {
            // Writing to a string cannot fail.
            true => drop(write!(shown, "\\u{:04x}", u32::from(char))),
            false => shown.push(char),
        }
    }
    Cow::Owned(shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_except_newlines_and_tabs_are_escaped() {
        let text = "a\tb\n\u{1b}]0;title\u{7}\r\u{7f}\u{9b}31m é";
        assert_eq!(escaped(text), "a\tb\n\\u001b]0;title\\u0007\\u000d\\u007f\\u009b31m é");
    }

    #[test]
    fn escaped_json_is_equal_json() {
        let json = serde_json::to_string("\u{9b}31m\u{1b}").unwrap();
        let shown = escaped(&json);
        assert!(!shown.contains(char::is_control), "{shown}");
        assert_eq!(serde_json::from_str::<String>(&shown).unwrap(), "\u{9b}31m\u{1b}");
    }
}
