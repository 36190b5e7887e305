//! Messages between the process that tokenizes and its parent: a length of 8 bytes, then `postcard`.

use super::super::Properties;
use crate::data::DataError;
use crate::data::source::{Content, Document, Record, TextOptions};
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::sync::Arc;

/// A request of the parent process.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request<'a> {
    Encode {
        #[serde(borrow)]
        options: TextOptions<'a>,
        #[serde(borrow)]
        records: Vec<RecordText<'a>>,
    },
    EndOfTurn,
    Decode {
        tokens: Vec<u32>,
        skip_special_tokens: bool,
        /// For errors.
        path: &'a str,
    },
}

/// A record.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct RecordText<'a> {
    /// For errors; none if it is that of the record before.
    pub(super) path: Option<String>,
    /// Of a line of JSON, counted from 1.
    pub(super) line: Option<u64>,
    pub(super) bytes: &'a [u8],
}

/// The answer to a request. The first one, without a request, is `Loaded` or `Failed`.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    Loaded(Properties),
    Failed(Failed),
    Documents(Vec<Result<Document, Failed>>),
    EndOfTurn(Option<u32>),
    Text(String),
}

/// An error with its causes.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Failed {
    message: String,
    is_of_a_line: bool,
}

/// Returns the records of a request.
pub(super) fn records(texts: Vec<RecordText<'_>>) -> Vec<Record> {
    let mut path = Arc::new(PathBuf::new());
    let record = |RecordText { path: other, line, bytes }: RecordText<'_>| {
        if let Some(other) = other {
            path = Arc::new(other.into());
        }
        let content = match line {
            Some(number) => Content::Line { number, bytes: bytes.to_vec() },
            None => Content::Text(String::from_utf8_lossy(bytes).into_owned()),
        };
        Record { path: path.clone(), content }
    };
    texts.into_iter().map(record).collect()
}

impl From<DataError> for Failed {
    fn from(error: DataError) -> Self {
        let is_of_a_line = error.is_of_a_line();
        let chain = anyhow::Error::from(error);
        let causes: Vec<String> = chain.chain().map(ToString::to_string).collect();
        Self { message: causes.join(": "), is_of_a_line }
    }
}

impl From<Failed> for DataError {
    fn from(Failed { message, is_of_a_line }: Failed) -> Self {
        Self::Worker { message, is_of_a_line }
    }
}

pub(super) fn encode(message: &impl Serialize) -> io::Result<Vec<u8>> {
    postcard::to_stdvec(message).map_err(io::Error::other)
}

pub(super) fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> io::Result<T> {
    postcard::from_bytes(bytes).map_err(io::Error::other)
}

pub(super) fn write(output: &mut impl Write, message: &[u8]) -> io::Result<()> {
    output.write_all(&(message.len() as u64).to_le_bytes())?;
    output.write_all(message)?;
    output.flush()
}

/// Reads a message of at most `max_bytes`.
pub(super) fn read(input: &mut impl Read, max_bytes: u64) -> io::Result<Vec<u8>> {
    let mut len = [0; 8];
    input.read_exact(&mut len)?;
    let len = u64::from_le_bytes(len);
    if len > max_bytes {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let mut message = Vec::new();
    input.take(len).read_to_end(&mut message)?;
    if (message.len() as u64) < len {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(message)
}
