//! [`Local`]: a tokenizer in this process.

use super::Properties;
use super::chat_files::ChatFiles;
use crate::data::DataError;
use crate::regular_file;
use std::ops::Range;
use std::path::Path;
use ulysses_chat::{ChatDate, catch_panic};

/// A tokenizer with its chat templates.
#[derive(Debug, Clone)]
pub(in crate::data) struct Local {
    kind: Kind,
    chat: ChatFiles,
}

#[derive(Debug, Clone)]
enum Kind {
    Bytes,
    HuggingFace(Box<tokenizers::Tokenizer>),
}

/// Tokens with their byte ranges in the text.
type Placed = (Vec<u32>, Vec<Range<usize>>);

impl Local {
    pub(super) fn bytes() -> Self {
        Self { kind: Kind::Bytes, chat: ChatFiles::default() }
    }

    /// Loads a `tokenizer.json` and the files next to it.
    pub(super) fn from_file(path: &Path, date: ChatDate) -> Result<(Self, Properties), DataError> {
        let load_error = |source| DataError::TokenizerLoad { path: path.to_owned(), source };
        let json = regular_file::read(path).map_err(|error| load_error(error.into()))?;
        let (tokenizer, vocab_size) =
            catch_panic(|| load(&json)).unwrap_or_else(|panic| Err(panic.into())).map_err(load_error)?;
        let chat = ChatFiles::read(path, date)?;
        let hash = blake3::hash(&json);
        let end_of_text = chat.special_token("eos_token").map(str::to_owned);
        let properties = Properties {
            vocab_size,
            hash: *hash.as_bytes(),
            fingerprint: fingerprint(hash, &chat),
            end_of_text_id: end_of_text.as_deref().and_then(|token| tokenizer.token_to_id(token)),
            end_of_text,
        };
        Ok((Self { kind: Kind::HuggingFace(Box::new(tokenizer)), chat }, properties))
    }

    /// Returns the chat templates.
    pub(in crate::data) fn chat(&self) -> &ChatFiles {
        &self.chat
    }

    /// Returns the text of the end-of-text token, if the tokenizer has one.
    pub(in crate::data) fn end_of_text(&self) -> Option<&str> {
        self.chat.special_token("eos_token")
    }

    /// Returns the id of the end-of-text token, if the tokenizer has one.
    pub(in crate::data) fn end_of_text_id(&self) -> Option<u32> {
        match &self.kind {
            Kind::Bytes => None,
            Kind::HuggingFace(tokenizer) => tokenizer.token_to_id(self.end_of_text()?),
        }
    }

    /// Returns the tokens of one document; errors name `path`.
    pub(in crate::data) fn encode(&self, text: &str, path: &Path) -> Result<Vec<u32>, DataError> {
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

    /// Returns the text of tokens, with special ones or without.
    pub(super) fn decode(
        &self,
        tokens: &[u32],
        skip_special_tokens: bool,
        path: &Path,
    ) -> Result<String, DataError> {
        match &self.kind {
            Kind::Bytes => {
                let bytes: Vec<u8> = tokens.iter().map(|&token| token.to_le_bytes()[0]).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Kind::HuggingFace(tokenizer) => catch_panic(|| tokenizer.decode(tokens, skip_special_tokens))
                .unwrap_or_else(|panic| Err(panic.into()))
                .map_err(|source| DataError::Tokenize { path: path.to_owned(), source }),
        }
    }

    /// Returns the tokens of a text with their byte ranges, which are empty for added tokens.
    pub(in crate::data) fn encode_placed(
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

/// Returns a hash of everything that affects the tokens of a line.
fn fingerprint(hash: blake3::Hash, chat: &ChatFiles) -> [u8; 32] {
    let parts = serde_json::json!([hash.to_hex().as_str(), chat.fingerprint()]);
    *blake3::hash(parts.to_string().as_bytes()).as_bytes()
}
