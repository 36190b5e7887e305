//! Tokens encode where they stand: token i of document d is `1000·(d+1) + i`, so none equals padding (0).

mod balance;
mod batch;
mod best_fit;
mod conversations;
mod corpus;
mod dataset;
mod documents;
mod loader;
mod packing;
#[cfg(feature = "parquet")]
mod parquet;
mod prepare;
mod read_ahead;
mod sources;
mod stream;
mod token_files;
mod tuning;

use super::*;

fn document(index: usize, len: usize) -> Vec<u32> {
    (0..len as u32).map(|at| 1000 * (index as u32 + 1) + at).collect()
}

fn documents(lens: &[usize]) -> Corpus {
    Corpus::from_documents(lens.iter().enumerate().map(|(index, &len)| document(index, len))).unwrap()
}

/// Documents laid end to end.
fn packed(lens: &[usize], seq_len: usize) -> PackedSequences {
    PackedSequences::with_packing(documents(lens), seq_len, Packing::Cut).unwrap()
}
