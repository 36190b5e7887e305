//! The tokens of a micro batch that input and objective of this rank read.

use crate::data::MicroBatch;
use crate::nn::LocalBatch;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

/// All tokens of this rank's shard, or some of each sequence: the ranks of tp share a shard.
pub(super) struct LocalTokens<'a> {
    batch_size: usize,
    seq_len_local: usize,
    input_ids: Cow<'a, [u32]>,
    labels: Cow<'a, [i64]>,
    values: Cow<'a, BTreeMap<String, Vec<f32>>>,
    all: &'a MicroBatch,
}

impl<'a> LocalTokens<'a> {
    /// The tokens `some` of each sequence's shard.
    pub(super) fn new(batch: &'a MicroBatch, some: Range<usize>) -> Self {
        let (batch_size, shard) = (batch.batch_size, batch.seq_len_local());
        let (input_ids, labels, values) = match some.len() == shard {
            true => (
                Cow::Borrowed(&*batch.input_ids),
                Cow::Borrowed(&*batch.labels),
                Cow::Borrowed(&batch.values),
            ),
            false => {
                let values = batch.values.iter().map(|(name, all)| {
                    let width = all.len() / (batch_size * shard).max(1);
                    (name.clone(), tokens_of_rows(all, shard, &some, width))
                });
                (
                    Cow::Owned(tokens_of_rows(&batch.input_ids, shard, &some, 1)),
                    Cow::Owned(tokens_of_rows(&batch.labels, shard, &some, 1)),
                    Cow::Owned(values.collect()),
                )
            }
        };
        Self { batch_size, seq_len_local: some.len(), input_ids, labels, values, all: batch }
    }

    /// The tokens, as the model reads them.
    pub(super) fn view(&self) -> LocalBatch<'_> {
        LocalBatch {
            batch_size: self.batch_size,
            seq_len_local: self.seq_len_local,
            input_ids: &self.input_ids,
            labels: &self.labels,
            all_input_ids: &self.all.input_ids,
            all_labels: &self.all.labels,
            values: &self.values,
        }
    }
}

/// Some tokens of each row of `[batch, seq, width]`.
pub(super) fn tokens_of_rows<T: Copy>(all: &[T], seq: usize, some: &Range<usize>, width: usize) -> Vec<T> {
    let rows = all.chunks_exact((seq * width).max(1));
    rows.flat_map(|row| &row[some.start * width..some.end * width]).copied().collect()
}
