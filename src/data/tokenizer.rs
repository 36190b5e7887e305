//! [`Tokenizer`]: text to token ids.

use super::DataError;
use super::catch_panic::catch_panic;
use super::chat::ChatFiles;
use crate::config::ChatDate;
use crate::regular_file;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Converts text to token ids.
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
    kind: Kind,
    vocab_size: usize,
    hash: [u8; 32],
    fingerprint: [u8; 32],
    /// Empty for bytes.
    path: PathBuf,
    chat: ChatFiles,
}

#[derive(Debug, Clone)]
enum Kind {
    Bytes,
    HuggingFace(Box<tokenizers::Tokenizer>),
}

/// Tokens with their byte ranges in the text.
type Placed = (Vec<u32>, Vec<Range<usize>>);

impl Tokenizer {
    /// Returns the byte tokenizer: every byte of the UTF-8 text is a token, with a vocabulary of 256.
    pub fn bytes() -> Self {
        let hash = *blake3::hash(b"bytes").as_bytes();
        let (path, chat) = Default::default();
        Self { kind: Kind::Bytes, vocab_size: 256, hash, fingerprint: hash, path, chat }
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
        let load_error = |source| DataError::TokenizerLoad { path: path.to_owned(), source };
        let json = regular_file::read(path).map_err(|error| load_error(error.into()))?;
        let (tokenizer, vocab_size) =
            catch_panic(|| load(&json)).unwrap_or_else(|panic| Err(panic.into())).map_err(load_error)?;
        let (kind, hash) = (Kind::HuggingFace(Box::new(tokenizer)), *blake3::hash(&json).as_bytes());
        let chat = ChatFiles::read(path)?;
        let mut tokenizer = Self { kind, vocab_size, hash, fingerprint: hash, path: path.to_owned(), chat };
        tokenizer.set_fingerprint();
        Ok(tokenizer)
    }

    /// Returns the largest token id plus 1.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Returns the BLAKE3 of the tokenizer's file, or of the word `bytes`. Equal hashes give equal tokens.
    pub fn hash(&self) -> [u8; 32] {
        self.hash
    }

    /// Returns a hash of everything that affects the tokens of a line, including the chat template.
    pub(super) fn fingerprint(&self) -> [u8; 32] {
        self.fingerprint
    }

    /// Returns this tokenizer with another date for `strftime_now` of its chat templates.
    ///
    /// # Errors
    /// As [`from_file`](Self::from_file).
    pub fn with_chat_date(mut self, date: ChatDate) -> Result<Self, DataError> {
        self.chat.set_date(date, &self.path)?;
        self.set_fingerprint();
        Ok(self)
    }

    fn set_fingerprint(&mut self) {
        if let Kind::HuggingFace(_) = self.kind {
            let parts =
                serde_json::json!([blake3::Hash::from(self.hash).to_hex().as_str(), self.chat.fingerprint()]);
            self.fingerprint = *blake3::hash(parts.to_string().as_bytes()).as_bytes();
        }
    }

    /// Returns the chat templates.
    pub(super) fn chat(&self) -> &ChatFiles {
        &self.chat
    }

    /// Returns the end-of-text token, if the tokenizer has one.
    pub fn end_of_text(&self) -> Option<&str> {
        self.chat.special_token("eos_token")
    }

    /// Returns the id of the end-of-text token, if the tokenizer has one.
    pub fn end_of_text_id(&self) -> Option<u32> {
        match &self.kind {
            Kind::Bytes => None,
            Kind::HuggingFace(tokenizer) => tokenizer.token_to_id(self.end_of_text()?),
        }
    }

    /// Returns the tokens of one document; errors name `path`.
    ///
    /// # Errors
    /// When the tokenizer rejects the text.
    pub fn encode(&self, text: &str, path: &Path) -> Result<Vec<u32>, DataError> {
        match &self.kind {
            Kind::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Kind::HuggingFace(tokenizer) => {
                let add_special_tokens = true;
                let encoding = catch_panic(|| tokenizer.encode_fast(text, add_special_tokens))
                    .unwrap_or_else(|panic| Err(panic.into()))
                    .map_err(|source| DataError::Tokenize { path: path.to_owned(), source })?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    /// Returns the text of tokens, including special ones.
    ///
    /// # Errors
    /// When the tokenizer rejects the tokens.
    pub fn decode(&self, tokens: &[u32], path: &Path) -> Result<String, DataError> {
        match &self.kind {
            Kind::Bytes => {
                let bytes: Vec<u8> = tokens.iter().map(|&token| token.to_le_bytes()[0]).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Kind::HuggingFace(tokenizer) => catch_panic(|| tokenizer.decode(tokens, false))
                .unwrap_or_else(|panic| Err(panic.into()))
                .map_err(|source| DataError::Tokenize { path: path.to_owned(), source }),
        }
    }

    /// Returns the tokens of a text with their byte ranges, which are empty for added tokens.
    pub(super) fn encode_placed(
        &self,
        text: &str,
        add_special_tokens: bool,
        path: &Path,
    ) -> Result<Placed, DataError> {
        match &self.kind {
            Kind::Bytes => {
                Ok((text.bytes().map(u32::from).collect(), (0..text.len()).map(|at| at..at + 1).collect()))
            }
            Kind::HuggingFace(tokenizer) => {
                let encoding = catch_panic(|| tokenizer.encode(text, add_special_tokens))
                    .unwrap_or_else(|panic| Err(panic.into()))
                    .map_err(|source| DataError::Tokenize { path: path.to_owned(), source })?;
                let places = encoding.get_offsets().iter().map(|&(start, end)| start..end).collect();
                Ok((encoding.get_ids().to_vec(), places))
            }
        }
    }
}

/// Returns a tokenizer and its vocabulary size. The library panics on some files.
fn load(json: &[u8]) -> tokenizers::Result<(tokenizers::Tokenizer, usize)> {
    let mut tokenizer = tokenizers::Tokenizer::from_bytes(json)?;
    tokenizer.with_truncation(None)?;
    tokenizer.with_padding(None);
    // Ids may have gaps, so the vocabulary size is not the number of entries.
    let vocab_size = tokenizer.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1);
    Ok((tokenizer, vocab_size))
}
