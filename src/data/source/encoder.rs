//! Tokenizes batches of records where the tokenizer runs.

use super::document::{Document, LocalEncoder, TextOptions};
use super::record::Record;
use crate::data::tokenizer::Place;
use crate::data::{DataError, OnBadLine, Tokenizer};
use std::error::Error as _;

/// Tokenizes records.
#[derive(Debug, Clone, Copy)]
pub(in crate::data) struct Encoder<'a> {
    pub(in crate::data) tokenizer: &'a Tokenizer,
    pub(in crate::data) options: TextOptions<'a>,
    pub(in crate::data) on_bad_line: OnBadLine,
}

impl Encoder<'_> {
    /// Tokenizes records in parallel, in order. The error is that of the first failing record in order; skipped bad lines are
    /// added to `bad_lines`.
    pub(in crate::data) fn encode_all(
        &self,
        records: Vec<Record>,
        bad_lines: &mut Vec<DataError>,
    ) -> Result<Vec<Document>, DataError> {
        let options = self.options;
        let documents = match self.tokenizer.place() {
            Place::Here(tokenizer) => LocalEncoder { tokenizer, options }.encode_all(records),
            #[cfg(unix)]
            Place::Worker(worker) => worker.encode(options, records)?,
        };
        let is_skipped = |error: &DataError| self.on_bad_line == OnBadLine::Skip && error.is_of_a_line();
        let keep = |document| match document {
            Err(error) if is_skipped(&error) => {
                bad_lines.push(error);
                None
            }
            document => Some(document),
        };
        documents.into_iter().filter_map(keep).collect()
    }
}

/// Starts the tokenization threads, unless they run already or the caller is in a pool. Rayon itself would panic on
/// failure.
pub(in crate::data) fn start_threads() -> Result<(), DataError> {
    if rayon::current_thread_index().is_some() {
        return Ok(());
    }
    let started = rayon::ThreadPoolBuilder::new().build_global();
    // An error without a cause means that they run already.
    match started.as_ref().err().and_then(|error| error.source()?.downcast_ref::<std::io::Error>()) {
        Some(source) => {
            Err(DataError::NoThreads { source: std::io::Error::new(source.kind(), source.to_string()) })
        }
        None => Ok(()),
    }
}
