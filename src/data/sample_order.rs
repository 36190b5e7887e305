//! The endless sequence of samples of a dataset.

use super::mixture::{MixedSample, Mixture};
use super::order::{epoch_order, ordered};
use super::{DataError, Dataset};
use std::sync::Arc;

/// Which sequence of a dataset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SequenceIndex {
    pub(super) source: usize,
    /// Counted within the source.
    pub(super) sequence: usize,
}

/// The endless sequence of samples of a dataset.
#[derive(Debug, Clone)]
pub(super) enum SampleOrder {
    /// All sequences of all sources, epoch by epoch, each epoch in its own order.
    Shuffled {
        /// The end of each source's sequences, counted over all sources.
        ends: Vec<usize>,
        epochs: EpochOrder,
    },
    /// All sequences of all sources, unshuffled.
    InOrder { ends: Vec<usize> },
    /// Sources by weight, each with its own epochs.
    Mixed { mixture: Mixture, sources: Vec<EpochOrder> },
}

impl SampleOrder {
    /// # Errors
    /// Sequences whose number exceeds 32 bits.
    pub(super) fn shuffled(data: &Dataset, seed: u64) -> Result<Self, DataError> {
        let Some(weights) = data.weights() else {
            let epochs = EpochOrder::new(seed, data.num_sequences())?;
            return Ok(Self::Shuffled { ends: ends(data), epochs });
        };
        // Sources of equal size, such as a text and its translation, must not have the same order.
        let seeds = (0..).map(|index| seed.wrapping_add(index));
        let sources = seeds
            .zip(data.sources())
            .map(|(seed, sequences)| EpochOrder::new(seed, sequences.num_sequences()));
        let sources = sources.collect::<Result<_, _>>()?;
        Ok(Self::Mixed { mixture: Mixture::new(weights, seed), sources })
    }

    pub(super) fn in_order(data: &Dataset) -> Self {
        Self::InOrder { ends: ends(data) }
    }

    /// Returns where a sample is.
    pub(super) fn locate(&mut self, sample: u64) -> SequenceIndex {
        let in_source = |ends: &[usize], sequence: usize| {
            let source = ends.partition_point(|&end| end <= sequence);
            let first = source.checked_sub(1).map_or(0, |before| ends[before]);
            SequenceIndex { source, sequence: sequence - first }
        };
        match self {
            Self::Shuffled { ends, epochs } => in_source(ends, epochs.sequence(sample)),
            Self::InOrder { ends } => {
                let num_sequences = ends.last().copied().unwrap_or(1) as u64;
                in_source(ends, (sample % num_sequences) as usize)
            }
            Self::Mixed { mixture, sources } => {
                let MixedSample { source, number } = mixture.locate(sample);
                SequenceIndex { source, sequence: sources[source].sequence(number) }
            }
        }
    }
}

fn ends(data: &Dataset) -> Vec<usize> {
    let add = |end: &mut usize, sequences: usize| {
        *end += sequences;
        Some(*end)
    };
    data.sources().iter().map(|sequences| sequences.num_sequences()).scan(0, add).collect()
}

/// The sequences of epoch 0, followed by those of epoch 1, and so on.
#[derive(Debug, Clone)]
pub(super) struct EpochOrder {
    seed: u64,
    num_sequences: u32,
    /// The current epoch: a rank's samples ascend, so each epoch is ordered once.
    epoch: u64,
    /// The order, 4 bytes per sequence, shared by clones of a loader.
    sequences: Arc<Vec<u32>>,
}

impl EpochOrder {
    /// Creates the order; `num_sequences` must not be 0.
    pub(super) fn new(seed: u64, num_sequences: usize) -> Result<Self, DataError> {
        let num_sequences = ordered("sequences", num_sequences)?;
        Ok(Self { seed, num_sequences, epoch: 0, sequences: epoch_order(seed, 0, num_sequences).into() })
    }

    fn sequence(&mut self, sample: u64) -> usize {
        let num_sequences = u64::from(self.num_sequences);
        let epoch = sample / num_sequences;
        if epoch != self.epoch {
            self.epoch = epoch;
            self.sequences = epoch_order(self.seed, epoch, self.num_sequences).into();
        }
        self.sequences[(sample % num_sequences) as usize] as usize
    }
}
