//! The documents that are packed in the sequences of a batch, for ops along the tokens of a document.

use crate::OpError;
use crate::device_table::DeviceTable;
use candle_core::{Device, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// The boundaries of the documents in each sequence of a batch.
///
/// Cloning copies pointers only.
#[derive(Debug, Clone)]
pub struct Documents {
    cu_seqlens: Arc<Vec<Vec<u32>>>,
    seq_len: usize,
    tokens_before: DeviceTable,
}

impl Documents {
    /// Creates the documents from `cu_seqlens`: per sequence, ascending boundaries from 0 to its length, which is the same
    /// for all sequences. Repeated boundaries (empty documents) are allowed.
    ///
    /// # Errors
    /// An empty batch, or boundaries that do not cover their sequence.
    pub fn new(cu_seqlens: impl Into<Arc<Vec<Vec<u32>>>>) -> Result<Self, OpError> {
        let cu_seqlens = cu_seqlens.into();
        let seq_len = cu_seqlens.first().and_then(|first| first.last()).copied().unwrap_or(0);
        let covers = |boundaries: &Vec<u32>| {
            let ends = [boundaries.first(), boundaries.last()];
            ends == [Some(&0), Some(&seq_len)] && boundaries.is_sorted()
        };
        let invalid = cu_seqlens.iter().position(|boundaries| !covers(boundaries));
        if invalid.is_some() || cu_seqlens.is_empty() {
            let sequence = invalid.unwrap_or(0);
            let boundaries = cu_seqlens.get(sequence).cloned().unwrap_or_default();
            return Err(OpError::Boundaries { sequence, seq_len, boundaries });
        }
        Ok(Self { cu_seqlens, seq_len: seq_len as usize, tokens_before: DeviceTable::default() })
    }

    /// Number of sequences.
    pub fn batch(&self) -> usize {
        self.cu_seqlens.len()
    }

    /// Tokens of each sequence.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// The tokens of the documents of a sequence that are not empty, in order.
    pub(crate) fn of_sequence(&self, sequence: usize) -> impl Iterator<Item = Range<usize>> + '_ {
        let pairs = self.cu_seqlens[sequence].windows(2);
        pairs.map(|pair| pair[0] as usize..pair[1] as usize).filter(|document| !document.is_empty())
    }

    /// For each token of the batch the number of its document's tokens before it, in u32 on `device`.
    pub(crate) fn tokens_before(&self, device: &Device) -> candle_core::Result<Tensor> {
        self.tokens_before.on(device, self.batch() * self.seq_len, || {
            let documents = (0..self.batch()).flat_map(|sequence| self.of_sequence(sequence));
            documents.flat_map(|document| 0..document.len() as u32).collect::<Vec<_>>()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_documents_are_skipped() {
        let documents = Documents::new(vec![vec![0, 0, 3, 3, 5], vec![0, 5]]).unwrap();
        assert_eq!((documents.batch(), documents.seq_len()), (2, 5));
        assert_eq!(documents.of_sequence(0).collect::<Vec<_>>(), [0..3, 3..5]);
        assert_eq!(documents.of_sequence(1).next(), Some(0..5));
        assert_eq!(Documents::new(vec![vec![0]]).unwrap().of_sequence(0).count(), 0);
    }

    #[test]
    fn boundaries_that_do_not_cover_a_sequence_are_refused() {
        for (invalid, cu_seqlens) in [
            (0, vec![]),
            (0, vec![vec![]]),
            (0, vec![vec![1, 4]]),
            (1, vec![vec![0, 4], vec![0, 3]]),
            (1, vec![vec![0, 4], vec![0, 3, 2, 4]]),
        ] {
            let error = Documents::new(cu_seqlens).unwrap_err();
            assert!(matches!(error, OpError::Boundaries { sequence, .. } if sequence == invalid), "{error}");
        }
    }
}
