//! Batches of whole sequences, and the shard of one rank.

use super::documents::RunningHash;
use super::packing::check_seq_len;
use super::{DataError, IGNORED_LABEL, PackedSequence};
use crate::mesh::{SeqSharding, TokenRanges};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// A batch of whole sequences, before they are sharded over the sp ranks.
///
/// # Shapes
/// `input_ids`, `shift_labels` and `position_ids` are `[batch_size, seq_len]`, row-major.
///
/// # Examples
///
/// ```
/// use ulysses::data::GlobalBatch;
///
/// let batch = GlobalBatch::new(1, 6, vec![1, 2, 3, 4, 5, 6], None, None)?;
/// let second_half = batch.micro_batch(0..1, 2, 1)?; // of sp rank 1
/// assert_eq!(second_half.input_ids, [4, 5, 6]);
/// assert_eq!(second_half.labels, [5, 6, -100]);
/// # Ok::<(), ulysses::data::DataError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct GlobalBatch {
    batch_size: usize,
    seq_len: usize,
    input_ids: Vec<u32>,
    shift_labels: Vec<i64>,
    position_ids: Vec<u32>,
    /// For each sequence: the starts of its documents, then `seq_len`.
    cu_seqlens: Vec<Vec<u32>>,
    /// By name, `[batch_size, seq_len, width]`.
    values: BTreeMap<String, Vec<f32>>,
}

/// The micro batch of one rank: its shard of some sequences.
///
/// # Shapes
/// `input_ids`, `labels` and `position_ids` are `[batch_size, seq_len_local]`, row-major, where `seq_len_local` is
/// the length of `shard`; each of `values` is `[batch_size, seq_len_local, width]`.
#[derive(Debug, Clone, PartialEq)]
pub struct MicroBatch {
    /// Number of sequences.
    pub batch_size: usize,
    /// Tokens per sequence, over all sp ranks.
    pub seq_len: usize,
    /// The tokens of each sequence that this rank has.
    pub shard: TokenRanges,
    /// The tokens of the shard.
    pub input_ids: Vec<u32>,
    /// The next token of each token, or [`IGNORED_LABEL`]; shifted before the sequence was sharded.
    pub labels: Vec<i64>,
    /// The position of each token in its document.
    pub position_ids: Vec<u32>,
    /// Other values of the tokens by name, such as the features and targets of a model without a vocabulary.
    pub values: BTreeMap<String, Vec<f32>>,
    /// For each whole sequence: the starts of its documents, then `seq_len`.
    pub cu_seqlens: Arc<Vec<Vec<u32>>>,
    /// Hash of the whole sequences, or of all documents of a flexible step and the ranks that compute them. Ranks of an sp
    /// group with equal hashes have shards of the same sequences.
    pub batch_hash: u64,
    /// The block and the step, if the documents were assigned by flexible sequence parallelism: the sequences are then
    /// shared by the ranks of the block instead of all sp ranks.
    pub flexible: Option<FlexibleStep>,
}

/// The block and the step of a micro batch that flexible sequence parallelism assigned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlexibleStep {
    /// Number of consecutive sp ranks that share the micro batch.
    pub block_size: usize,
    /// Micro steps of the step, on all ranks.
    pub micro_steps: usize,
    /// Tokens of the step's packed sequences, over all ranks, including padding that no rank computes.
    pub tokens: u64,
}

impl MicroBatch {
    /// Returns the tokens per sequence on this rank.
    pub fn seq_len_local(&self) -> usize {
        self.shard.len()
    }

    /// Returns the number of tokens in this shard that contribute to the loss.
    pub fn num_valid_tokens(&self) -> usize {
        self.labels.iter().filter(|&&label| label != IGNORED_LABEL).count()
    }
}

impl GlobalBatch {
    /// Creates a batch from tensors.
    ///
    /// Without `position_ids`, each sequence is one document. A document starts wherever a position is not the
    /// previous one plus 1. Without `shift_labels`, each token's label is the next token of its document; the last
    /// token of a sequence has no label, because the next token is unknown.
    ///
    /// # Shapes
    /// All tensors are `[batch_size, seq_len]`, row-major.
    ///
    /// # Errors
    /// When there is no sequence, `seq_len` is invalid, or a tensor has a different length.
    pub fn new(
        batch_size: usize,
        seq_len: usize,
        input_ids: Vec<u32>,
        position_ids: Option<Vec<u32>>,
        shift_labels: Option<Vec<i64>>,
    ) -> Result<Self, DataError> {
        check_seq_len(seq_len)?;
        if batch_size == 0 {
            return Err(DataError::NoSequences);
        }
        let check = |tensor, found| match batch_size.checked_mul(seq_len) {
            Some(expected) if expected == found => Ok(()),
            _ => Err(DataError::WrongLength { tensor, found, batch_size, seq_len }),
        };
        check("input_ids", input_ids.len())?;
        // `seq_len` fits 32 bits, as checked above.
        let position_ids =
            position_ids.unwrap_or_else(|| (0..batch_size).flat_map(|_| 0..seq_len as u32).collect());
        check("position_ids", position_ids.len())?;
        let cu_seqlens: Vec<_> = position_ids.chunks(seq_len).map(document_bounds).collect();
        let shift_labels = shift_labels.unwrap_or_else(|| shifted(&input_ids, &cu_seqlens));
        check("shift_labels", shift_labels.len())?;
        let values = BTreeMap::new();
        Ok(Self { batch_size, seq_len, input_ids, shift_labels, position_ids, cu_seqlens, values })
    }

    /// Creates a batch of tokens without ids, for values that [`with_values`](Self::with_values) adds. Every token has the
    /// label 0; that of padding is [`IGNORED_LABEL`].
    ///
    /// # Errors
    /// When there is no sequence, `seq_len` is invalid, or their product does not fit memory.
    pub fn without_ids(batch_size: usize, seq_len: usize) -> Result<Self, DataError> {
        check_seq_len(seq_len)?;
        let too_large = DataError::WrongLength { tensor: "input_ids", found: 0, batch_size, seq_len };
        let tokens = batch_size.checked_mul(seq_len).filter(|tokens| isize::try_from(tokens * 8).is_ok());
        let tokens = tokens.ok_or(too_large)?;
        Self::new(batch_size, seq_len, vec![0; tokens], None, Some(vec![0; tokens]))
    }

    /// Adds values of the tokens: `width` numbers for each.
    ///
    /// # Shapes
    /// `values`: `[batch_size, seq_len, width]`, row-major.
    ///
    /// # Errors
    /// Another number of values.
    pub fn with_values(mut self, name: &str, width: usize, values: Vec<f32>) -> Result<Self, DataError> {
        let (found, batch_size, seq_len) = (values.len(), self.batch_size, self.seq_len);
        if width == 0 || found / width != batch_size * seq_len || !found.is_multiple_of(width) {
            return Err(DataError::WrongValues { name: name.to_owned(), found, batch_size, seq_len, width });
        }
        self.values.insert(name.to_owned(), values);
        Ok(self)
    }

    /// Stacks packed sequences of equal length.
    pub(super) fn from_sequences(sequences: Vec<PackedSequence>, seq_len: usize) -> Self {
        let batch_size = sequences.len();
        let mut stacked = Self {
            batch_size,
            seq_len,
            input_ids: Vec::with_capacity(batch_size * seq_len),
            shift_labels: Vec::with_capacity(batch_size * seq_len),
            position_ids: Vec::with_capacity(batch_size * seq_len),
            cu_seqlens: Vec::with_capacity(batch_size),
            values: BTreeMap::new(),
        };
        for sequence in sequences {
            stacked.input_ids.extend(sequence.input_ids);
            stacked.shift_labels.extend(sequence.shift_labels);
            stacked.position_ids.extend(sequence.position_ids);
            stacked.cu_seqlens.push(sequence.cu_seqlens);
        }
        stacked
    }

    /// Returns the number of sequences.
    pub fn batch_size(&self) -> usize {
        self.batch_size
    }

    /// Returns the tokens per sequence.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// Returns the tokens, `[batch_size, seq_len]`.
    pub fn input_ids(&self) -> &[u32] {
        &self.input_ids
    }

    /// Returns the next token of each token, or [`IGNORED_LABEL`], `[batch_size, seq_len]`.
    pub fn shift_labels(&self) -> &[i64] {
        &self.shift_labels
    }

    /// Returns the position of each token in its document, `[batch_size, seq_len]`.
    pub fn position_ids(&self) -> &[u32] {
        &self.position_ids
    }

    /// Returns, for each sequence, the starts of its documents, then `seq_len`.
    pub fn cu_seqlens(&self) -> &[Vec<u32>] {
        &self.cu_seqlens
    }

    /// Checks that every token and label is in a vocabulary of `vocab_size`.
    ///
    /// # Errors
    /// Names the first token or label outside the vocabulary.
    pub fn check_vocab(&self, vocab_size: usize) -> Result<(), DataError> {
        if let Some(at) = self.input_ids.iter().position(|&id| id as usize >= vocab_size) {
            let (sequence, position) = (at / self.seq_len, at % self.seq_len);
            return Err(DataError::TokenOutOfVocab {
                sequence,
                position,
                id: self.input_ids[at],
                vocab_size,
            });
        }
        let is_known =
            |label: i64| label == IGNORED_LABEL || usize::try_from(label).is_ok_and(|id| id < vocab_size);
        match self.shift_labels.iter().position(|&label| !is_known(label)) {
            None => Ok(()),
            Some(at) => {
                let (sequence, position) = (at / self.seq_len, at % self.seq_len);
                Err(DataError::LabelOutOfVocab {
                    sequence,
                    position,
                    label: self.shift_labels[at],
                    vocab_size,
                })
            }
        }
    }

    /// Appends fully masked sequences until `multiple` divides the number of sequences; returns how many were added.
    ///
    /// # Errors
    /// When `multiple` is 0.
    pub fn pad_to_multiple(&mut self, multiple: usize) -> Result<usize, DataError> {
        if multiple == 0 {
            return Err(DataError::Zero { name: "the multiple" });
        }
        let missing = (multiple - self.batch_size % multiple) % multiple;
        for _ in 0..missing {
            let seq_len = self.seq_len as u32;
            self.position_ids.extend(0..seq_len);
            self.cu_seqlens.push(vec![0, seq_len]);
        }
        self.batch_size += missing;
        self.input_ids.resize(self.batch_size * self.seq_len, 0);
        self.shift_labels.resize(self.batch_size * self.seq_len, IGNORED_LABEL);
        for values in self.values.values_mut() {
            values.resize(values.len() / (self.batch_size - missing) * self.batch_size, 0.0);
        }
        Ok(missing)
    }

    /// Returns an sp rank's shard of some sequences. `sharding` is the number of sp ranks, or a [`SeqSharding`].
    ///
    /// # Errors
    /// When the sequences or the rank do not exist, or a rank would get no token.
    pub fn micro_batch(
        &self,
        sequences: Range<usize>,
        sharding: impl Into<SeqSharding>,
        sp_rank: usize,
    ) -> Result<MicroBatch, DataError> {
        let sharding = sharding.into();
        let sp_size = sharding.sp_size();
        if sequences.is_empty() || sequences.end > self.batch_size {
            return Err(DataError::SequencesOutOfRange { sequences, available: self.batch_size });
        }
        if sp_rank >= sp_size {
            return Err(DataError::RankOutOfRange { axis: "sp", rank: sp_rank, size: sp_size });
        }
        if self.seq_len < sp_size {
            return Err(DataError::SeqLenBelowSp { seq_len: self.seq_len, sp_size });
        }
        let shard = sharding.tokens(self.seq_len, sp_rank);
        let cut = Cut { sequences: sequences.clone(), seq_len: self.seq_len, shard: shard.clone() };
        Ok(MicroBatch {
            batch_size: sequences.len(),
            seq_len: self.seq_len,
            input_ids: cut.of(&self.input_ids, 1),
            labels: cut.of(&self.shift_labels, 1),
            position_ids: cut.of(&self.position_ids, 1),
            values: self
                .values
                .iter()
                .map(|(name, all)| (name.clone(), cut.of(all, self.width(all))))
                .collect(),
            batch_hash: self.hash_sequences(sequences.clone()),
            cu_seqlens: Arc::new(self.cu_seqlens[sequences].to_vec()),
            shard,
            flexible: None,
        })
    }

    /// Number of values per token.
    fn width(&self, values: &[f32]) -> usize {
        values.len() / (self.batch_size * self.seq_len)
    }

    fn hash_sequences(&self, sequences: Range<usize>) -> u64 {
        let elements = sequences.start * self.seq_len..sequences.end * self.seq_len;
        let mut hash = RunningHash::default();
        hash.add([sequences.len() as u64, self.seq_len as u64]);
        hash.add(self.input_ids[elements.clone()].iter().copied().map(u64::from));
        hash.add(self.shift_labels[elements.clone()].iter().map(|label| label.cast_unsigned()));
        hash.add(self.position_ids[elements.clone()].iter().copied().map(u64::from));
        hash.add(self.cu_seqlens[sequences].iter().flatten().copied().map(u64::from));
        for (name, values) in &self.values {
            let width = self.width(values);
            hash.add(name.bytes().map(u64::from).chain([width as u64]));
            let of_sequences = &values[elements.start * width..elements.end * width];
            hash.add(of_sequences.iter().map(|value| u64::from(value.to_bits())));
        }
        hash.finish()
    }
}

/// A block of a row-major `[batch_size, seq_len, width]` tensor.
struct Cut {
    sequences: Range<usize>,
    seq_len: usize,
    shard: TokenRanges,
}

impl Cut {
    fn of<T: Copy>(&self, tensor: &[T], width: usize) -> Vec<T> {
        let mut block = Vec::with_capacity(self.sequences.len() * self.shard.len() * width);
        let sequences = tensor.chunks(self.seq_len * width);
        for sequence in sequences.skip(self.sequences.start).take(self.sequences.len()) {
            for range in self.shard.ranges() {
                block.extend_from_slice(&sequence[range.start * width..range.end * width]);
            }
        }
        block
    }
}

/// Returns the starts of a sequence's documents, then its length.
fn document_bounds(position_ids: &[u32]) -> Vec<u32> {
    let continues = |pair: &[u32]| pair[0].checked_add(1) == Some(pair[1]);
    let starts = position_ids.windows(2).zip(1..).filter(|(pair, _)| !continues(pair)).map(|(_, at)| at);
    let mut bounds = vec![0];
    bounds.extend(starts);
    bounds.push(position_ids.len() as u32);
    bounds
}

/// Returns the labels of sequences whose continuation is unknown: the next token within each document.
fn shifted(input_ids: &[u32], cu_seqlens: &[Vec<u32>]) -> Vec<i64> {
    let mut labels: Vec<i64> = input_ids.iter().skip(1).map(|&id| i64::from(id)).collect();
    labels.push(IGNORED_LABEL);
    let seq_len = input_ids.len() / cu_seqlens.len();
    for (sequence, bounds) in labels.chunks_mut(seq_len).zip(cu_seqlens) {
        for &end in &bounds[1..] {
            sequence[end as usize - 1] = IGNORED_LABEL;
        }
    }
    labels
}
