//! Limits of a template. Templates are untrusted: a small file must not exhaust time or memory.

use super::failed;
use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};
use std::cell::Cell;

/// Maximum instructions per rendering: seconds, far more than a conversation of thousands of messages needs.
pub(super) const MAX_INSTRUCTIONS: u64 = 20_000_000;

/// Maximum instructions of all renderings that locate the answers of one conversation.
pub(super) const MAX_TOTAL_INSTRUCTIONS: u64 = 2_000_000_000;

/// Maximum bytes that the operations of one rendering read and write; also bounds the size of each value.
const MAX_BYTES: usize = 1 << 28;

/// Maximum nesting of values. Messages have at most 128 levels, the limit of their JSON.
pub(super) const MAX_DEPTH: usize = 200;

/// Maximum nesting of macro calls and blocks, each of which takes stack.
pub(super) const MAX_RECURSION: usize = 120;

/// Maximum bytes of a template; published ones have less than 30 thousand.
const MAX_SOURCE_BYTES: usize = 1 << 20;

/// Maximum tokens of one `{{ … }}` or `{% … %}`; the compiler recurses for each.
const MAX_TAG_TOKENS: usize = 1000;

/// The cost of one element of a list.
const ELEMENT_BYTES: usize = 32;

thread_local! {
    /// Bytes that remain for the rendering of this thread.
    static BYTES_LEFT: Cell<usize> = const { Cell::new(0) };
}

/// Starts a rendering.
pub(super) fn start() {
    BYTES_LEFT.set(MAX_BYTES);
}

/// Counts the bytes of an operation in advance.
pub(super) fn charge(bytes: usize) -> Result<(), Error> {
    let left = BYTES_LEFT.get().checked_sub(bytes).ok_or_else(|| {
        let message = format!("it takes operations on more than {} MiB of values", MAX_BYTES >> 20);
        Error::new(ErrorKind::OutOfFuel, message)
    })?;
    BYTES_LEFT.set(left);
    Ok(())
}

/// Counts the elements of a list.
pub(super) fn charge_elements(count: usize) -> Result<(), Error> {
    charge(count.saturating_mul(ELEMENT_BYTES))
}

/// Counts the bytes or the elements of a value.
pub(super) fn charge_value(value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::String => charge(value.as_str().map_or(0, str::len)),
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map => charge_elements(value.len().unwrap_or(0)),
        _ => Ok(()),
    }
}

/// Checks the limits that the compiler does not have: the length of an expression, and the size of constants.
pub(super) fn check_source(source: &str, syntax: &SyntaxConfig) -> Result<(), Error> {
    if source.len() > MAX_SOURCE_BYTES {
        return Err(failed(format!("the template has {} bytes; {MAX_SOURCE_BYTES} are valid", source.len())));
    }
    let mut tag = Tag::default();
    for token in tokenize(source, false, syntax.clone()) {
        let (token, span) = token?;
        tag.add(&token);
        let line = span.start_line;
        if tag.num_tokens > MAX_TAG_TOKENS {
            return Err(failed(format!(
                "line {line}: a tag has more than {MAX_TAG_TOKENS} names, values and signs"
            )));
        }
        // Repetitions of constants are computed by the compiler.
        if tag.multiplies && (tag.raises || tag.product.saturating_mul(tag.literal_bytes) > 1 << 20) {
            return Err(failed(format!("line {line}: a tag makes a constant of more than a MiB")));
        }
    }
    Ok(())
}

#[derive(Default)]
struct Tag {
    num_tokens: usize,
    /// Of all its integers.
    product: u128,
    literal_bytes: u128,
    multiplies: bool,
    raises: bool,
}

impl Tag {
    fn add(&mut self, token: &Token<'_>) {
        self.num_tokens += 1;
        match token {
            Token::TemplateData(_) | Token::VariableStart | Token::BlockStart => {
                *self = Self { product: 1, literal_bytes: 1, ..Self::default() };
            }
            Token::Int(number) => {
                self.product = self.product.saturating_mul(u128::from(*number).max(1));
            }
            Token::Int128(_) => self.product = u128::MAX,
            Token::Str(text) => self.literal_bytes += text.len() as u128,
            Token::String(text) => self.literal_bytes += text.len() as u128,
            Token::Comma => self.literal_bytes += ELEMENT_BYTES as u128,
            Token::Mul => self.multiplies = true,
            Token::Pow => self.raises = true,
            _ => {}
        }
    }
}
