//! Splits the elements that a rank updates into ranges with the settings of one parameter group.

use crate::config::{GroupRate, OptimizerConfig, ParameterGroup};
use crate::optim::{Rule, Step};
use crate::zero::flat_unit::FlatUnit;
use crate::zero::{FlatLayout, ZeroError};
use candle_core::Device;
use std::ops::Range;
use ulysses_kernels::optimizer::lamb::Segments;

/// The optimizer settings of a parameter group.
#[derive(Clone, Copy, PartialEq)]
pub(in crate::zero) struct GroupSettings {
    pub(in crate::zero) rate: GroupRate,
    pub(in crate::zero) weight_decay: Option<f64>,
}

impl GroupSettings {
    fn of(groups: &[ParameterGroup], name: &str) -> Self {
        match ParameterGroup::of(groups, name) {
            Some(group) => Self { rate: group.rate(), weight_decay: group.weight_decay },
            None => Self { rate: GroupRate::Scaled(1.0), weight_decay: None },
        }
    }

    /// The optimizer's step with these settings.
    pub(in crate::zero) fn rule(self, config: &OptimizerConfig, step: Step) -> Rule {
        let lr = self.rate.at(step.lr, config.lr());
        let config = config.clone();
        let config = match self.weight_decay {
            Some(weight_decay) => config.with_weight_decay(weight_decay),
            None => config,
        };
        config.params().rule(Step { lr, ..step })
    }
}

/// Consecutive elements with the same settings. Padding belongs to no range.
pub(in crate::zero) struct ParamGroupRange {
    /// Range within the elements that this rank updates.
    pub(in crate::zero) elements: Range<usize>,
    pub(in crate::zero) settings: GroupSettings,
    /// For a rule by tensors, the parameter tensors of the elements.
    pub(in crate::zero) tensors: Option<Tensors>,
}

/// The parts of parameter tensors that lie in a range.
pub(in crate::zero) struct Tensors {
    /// The parameter of each segment.
    pub(in crate::zero) parameters: Vec<usize>,
    pub(in crate::zero) segments: Segments,
}

impl FlatUnit {
    /// The ranges of the elements that this rank updates: `all` of them, or its partition.
    pub(in crate::zero) fn param_group_ranges(
        &self,
        all: bool,
        config: &OptimizerConfig,
        groups: &[ParameterGroup],
        device: &Device,
    ) -> Result<Vec<ParamGroupRange>, ZeroError> {
        let layout = &self.layout;
        let names = layout.parameters().iter().map(|parameter| &parameter.name);
        let settings: Vec<_> = names.map(|name| GroupSettings::of(groups, name)).collect();
        let updated = if all { 0..layout.padded_numel() } else { layout.partition(self.shard_rank) };
        if config.is_by_element() {
            let runs = equal_settings(layout, updated, &settings);
            return Ok(runs.into_iter().map(|run| run.into_range(0, None)).collect());
        }
        // Split at partition boundaries too, so that norms are sums over the same parts on every rank and at
        // every stage.
        let partitions = if all { 0..layout.num_partitions() } else { self.shard_rank..self.shard_rank + 1 };
        let runs = partitions.flat_map(|partition| {
            let elements = layout.partition(partition);
            let first = elements.start - updated.start;
            equal_settings(layout, elements, &settings).into_iter().map(move |run| (first, run))
        });
        runs.map(|(first, run)| {
            let segments = Segments::new(run.pieces.clone(), device)?;
            let tensors = Tensors { parameters: run.parameters.clone(), segments };
            Ok(run.into_range(first, Some(tensors)))
        })
        .collect()
    }
}

/// Consecutive pieces of parameters with equal settings.
struct Run {
    start: usize,
    settings: GroupSettings,
    parameters: Vec<usize>,
    /// Relative to `start`.
    pieces: Vec<Range<usize>>,
}

impl Run {
    fn into_range(self, first: usize, tensors: Option<Tensors>) -> ParamGroupRange {
        let start = first + self.start;
        let len = self.pieces.last().map_or(0, |piece| piece.end);
        ParamGroupRange { elements: start..start + len, settings: self.settings, tensors }
    }
}

/// The runs within `range` of a flat buffer, relative to its start.
fn equal_settings(layout: &FlatLayout, range: Range<usize>, settings: &[GroupSettings]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for piece in layout.pieces(range) {
        let settings = settings[piece.parameter];
        if runs.last().is_none_or(|run| run.settings != settings) {
            let start = piece.target.start;
            runs.push(Run { start, settings, parameters: Vec::new(), pieces: Vec::new() });
        }
        if let Some(run) = runs.last_mut() {
            run.parameters.push(piece.parameter);
            run.pieces.push(piece.target.start - run.start..piece.target.end - run.start);
        }
    }
    runs
}
