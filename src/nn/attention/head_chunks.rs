//! Heads in chunks of whole KV heads.

use std::ops::Range;

/// Heads that run through attention together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadChunk {
    /// Query heads.
    pub q: Range<usize>,
    /// The KV heads that these use.
    pub kv: Range<usize>,
}

/// Splits heads into `chunks` parts of whole KV groups, as evenly as possible. If there are more parts than KV heads,
/// the others are empty.
pub fn head_chunks(num_heads: usize, num_kv_heads: usize, chunks: usize) -> Vec<HeadChunk> {
    let group = num_heads / num_kv_heads;
    let bound = |index| index * num_kv_heads / chunks;
    let chunk = |index| {
        let kv = bound(index)..bound(index + 1);
        HeadChunk { q: kv.start * group..kv.end * group, kv }
    };
    (0..chunks).map(chunk).collect()
}
