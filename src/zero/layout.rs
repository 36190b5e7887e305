//! The layout of a unit's parameters in its flat buffer, and its partitions.

use super::{Division, ZeroError};
use crate::mesh::{ShardRun, TensorShard};
use candle_core::Tensor;
use std::ops::Range;

/// One parameter of a unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlatParameter {
    /// Full name.
    pub name: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// First element within the flat buffer.
    pub offset: usize,
    /// The part of the whole parameter that this rank has, if the ranks of tp divide it; `shape` is the part's.
    pub shard: Option<Box<TensorShard>>,
    /// Whether the last stage of a pipeline has it too, for its objective.
    pub is_tied: bool,
    /// Whether it is frozen: without gradient and optimizer state.
    pub is_frozen: bool,
}

impl FlatParameter {
    /// The ranks that have the parameter.
    pub fn division(&self) -> Division {
        Division { over_tp: self.shard.is_some(), is_tied: self.is_tied }
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Elements within the flat buffer.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.numel()
    }

    /// Shape of the whole parameter.
    pub fn whole_shape(&self) -> Vec<usize> {
        self.shard.as_ref().map_or_else(|| self.shape.clone(), |shard| shard.whole_shape(&self.shape))
    }

    /// The elements `local` of this part, as runs of the whole parameter.
    pub fn whole_runs(&self, local: Range<usize>) -> Vec<ShardRun> {
        match &self.shard {
            Some(shard) => shard.runs(&self.shape, local),
            None => vec![ShardRun { local: local.start, whole: local.start, len: local.len() }],
        }
    }
}

/// The layout of a unit: its parameters one after another, padded so that all partitions have equal length.
/// Partition boundaries may cut through parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlatLayout {
    name: String,
    parameters: Vec<FlatParameter>,
    numel: usize,
    num_partitions: usize,
}

impl FlatLayout {
    /// Creates the layout of the given parameters (name and shape), for `num_partitions` ranks.
    pub fn new(
        name: impl Into<String>,
        parameters: impl IntoIterator<Item = (String, Vec<usize>)>,
        num_partitions: usize,
    ) -> Self {
        let whole = |(name, shape)| FlatParameter {
            name,
            shape,
            offset: 0,
            shard: None,
            is_tied: false,
            is_frozen: false,
        };
        Self::with_parameters(name, parameters.into_iter().map(whole), num_partitions)
    }

    /// Places parameters one after another.
    pub(super) fn with_parameters(
        name: impl Into<String>,
        parameters: impl IntoIterator<Item = FlatParameter>,
        num_partitions: usize,
    ) -> Self {
        let mut numel = 0;
        let place = |parameter: FlatParameter| {
            let parameter = FlatParameter { offset: numel, ..parameter };
            numel += parameter.numel();
            parameter
        };
        let parameters = parameters.into_iter().map(place).collect();
        Self { name: name.into(), parameters, numel, num_partitions: num_partitions.max(1) }
    }

    /// Sets the parts of the whole parameters, one per parameter.
    #[must_use]
    pub fn with_shards(mut self, shards: impl IntoIterator<Item = Option<TensorShard>>) -> Self {
        self.parameters
            .iter_mut()
            .zip(shards)
            .for_each(|(parameter, shard)| parameter.shard = shard.map(Box::new));
        self
    }

    /// Marks the parameters with a name that `is_tied` as those of the first and the last stage of a pipeline.
    #[must_use]
    pub fn with_tied(mut self, is_tied: impl Fn(&str) -> bool) -> Self {
        self.parameters.iter_mut().for_each(|parameter| parameter.is_tied = is_tied(&parameter.name));
        self
    }

    /// Marks the parameters with a name that `is_frozen` as frozen too.
    #[must_use]
    pub fn with_frozen(mut self, is_frozen: impl Fn(&str) -> bool) -> Self {
        self.parameters.iter_mut().for_each(|parameter| parameter.is_frozen |= is_frozen(&parameter.name));
        self
    }

    /// The ranks that have the parameters. A flat buffer has parameters of one division.
    pub fn division(&self) -> Division {
        self.parameters.first().map_or_else(Division::default, FlatParameter::division)
    }

    /// Returns whether the ranks of tp divide the parameters. Otherwise all of them have the same.
    pub fn is_sharded(&self) -> bool {
        self.parameters.iter().any(|parameter| parameter.shard.is_some())
    }

    /// The layout of the same unit on another rank of tp.
    #[must_use]
    pub fn at_tp_rank(&self, tp_rank: usize) -> Self {
        let at = |parameter: &FlatParameter| match &parameter.shard {
            None => parameter.clone(),
            Some(shard) => {
                let (whole, shard) = (parameter.whole_shape(), shard.at(tp_rank));
                let shape = shard.local_shape(&whole);
                FlatParameter { shape, shard: Some(Box::new(shard)), ..parameter.clone() }
            }
        };
        Self::with_parameters(self.name.clone(), self.parameters.iter().map(at), self.num_partitions)
    }

    /// Returns whether the parameters are frozen, without gradients and optimizer state.
    pub fn is_frozen(&self) -> bool {
        self.parameters.first().is_some_and(|parameter| parameter.is_frozen)
    }

    /// Name of the unit.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The parameters in order.
    pub fn parameters(&self) -> &[FlatParameter] {
        &self.parameters
    }

    /// Number of elements without padding.
    pub fn numel(&self) -> usize {
        self.numel
    }

    /// Number of elements with padding: a multiple of the number of partitions.
    pub fn padded_numel(&self) -> usize {
        self.partition_numel() * self.num_partitions
    }

    /// Number of elements of one partition.
    pub fn partition_numel(&self) -> usize {
        self.numel.div_ceil(self.num_partitions)
    }

    /// Number of partitions.
    pub fn num_partitions(&self) -> usize {
        self.num_partitions
    }

    /// The element range of `rank`'s partition in the flat buffer.
    pub fn partition(&self, rank: usize) -> Range<usize> {
        rank * self.partition_numel()..(rank + 1) * self.partition_numel()
    }

    /// The part of `range` that is not padding.
    pub fn unpadded(&self, range: Range<usize>) -> Range<usize> {
        range.start.min(self.numel)..range.end.min(self.numel)
    }

    /// Splits a flat buffer of all padded elements into one view per parameter.
    ///
    /// # Shapes
    /// `flat`: `[padded_numel]` → the shape of each parameter. Views share its storage.
    ///
    /// # Errors
    /// A buffer of another length.
    pub fn views(&self, flat: &Tensor) -> Result<Vec<Tensor>, ZeroError> {
        let view = |p: &FlatParameter| flat.narrow(0, p.offset, p.numel())?.reshape(p.shape.as_slice());
        Ok(self.parameters.iter().map(view).collect::<candle_core::Result<_>>()?)
    }

    /// The pieces of parameters within `range` of the flat buffer.
    pub fn pieces(&self, range: Range<usize>) -> impl Iterator<Item = Piece> {
        self.parameters.iter().enumerate().filter_map(move |(index, parameter)| {
            let covered = parameter.range();
            let start = covered.start.max(range.start);
            let end = covered.end.min(range.end);
            (start < end).then(|| Piece {
                parameter: index,
                elements: start - covered.start..end - covered.start,
                target: start - range.start..end - range.start,
            })
        })
    }
}

/// Part of a parameter within part of a flat buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Index of the parameter.
    pub parameter: usize,
    /// Elements within the parameter.
    pub elements: Range<usize>,
    /// The same elements within the part of the buffer.
    pub target: Range<usize>,
}
