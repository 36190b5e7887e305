//! Searches the cheapest settings with which a model fits into memory.
//!
//! Settings form a [`Grid`] for each mesh. Along each axis of the grid memory falls and cost grows, so the search
//! neither runs settings that save less than ones that do not fit, nor ones that cost more than ones that do. Tiles and
//! head chunks do not always save memory (with head chunks, a recomputed layer has two checkpoints), so their values
//! are tried first.

mod grid;

use super::search::Search;
use super::{Candidate, Criteria, MemoryBudget, RankPlan, Workload};
use crate::config::MachineProfile;
use crate::engine::{EngineError, StepPart};
use grid::{Grid, Point, Setting};
use std::cmp::{Ordering, Reverse};

/// The order of [`Fit::choices`] without a machine profile.
pub const FIT_CRITERION: &str = "fewest bytes offloaded, then fewest FLOPs recomputed, or not computed by idle pipeline stages, \
                                 then fewest bytes sent between nodes, then within nodes, then fewest head chunks, \
                                 largest tiles and micro batches";

/// The factor by which settings may exceed the budget before less saving ones are given up: offload needs buffers, which
/// count in small models.
const BUFFERS: f64 = 1.1;

/// The settings with which a model fits.
#[derive(Debug, Clone)]
pub struct Fit {
    /// Configurations that fit, the cheapest first: the fastest on the machine, else by [`FIT_CRITERION`].
    pub choices: Vec<Candidate>,
    /// If none fits: of those planned, the configuration that exceeds the budget by the smallest factor, with the
    /// longest sequence that fits on it.
    pub nearest: Option<Candidate>,
    /// Number of configurations that were planned.
    pub tried: usize,
    /// Number of combinations of settings on all meshes.
    pub combinations: usize,
}

impl Workload {
    /// Searches the cheapest settings within `budget` on the meshes with the same ranks and the same global batch. Mesh,
    /// micro batch, ZeRO stage and its axes, activation checkpointing, tiles, head chunks and offload are searched;
    /// everything else is as configured. There is at least one choice per mesh on which the model fits, and several if
    /// they trade offload for recomputation.
    ///
    /// Other numbers of pipeline stages than the configured one are searched where it can matter: on a machine, whose times include
    /// the idle time of the stages, or if nothing fits without offload.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn fit(&self, budget: MemoryBudget, machine: Option<&MachineProfile>) -> Result<Fit, EngineError> {
        let mut search = FitSearch { runs: Search::new(budget), choices: Vec::new() };
        let mut base = self.clone();
        base.config.ulysses.head_chunks = 1;
        let mut combinations = 0;
        let configured = self.config.mesh.pp_size;
        for pp in std::iter::once(configured).chain(self.other_sizes_of_pp()) {
            let needs_none = search.choices.iter().any(|choice| choice.plan.offloaded_bytes == 0);
            if pp != configured && machine.is_none() && needs_none {
                continue;
            }
            for mesh in base.meshes_of_batch(pp)? {
                let mut grid = Grid::new(mesh)?;
                combinations += grid.num_points();
                let most_recomputation = grid.num_levels(Setting::Recomputation) - 1;
                search.keep_saving(&mut grid, Setting::Tiles, most_recomputation)?;
                search.on_mesh(&grid)?;
            }
        }
        let FitSearch { runs: Search { tried, .. }, choices } = search;
        let choices = choices.into_iter().map(|choice| choice.timed(machine));
        let mut choices = choices.collect::<Result<Vec<Candidate>, EngineError>>()?;
        choices.sort_by(compare);
        let num_tried = tried.len();
        let planned = tried.into_iter().filter_map(|(_, candidate)| candidate);
        let nearest = planned.min_by(|a, b| excess(a, budget).total_cmp(&excess(b, budget)));
        let nearest = nearest.filter(|_| choices.is_empty());
        let nearest = nearest.map(|nearest| nearest.rated(Criteria { budget: Some(budget), machine: None }));
        Ok(Fit { choices, nearest: nearest.transpose()?, tried: num_tried, combinations })
    }
}

/// Orders the cheaper one first.
fn compare(choice: &Candidate, other: &Candidate) -> Ordering {
    let bytes = |choice: &Candidate| {
        let RankPlan { sent, peak_bytes, .. } = choice.plan;
        let config = &choice.workload.config;
        let tiles = config.ulysses.tile_tokens.map_or(0, |tokens| usize::MAX - tokens.get());
        let order = (config.ulysses.head_chunks, tiles, Reverse(config.micro_batch_size));
        (sent.inter_node_bytes, sent.intra_node_bytes, order, peak_bytes)
    };
    // Recomputed, and not computed while stages wait.
    let flops = |Candidate { plan, workload, .. }: &Candidate| {
        let bubble = workload.pipeline_bubble();
        plan.recompute_flops + (plan.model_flops + plan.recompute_flops) * bubble / (1.0 - bubble)
    };
    choice
        .compare_seconds(other)
        .then(choice.plan.offloaded_bytes.cmp(&other.plan.offloaded_bytes))
        .then_with(|| flops(choice).total_cmp(&flops(other)))
        .then_with(|| bytes(choice).cmp(&bytes(other)))
}

/// Returns the factor by which a candidate exceeds the budget.
fn excess(candidate: &Candidate, budget: MemoryBudget) -> f64 {
    let host = candidate.host_bytes_per_node as f64;
    let of_host = budget.host_bytes_per_node.map_or(0.0, |bytes| host / bytes as f64);
    of_host.max(candidate.plan.peak_bytes as f64 / budget.rank_bytes as f64)
}

/// The state of the search.
struct FitSearch {
    runs: Search,
    choices: Vec<Candidate>,
}

impl FitSearch {
    /// Drops the values of a setting that do not save memory in a layer, with one head chunk unless they are chunks.
    fn keep_saving(
        &mut self,
        grid: &mut Grid,
        setting: Setting,
        recomputation: usize,
    ) -> Result<(), EngineError> {
        let (mut kept, mut least) = (Vec::new(), u64::MAX);
        let most_saving = grid.most_saving().with(Setting::Recomputation, recomputation);
        for level in 0..grid.num_levels(setting) {
            let point = most_saving.with(Setting::HeadChunks, 0).with(setting, level);
            let candidate = self.runs.candidate(&grid.workload(point))?;
            let peak = candidate.map_or(u64::MAX, |candidate| peak_of_layers(&candidate.plan));
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
        let mut num_states = grid.num_levels(Setting::Offload);
        for recomputation in 0..grid.num_levels(Setting::Recomputation) {
            let mut grid = grid.clone();
            self.keep_saving(&mut grid, Setting::HeadChunks, recomputation)?;
            let most_saving = grid.most_saving().with(Setting::Recomputation, recomputation);
            let with_state = |state: usize| most_saving.with(Setting::Offload, state);
            if num_states == 0 || !self.may_fit(&grid.workload(with_state(num_states - 1)))? {
                continue;
            }
            for state in 0..num_states {
                if let Some(choice) = self.cheapest(&grid, with_state(state))? {
                    self.choices.push(choice);
                    num_states = state;
                    break;
                }
            }
        }
        Ok(())
    }

    /// Makes each setting of a point as cheap as fits, in the order of their costs; `None` if the point does not fit.
    fn cheapest(&mut self, grid: &Grid, mut point: Point) -> Result<Option<Candidate>, EngineError> {
        // Fewer head chunks need less host memory where layer inputs are offloaded: a recomputed layer with chunks has two.
        while !self.runs.fits(&grid.workload(point))? {
            match point.level(Setting::HeadChunks).checked_sub(1) {
                Some(fewer) => point = point.with(Setting::HeadChunks, fewer),
                None => return Ok(None),
            }
        }
        for setting in Setting::BY_COST {
            let at = |level| grid.workload(point.with(setting, level));
            let cheapest = self.runs.first_that_fits(point.level(setting), at)?;
            point = point.with(setting, cheapest);
        }
        Ok(self.runs.candidate(&grid.workload(point))?.cloned())
    }

    /// Returns whether settings that save less than these may fit a rank.
    fn may_fit(&mut self, workload: &Workload) -> Result<bool, EngineError> {
        let limit = BUFFERS * self.runs.budget.rank_bytes as f64;
        Ok(self.runs.candidate(workload)?.is_some_and(|found| found.plan.peak_bytes as f64 <= limit))
    }
}

/// Returns the peak memory of forward and backward passes of layers.
fn peak_of_layers(plan: &RankPlan) -> u64 {
    let is_layer = |at: StepPart| {
        matches!(at, StepPart::Forward { .. } | StepPart::Backward { .. } | StepPart::WeightBackward { .. })
    };
    plan.timeline.iter().filter(|moment| is_layer(moment.at)).map(|moment| moment.bytes).max().unwrap_or(0)
}

#[cfg(test)]
mod tests;
