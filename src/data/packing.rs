//! Documents laid end to end and cut into rows.

use super::{Corpus, DataError, IGNORED_LABEL};
use std::ops::Range;

/// A corpus as rows of `seq_len` tokens.
///
/// Documents follow each other without gaps; row r holds tokens `r·seq_len .. (r+1)·seq_len` of the corpus.
/// Only the last row is padded. Rows are made when asked for: the packing itself takes no memory.
#[derive(Debug, Clone)]
pub struct PackedRows {
    corpus: Corpus,
    seq_len: usize,
}

/// One packed row.
///
/// # Shapes
/// Vectors are `[seq_len]`, except `cu_seqlens`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// The tokens; padding is token 0.
    pub input_ids: Vec<u32>,
    /// For each token the next one of its document, or [`IGNORED_LABEL`] at the document's end.
    ///
    /// A document that goes on in the next row has its label at the end of this one.
    pub shift_labels: Vec<i64>,
    /// Position in the document as far as this row sees it.
    ///
    /// The rest of a document that began in the row before starts at 0 again: attention cannot look back there.
    pub position_ids: Vec<u32>,
    /// Where documents start in the row, and at the end `seq_len`; padding counts as a document.
    pub cu_seqlens: Vec<u32>,
}

impl PackedRows {
    /// Cuts a corpus into rows.
    ///
    /// # Errors
    /// When `seq_len` is 0 or does not fit 32 bits.
    pub fn new(corpus: Corpus, seq_len: usize) -> Result<Self, DataError> {
        check_seq_len(seq_len)?;
        Ok(Self { corpus, seq_len })
    }

    /// Number of rows, at least 1.
    pub fn num_rows(&self) -> usize {
        self.corpus.num_tokens().div_ceil(self.seq_len)
    }

    /// Tokens per row.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// The documents that are packed.
    pub fn corpus(&self) -> &Corpus {
        &self.corpus
    }

    /// Checks that a model with `vocab_size` embeddings knows every token.
    ///
    /// # Errors
    /// Names the first token that it does not know.
    pub fn check_vocab(&self, vocab_size: usize) -> Result<(), DataError> {
        match self.corpus.first_outside(vocab_size)? {
            None => Ok(()),
            Some((at, id)) => {
                let (row, position) = (at / self.seq_len, at % self.seq_len);
                // Ids have 32 bits.
                let id = u32::try_from(id).unwrap_or(u32::MAX);
                Err(DataError::TokenOutOfVocab { row, position, id, vocab_size })
            }
        }
    }

    /// Makes one row.
    ///
    /// # Errors
    /// When there is no such row.
    pub fn row(&self, index: usize) -> Result<Row, DataError> {
        let available = self.num_rows();
        if index >= available {
            let rows = index..index.saturating_add(1);
            return Err(DataError::RowsOutOfRange { rows, available });
        }
        let start = index * self.seq_len;
        let end = self.corpus.num_tokens().min(start + self.seq_len);
        let mut row = Row::empty(self.seq_len);
        let mut document = self.corpus.document_at(start);
        while start + row.input_ids.len() < end {
            let document_end = self.corpus.document(document)?.end;
            row.push_document(
                &self.corpus,
                start + row.input_ids.len()..end.min(document_end),
                document_end,
            )?;
            document += 1;
        }
        row.pad(self.seq_len);
        Ok(row)
    }
}

impl Row {
    fn empty(seq_len: usize) -> Self {
        Self {
            input_ids: Vec::with_capacity(seq_len),
            shift_labels: Vec::with_capacity(seq_len),
            position_ids: Vec::with_capacity(seq_len),
            cu_seqlens: vec![0],
        }
    }

    /// Appends a piece of a document. Its labels are read one token ahead, which may lie in the next row.
    fn push_document(
        &mut self,
        corpus: &Corpus,
        piece: Range<usize>,
        document_end: usize,
    ) -> Result<(), DataError> {
        corpus.read_tokens(piece.clone(), &mut self.input_ids)?;
        corpus.read_labels(piece.start + 1..document_end.min(piece.end + 1), &mut self.shift_labels)?;
        self.end_document();
        Ok(())
    }

    /// Fills up what the tokens since the last document's end came without.
    fn end_document(&mut self) {
        let len = self.input_ids.len();
        let missing = len - self.position_ids.len();
        self.shift_labels.resize(len, IGNORED_LABEL);
        self.position_ids.extend((0_u32..).take(missing));
        // Rows are limited to 32-bit lengths.
        self.cu_seqlens.push(len as u32);
    }

    fn pad(&mut self, seq_len: usize) {
        if self.input_ids.len() < seq_len {
            self.input_ids.resize(seq_len, 0);
            self.end_document();
        }
    }
}

pub(super) fn check_seq_len(seq_len: usize) -> Result<(), DataError> {
    if seq_len == 0 || u32::try_from(seq_len).is_err() {
        return Err(DataError::InvalidSeqLen { seq_len });
    }
    Ok(())
}

/// Checks ids that lie in rows of `seq_len`.
pub(super) fn check_ids(ids: &[u32], seq_len: usize, vocab_size: usize) -> Result<(), DataError> {
    match ids.iter().position(|&id| id as usize >= vocab_size) {
        None => Ok(()),
        Some(at) => {
            let (row, position) = (at / seq_len, at % seq_len);
            Err(DataError::TokenOutOfVocab { row, position, id: ids[at], vocab_size })
        }
    }
}
