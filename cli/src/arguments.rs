//! The command line's arguments, and what is said of those that are no numbers or no valid ones.

use super::{Cli, log_line};
use clap::builder::Styles;
use clap::error::{ContextKind, Error, ErrorKind};
use clap::{Arg, Command, CommandFactory, FromArgMatches};
use std::error::Error as _;
use std::ffi::OsString;
use std::num::{IntErrorKind, ParseFloatError, ParseIntError};
use std::str::FromStr;

/// The arguments of this process. What is wrong with them ends it with exit code 2.
pub(super) fn parse() -> Cli {
    parse_from(std::env::args_os()).unwrap_or_else(|error| exit(&error))
}

/// Shows an error, or the help that was asked for. An error shows arguments; where those hold control characters, it does
/// so without clap's colors and with these characters escaped.
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

/// The arguments of another process of this program, its name first.
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
    matches.and_then(|matches| Cli::from_arg_matches(&matches)).map_err(in_plain_words).and_then(settled)
}

/// Resolves arguments that depend on each other.
fn settled(mut cli: Cli) -> Result<Cli, Error> {
    if let super::Command::Train(args) = &mut cli.command {
        args.settle().map_err(|message| Error::raw(ErrorKind::MissingRequiredArgument, message))?;
    }
    Ok(cli)
}

/// The command line that is taken.
pub(super) fn command() -> Command {
    taking_negative_numbers(Cli::command())
}

/// `-1` after a flag is its value, which is told what is wrong with it, and no flag of its own.
fn taking_negative_numbers(command: Command) -> Command {
    let of_arg = |arg: Arg| match arg.get_action().takes_values() {
        true => arg.allow_negative_numbers(true),
        false => arg,
    };
    command.mut_args(of_arg).mut_subcommands(taking_negative_numbers)
}

/// Parses a count that cannot be 0.
pub(super) fn at_least_1<N: FromStr + PartialOrd + From<u8>>(text: &str) -> Result<N, String> {
    let number = text.parse().ok().filter(|number: &N| *number >= N::from(1));
    number.ok_or_else(|| "expected a whole number from 1".to_owned())
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
