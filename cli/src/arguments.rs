//! Parsing of the command line, with error messages for invalid numbers.

use super::Cli;
use crate::output::log_line;
use clap::builder::Styles;
use clap::error::{ContextKind, Error, ErrorKind};
use clap::{Arg, Command, CommandFactory, FromArgMatches};
use std::error::Error as _;
use std::ffi::OsString;
use std::num::{IntErrorKind, ParseFloatError, ParseIntError};
use std::str::FromStr;

/// Parses the arguments of this process. Invalid arguments end it with exit code 2.
pub(super) fn parse() -> Cli {
    parse_from(std::env::args_os()).unwrap_or_else(|error| exit(&error))
}

/// Prints a parse error or the requested help, and exits. If an argument contains control characters, the error is
/// printed without colors and with these characters escaped.
fn exit(error: &Error) -> ! {
    let mut arguments = std::env::args_os();
    let has_control = arguments.any(|argument| argument.to_string_lossy().contains(char::is_control));
    let without_colors = command().styles(Styles::plain());
    match parse_by(without_colors, std::env::args_os()) {
        Err(error) if has_control && error.use_stderr() => {
            log_line(error.render().ansi().to_string().trim_end());
            std::process::exit(error.exit_code())
        }
        _ => error.exit(),
    }
}

/// Parses the arguments of another `ulysses` process, including the program name.
pub(super) fn parse_from<W: Into<OsString> + Clone>(
    words: impl IntoIterator<Item = W>,
) -> Result<Cli, Error> {
    parse_by(command(), words)
}

fn parse_by<W: Into<OsString> + Clone>(
    command: Command,
    words: impl IntoIterator<Item = W>,
) -> Result<Cli, Error> {
    let matches = command.try_get_matches_from(words);
    matches.and_then(|matches| Cli::from_arg_matches(&matches)).map_err(with_expected_value).and_then(settled)
}

/// Resolves arguments that depend on each other.
fn settled(mut cli: Cli) -> Result<Cli, Error> {
    if let super::Command::Train(args) = &mut cli.command {
        args.settle().map_err(|message| Error::raw(ErrorKind::MissingRequiredArgument, message))?;
    }
    Ok(cli)
}

/// Returns the definition of the command line.
pub(super) fn command() -> Command {
    allow_negative_numbers(Cli::command())
}

/// Lets every flag take a negative number, so that `-1` gets the flag's own error instead of "unknown flag".
fn allow_negative_numbers(command: Command) -> Command {
    let of_arg = |arg: Arg| match arg.get_action().takes_values() {
        true => arg.allow_negative_numbers(true),
        false => arg,
    };
    command.mut_args(of_arg).mut_subcommands(allow_negative_numbers)
}

/// Parses a count that cannot be 0.
pub(super) fn at_least_1<N: FromStr + PartialOrd + From<u8>>(text: &str) -> Result<N, String> {
    let number = text.parse().ok().filter(|number: &N| *number >= N::from(1));
    number.ok_or_else(|| "expected a whole number of at least 1".to_owned())
}

/// Replaces the standard library's "invalid digit found in string" by the expected kind of value.
fn with_expected_value(error: Error) -> Error {
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
        _ => "a whole number of at least 0",
    })
}
