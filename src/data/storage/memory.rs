//! Tokens in memory.

use super::TokenStore;
use crate::data::{DataError, IGNORED_LABEL};
use std::ops::Range;

/// The value of [`IGNORED_LABEL`], which cannot be a token.
const IGNORED: u32 = u32::MAX;

/// The tokens of all documents in order, with the ends of documents.
#[derive(Debug, Default)]
pub(in crate::data) struct MemoryTokens {
    tokens: Vec<u32>,
    /// `None` as long as every token is its own label.
    labels: Option<Vec<u32>>,
    document_ends: Vec<usize>,
}

impl MemoryTokens {
    /// Appends a document; an empty one is dropped. There must be one label per token, each ignored or below
    /// `u32::MAX`; without labels, every token is its own label.
    pub(in crate::data) fn push(&mut self, tokens: &[u32], labels: Option<&[i64]>) {
        if tokens.is_empty() {
            return;
        }
        if labels.is_some() && self.labels.is_none() {
            self.labels = Some(self.tokens.clone());
        }
        self.tokens.extend(tokens);
        if let Some(all) = &mut self.labels {
            match labels {
                // Labels that are not ids are ignored.
                Some(labels) => {
                    all.extend(labels.iter().map(|&label| u32::try_from(label).unwrap_or(IGNORED)))
                }
                None => all.extend(tokens),
            }
        }
        self.document_ends.push(self.tokens.len());
    }
}

impl TokenStore for MemoryTokens {
    fn num_tokens(&self) -> usize {
        self.tokens.len()
    }

    fn num_documents(&self) -> usize {
        self.document_ends.len()
    }

    fn document_end(&self, index: usize) -> Result<usize, DataError> {
        let available = self.num_documents();
        self.document_ends.get(index).copied().ok_or(DataError::NoDocument { index, available })
    }

    fn read_tokens(&self, range: Range<usize>, tokens: &mut Vec<u32>) -> Result<(), DataError> {
        tokens.extend(&self.tokens[range]);
        Ok(())
    }

    fn read_labels(&self, range: Range<usize>, labels: &mut Vec<i64>) -> Result<(), DataError> {
        let found = &self.labels.as_ref().unwrap_or(&self.tokens)[range];
        labels.extend(found.iter().map(|&label| if label == IGNORED { IGNORED_LABEL } else { label.into() }));
        Ok(())
    }

    fn has_labels(&self) -> bool {
        self.labels.is_some()
    }

    fn checks_vocab(&self, _vocab_size: usize) -> bool {
        false
    }
}
