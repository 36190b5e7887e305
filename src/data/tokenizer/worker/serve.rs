//! The process that tokenizes.

use super::super::Local;
use super::limits::Limits;
use super::protocol::{self, Failed, Reply, Request};
use crate::config::ChatDate;
use crate::data::DataError;
use crate::data::source::{LocalEncoder, TextOptions, start_threads};
use std::io::{self, ErrorKind};
use std::path::Path;

/// Loads the tokenizer at `path` and answers the requests of a [`Tokenizer`](crate::data::Tokenizer) in another process, from
/// standard input to standard output, until the input ends. Sets limits of this process and its panic hook.
///
/// # Errors
/// When a request is damaged or an answer cannot be written.
pub fn serve_tokenizer(path: &Path, date: ChatDate) -> io::Result<()> {
    // A panic of the tokenizers library is an error with its message.
    std::panic::set_hook(Box::new(|_| {}));
    let (mut input, mut output) = (io::stdin().lock(), io::stdout().lock());
    let tokenizer_bytes = std::fs::metadata(path).map_or(0, |metadata| metadata.len());
    Limits::new(tokenizer_bytes, 0).hold();
    let loaded = start_threads().and_then(|()| Local::from_file(path, date));
    let (tokenizer, reply) = match loaded {
        Ok((tokenizer, properties)) => (Some(tokenizer), Reply::Loaded(properties)),
        Err(error) => (None, Reply::Failed(error.into())),
    };
    protocol::write(&mut output, &protocol::encode(&reply)?)?;
    let Some(tokenizer) = tokenizer else { return Ok(()) };
    loop {
        let message = match protocol::read(&mut input, u64::MAX) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(()),
            message => message?,
        };
        Limits::new(tokenizer_bytes, message.len() as u64).hold();
        let reply = answer(&tokenizer, protocol::decode(&message)?);
        protocol::write(&mut output, &protocol::encode(&reply)?)?;
    }
}

fn answer(tokenizer: &Local, request: Request<'_>) -> Reply {
    match request {
        Request::Encode { options, records } => {
            let documents = LocalEncoder { tokenizer, options }.encode_all(protocol::records(records));
            let documents = documents.into_iter().map(|document| document.map_err(Failed::from));
            Reply::Documents(documents.collect())
        }
        Request::EndOfTurn => {
            Reply::EndOfTurn(LocalEncoder { tokenizer, options: TextOptions::default() }.end_of_turn())
        }
        Request::Decode { tokens, skip_special_tokens, path } => {
            let text: Result<String, DataError> =
                tokenizer.decode(&tokens, skip_special_tokens, Path::new(path));
            text.map_or_else(|error| Reply::Failed(error.into()), Reply::Text)
        }
    }
}
