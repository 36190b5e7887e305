//! The command line's arguments, and what is said of those that are no numbers.

use super::Cli;
use clap::Parser;
use clap::error::{ContextKind, Error, ErrorKind};
use std::error::Error as _;
use std::num::{IntErrorKind, ParseFloatError, ParseIntError};

/// The arguments of this process. What is wrong with them ends it with exit code 2.
pub(super) fn parse() -> Cli {
    Cli::try_parse().unwrap_or_else(|error| in_plain_words(error).exit())
}

/// The standard library says what is wrong with a text that is no number ("invalid digit found in string"), not what would be
/// right.
fn in_plain_words(error: Error) -> Error {
    let context = |kind| error.get(kind).map(ToString::to_string);
    let Some(expected) = error.source().and_then(expected) else { return error };
    let (Some(argument), Some(value)) =
        (context(ContextKind::InvalidArg), context(ContextKind::InvalidValue))
    else {
        return error;
    };
    let message = format!("invalid value '{value}' for '{argument}': expected {expected}\n");
    Error::raw(ErrorKind::ValueValidation, message)
}

fn expected(source: &(dyn std::error::Error + 'static)) -> Option<&'static str> {
    if source.is::<ParseFloatError>() {
        return Some("a number, such as 80 or 0.5");
    }
    Some(match source.downcast_ref::<ParseIntError>()?.kind() {
        IntErrorKind::PosOverflow => "a smaller number",
        _ => "a whole number that is not negative",
    })
}
