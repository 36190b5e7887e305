//! [`Tokenizer`]: text to token ids.

mod chat_files;
mod local;
#[cfg(unix)]
mod worker;

use super::DataError;
use super::source::{LocalEncoder, TextOptions};
use crate::config::ChatDate;
pub(super) use local::Local;
use serde::{Deserialize, Serialize};
use std::path::Path;
#[cfg(unix)]
pub(super) use worker::Worker;
#[cfg(unix)]
pub use worker::serve_tokenizer;

/// Converts text to token ids.
///
/// A `tokenizer.json` and a chat template may come from anyone. In the process of the caller
/// ([`from_file`](Self::from_file)), a template has a limit of instructions, and nothing limits the memory of either. A
/// process of its own ([`in_worker`](Self::in_worker)) has limits that the operating system holds.
///
/// # Examples
///
/// ```
/// use std::path::Path;
/// use ulysses::data::Tokenizer;
///
/// let tokenizer = Tokenizer::bytes(); // or Tokenizer::from_file(Path::new("tokenizer.json"))?
/// let origin = Path::new("example"); // named in errors
/// assert_eq!(tokenizer.encode("abc", origin)?, [97, 98, 99]);
/// assert_eq!(tokenizer.decode(&[97, 98, 99], origin)?, "abc");
/// # Ok::<(), ulysses::data::DataError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Tokenizer {
    properties: Properties,
    place: Place,
}

/// Where a tokenizer runs.
#[derive(Debug, Clone)]
pub(super) enum Place {
    Here(Local),
    #[cfg(unix)]
    Worker(std::sync::Arc<Worker>),
}

/// The properties of a loaded tokenizer.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Properties {
    vocab_size: usize,
    hash: [u8; 32],
    fingerprint: [u8; 32],
    end_of_text: Option<String>,
    end_of_text_id: Option<u32>,
}

impl Tokenizer {
    /// The first argument of a program that [`in_worker`](Self::in_worker) starts.
    pub const WORKER: &str = "tokenizer-worker";

    /// Returns the byte tokenizer: every byte of the UTF-8 text is a token, with a vocabulary of 256.
    pub fn bytes() -> Self {
        let hash = *blake3::hash(b"bytes").as_bytes();
        let (end_of_text, end_of_text_id) = Default::default();
        let properties = Properties { vocab_size: 256, hash, fingerprint: hash, end_of_text, end_of_text_id };
        Self { properties, place: Place::Here(Local::bytes()) }
    }

    /// Loads a Hugging Face `tokenizer.json`, and from the files next to it the chat templates
    /// (`chat_template.jinja` and `additional_chat_templates/`, or `chat_template` in `tokenizer_config.json`) and the
    /// special tokens.
    ///
    /// Truncation and padding of the file are disabled, because packing cuts and pads. Special tokens that it adds to a
    /// text (such as a leading BOS) are kept, once per document.
    ///
    /// # Errors
    /// When the file does not exist, cannot be read, or is not a tokenizer, or a file next to it is invalid.
    pub fn from_file(path: &Path) -> Result<Self, DataError> {
        Self::from_file_with_date(path, ChatDate::default())
    }

    /// Loads a tokenizer as [`from_file`](Self::from_file) does; `date` is what `strftime_now` gives to a chat template.
    ///
    /// # Errors
    /// As [`from_file`](Self::from_file).
    pub fn from_file_with_date(path: &Path, date: ChatDate) -> Result<Self, DataError> {
        let (local, properties) = Local::from_file(path, date)?;
        Ok(Self { properties, place: Place::Here(local) })
    }

    /// Loads a tokenizer as [`from_file`](Self::from_file) does, in a process that runs `program` and limits its own processor
    /// time and memory. Files that exceed the limits or crash the process are errors of the calls below.
    ///
    /// The process gets the arguments [`WORKER`](Self::WORKER), `path` and `date`, with which `program` must call
    /// [`serve_tokenizer`].
    ///
    /// # Errors
    /// As [`from_file`](Self::from_file), and when the process does not start.
    #[cfg(unix)]
    pub fn in_worker(path: &Path, date: ChatDate, program: &Path) -> Result<Self, DataError> {
        let (worker, properties) = Worker::start(path, date, program)?;
        Ok(Self { properties, place: Place::Worker(worker.into()) })
    }

    /// Returns the largest token id plus 1.
    pub fn vocab_size(&self) -> usize {
        self.properties.vocab_size
    }

    /// Returns the BLAKE3 of the tokenizer's file, or of the word `bytes`. Equal hashes give equal tokens.
    pub fn hash(&self) -> [u8; 32] {
        self.properties.hash
    }

    /// Returns a hash of everything that affects the tokens of a line, including the chat template.
    pub(super) fn fingerprint(&self) -> [u8; 32] {
        self.properties.fingerprint
    }

    /// Returns where the tokenizer runs.
    pub(super) fn place(&self) -> &Place {
        &self.place
    }

    /// Returns the end-of-text token, if the tokenizer has one.
    pub fn end_of_text(&self) -> Option<&str> {
        self.properties.end_of_text.as_deref()
    }

    /// Returns the id of the end-of-text token, if the tokenizer has one.
    pub fn end_of_text_id(&self) -> Option<u32> {
        self.properties.end_of_text_id
    }

    /// Returns the tokens of one document; errors name `path`.
    ///
    /// # Errors
    /// When the tokenizer rejects the text.
    pub fn encode(&self, text: &str, path: &Path) -> Result<Vec<u32>, DataError> {
        match &self.place {
            Place::Here(local) => local.encode(text, path),
            #[cfg(unix)]
            Place::Worker(worker) => worker.encode_text(text, path),
        }
    }

    /// Returns the token that ends an answer of the chat template, if it is one for all answers.
    pub(super) fn end_of_turn(&self) -> Option<u32> {
        match &self.place {
            Place::Here(tokenizer) => {
                LocalEncoder { tokenizer, options: TextOptions::default() }.end_of_turn()
            }
            #[cfg(unix)]
            Place::Worker(worker) => worker.end_of_turn(),
        }
    }

    /// Returns the text of tokens, including special ones.
    ///
    /// # Errors
    /// When the tokenizer rejects the tokens.
    pub fn decode(&self, tokens: &[u32], path: &Path) -> Result<String, DataError> {
        self.decode_with(tokens, false, path)
    }

    /// Returns the text of tokens, with special ones or without.
    pub(super) fn decode_with(
        &self,
        tokens: &[u32],
        skip_special_tokens: bool,
        path: &Path,
    ) -> Result<String, DataError> {
        match &self.place {
            Place::Here(local) => local.decode(tokens, skip_special_tokens, path),
            #[cfg(unix)]
            Place::Worker(worker) => worker.decode(tokens, skip_special_tokens, path),
        }
    }
}
