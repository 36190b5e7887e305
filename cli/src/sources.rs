//! Tokenizers and data files, for all commands that read data.

use crate::failure::{Failure, OrFail};
use crate::output::log_line;
use anyhow::Context;
use std::path::{Path, PathBuf};
use ulysses::config::ChatDate;
use ulysses::data::{DataError, FileError, Notes, Tokenizer};
use ulysses::trainer::JobError;

/// Opens a tokenizer file, or that of bytes.
pub(super) fn tokenizer_file(path: Option<&Path>, chat_date: ChatDate) -> Result<Tokenizer, JobError> {
    let Some(path) = path else { return Ok(Tokenizer::bytes()) };
    let program = std::env::current_exe().context("cannot find the path of this program");
    Tokenizer::in_worker(path, chat_date, &program.map_err(JobError::usage)?).map_err(JobError::usage)
}

/// Answers the requests of [`tokenizer_file`] in another process.
pub(super) fn serve_tokenizer(TokenizerArgs { path, chat_date }: &TokenizerArgs) -> Result<(), Failure> {
    ulysses::data::serve_tokenizer(path, *chat_date).or_run()
}

/// The arguments that [`Tokenizer::in_worker`] gives.
#[derive(clap::Args)]
pub(super) struct TokenizerArgs {
    #[arg(allow_hyphen_values = true)]
    path: PathBuf,
    chat_date: ChatDate,
}

/// Parses a flag whose values are the `CHOICES` of a key.
pub(super) fn parse_choice<T: Copy>(choices: &[(&str, T)], name: &str) -> Result<T, String> {
    let found = choices.iter().find(|(choice, _)| *choice == name);
    found.map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
        let (last, others) = names.split_last().unwrap_or((&"", &[]));
        format!("expected {} or {last}", others.join(", "))
    })
}

/// Logs what the user should know about lines.
pub(super) fn log_notes(notes: &Notes) {
    if !notes.is_empty() {
        log_line(format_args!("data: {notes}"));
    }
}

/// Classifies a data error as bad arguments or as a failed run.
pub(super) fn failure(error: DataError) -> Failure {
    let is_usage = matches!(
        error,
        DataError::Missing { .. }
            | DataError::Pattern { .. }
            | DataError::OutputExists { .. }
            | DataError::OtherPreparation { .. }
            | DataError::File(FileError::NotRead { .. })
    );
    if is_usage { Failure::Usage(error.into()) } else { Failure::Run(error.into()) }
}
