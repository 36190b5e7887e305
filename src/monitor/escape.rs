//! Escapes control characters for terminals.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::Write;

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

/// Writes a line with control characters [`escaped`], in a single write: a line of several writes mixes with those of other
/// processes, and `mpirun --tag-output` tags each part.
///
/// # Errors
/// Those of `to`.
pub fn write_line(to: &mut impl Write, line: &str) -> std::io::Result<()> {
    // Also after the escape, which is up to six times as long.
    to.write_all(format!("{}\n", brief(&escaped(&brief(line)))).as_bytes())
}

/// The most bytes of a message: what it quotes, such as a file or the error of a chat template, may have any length.
const MAX_MESSAGE_BYTES: usize = 8 << 10;

/// Returns a message of a few KiB: a longer one without its middle.
pub fn brief(message: &str) -> Cow<'_, str> {
    if message.len() <= MAX_MESSAGE_BYTES {
        return Cow::Borrowed(message);
    }
    let (head, tail) = (MAX_MESSAGE_BYTES * 3 / 4, message.len() - MAX_MESSAGE_BYTES / 8);
    let boundary = |at: usize| (0..=at).rev().find(|at| message.is_char_boundary(*at)).unwrap_or_default();
    let (head, tail) = (boundary(head), boundary(tail));
    let omitted = tail - head;
    Cow::Owned(format!("{} … ({omitted} bytes omitted) … {}", &message[..head], &message[tail..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_a_single_write() {
        struct Writes(Vec<Vec<u8>>);

        impl Write for Writes {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                self.0.push(bytes.to_vec());
                Ok(bytes.len())
            }

            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }

        let mut writes = Writes(Vec::new());
        write_line(&mut writes, "a\rb").unwrap();
        assert_eq!(writes.0, [b"a\\u000db\n"]);
        write_line(&mut writes, &"\0".repeat(10_000)).unwrap();
        assert!(writes.0[1].len() <= MAX_MESSAGE_BYTES + 1, "{}", writes.0[1].len());
    }

    #[test]
    fn control_characters_except_newlines_and_tabs_are_escaped() {
        let text = "a\tb\n\u{1b}]0;title\u{7}\r\u{7f}\u{9b}31m é";
        assert_eq!(escaped(text), "a\tb\n\\u001b]0;title\\u0007\\u000d\\u007f\\u009b31m é");
    }

    #[test]
    fn a_long_message_is_shown_without_its_middle() {
        let short = "a".repeat(MAX_MESSAGE_BYTES);
        assert_eq!(brief(&short), short);
        // Characters of several bytes are not cut.
        for (filler, count) in [("a", 100_000_000), ("é", 5000), ("\u{1b}", 10_000)] {
            let message = format!("line 3: {filler}{}: expected less", filler.repeat(count));
            let shown = brief(&message);
            assert!(shown.len() <= MAX_MESSAGE_BYTES && shown.starts_with("line 3: "), "{}", shown.len());
            assert!(shown.contains("bytes omitted) … ") && shown.ends_with(": expected less"));
        }
    }

    #[test]
    fn escaped_json_is_equal_json() {
        let json = serde_json::to_string("\u{9b}31m\u{1b}").unwrap();
        let shown = escaped(&json);
        assert!(!shown.contains(char::is_control), "{shown}");
        assert_eq!(serde_json::from_str::<String>(&shown).unwrap(), "\u{9b}31m\u{1b}");
    }
}
