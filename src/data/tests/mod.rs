//! Tokens encode where they stand: token i of document d is `1000·(d+1) + i`, so none equals padding (0).

mod batch;
mod corpus;
mod loader;
mod packing;
mod prepare;
mod sources;
mod token_files;
mod tuning;

use super::*;

fn document(index: usize, len: usize) -> Vec<u32> {
    (0..len as u32).map(|at| 1000 * (index as u32 + 1) + at).collect()
}

fn documents(lens: &[usize]) -> Corpus {
    Corpus::from_documents(lens.iter().enumerate().map(|(index, &len)| document(index, len))).unwrap()
}

fn packed(lens: &[usize], seq_len: usize) -> PackedRows {
    PackedRows::new(documents(lens), seq_len).unwrap()
}
