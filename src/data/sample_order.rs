//! The endless sequence of samples of a dataset.

use super::Dataset;
use super::mixture::Mixture;
use super::order::epoch_order;
use std::sync::Arc;

/// The endless sequence of samples of a dataset, as (source, row).
#[derive(Debug, Clone)]
pub(super) enum SampleOrder {
    /// All rows of all sources, epoch after epoch, in an order of their own each time.
    Shuffled {
        /// One past the last row of each source, counted over all of them.
        ends: Vec<usize>,
        epochs: EpochOrder,
    },
    /// The same rows as they are.
    InRowOrder { ends: Vec<usize> },
    /// Sources by weight, each with epochs of its own.
    Mixed { mixture: Mixture, sources: Vec<EpochOrder> },
}

impl SampleOrder {
    pub(super) fn shuffled(data: &Dataset, seed: u64) -> Self {
        let Some(weights) = data.weights() else {
            return Self::Shuffled { ends: ends(data), epochs: EpochOrder::new(seed, data.num_rows()) };
        };
        // Sources of one size, such as a text and its translation, are not to come in one order.
        let seeds = (0..).map(|index| seed.wrapping_add(index));
        let sources = seeds.zip(data.sources()).map(|(seed, rows)| EpochOrder::new(seed, rows.num_rows()));
        let sources = sources.collect();
        Self::Mixed { mixture: Mixture::new(weights, seed), sources }
    }

    pub(super) fn in_row_order(data: &Dataset) -> Self {
        Self::InRowOrder { ends: ends(data) }
    }

    /// The source and the row that a sample is.
    pub(super) fn place(&mut self, sample: u64) -> (usize, usize) {
        let in_source = |ends: &[usize], row: usize| {
            let source = ends.partition_point(|&end| end <= row);
            (source, row - source.checked_sub(1).map_or(0, |before| ends[before]))
        };
        match self {
            Self::Shuffled { ends, epochs } => in_source(ends, epochs.row(sample)),
            Self::InRowOrder { ends } => {
                let num_rows = ends.last().copied().unwrap_or(1) as u64;
                in_source(ends, (sample % num_rows) as usize)
            }
            Self::Mixed { mixture, sources } => {
                let (source, sample) = mixture.place(sample);
                (source, sources[source].row(sample))
            }
        }
    }
}

fn ends(data: &Dataset) -> Vec<usize> {
    let add = |end: &mut usize, rows: usize| {
        *end += rows;
        Some(*end)
    };
    data.sources().iter().map(|rows| rows.num_rows()).scan(0, add).collect()
}

/// The rows of epoch 0, then those of epoch 1, and so on.
#[derive(Debug, Clone)]
pub(super) struct EpochOrder {
    seed: u64,
    num_rows: usize,
    /// The epoch looked at last: a rank's samples ascend, so each epoch is ordered once.
    epoch: u64,
    /// 8 bytes per row: clones of a loader share them.
    rows: Arc<[usize]>,
}

impl EpochOrder {
    /// `num_rows` must not be 0.
    fn new(seed: u64, num_rows: usize) -> Self {
        Self { seed, num_rows, epoch: 0, rows: epoch_order(seed, 0, num_rows).into() }
    }

    fn row(&mut self, sample: u64) -> usize {
        let epoch = sample / self.num_rows as u64;
        if epoch != self.epoch {
            self.epoch = epoch;
            self.rows = epoch_order(self.seed, epoch, self.num_rows).into();
        }
        self.rows[(sample % self.num_rows as u64) as usize]
    }
}
