//! Packs documents into sequences of equal length.

use super::best_fit::{BestFit, Segment};
use super::{Corpus, DataError, Documents, IGNORED_LABEL};
use crate::config::Packing;

/// Documents packed into sequences of `seq_len` tokens.
///
/// Sequences are built on access. Packings that concatenate documents take no memory, and pad only the last sequence.
///
/// # Examples
///
/// ```
/// use ulysses::data::{Corpus, PackedSequences};
///
/// let corpus = Corpus::from_documents([vec![1; 6], vec![2; 2], vec![3; 8]])?;
/// let data = PackedSequences::new(corpus, 8)?;
/// assert_eq!((data.num_sequences(), data.padding_share()), (2, 0.0));
/// # Ok::<(), ulysses::data::DataError>(())
/// ```
#[derive(Debug, Clone)]
pub struct PackedSequences {
    documents: Documents,
    seq_len: usize,
    packing: Packing,
    /// Only in [`Packing::Greedy`].
    best_fit: Option<BestFit>,
}

/// One packed sequence.
///
/// # Shapes
/// Vectors are `[seq_len]`, except `cu_seqlens`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedSequence {
    /// The tokens; padding is token 0.
    pub input_ids: Vec<u32>,
    /// The next token of each token's document, or [`IGNORED_LABEL`] at the end of the document.
    ///
    /// If a document continues in the next sequence, the last token of this one has a label.
    pub shift_labels: Vec<i64>,
    /// The position of each token in its document.
    ///
    /// The rest of a document that started in another sequence counts from 0: attention does not reach back there.
    pub position_ids: Vec<u32>,
    /// The starts of the documents in the sequence, then `seq_len`; padding counts as a document.
    pub cu_seqlens: Vec<u32>,
}

impl PackedSequences {
    /// Packs documents with the default packing, [`Packing::Greedy`].
    ///
    /// # Errors
    /// When `seq_len` is 0 or does not fit 32 bits, or the corpus cannot be read.
    pub fn new(documents: impl Into<Documents>, seq_len: usize) -> Result<Self, DataError> {
        Self::with_packing(documents, seq_len, Packing::default())
    }

    /// Packs documents with the given packing.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_packing(
        documents: impl Into<Documents>,
        seq_len: usize,
        packing: Packing,
    ) -> Result<Self, DataError> {
        check_seq_len(seq_len)?;
        let documents = documents.into();
        let best_fit = (packing == Packing::Greedy).then(|| BestFit::new(&documents, seq_len)).transpose()?;
        Ok(Self { documents, seq_len, packing, best_fit })
    }

    /// Returns the number of sequences, at least 1.
    pub fn num_sequences(&self) -> usize {
        match &self.best_fit {
            Some(best_fit) => best_fit.num_sequences(),
            None => self.documents.num_tokens().div_ceil(self.seq_len),
        }
    }

    /// Returns the tokens per sequence.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// Returns the packing.
    pub fn packing(&self) -> Packing {
        self.packing
    }

    /// Returns the documents.
    pub fn documents(&self) -> &Documents {
        &self.documents
    }

    /// Returns the corpus of the documents.
    pub fn corpus(&self) -> &Corpus {
        self.documents.corpus()
    }

    /// Returns the number of tokens that follow another token, so that they can be labels.
    pub fn num_predicted_tokens(&self) -> usize {
        self.documents.num_predicted_tokens(self.packing)
    }

    /// Returns the share of padding in the sequences, from 0 to 1.
    pub fn padding_share(&self) -> f64 {
        let room = self.num_sequences() * self.seq_len;
        (room - self.documents.num_tokens()) as f64 / room as f64
    }

    /// Builds one sequence.
    ///
    /// # Errors
    /// When the sequence does not exist, or its tokens cannot be read.
    pub fn sequence(&self, index: usize) -> Result<PackedSequence, DataError> {
        let available = self.num_sequences();
        if index >= available {
            let sequences = index..index.saturating_add(1);
            return Err(DataError::SequencesOutOfRange { sequences, available });
        }
        let mut sequence = PackedSequence::empty(self.seq_len);
        for segment in self.segments(index)? {
            sequence.push(&self.documents, segment)?;
        }
        sequence.pad(self.seq_len);
        Ok(sequence)
    }

    /// Returns the documents of a sequence, without padding; the sequence must exist.
    pub(super) fn segments(&self, sequence: usize) -> Result<Vec<Segment>, DataError> {
        if let Some(best_fit) = &self.best_fit {
            return Ok(best_fit.segments(sequence));
        }
        let num_tokens = self.documents.num_tokens();
        let (mut start, end) = (sequence * self.seq_len, num_tokens.min((sequence + 1) * self.seq_len));
        if self.packing == Packing::Concat {
            return Ok(vec![Segment { tokens: start..end, labels_end: num_tokens }]);
        }
        let mut segments = Vec::new();
        let mut document = self.documents.document_at(start)?;
        while start < end {
            let labels_end = self.documents.document(document)?.end;
            let tokens = start..end.min(labels_end);
            start = tokens.end;
            document += 1;
            segments.push(Segment { tokens, labels_end });
        }
        Ok(segments)
    }
}

impl PackedSequence {
    /// Returns a sequence without tokens, with room for `seq_len`.
    pub(super) fn empty(seq_len: usize) -> Self {
        Self {
            input_ids: Vec::with_capacity(seq_len),
            shift_labels: Vec::with_capacity(seq_len),
            position_ids: Vec::with_capacity(seq_len),
            cu_seqlens: vec![0],
        }
    }

    /// Returns a sequence of padding.
    pub(super) fn masked(seq_len: usize) -> Self {
        let mut sequence = Self::empty(seq_len);
        sequence.pad(seq_len);
        sequence
    }

    /// Appends a segment. Its labels are read one token ahead, which may belong to the next sequence.
    pub(super) fn push(&mut self, documents: &Documents, segment: Segment) -> Result<(), DataError> {
        let Segment { tokens, labels_end } = segment;
        let labels = tokens.start + 1..labels_end.min(tokens.end + 1);
        documents.read_tokens(tokens, &mut self.input_ids)?;
        documents.read_labels(labels, &mut self.shift_labels)?;
        self.end_segment();
        Ok(())
    }

    /// Completes labels and positions of the tokens since the end of the last segment.
    fn end_segment(&mut self) {
        let len = self.input_ids.len();
        let missing = len - self.position_ids.len();
        self.shift_labels.resize(len, IGNORED_LABEL);
        self.position_ids.extend((0_u32..).take(missing));
        // `seq_len` fits 32 bits.
        self.cu_seqlens.push(len as u32);
    }

    /// Appends padding up to `seq_len` tokens, as a document of its own.
    pub(super) fn pad(&mut self, seq_len: usize) {
        if self.input_ids.len() < seq_len {
            self.input_ids.resize(seq_len, 0);
            self.end_segment();
        }
    }
}

pub(super) fn check_seq_len(seq_len: usize) -> Result<(), DataError> {
    if seq_len == 0 || u32::try_from(seq_len).is_err() {
        return Err(DataError::InvalidSeqLen { seq_len });
    }
    Ok(())
}
