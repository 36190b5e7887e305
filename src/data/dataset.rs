//! What a run draws its samples from: the rows of one or several sources.

use super::documents::RunningHash;
use super::{DataError, PackedRows, Row};
use std::sync::Arc;

/// Sources of rows, one after the other or mixed by weight. Cloning it copies no rows.
#[derive(Debug, Clone)]
pub struct Dataset {
    /// At least one, all of one `seq_len`.
    sources: Vec<Arc<PackedRows>>,
    /// One for each source, positive and finite.
    weights: Option<Vec<f64>>,
}

impl From<Arc<PackedRows>> for Dataset {
    fn from(rows: Arc<PackedRows>) -> Self {
        Self { sources: vec![rows], weights: None }
    }
}

impl Dataset {
    /// All rows of all sources: an epoch sees each of them once.
    ///
    /// # Errors
    /// When there is no source, or their rows differ in length.
    pub fn concatenated(sources: impl IntoIterator<Item = PackedRows>) -> Result<Self, DataError> {
        let sources: Vec<_> = sources.into_iter().map(Arc::new).collect();
        let first = sources.first().ok_or(DataError::NoRows)?.seq_len();
        match sources.iter().map(|rows| rows.seq_len()).find(|&other| other != first) {
            Some(other) => Err(DataError::SeqLensDiffer { first, other }),
            None => Ok(Self { sources, weights: None }),
        }
    }

    /// Sources with weights: a source with twice the weight gives twice the samples, however many rows it has.
    /// Each goes through its rows again and again, in epochs of its own.
    ///
    /// # Errors
    /// As [`concatenated`](Self::concatenated), or a weight that is not positive and finite.
    pub fn mixture(sources: impl IntoIterator<Item = (PackedRows, f64)>) -> Result<Self, DataError> {
        let (sources, weights): (Vec<_>, Vec<f64>) = sources.into_iter().unzip();
        // Their sum must be finite too.
        if let Some(&weight) = weights.iter().find(|&&weight| !(weight > 0.0 && weight < 1e300)) {
            return Err(DataError::InvalidWeight { weight });
        }
        Ok(Self { weights: Some(weights), ..Self::concatenated(sources)? })
    }

    /// The rows of each source.
    pub fn sources(&self) -> &[Arc<PackedRows>] {
        &self.sources
    }

    /// The weights of the sources, where they are mixed by weight.
    pub fn weights(&self) -> Option<&[f64]> {
        self.weights.as_deref()
    }

    /// Tokens per row.
    pub fn seq_len(&self) -> usize {
        self.sources[0].seq_len()
    }

    /// Number of rows of all sources, at least 1.
    pub fn num_rows(&self) -> usize {
        self.sources.iter().map(|rows| rows.num_rows()).sum()
    }

    /// Makes one row of a source.
    ///
    /// # Errors
    /// When there is no such row, or its tokens cannot be read.
    pub fn row(&self, source: usize, row: usize) -> Result<Row, DataError> {
        let available = self.sources.len();
        let rows = self.sources.get(source).ok_or(DataError::NoSource { index: source, available })?;
        rows.row(row)
    }

    /// The share of the samples' tokens that is padding, from 0 to 1.
    pub fn padding_share(&self) -> f64 {
        let weight = |source: usize| match &self.weights {
            Some(weights) => weights[source],
            None => self.sources[source].num_rows() as f64,
        };
        let shares = self.sources.iter().enumerate().map(|(i, rows)| (weight(i), rows.padding_share()));
        let (total, padding) =
            shares.fold((0.0, 0.0), |(total, sum), (weight, share)| (total + weight, sum + weight * share));
        padding / total
    }

    /// Tells apart what gives other samples: the documents (by a sample of their tokens), their packing, and the
    /// weights.
    ///
    /// # Errors
    /// When the data cannot be read.
    pub fn sampled_hash(&self) -> Result<u64, DataError> {
        let mut hash = RunningHash::default();
        for (index, rows) in self.sources.iter().enumerate() {
            let weight = self.weights.as_ref().map_or(0, |weights| weights[index].to_bits());
            hash.add([
                rows.documents().sampled_hash()?,
                rows.packing() as u64,
                rows.seq_len() as u64,
                weight,
            ]);
        }
        Ok(hash.finish())
    }
}
