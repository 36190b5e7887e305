//! Documents laid end to end and cut into rows.

use super::{Corpus, DataError, IGNORED_LABEL};

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
        self.corpus.tokens().len().div_ceil(self.seq_len)
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
        check_ids(self.corpus.tokens(), self.seq_len, vocab_size)
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
        let tokens = self.corpus.tokens();
        let start = index * self.seq_len;
        let end = tokens.len().min(start + self.seq_len);
        let mut row = Row::empty(self.seq_len);
        let ends = self.corpus.document_ends();
        let first = ends.partition_point(|&document_end| document_end <= start);
        for &document_end in &ends[first..] {
            let piece = start + row.input_ids.len()..end.min(document_end);
            if piece.is_empty() {
                break;
            }
            // One token ahead, which may lie in the next row.
            let next = &tokens[piece.start + 1..document_end.min(piece.end + 1)];
            row.push_document(&tokens[piece], next);
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

    /// Appends a piece of a document; `labels` may be one shorter than it, at the document's end.
    fn push_document(&mut self, tokens: &[u32], labels: &[u32]) {
        self.input_ids.extend(tokens);
        self.shift_labels.extend(labels.iter().map(|&label| i64::from(label)));
        self.shift_labels.resize(self.input_ids.len(), IGNORED_LABEL);
        self.position_ids.extend((0_u32..).take(tokens.len()));
        // Rows are limited to 32-bit lengths.
        self.cu_seqlens.push(self.input_ids.len() as u32);
    }

    fn pad(&mut self, seq_len: usize) {
        let missing = seq_len - self.input_ids.len();
        if missing > 0 {
            self.push_document(&vec![0; missing], &[]);
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
