//! [`Worker`]: a tokenizer in a process of its own, under limits of the operating system.
//!
//! Any part of a `tokenizer.json` or a chat template may take unbounded time, memory or stack. Instead of a limit on each
//! operation, the process that runs them limits itself (`limits`). When it ends, the records of its batch are sent one by
//! one to a new process, so that the error names the record on which it ends.

mod limits;
mod process;
mod protocol;
mod serve;

use super::Properties;
use crate::config::ChatDate;
use crate::data::DataError;
use crate::data::source::{Content, Document, Record, TextOptions};
use parking_lot::Mutex;
use process::{Ended, Process};
use protocol::{RecordText, Reply, Request};
pub use serve::serve_tokenizer;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A tokenizer in another process.
#[derive(Debug)]
pub(in crate::data) struct Worker {
    program: PathBuf,
    path: PathBuf,
    date: ChatDate,
    /// None after the process has ended.
    process: Mutex<Option<Process>>,
}

impl Worker {
    pub(super) fn start(
        path: &Path,
        date: ChatDate,
        program: &Path,
    ) -> Result<(Self, Properties), DataError> {
        let (path, program) = (path.to_owned(), program.to_owned());
        let worker = Self { program, path, date, process: Mutex::default() };
        let (process, properties) = worker.start_process()?;
        *worker.process.lock() = Some(process);
        Ok((worker, properties))
    }

    fn start_process(&self) -> Result<(Process, Properties), DataError> {
        let error = |source| DataError::TokenizerLoad { path: self.path.clone(), source };
        let started = Process::start(&self.program, &self.path, self.date);
        let mut process =
            started.map_err(|source| error(format!("cannot start its process: {source}").into()))?;
        match process.read_reply() {
            Ok(Reply::Loaded(properties)) => Ok((process, properties)),
            Ok(Reply::Failed(failed)) => Err(failed.into()),
            Ok(_) => Err(error(format!("reading it {}", wrong_answer()).into())),
            Err(ended) => Err(error(format!("reading it {ended}").into())),
        }
    }

    /// Tokenizes records in order, up to one on which the process ends. The outer error is that of a process that does not start.
    pub(in crate::data) fn encode(
        &self,
        options: TextOptions<'_>,
        records: Vec<Record>,
    ) -> Result<Vec<Result<Document, DataError>>, DataError> {
        let mut documents = match self.documents(options, &records)? {
            Ok(documents) => documents,
            Err(_) => self.one_by_one(options, &records)?,
        };
        for (document, record) in documents.iter_mut().zip(records) {
            if let Content::Broken(error) = record.content {
                *document = Err(error.into());
            }
        }
        Ok(documents)
    }

    /// Tokenizes records in order, up to one on which the process ends.
    fn one_by_one(
        &self,
        options: TextOptions<'_>,
        records: &[Record],
    ) -> Result<Vec<Result<Document, DataError>>, DataError> {
        let mut documents = Vec::with_capacity(records.len());
        for record in records {
            match self.documents(options, std::slice::from_ref(record))? {
                Ok(found) => documents.extend(found),
                Err(ended) => {
                    documents.push(Err(ended_on(&place(record), ended)));
                    break;
                }
            }
        }
        Ok(documents)
    }

    /// Tokenizes records. The outer error is that of a process that does not start.
    fn documents(
        &self,
        options: TextOptions<'_>,
        records: &[Record],
    ) -> Result<Result<Vec<Result<Document, DataError>>, Ended>, DataError> {
        let mut last_path = None;
        let texts = records.iter().map(|Record { path, content }| {
            let is_same = last_path.replace(path).is_some_and(|last| Arc::ptr_eq(last, path));
            let path = (!is_same).then(|| path.display().to_string());
            let (line, bytes) = match content {
                Content::Text(text) => (None, text.as_bytes()),
                Content::Line { number, bytes } => (Some(*number), bytes.as_slice()),
                Content::Broken(_) => (None, &[][..]),
            };
            RecordText { path, line, bytes }
        });
        let request = Request::Encode { options, records: texts.collect() };
        Ok(self.call(&request)?.and_then(|reply| match reply {
            Reply::Documents(documents) if documents.len() == records.len() => {
                Ok(documents.into_iter().map(|document| document.map_err(DataError::from)).collect())
            }
            _ => Err(wrong_answer()),
        }))
    }

    pub(super) fn encode_text(&self, text: &str, path: &Path) -> Result<Vec<u32>, DataError> {
        let record = Record { path: Arc::new(path.to_owned()), content: Content::Text(text.to_owned()) };
        let mut documents = self.one_by_one(TextOptions::default(), &[record])?;
        documents.pop().map_or_else(|| Ok(Vec::new()), |document| Ok(document?.tokens))
    }

    pub(super) fn end_of_turn(&self) -> Option<u32> {
        match self.call(&Request::EndOfTurn) {
            Ok(Ok(Reply::EndOfTurn(token))) => token,
            _ => None,
        }
    }

    pub(super) fn decode(
        &self,
        tokens: &[u32],
        skip_special_tokens: bool,
        path: &Path,
    ) -> Result<String, DataError> {
        let path = path.display().to_string();
        let request = Request::Decode { tokens: tokens.to_vec(), skip_special_tokens, path: &path };
        match self.call(&request)?.map_err(|ended| ended_on(&path, ended))? {
            Reply::Text(text) => Ok(text),
            Reply::Failed(failed) => Err(failed.into()),
            _ => Err(ended_on(&path, wrong_answer())),
        }
    }

    /// Sends a request to the process, or to a new one if it has ended.
    fn call(&self, request: &Request<'_>) -> Result<Result<Reply, Ended>, DataError> {
        let mut current = self.process.lock();
        let mut process = match current.take() {
            Some(process) => process,
            None => self.start_process()?.0,
        };
        let reply = process.call(request);
        *current = reply.is_ok().then_some(process);
        Ok(reply)
    }
}

/// Returns the file and line of a record.
fn place(record: &Record) -> String {
    match &record.content {
        Content::Line { number, .. } => format!("{}, line {number}", record.path.display()),
        _ => record.path.display().to_string(),
    }
}

fn ended_on(place: &str, ended: Ended) -> DataError {
    DataError::Worker {
        message: format!("{place}: the tokenizer or its chat template {ended}"),
        is_of_a_line: false,
    }
}

fn wrong_answer() -> Ended {
    Ended::Other("it gave a wrong answer".to_owned())
}
