//! Text that a terminal only shows.

use std::borrow::Cow;
use std::fmt::Write;

/// The text with its control characters escaped, as JSON escapes them: what names of files, config keys or tensors hold
/// is shown by a terminal and not obeyed. Newlines and tabs stay.
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
    fn control_characters_are_escaped_but_for_newlines_and_tabs() {
        let text = "a\tb\n\u{1b}]0;title\u{7}\r\u{7f}\u{9b}31m é";
        assert_eq!(escaped(text), "a\tb\n\\u001b]0;title\\u0007\\u000d\\u007f\\u009b31m é");
    }

    #[test]
    fn what_is_json_stays_the_same_json() {
        let json = serde_json::to_string("\u{9b}31m\u{1b}").unwrap();
        let shown = escaped(&json);
        assert!(!shown.contains(char::is_control), "{shown}");
        assert_eq!(serde_json::from_str::<String>(&shown).unwrap(), "\u{9b}31m\u{1b}");
    }
}
