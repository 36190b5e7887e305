//! The documents of a batch, each in a sequence of its own.

use super::{DataError, GlobalBatch, IGNORED_LABEL};
use std::ops::Range;

impl GlobalBatch {
    /// Returns every document in a sequence of its own, in the order of the batch. Tokens keep their positions and labels.
    /// Shorter documents are followed by padding, which is a document without labels. Values by name are left out.
    ///
    /// # Errors
    /// None for a batch that has a document; those of [`new`](Self::new) otherwise.
    pub fn unpacked(&self) -> Result<Self, DataError> {
        let documents: Vec<Range<usize>> = self.documents().collect();
        let seq_len = documents.iter().map(Range::len).max().unwrap_or(0);
        let ids = padded(&documents, seq_len, self.input_ids(), |_| 0);
        let positions = padded(&documents, seq_len, self.position_ids(), |at| at as u32);
        let labels = padded(&documents, seq_len, self.shift_labels(), |_| IGNORED_LABEL);
        Self::new(documents.len(), seq_len, ids, Some(positions), Some(labels))
    }

    /// The tokens of every document, counted over all sequences of the batch.
    fn documents(&self) -> impl Iterator<Item = Range<usize>> {
        self.cu_seqlens().iter().enumerate().flat_map(|(sequence, bounds)| {
            let first = sequence * self.seq_len();
            bounds.windows(2).map(move |pair| first + pair[0] as usize..first + pair[1] as usize)
        })
    }
}

/// The elements of each document, then those of its padding by their position in it.
fn padded<T: Copy>(
    documents: &[Range<usize>],
    seq_len: usize,
    elements: &[T],
    padding: impl Fn(usize) -> T,
) -> Vec<T> {
    let padding = &padding;
    let sequence = |document: &Range<usize>| {
        let missing = (0..seq_len - document.len()).map(padding);
        elements[document.clone()].iter().copied().chain(missing)
    };
    documents.iter().flat_map(sequence).collect()
}
