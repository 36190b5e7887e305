//! Searches the cheapest settings with which a model fits into memory.
//!
//! Settings form a grid: for each mesh the place of the optimizer state and the parameters, activation checkpointing, and
//! the settings of a [`Setting`]. Along each axis of the grid memory falls and cost grows, so the search neither runs
//! settings that save less than ones that do not fit, nor ones that cost more than ones that do. Tiles and head chunks do
//! not always save memory (with head chunks, a recomputed layer has two checkpoints), so their values
//! are tried first.

mod grid;

use super::{Criteria, MemoryBudget, RankPlan, Throughput, Workload};
use crate::config::Config;
use crate::engine::{EngineError, Moment};
use grid::{Grid, OffloadedState, Point, Recomputation, STATES, Setting};
use std::cmp::{Ordering, Reverse};

/// The order of [`Fit::choices`] without a machine profile.
pub const FIT_CRITERION: &str = "fewest bytes offloaded, then fewest FLOPs recomputed, then fewest bytes sent between \
                                 nodes, then within nodes, then fewest head chunks, largest tiles and micro batches";

/// The factor by which settings may exceed the budget before less saving ones are given up: offload needs buffers, which
/// count in small models.
const BUFFERS: f64 = 1.1;

/// The settings with which a model fits.
#[derive(Debug, Clone)]
pub struct Fit {
    /// Configurations that fit, the cheapest first: the fastest on the machine, else by [`FIT_CRITERION`].
    pub choices: Vec<FitChoice>,
    /// Of those planned, the configuration that exceeds the budget by the smallest factor, if none fits.
    pub nearest: Option<FitChoice>,
    /// Number of configurations that were planned.
    pub tried: usize,
    /// Number of combinations of settings on all meshes.
    pub combinations: usize,
}

/// A configuration and its plan.
#[derive(Debug, Clone)]
pub struct FitChoice {
    /// The configuration.
    pub workload: Workload,
    /// The plan of the rank that needs most memory.
    pub plan: RankPlan,
    /// The step time, if there is a machine profile.
    pub throughput: Option<Throughput>,
}

impl FitChoice {
    /// Orders the cheaper one first.
    fn compare(&self, other: &Self) -> Ordering {
        let seconds = |choice: &Self| {
            choice.throughput.as_ref().and_then(Throughput::step_seconds).unwrap_or(f64::INFINITY)
        };
        let bytes = |choice: &Self| {
            let RankPlan { sent, peak_bytes, .. } = choice.plan;
            let config = &choice.workload.config;
            let tiles = config.ulysses.tile_tokens.map_or(0, |tokens| usize::MAX - tokens.get());
            let order = (config.ulysses.head_chunks, tiles, Reverse(config.micro_batch_size));
            (sent.inter_node_bytes, sent.intra_node_bytes, order, peak_bytes)
        };
        let (plan, of_other) = (&self.plan, &other.plan);
        seconds(self)
            .total_cmp(&seconds(other))
            .then(plan.offloaded_bytes.cmp(&of_other.offloaded_bytes))
            .then(plan.recompute_flops.total_cmp(&of_other.recompute_flops))
            .then_with(|| bytes(self).cmp(&bytes(other)))
    }

    /// Returns the factor by which the plan exceeds the budget.
    fn excess(&self, budget: MemoryBudget) -> f64 {
        let host = self.workload.host_bytes_per_node(&self.plan) as f64;
        let of_host = budget.host_bytes_per_node.map_or(0.0, |bytes| host / bytes as f64);
        of_host.max(self.plan.peak_bytes as f64 / budget.rank_bytes as f64)
    }
}

impl Workload {
    /// Searches the cheapest settings within `budget` on the meshes with the same ranks and the same global batch. Mesh,
    /// micro batch, ZeRO stage and its axes, activation checkpointing, tiles, head chunks and offload are searched;
    /// everything else is as configured. There is at least one choice per mesh on which the model fits, and several if
    /// they trade offload for recomputation.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn fit(&self, criteria: Criteria<'_>, budget: MemoryBudget) -> Result<Fit, EngineError> {
        let mut search = Search { budget, tried: Vec::new(), choices: Vec::new() };
        let mut combinations = 0;
        for mut grid in self.grids()? {
            combinations += grid.num_points();
            search.keep_saving(&mut grid, Setting::Tiles, Recomputation::OffloadedInputs)?;
            search.on_mesh(&grid)?;
        }
        let Search { tried, mut choices, .. } = search;
        for choice in &mut choices {
            choice.throughput = choice.workload.throughput(criteria)?;
        }
        choices.sort_by(FitChoice::compare);
        let is_none = choices.is_empty();
        let count = tried.len();
        let planned = tried
            .into_iter()
            .filter_map(|(workload, plan)| Some(FitChoice { workload, plan: plan?, throughput: None }));
        let nearest = planned.min_by(|a, b| a.excess(budget).total_cmp(&b.excess(budget)));
        Ok(Fit { choices, nearest: nearest.filter(|_| is_none), tried: count, combinations })
    }

    /// Returns the grid of settings of each mesh.
    fn grids(&self) -> Result<Vec<Grid>, EngineError> {
        let mut base = self.clone();
        base.config.ulysses.head_chunks = 1;
        let meshes = base.meshes_of_batch()?;
        meshes.into_iter().map(Grid::new).collect()
    }
}

/// The state of a search.
struct Search {
    budget: MemoryBudget,
    /// Every configuration that was planned; without a plan if its bytes overflow.
    tried: Vec<(Workload, Option<RankPlan>)>,
    choices: Vec<FitChoice>,
}

impl Search {
    /// Drops the values of a setting that do not save memory in a layer, with one head chunk unless they are chunks.
    fn keep_saving(
        &mut self,
        grid: &mut Grid,
        setting: Setting,
        recomputation: Recomputation,
    ) -> Result<(), EngineError> {
        let (mut kept, mut least) = (Vec::new(), u64::MAX);
        for level in 0..grid.num_levels(setting) {
            let point = grid.most_saving_with(OffloadedState::OptimizerAndParameters, recomputation);
            let workload = point.with(Setting::HeadChunks, 0).with(setting, level).workload();
            let peak = self.plan(&workload)?.map_or(u64::MAX, |plan| peak_of_layers(&plan));
            if kept.is_empty() || peak < least {
                kept.push(level);
                least = peak;
            }
        }
        grid.keep(setting, &kept);
        Ok(())
    }

    /// Adds the cheapest settings of a mesh: for each kind of recomputation, cheapest first, the fewest offloaded states.
    fn on_mesh(&mut self, grid: &Grid) -> Result<(), EngineError> {
        // More recomputation is of interest only if it avoids offload.
        let mut num_states = STATES.len();
        for recomputation in Recomputation::ALL {
            let mut grid = grid.clone();
            self.keep_saving(&mut grid, Setting::HeadChunks, recomputation)?;
            let point = |state: usize| grid.most_saving_with(STATES[state], recomputation);
            if num_states == 0 || !self.may_fit(&point(num_states - 1))? {
                continue;
            }
            for state in 0..num_states {
                if let Some(choice) = self.cheapest(point(state))? {
                    self.choices.push(choice);
                    num_states = state;
                    break;
                }
            }
        }
        Ok(())
    }

    /// Makes each setting of a point as cheap as fits, in the order of their costs; `None` if the point does not fit.
    fn cheapest(&mut self, mut point: Point<'_>) -> Result<Option<FitChoice>, EngineError> {
        // Fewer head chunks need less host memory where layer inputs are offloaded: a recomputed layer with chunks has two.
        while !self.fits(&point)? {
            match point.level(Setting::HeadChunks).checked_sub(1) {
                Some(fewer) => point = point.with(Setting::HeadChunks, fewer),
                None => return Ok(None),
            }
        }
        for setting in Setting::ALL {
            let mut cheapest = 0;
            while cheapest < point.level(setting) {
                let middle = point.with(setting, cheapest.midpoint(point.level(setting)));
                if self.fits(&middle)? {
                    point = middle;
                } else {
                    cheapest = middle.level(setting) + 1;
                }
            }
        }
        let workload = point.workload();
        let plan = self.plan(&workload)?;
        Ok(plan.map(|plan| FitChoice { workload, plan, throughput: None }))
    }

    /// Returns whether settings that save less than a point may fit a rank.
    fn may_fit(&mut self, point: &Point<'_>) -> Result<bool, EngineError> {
        let plan = self.plan(&point.workload())?;
        let limit = BUFFERS * self.budget.rank_bytes as f64;
        Ok(plan.is_some_and(|plan| plan.peak_bytes as f64 <= limit))
    }

    fn fits(&mut self, point: &Point<'_>) -> Result<bool, EngineError> {
        let workload = point.workload();
        let plan = self.plan(&workload)?;
        Ok(plan.is_some_and(|plan| workload.fits(&plan, self.budget)))
    }

    /// Plans a workload that was not planned yet.
    fn plan(&mut self, workload: &Workload) -> Result<Option<RankPlan>, EngineError> {
        let is_of = |config: &Config| *config == workload.config;
        if let Some((_, plan)) = self.tried.iter().find(|(known, _)| is_of(&known.config)) {
            return Ok(plan.clone());
        }
        let plan = match workload.plan() {
            Err(EngineError::StepTooLarge { .. }) => None,
            plan => Some(plan?),
        };
        self.tried.push((workload.clone(), plan.clone()));
        Ok(plan)
    }
}

/// Returns the peak memory of forward and backward passes of layers.
fn peak_of_layers(plan: &RankPlan) -> u64 {
    let is_layer = |at: Moment| matches!(at, Moment::Forward { .. } | Moment::Backward { .. });
    plan.timeline.iter().filter(|moment| is_layer(moment.at)).map(|moment| moment.bytes).max().unwrap_or(0)
}

#[cfg(test)]
mod tests;
