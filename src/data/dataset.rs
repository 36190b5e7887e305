//! [`Dataset`]: the sequences of one or more sources.

use super::documents::RunningHash;
use super::{DataError, PackedSequence, PackedSequences};
use std::sync::Arc;

/// One or more sources of sequences, concatenated or mixed by weight. Clones share the data.
#[derive(Debug, Clone)]
pub struct Dataset {
    /// At least one, all with the same `seq_len`.
    sources: Vec<Arc<PackedSequences>>,
    /// One per source, positive and finite.
    weights: Option<Vec<f64>>,
}

impl From<Arc<PackedSequences>> for Dataset {
    fn from(sequences: Arc<PackedSequences>) -> Self {
        Self { sources: vec![sequences], weights: None }
    }
}

impl Dataset {
    /// Concatenates sources: an epoch contains each of their sequences once.
    ///
    /// # Errors
    /// When there is no source, or the sources have different sequence lengths.
    pub fn concatenated(sources: impl IntoIterator<Item = PackedSequences>) -> Result<Self, DataError> {
        let sources: Vec<_> = sources.into_iter().map(Arc::new).collect();
        let first = sources.first().ok_or(DataError::NoSequences)?.seq_len();
        match sources.iter().map(|sequences| sequences.seq_len()).find(|&other| other != first) {
            Some(other) => Err(DataError::SeqLensDiffer { first, other }),
            None => Ok(Self { sources, weights: None }),
        }
    }

    /// Mixes sources by weight: a source with twice the weight gives twice the samples, however many sequences it has.
    /// Each source has its own epochs.
    ///
    /// # Errors
    /// As [`concatenated`](Self::concatenated), or when a weight is not positive and finite.
    pub fn mixture(sources: impl IntoIterator<Item = (PackedSequences, f64)>) -> Result<Self, DataError> {
        let (sources, weights): (Vec<_>, Vec<f64>) = sources.into_iter().unzip();
        // The sum of the weights must be finite too.
        if let Some(&weight) = weights.iter().find(|&&weight| !(weight > 0.0 && weight < 1e300)) {
            return Err(DataError::InvalidWeight { weight });
        }
        Ok(Self { weights: Some(weights), ..Self::concatenated(sources)? })
    }

    /// Returns the sources.
    pub fn sources(&self) -> &[Arc<PackedSequences>] {
        &self.sources
    }

    /// Returns the weights of the sources, if they are mixed by weight.
    pub fn weights(&self) -> Option<&[f64]> {
        self.weights.as_deref()
    }

    /// Returns the tokens per sequence.
    pub fn seq_len(&self) -> usize {
        self.sources[0].seq_len()
    }

    /// Returns the number of sequences of all sources, at least 1.
    pub fn num_sequences(&self) -> usize {
        self.sources.iter().map(|sequences| sequences.num_sequences()).sum()
    }

    /// Builds one sequence of a source.
    ///
    /// # Errors
    /// When the sequence does not exist, or its tokens cannot be read.
    pub fn sequence(&self, source: usize, sequence: usize) -> Result<PackedSequence, DataError> {
        self.source(source)?.sequence(sequence)
    }

    pub(super) fn source(&self, index: usize) -> Result<&PackedSequences, DataError> {
        let available = self.sources.len();
        Ok(self.sources.get(index).ok_or(DataError::NoSource { index, available })?)
    }

    /// Returns the share of padding in the samples, from 0 to 1.
    pub fn padding_share(&self) -> f64 {
        let weight = |source: usize| match &self.weights {
            Some(weights) => weights[source],
            None => self.sources[source].num_sequences() as f64,
        };
        let shares =
            self.sources.iter().enumerate().map(|(i, sequences)| (weight(i), sequences.padding_share()));
        let (total, padding) =
            shares.fold((0.0, 0.0), |(total, sum), (weight, share)| (total + weight, sum + weight * share));
        padding / total
    }

    /// Returns a hash of the documents (by a sample of their tokens), the packing and the weights. Different samples
    /// have different hashes.
    ///
    /// # Errors
    /// When the data cannot be read.
    pub fn sampled_hash(&self) -> Result<u64, DataError> {
        let mut hash = RunningHash::default();
        for (index, sequences) in self.sources.iter().enumerate() {
            let weight = self.weights.as_ref().map_or(0, |weights| weights[index].to_bits());
            hash.add([
                sequences.documents().sampled_hash()?,
                sequences.packing() as u64,
                sequences.seq_len() as u64,
                weight,
            ]);
        }
        Ok(hash.finish())
    }
}
