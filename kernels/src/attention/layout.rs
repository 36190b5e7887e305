//! The attention mask, as one contiguous range of visible keys per query.

use super::pair_count;
use super::{AttentionError, Logits, Sinks, VisibleRanges};
use crate::device::dry::{self, Allocation};
use crate::device_table::DeviceTable;
use candle_core::{Device, Tensor};
use std::{ops::Range, slice::from_ref, sync::Arc};

/// Positions, documents and heads of an attention call: which keys each query may see, and with which factor.
///
/// A key is visible to a query of the same sequence if it is not later (`kv_pos <= q_pos`), belongs to the
/// same document, or chunk of it, and lies within the sliding window (`q_pos - kv_pos < window`), if there is one.
///
/// Queries and keys may be different parts of a sequence (the KV shard of another rank, a zigzag shard with
/// gaps). Both lists of positions ascend, so a query's visible keys are one contiguous range of key indices,
/// whose ends never decrease from one query to the next. Kernels use only these [`VisibleRanges`], which are
/// computed once, here.
///
/// Cloning copies pointers only.
///
/// # Examples
///
/// ```
/// use ulysses_kernels::attention::AttentionLayout;
///
/// let layout = AttentionLayout::causal(1, 4, vec![0, 0])?; // two query heads share a KV head
/// assert_eq!(layout.num_visible_pairs(), 1 + 2 + 3 + 4);
/// # Ok::<(), ulysses_kernels::attention::AttentionError>(())
/// ```
#[derive(Debug, Clone)]
pub struct AttentionLayout {
    q_positions: Arc<[u32]>,
    kv_positions: Arc<[u32]>,
    num_queries: usize,
    num_keys: usize,
    /// The boundaries of the documents, or of chunks of them.
    cu_seqlens: Arc<Vec<Vec<u32>>>,
    /// The boundaries of the documents.
    documents: Arc<Vec<Vec<u32>>>,
    q_to_kv: Arc<[usize]>,
    window: Option<usize>,
    logits: Logits,
    sinks: Option<Sinks>,
    visible: Arc<[VisibleRanges]>,
    ranges_on_device: DeviceTable,
    heads_on_device: DeviceTable,
    /// In a dry run, which does not create positions and ranges: the tokens, and the memory.
    dry: Arc<Option<DryTokens>>,
}

/// The tokens of a layout in a dry run.
#[derive(Debug)]
struct DryTokens {
    queries: Vec<Range<usize>>,
    keys: Vec<Range<usize>>,
    _allocation: Option<Allocation>,
}

impl AttentionLayout {
    /// Creates the layout for any part of a batch of packed sequences.
    ///
    /// * `q_positions`, `kv_positions`: index within the sequence of each local token, strictly ascending.
    /// * `cu_seqlens`: per sequence, the document boundaries over the *whole* sequence: from 0 to its length,
    ///   which is the same for all. Repeated boundaries (empty documents) are allowed.
    /// * `q_to_kv`: the local KV head of each local query head, in any order and group size.
    /// * `window`: number of positions that a query sees, including its own; `None` for all.
    ///
    /// # Errors
    /// Positions that do not ascend or lie outside the sequence, boundaries that do not cover it, an empty
    /// batch, or a window of 0.
    pub fn new(
        q_positions: impl Into<Arc<[u32]>>,
        kv_positions: impl Into<Arc<[u32]>>,
        cu_seqlens: impl Into<Arc<Vec<Vec<u32>>>>,
        q_to_kv: impl Into<Arc<[usize]>>,
        window: Option<usize>,
    ) -> Result<Self, AttentionError> {
        let (q_positions, kv_positions) = (q_positions.into(), kv_positions.into());
        let cu_seqlens = cu_seqlens.into();
        let seq_len = check_boundaries(&cu_seqlens)?;
        check_positions("q", &q_positions, seq_len)?;
        check_positions("kv", &kv_positions, seq_len)?;
        if window == Some(0) {
            return Err(AttentionError::EmptyWindow);
        }
        let visible = cu_seqlens
            .iter()
            .map(|boundaries| VisibleRanges::new(&q_positions, &kv_positions, boundaries, window))
            .collect();
        let (num_queries, num_keys) = (q_positions.len(), kv_positions.len());
        Ok(Self {
            q_positions,
            kv_positions,
            num_queries,
            num_keys,
            documents: cu_seqlens.clone(),
            cu_seqlens,
            q_to_kv: q_to_kv.into(),
            window,
            logits: Logits::default(),
            sinks: None,
            visible,
            ranges_on_device: DeviceTable::default(),
            heads_on_device: DeviceTable::default(),
            dry: Arc::default(),
        })
    }

    /// As [`new`](Self::new), for the tokens of ascending ranges. In a [dry run](crate::device::dry) only the sizes of
    /// positions and ranges exist.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_ranges(
        queries: &[Range<usize>],
        keys: &[Range<usize>],
        cu_seqlens: impl Into<Arc<Vec<Vec<u32>>>>,
        q_to_kv: impl Into<Arc<[usize]>>,
        window: Option<usize>,
    ) -> Result<Self, AttentionError> {
        let positions = |ranges: &[Range<usize>]| -> Arc<[u32]> {
            // A position above 32 bits lies outside of any sequence, and is refused as such.
            let position = |position| u32::try_from(position).unwrap_or(u32::MAX);
            ranges.iter().cloned().flatten().map(position).collect()
        };
        if !dry::is_dry() {
            let q_positions = positions(queries);
            let kv_positions = if queries == keys { q_positions.clone() } else { positions(keys) };
            return Self::new(q_positions, kv_positions, cu_seqlens, q_to_kv, window);
        }
        let layout = Self::new(Vec::new(), Vec::new(), cu_seqlens, q_to_kv, window)?;
        let [num_queries, num_keys] =
            [queries, keys].map(|ranges| ranges.iter().map(Range::len).sum::<usize>());
        let numbers = if queries == keys { num_queries } else { num_queries + num_keys };
        let tables = numbers + 2 * layout.batch() * num_queries;
        let allocation = Allocation::on_host(tables * size_of::<u32>());
        let dry = DryTokens { queries: queries.to_vec(), keys: keys.to_vec(), _allocation: allocation };
        Ok(Self { num_queries, num_keys, dry: Arc::new(Some(dry)), ..layout })
    }

    /// The same tokens with other heads, and the default form of the logits. A token sees a window of its document, and of the chunk
    /// of it that it is in, if documents are cut into chunks of a size (Llama 4).
    ///
    /// # Errors
    /// A window or chunks of 0.
    pub fn masked(
        &self,
        q_to_kv: impl Into<Arc<[usize]>>,
        window: Option<usize>,
        chunk: Option<u32>,
    ) -> Result<Self, AttentionError> {
        let (q_positions, kv_positions) = (self.q_positions.clone(), self.kv_positions.clone());
        let cu_seqlens = match chunk {
            None => self.cu_seqlens.clone(),
            Some(0) => return Err(AttentionError::EmptyWindow),
            Some(chunk) => Arc::new(self.cu_seqlens.iter().map(|list| in_chunks(list, chunk)).collect()),
        };
        let layout = Self::new(q_positions, kv_positions, cu_seqlens, q_to_kv, window)?;
        let Self { num_queries, num_keys, .. } = *self;
        let dry = Option::as_ref(&self.dry).map(|DryTokens { queries, keys, .. }| DryTokens {
            queries: queries.clone(),
            keys: keys.clone(),
            _allocation: Allocation::on_host(2 * self.batch() * num_queries * size_of::<u32>()),
        });
        Ok(Self { num_queries, num_keys, documents: self.documents.clone(), dry: Arc::new(dry), ..layout })
    }

    /// Whole sequences of one document each: plain causal attention.
    ///
    /// # Errors
    /// When `batch` is 0.
    pub fn causal(
        batch: usize,
        seq_len: u32,
        q_to_kv: impl Into<Arc<[usize]>>,
    ) -> Result<Self, AttentionError> {
        let tokens = 0..seq_len as usize;
        let tokens = from_ref(&tokens);
        Self::of_ranges(tokens, tokens, vec![vec![0, seq_len]; batch], q_to_kv, None)
    }

    /// The same tokens with other heads, without sinks.
    #[must_use]
    pub fn with_heads(&self, q_to_kv: impl Into<Arc<[usize]>>) -> Self {
        let heads_on_device = DeviceTable::default();
        Self { q_to_kv: q_to_kv.into(), heads_on_device, sinks: None, ..self.clone() }
    }

    /// The same layout with another form of the logits.
    #[must_use]
    pub fn with_logits(self, logits: Logits) -> Self {
        Self { logits, ..self }
    }

    /// The same layout with sinks of its query heads. [`Attention`](super::Attention) applies them;
    /// [`AttentionCompute::attend`](super::AttentionCompute::attend) does not.
    #[must_use]
    pub fn with_sinks(self, sinks: Option<Sinks>) -> Self {
        Self { sinks, ..self }
    }

    /// The same layout without them.
    #[must_use]
    pub fn without_sinks(&self) -> Self {
        self.clone().with_sinks(None)
    }

    /// The sinks of the query heads, if there are any.
    pub fn sinks(&self) -> Option<&Sinks> {
        self.sinks.as_ref()
    }

    /// Number of sequences.
    pub fn batch(&self) -> usize {
        self.cu_seqlens.len()
    }

    /// Number of local query tokens per sequence.
    pub fn num_queries(&self) -> usize {
        self.num_queries
    }

    /// Number of local keys per sequence.
    pub fn num_keys(&self) -> usize {
        self.num_keys
    }

    /// Index within the sequence of each local query token.
    pub fn q_positions(&self) -> &Arc<[u32]> {
        &self.q_positions
    }

    /// Index within the sequence of each local key.
    pub fn kv_positions(&self) -> &Arc<[u32]> {
        &self.kv_positions
    }

    /// Per sequence, the boundaries over the whole sequence of what attends to itself alone: the documents, or chunks of them.
    pub fn cu_seqlens(&self) -> &Arc<Vec<Vec<u32>>> {
        &self.cu_seqlens
    }

    /// Per sequence, the document boundaries over the whole sequence.
    pub fn documents(&self) -> &Arc<Vec<Vec<u32>>> {
        &self.documents
    }

    /// The local KV head of each local query head.
    pub fn q_to_kv(&self) -> &Arc<[usize]> {
        &self.q_to_kv
    }

    /// Number of positions that a query sees, including its own.
    pub fn window(&self) -> Option<usize> {
        self.window
    }

    /// The form of the logits.
    pub fn logits(&self) -> Logits {
        self.logits
    }

    /// The visible keys of the queries of the sequence, or `None` if it does not exist.
    pub fn visible_ranges(&self, sequence: usize) -> Option<&VisibleRanges> {
        self.visible.get(sequence)
    }

    /// Number of visible (query, key) pairs over all sequences, for one query head. Attention costs `4 *
    /// head_dim` floating-point operations per pair in the forward pass and `10 * head_dim` in the backward
    /// pass.
    pub fn num_visible_pairs(&self) -> u64 {
        match &*self.dry {
            Some(DryTokens { queries, keys, .. }) => self.num_visible_pairs_between(queries, keys),
            None => self.visible.iter().map(VisibleRanges::num_pairs).sum(),
        }
    }

    /// [`num_visible_pairs`](Self::num_visible_pairs) of the tokens of other ascending ranges, in closed form.
    pub fn num_visible_pairs_between(&self, queries: &[Range<usize>], keys: &[Range<usize>]) -> u64 {
        pair_count::num_pairs(queries, keys, &self.cu_seqlens, self.window)
    }

    /// The visible keys of the queries of the sequence, for kernels that have checked the batch size.
    pub(super) fn visible(&self, sequence: usize) -> &VisibleRanges {
        &self.visible[sequence]
    }

    /// The key range of every query on the device: `[batch, queries, 2]`, start and end.
    pub(super) fn ranges_on(&self, device: &Device) -> candle_core::Result<Tensor> {
        let len = 2 * self.batch() * self.num_queries;
        self.ranges_on_device.on(device, len, || {
            let ranges = self.visible.iter();
            ranges
                .flat_map(|ranges| ranges.start.iter().zip(&ranges.end))
                .flat_map(|(start, end)| [*start, *end])
                .collect::<Vec<u32>>()
        })
    }

    /// The query heads on the device, sorted by KV head, and in ascending order within each.
    pub(super) fn heads_by_kv_head_on(&self, device: &Device) -> candle_core::Result<Tensor> {
        self.heads_on_device.on(device, self.q_to_kv.len(), || {
            let mut heads: Vec<u32> = (0..self.q_to_kv.len() as u32).collect();
            heads.sort_by_key(|head| self.q_to_kv[*head as usize]);
            heads
        })
    }
}

/// The boundaries of the chunks of each document.
fn in_chunks(boundaries: &[u32], chunk: u32) -> Vec<u32> {
    let documents = boundaries.windows(2).map(|document| document[0]..document[1]);
    documents
        .flat_map(|document| document.step_by(chunk as usize))
        .chain(boundaries.last().copied())
        .collect()
}

fn check_boundaries(cu_seqlens: &[Vec<u32>]) -> Result<u32, AttentionError> {
    let first = cu_seqlens.first().ok_or(AttentionError::NoSequences)?;
    let seq_len = first.last().copied().unwrap_or(0);
    for (sequence, boundaries) in cu_seqlens.iter().enumerate() {
        let covers = boundaries.first() == Some(&0) && boundaries.last() == Some(&seq_len);
        if !covers || !boundaries.is_sorted() {
            return Err(AttentionError::Boundaries { sequence, seq_len, boundaries: boundaries.clone() });
        }
    }
    Ok(seq_len)
}

fn check_positions(which: &'static str, positions: &[u32], seq_len: u32) -> Result<(), AttentionError> {
    for (index, pair) in positions.windows(2).enumerate() {
        if pair[0] >= pair[1] {
            let (previous, position) = (pair[0], pair[1]);
            return Err(AttentionError::PositionsNotAscending {
                which,
                index: index + 1,
                previous,
                position,
            });
        }
    }
    match positions.last() {
        Some(&position) if position >= seq_len => {
            Err(AttentionError::PositionOutsideSequence { which, position, seq_len })
        }
        _ => Ok(()),
    }
}

/// The KV head of each query head if all KV heads have equally many adjacent query heads (MHA, GQA, MQA): `h
/// * num_kv_heads / num_heads`.
#[must_use]
pub fn grouped_heads(num_heads: usize, num_kv_heads: usize) -> Vec<usize> {
    (0..num_heads).map(|head| head * num_kv_heads / num_heads).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(layout: &AttentionLayout, sequence: usize) -> Vec<Range<usize>> {
        let visible = layout.visible(sequence);
        (0..visible.len()).map(|query| visible.of(query)).collect()
    }

    #[test]
    fn causal_queries_see_themselves_and_all_before() -> Result<(), AttentionError> {
        let layout = AttentionLayout::causal(2, 4, vec![0])?;
        for sequence in 0..2 {
            assert_eq!(ranges(&layout, sequence), [0..1, 0..2, 0..3, 0..4]);
        }
        assert_eq!(layout.num_visible_pairs(), 20);
        assert!(layout.visible_ranges(2).is_none());
        Ok(())
    }

    #[test]
    fn documents_and_the_window_limit_the_visible_keys() -> Result<(), AttentionError> {
        let positions: Vec<u32> = (0..7).collect();
        let cu_seqlens = vec![vec![0, 2, 2, 7], vec![0, 7]];
        let layout = AttentionLayout::new(positions.clone(), positions, cu_seqlens, vec![0], Some(3))?;
        assert_eq!(ranges(&layout, 0), [0..1, 0..2, 2..3, 2..4, 2..5, 3..6, 4..7]);
        assert_eq!(ranges(&layout, 1), [0..1, 0..2, 0..3, 1..4, 2..5, 3..6, 4..7]);
        Ok(())
    }

    #[test]
    fn chunks_begin_at_the_start_of_each_document() -> Result<(), AttentionError> {
        let positions: Vec<u32> = (0..9).collect();
        let cu_seqlens = vec![vec![0, 2, 2, 9], vec![0, 9]];
        let layout = AttentionLayout::new(positions.clone(), positions, cu_seqlens, vec![0], None)?;
        let layout = layout.masked(vec![0], None, Some(3))?;
        assert_eq!(ranges(&layout, 0), [0..1, 0..2, 2..3, 2..4, 2..5, 5..6, 5..7, 5..8, 8..9]);
        assert_eq!(ranges(&layout, 1), [0..1, 0..2, 0..3, 3..4, 3..5, 3..6, 6..7, 6..8, 6..9]);
        assert_eq!(**layout.documents(), [vec![0, 2, 2, 9], vec![0, 9]]);
        let windowed = layout.masked(vec![0], Some(2), Some(3))?;
        assert_eq!(ranges(&windowed, 1), [0..1, 0..2, 1..3, 3..4, 3..5, 4..6, 6..7, 6..8, 7..9]);
        assert!(matches!(layout.masked(vec![0], None, Some(0)), Err(AttentionError::EmptyWindow)));
        Ok(())
    }

    #[test]
    fn shards_with_gaps_see_the_keys_that_are_not_later() -> Result<(), AttentionError> {
        let cu_seqlens = vec![vec![0, 3, 8]];
        let layout =
            AttentionLayout::new(vec![0, 1, 6, 7], vec![2, 3, 4, 5], cu_seqlens.clone(), vec![0], None)?;
        assert_eq!(ranges(&layout, 0), [0..0, 0..0, 1..4, 1..4], "key 2 is of the first document");
        let later = AttentionLayout::new(vec![0, 1], vec![6, 7], cu_seqlens, vec![0], None)?;
        assert_eq!(ranges(&later, 0), [0..0, 0..0]);
        Ok(())
    }

    #[test]
    fn queries_of_inverts_hull() -> Result<(), AttentionError> {
        let positions: Vec<u32> = (0..40).collect();
        let layout = AttentionLayout::new(
            positions.clone(),
            positions,
            vec![vec![0, 11, 12, 30, 40]],
            vec![0],
            Some(9),
        )?;
        let visible = layout.visible(0);
        for start in 0..40 {
            for end in start + 1..=40 {
                let sees = |query: &usize| visible.of(*query).start < end && start < visible.of(*query).end;
                let seeing: Vec<usize> = (0..40).filter(sees).collect();
                assert_eq!(
                    visible.queries_of(&(start..end)).collect::<Vec<_>>(),
                    seeing,
                    "keys {start}..{end}"
                );
            }
        }
        Ok(())
    }

    #[test]
    fn bad_layouts_are_refused_by_name() {
        let build = |q: &[u32], cu_seqlens: &[&[u32]], window| {
            let cu_seqlens: Vec<Vec<u32>> = cu_seqlens.iter().map(|boundaries| boundaries.to_vec()).collect();
            AttentionLayout::new(q, [0, 1].as_slice(), cu_seqlens, vec![0], window).expect_err("invalid")
        };
        assert!(matches!(
            build(&[0, 2, 2], &[&[0, 4]], None),
            AttentionError::PositionsNotAscending { which: "q", index: 2, previous: 2, position: 2 }
        ));
        assert!(matches!(
            build(&[4], &[&[0, 4]], None),
            AttentionError::PositionOutsideSequence { which: "q", position: 4, seq_len: 4 }
        ));
        assert!(matches!(build(&[0], &[], None), AttentionError::NoSequences));
        assert!(matches!(build(&[0], &[&[0, 4]], Some(0)), AttentionError::EmptyWindow));
        for bad in [&[1, 4][..], &[0, 3], &[0, 3, 2, 4], &[]] {
            let error = build(&[0], &[&[0, 4], bad], None);
            assert!(matches!(error, AttentionError::Boundaries { sequence: 1, seq_len: 4, .. }), "{error}");
        }
    }
}
