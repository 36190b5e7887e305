//! Limits of a template. A template comes with a model from anywhere, so a small file must not occupy a machine.

use super::failed;
use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};
use std::cell::Cell;

/// Instructions of one text: seconds, and far beyond a conversation of thousands of messages.
pub(super) const MAX_INSTRUCTIONS: u64 = 20_000_000;

/// Instructions of all the texts that tell where the answers of one conversation are.
pub(super) const MAX_TOTAL_INSTRUCTIONS: u64 = 2_000_000_000;

/// Bytes that the operations of one text may read and make. No value of it can be larger.
const MAX_BYTES: usize = 1 << 28;

/// Values inside of each other. Messages have 128 levels at most, as their JSON.
pub(super) const MAX_DEPTH: usize = 200;

/// Macros that call each other, and blocks inside of each other: each takes some of a thread's stack.
pub(super) const MAX_RECURSION: usize = 120;

/// Bytes of a template; published ones have less than 30 thousand.
const MAX_SOURCE_BYTES: usize = 1 << 20;

/// Tokens of one `{{ … }}` or `{% … %}`. The compiler calls itself for each.
const MAX_TAG_TOKENS: usize = 1000;

/// The cost of one element of a list.
const ELEMENT_BYTES: usize = 32;

thread_local! {
    /// Bytes that are left to the text that this thread is making.
    static BYTES_LEFT: Cell<usize> = const { Cell::new(0) };
}

/// Starts a text.
pub(super) fn start() {
    BYTES_LEFT.set(MAX_BYTES);
}

/// Counts bytes of an operation, before they are made.
pub(super) fn charge(bytes: usize) -> Result<(), Error> {
    let left = BYTES_LEFT.get().checked_sub(bytes).ok_or_else(|| {
        let message = format!("it takes operations on more than {} MiB of values", MAX_BYTES >> 20);
        Error::new(ErrorKind::OutOfFuel, message)
    })?;
    BYTES_LEFT.set(left);
    Ok(())
}

/// Counts elements of a list.
pub(super) fn charge_elements(count: usize) -> Result<(), Error> {
    charge(count.saturating_mul(ELEMENT_BYTES))
}

/// Counts a value by its bytes or by its own elements.
pub(super) fn charge_value(value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::String => charge(value.as_str().map_or(0, str::len)),
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map => charge_elements(value.len().unwrap_or(0)),
        _ => Ok(()),
    }
}

/// Checks a template for what the compiler itself has no bound for: the length of an expression, and constants
/// that it would compute.
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
        // A constant that is repeated is made while compiling.
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
