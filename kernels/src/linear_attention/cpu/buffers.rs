//! The working memory of the heads that are processed together, with a name for each part.

use super::super::segments::{CHUNK, STATE_INTERVAL, Segment};
use super::Sizes;
use std::ops::Range;

/// Columns of a value, and so of a state, that one task of a scan processes. No two columns depend on each other.
pub(super) const COLUMNS: usize = 32;

/// A segment of one key head: rows per token.
pub(super) struct KeyHead<'a> {
    pub(super) sequence: usize,
    pub(super) head: usize,
    /// Queries, by the delta rule normalized and times 1/√Dk, `[tokens, Dk]`.
    pub(super) q: &'a mut [f32],
    /// Keys, by the delta rule normalized, `[tokens, Dk]`.
    pub(super) k: &'a mut [f32],
    /// Inverse norms of the queries, `[tokens]`. By the delta rule.
    pub(super) q_inverse_norms: &'a mut [f32],
    /// Inverse norms of the keys, `[tokens]`. By the delta rule.
    pub(super) k_inverse_norms: &'a mut [f32],
    /// Products of a chunk's queries with its keys, `[tokens, CHUNK]`. With decays per channel, they have those between the two tokens, and
    /// exist for keys up to the query only.
    pub(super) qk: &'a mut [f32],
    /// Products of a chunk's keys, likewise. By the delta rule.
    pub(super) kk: &'a mut [f32],
    /// With decays per channel.
    pub(super) channels: Option<ChannelRows<'a>>,
}

/// Rows of a key head with decays per channel, each `[tokens, Dk]`.
pub(super) struct ChannelRows<'a> {
    /// Sums of g from the start of the chunk: γ.
    pub(super) decay: &'a mut [f32],
    /// `Q∘exp(γ)`
    pub(super) q: &'a mut [f32],
    /// `K∘exp(γ)`
    pub(super) k: &'a mut [f32],
    /// `K∘exp(γ_end − γ)`
    pub(super) stored: &'a mut [f32],
}

impl ChannelRows<'_> {
    /// Those of each chunk.
    pub(super) fn by_chunk(
        &mut self,
        dim: usize,
        segment: &Segment,
    ) -> impl Iterator<Item = ChannelRows<'_>> {
        let Self { decay, q, k, stored } = self;
        let rows = [decay, q, k, stored].map(|rows| (&mut **rows, dim));
        by_chunk(rows, segment).map(|[decay, q, k, stored]| ChannelRows { decay, q, k, stored })
    }
}

impl KeyHead<'_> {
    /// The rows that read the state before a chunk, of queries and of keys, and those that store in the state behind it; but for the
    /// decays of value heads.
    pub(super) fn rows_of_state(&self) -> [&[f32]; 3] {
        match &self.channels {
            None => [self.q, self.k, self.k],
            Some(ChannelRows { q, k, stored, .. }) => [q, k, stored],
        }
    }

    /// γ of a chunk's last token by channel, if it has that. `end`: the token behind the chunk, within the segment.
    pub(super) fn channel_decay(&self, end: usize, dim: usize) -> Option<&[f32]> {
        self.channels.as_ref().map(|channels| &channels.decay[(end - 1) * dim..end * dim])
    }
}

/// A segment of one value head.
pub(super) struct ValueHead<'a> {
    pub(super) sequence: usize,
    pub(super) head: usize,
    /// The index of its key head among those that are processed together.
    pub(super) key: usize,
    /// Sums of g from the start of the chunk, `[tokens]`; zeros with decays per channel.
    pub(super) decay: &'a mut [f32],
    /// β, `[tokens]`.
    pub(super) beta: &'a mut [f32],
    /// (I + L)⁻¹ of each chunk, `[tokens, CHUNK]`, with zeros above the diagonal. By the delta rule.
    pub(super) inverse: &'a mut [f32],
    /// The gradient of the output, `[tokens, Dv]`. In a backward pass.
    pub(super) dout: &'a mut [f32],
    pub(super) blocks: Vec<Block<'a>>,
}

/// Some columns of a [`ValueHead`].
pub(super) struct Block<'a> {
    pub(super) columns: Range<usize>,
    /// Values, by the delta rule minus those that the state recalls, `[tokens, columns]`.
    pub(super) errors: &'a mut [f32],
    /// `beta · error` of each token, the update of the state along its key: `[tokens, columns]`.
    pub(super) updates: &'a mut [f32],
    /// The state behind the tokens that were processed last, `[Dk, columns]`.
    pub(super) state: &'a mut [f32],
    /// The states before chunks, `[SLOTS, Dk, columns]`.
    pub(super) states: &'a mut [f32],
    /// In a backward pass: gradients of the updates, then of β · errors, `[tokens, columns]`.
    pub(super) gradients: &'a mut [f32],
    /// The gradient of the state before the tokens that were processed last, `[Dk, columns]`.
    pub(super) dstate: &'a mut [f32],
    /// The gradients of the states behind chunks, `[SLOTS, Dk, columns]`.
    pub(super) dstates: &'a mut [f32],
}

impl Block<'_> {
    /// The state in a slot; `None` if it is zero.
    pub(super) fn slot<'b>(&self, slots: &'b [f32], slot: Option<usize>) -> Option<&'b [f32]> {
        slot.map(|slot| &slots[slot * self.state.len()..][..self.state.len()])
    }
}

/// A key head of a sequence, and the value heads that use it.
#[derive(Debug, Clone)]
pub(super) struct Unit {
    pub(super) sequence: usize,
    pub(super) key_head: usize,
    pub(super) value_heads: Vec<usize>,
}

/// The units of a call in the order in which they are processed: by sequence, then by key head.
pub(super) fn units(sizes: &Sizes, v_to_k: &[usize]) -> Vec<Unit> {
    let mut of_sequence: Vec<_> = (0..sizes.key_heads)
        .map(|key_head| Unit { sequence: 0, key_head, value_heads: Vec::new() })
        .collect();
    for (value_head, &key_head) in v_to_k.iter().enumerate() {
        of_sequence[key_head].value_heads.push(value_head);
    }
    let of = |sequence| of_sequence.iter().map(move |unit| Unit { sequence, ..unit.clone() });
    (0..sizes.batch).flat_map(of).collect()
}

/// Number of units that are processed together: enough tasks for the threads, of chunks and of blocks of columns, and enough
/// tokens to be worth a division.
pub(super) fn units_together(sizes: &Sizes, threads: usize) -> usize {
    let tasks = if threads > 1 { 2 * threads } else { 1 };
    let heads_per_key = (sizes.value_heads / sizes.key_heads.max(1)).max(1);
    let blocks = heads_per_key * sizes.value_dim.div_ceil(COLUMNS);
    let tokens = sizes.segment_tokens().max(1);
    tasks.div_ceil(blocks.min(tokens.div_ceil(CHUNK))).max(STATE_INTERVAL / tokens)
}

/// The columns of each block.
pub(super) fn blocks(value_dim: usize) -> impl Iterator<Item = Range<usize>> {
    (0..value_dim).step_by(COLUMNS).map(move |start| start..value_dim.min(start + COLUMNS))
}

/// Number of f32 elements of a call's working memory, for its largest group of units.
pub(super) fn scratch_elems(sizes: &Sizes, v_to_k: &[usize], together: usize, is_backward: bool) -> usize {
    let elems = |units: &[Unit]| {
        let value_heads: usize = units.iter().map(|unit| unit.value_heads.len()).sum();
        units.len() * key_head_elems(sizes) + value_heads * value_head_elems(sizes, is_backward)
    };
    units(sizes, v_to_k).chunks(together).map(elems).max().unwrap_or(0)
}

fn key_head_elems(sizes: &Sizes) -> usize {
    let row = 2 * sizes.key_dim + CHUNK + sizes.of_delta(2 + CHUNK) + sizes.of_channels(4 * sizes.key_dim);
    sizes.segment_tokens() * row
}

fn value_head_elems(sizes: &Sizes, is_backward: bool) -> usize {
    let (tokens, slots) = (sizes.segment_tokens(), sizes.slots());
    let forward = tokens * (2 + sizes.of_delta(CHUNK) + 2 * sizes.value_dim)
        + (1 + slots) * sizes.key_dim * sizes.value_dim;
    let backward = tokens * 2 * sizes.value_dim + (1 + slots) * sizes.key_dim * sizes.value_dim;
    forward + if is_backward { backward } else { 0 }
}

/// The working memory of some units.
pub(super) struct HeadBuffers<'a> {
    pub(super) keys: Vec<KeyHead<'a>>,
    pub(super) values: Vec<ValueHead<'a>>,
}

impl<'a> HeadBuffers<'a> {
    /// Divides `scratch` of at least [`scratch_elems`].
    pub(super) fn new(sizes: &Sizes, units: &[Unit], mut scratch: &'a mut [f32], is_backward: bool) -> Self {
        let mut take = |len: usize| scratch.split_off_mut(..len).unwrap_or_default();
        let (tokens, key_dim, value_dim) = (sizes.segment_tokens(), sizes.key_dim, sizes.value_dim);
        let only_backward = |len: usize| if is_backward { len } else { 0 };
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for unit in units {
            let Unit { sequence, key_head, .. } = *unit;
            for &head in &unit.value_heads {
                let blocks = blocks(value_dim).map(|columns| {
                    let (rows, state) = (tokens * columns.len(), key_dim * columns.len());
                    Block {
                        columns,
                        errors: take(rows),
                        updates: take(rows),
                        state: take(state),
                        states: take(sizes.slots() * state),
                        gradients: take(only_backward(rows)),
                        dstate: take(only_backward(state)),
                        dstates: take(only_backward(sizes.slots() * state)),
                    }
                });
                let blocks = blocks.collect();
                values.push(ValueHead {
                    sequence,
                    head,
                    key: keys.len(),
                    decay: take(tokens),
                    beta: take(tokens),
                    inverse: take(sizes.of_delta(tokens * CHUNK)),
                    dout: take(only_backward(tokens * value_dim)),
                    blocks,
                });
            }
            keys.push(KeyHead {
                sequence,
                head: key_head,
                q: take(tokens * key_dim),
                k: take(tokens * key_dim),
                q_inverse_norms: take(sizes.of_delta(tokens)),
                k_inverse_norms: take(sizes.of_delta(tokens)),
                qk: take(tokens * CHUNK),
                kk: take(sizes.of_delta(tokens * CHUNK)),
                channels: sizes.rule.has_channel_decays().then(|| ChannelRows {
                    decay: take(tokens * key_dim),
                    q: take(tokens * key_dim),
                    k: take(tokens * key_dim),
                    stored: take(tokens * key_dim),
                }),
            });
        }
        Self { keys, values }
    }
}

/// Divides rows of a segment, each with its number of elements per token, among the chunks.
pub(super) fn by_chunk<'a, const N: usize>(
    mut rows: [(&'a mut [f32], usize); N],
    segment: &Segment,
) -> impl Iterator<Item = [&'a mut [f32]; N]> {
    segment.chunks.iter().map(move |chunk| {
        let tokens = chunk.tokens.len();
        rows.each_mut().map(|(rows, width)| rows.split_off_mut(..tokens * *width).unwrap_or_default())
    })
}
