//! [`Documents`]: all documents of a corpus, or one part of a split.

use super::order::ordered;
use super::{Corpus, DataError, IGNORED_LABEL, epoch_order};
use crate::config::{LongConversations, Packing};
use crate::fnv1a;
use std::ops::Range;
use std::sync::Arc;

/// Number of samples in the hash of the data.
const SAMPLES: usize = 256;

/// Tokens per sample.
const SAMPLE_TOKENS: usize = 64;

/// Labels that are read at once to count them, and the maximum number of such pieces.
const LABEL_PIECE: usize = 1 << 16;
const MAX_LABEL_PIECES: usize = 512;

/// Documents of a corpus, concatenated: token indices count the tokens of these documents only.
#[derive(Debug, Clone)]
pub struct Documents {
    corpus: Arc<Corpus>,
    /// `None` for the whole corpus.
    selection: Option<Selection>,
}

#[derive(Debug, Clone, Default)]
struct Selection {
    /// Token ranges of the corpus, ascending.
    ranges: Vec<Range<usize>>,
    /// The end of each range, counted over these ranges only.
    ends: Vec<usize>,
}

impl Selection {
    fn push(&mut self, range: Range<usize>) {
        let end = self.ends.last().copied().unwrap_or(0) + range.len();
        self.ranges.push(range);
        self.ends.push(end);
    }

    /// Returns the document of a token, or the number of documents if there is none.
    fn at(&self, token: usize) -> usize {
        self.ends.partition_point(|&end| end <= token)
    }
}

impl<C: Into<Arc<Corpus>>> From<C> for Documents {
    fn from(corpus: C) -> Self {
        Self { corpus: corpus.into(), selection: None }
    }
}

impl Documents {
    /// Splits a corpus into training and held-out documents.
    ///
    /// Whole documents are held out, at least one and not all; which ones depends only on their number. Of a single
    /// document, the end is held out.
    ///
    /// # Errors
    /// When the fraction is not between 0 and 1, or the corpus has one token.
    pub fn split(corpus: impl Into<Arc<Corpus>>, fraction: f64) -> Result<[Self; 2], DataError> {
        let corpus = corpus.into();
        let (num_documents, num_tokens) = (corpus.num_documents(), corpus.num_tokens());
        if !(fraction > 0.0 && fraction < 1.0) || num_tokens < 2 {
            return Err(DataError::NoSplit { fraction, num_tokens });
        }
        let held_out = |of: usize| ((of as f64 * fraction).round() as usize).clamp(1, of - 1);
        let mut parts = [Selection::default(), Selection::default()];
        if num_documents == 1 {
            let cut = num_tokens - held_out(num_tokens);
            parts[0].push(0..cut);
            parts[1].push(cut..num_tokens);
        } else {
            let mut is_held_out = vec![false; num_documents];
            let to_order = ordered("documents", num_documents)?;
            for document in &epoch_order(0, 0, to_order)[..held_out(num_documents)] {
                is_held_out[*document as usize] = true;
            }
            for (index, is_held_out) in is_held_out.into_iter().enumerate() {
                parts[usize::from(is_held_out)].push(corpus.document(index)?);
            }
        }
        Ok(parts.map(|selection| Self { corpus: corpus.clone(), selection: Some(selection) }))
    }

    /// Applies a rule to documents with labels of more than `max_tokens`, and returns how many there are.
    ///
    /// # Errors
    /// When the rule is [`LongConversations::Error`] and there is such a document, or no document is left.
    pub fn limited(&self, max_tokens: usize, rule: LongConversations) -> Result<(Self, usize), DataError> {
        if !self.corpus.has_labels() {
            return Ok((self.clone(), 0));
        }
        let (mut limited, mut num_long) = (Selection::default(), 0);
        for index in 0..self.num_documents() {
            let range = match &self.selection {
                Some(selection) => selection.ranges[index].clone(),
                None => self.corpus.document(index)?,
            };
            let is_long = range.len() > max_tokens && self.corpus.has_labels_at(range.start);
            num_long += usize::from(is_long);
            match rule {
                LongConversations::Truncate if is_long => limited.push(range.start..range.start + max_tokens),
                LongConversations::Drop if is_long => {}
                _ => limited.push(range),
            }
        }
        if num_long > 0 && (rule == LongConversations::Error || limited.ends.is_empty()) {
            return Err(DataError::LongConversations { num_long, max_tokens });
        }
        let selection = if num_long > 0 { Some(limited) } else { self.selection.clone() };
        Ok((Self { corpus: self.corpus.clone(), selection }, num_long))
    }

    /// Returns the corpus of the documents.
    pub fn corpus(&self) -> &Corpus {
        &self.corpus
    }

    /// Returns the number of tokens.
    pub fn num_tokens(&self) -> usize {
        match &self.selection {
            None => self.corpus.num_tokens(),
            Some(selection) => selection.ends.last().copied().unwrap_or(0),
        }
    }

    /// Returns the number of documents, none of them empty.
    pub fn num_documents(&self) -> usize {
        self.selection.as_ref().map_or_else(|| self.corpus.num_documents(), |selection| selection.ends.len())
    }

    /// Returns the number of tokens that follow another token in the given packing, so that they can be labels.
    pub fn num_predicted_tokens(&self, packing: Packing) -> usize {
        let first_tokens = if packing == Packing::Concat { 1 } else { self.num_documents() };
        self.num_tokens() - first_tokens
    }

    /// Returns the token range of a document.
    ///
    /// # Errors
    /// When the document does not exist.
    pub fn document(&self, index: usize) -> Result<Range<usize>, DataError> {
        let Some(Selection { ranges, ends }) = &self.selection else { return self.corpus.document(index) };
        let range =
            ranges.get(index).ok_or(DataError::NoDocument { index, available: self.num_documents() })?;
        Ok(ends[index] - range.len()..ends[index])
    }

    /// Returns the document of a token, or the number of documents if there is none.
    ///
    /// # Errors
    /// When the document bounds cannot be read.
    pub fn document_at(&self, token: usize) -> Result<usize, DataError> {
        match &self.selection {
            None => self.corpus.document_at(token),
            Some(selection) => Ok(selection.at(token)),
        }
    }

    /// Appends the tokens of a range, which may span several documents.
    ///
    /// # Errors
    /// When the range is out of bounds, or cannot be read.
    pub fn read_tokens(&self, range: Range<usize>, tokens: &mut Vec<u32>) -> Result<(), DataError> {
        self.in_corpus(range, |range| self.corpus.read_tokens(range, tokens))
    }

    /// Appends the unshifted labels of a range; see [`Corpus::read_labels`].
    ///
    /// # Errors
    /// As [`read_tokens`](Self::read_tokens).
    pub fn read_labels(&self, range: Range<usize>, labels: &mut Vec<i64>) -> Result<(), DataError> {
        self.in_corpus(range, |range| self.corpus.read_labels(range, labels))
    }

    /// Calls `read` with the corpus ranges that a range consists of.
    fn in_corpus(
        &self,
        range: Range<usize>,
        mut read: impl FnMut(Range<usize>) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let Some(selection) = &self.selection else { return read(range) };
        let Selection { ranges, ends } = selection;
        let mut at = range.start;
        while at < range.end {
            let index = selection.at(at);
            let available = self.num_tokens();
            let document =
                ranges.get(index).ok_or(DataError::NoTokenRange { range: range.clone(), available })?;
            // `ends[index] - at` tokens of the document remain.
            let start = document.end - (ends[index] - at);
            let end = document.end.min(start + (range.end - at));
            read(start..end)?;
            at += end - start;
        }
        Ok(())
    }

    /// Checks that every token and label of the corpus is in a vocabulary of `vocab_size`, except those that
    /// [are checked when they are read](Corpus::first_outside).
    ///
    /// # Errors
    /// Names the first one outside the vocabulary, by document of the corpus.
    pub fn check_vocab(&self, vocab_size: usize) -> Result<(), DataError> {
        let Some((at, id)) = self.corpus.first_outside(vocab_size)? else { return Ok(()) };
        let document = self.corpus.document_at(at)?;
        let position = at - self.corpus.document(document)?.start;
        Err(DataError::DocumentOutOfVocab { id, document, position, vocab_size })
    }

    /// Returns the share of tokens with labels, from 0 to 1. Of a large corpus, evenly spaced samples are read.
    ///
    /// # Errors
    /// When the labels cannot be read.
    pub fn labeled_share(&self) -> Result<f64, DataError> {
        if !self.corpus.has_labels() {
            return Ok(1.0);
        }
        let (num_tokens, mut labels) = (self.num_tokens(), Vec::new());
        let (mut num_read, mut num_labeled) = (0, 0);
        let step = num_tokens.div_ceil(MAX_LABEL_PIECES).max(LABEL_PIECE);
        for start in (0..num_tokens).step_by(step) {
            labels.clear();
            self.read_labels(start..num_tokens.min(start + LABEL_PIECE), &mut labels)?;
            num_read += labels.len();
            num_labeled += labels.iter().filter(|&&label| label != IGNORED_LABEL).count();
        }
        Ok(num_labeled as f64 / num_read.max(1) as f64)
    }

    /// Returns a hash of the data without reading all of it: of the counts, and of evenly spaced tokens and labels.
    ///
    /// # Errors
    /// When the data cannot be read.
    pub fn sampled_hash(&self) -> Result<u64, DataError> {
        let num_tokens = self.num_tokens();
        let mut hash = RunningHash::default();
        hash.add([num_tokens as u64, self.num_documents() as u64]);
        let (mut tokens, mut labels) = (Vec::new(), Vec::new());
        for sample in 0..SAMPLES {
            // Below `num_tokens`, so it fits.
            let start = (num_tokens as u128 * sample as u128 / SAMPLES as u128) as usize;
            let range = start..num_tokens.min(start + SAMPLE_TOKENS);
            tokens.clear();
            labels.clear();
            self.read_tokens(range.clone(), &mut tokens)?;
            self.read_labels(range, &mut labels)?;
            hash.add(tokens.iter().map(|&token| u64::from(token)));
            hash.add(labels.iter().map(|label| label.cast_unsigned()));
            hash.add([self.document_at(start)? as u64]);
        }
        Ok(hash.finish())
    }
}

/// FNV-1a over whole words, mixed at the end. It detects accidental differences, not malicious ones.
#[derive(Debug, Clone, Copy)]
pub(super) struct RunningHash(u64);

impl Default for RunningHash {
    fn default() -> Self {
        Self(fnv1a::OFFSET_BASIS)
    }
}

impl RunningHash {
    pub(super) fn add(&mut self, words: impl IntoIterator<Item = u64>) {
        for word in words {
            // The rotation moves high bits to low ones, which the multiplication spreads.
            self.0 = fnv1a::step(self.0, word).rotate_left(29);
        }
    }

    pub(super) fn finish(self) -> u64 {
        (self.0 ^ (self.0 >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}
