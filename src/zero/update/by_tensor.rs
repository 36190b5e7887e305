//! The update of a rank's elements by a rule that needs the norm of each whole parameter tensor (LAMB). But
//! partition boundaries cut through tensors. So every rank sums the squares of its parts, and the parts are
//! added in partition order. A rank that holds everything sums the same parts, so all stages give the same
//! bits.

use super::UpdateTensors;
use super::param_group_ranges::{ParamGroupRange, Tensors};
use crate::comm::{ProcessGroup, ProcessGroupExt};
use crate::config::OptimizerConfig;
use crate::optim::Step;
use crate::zero::flat_unit::FlatUnit;
use crate::zero::{ZeroError, ZeroOptimizer};
use ulysses_kernels::optimizer::lamb::SquaredNorms;

/// The squared norms of every parameter tensor of a flat unit.
type FlatNorms = Vec<SquaredNorms>;

impl ZeroOptimizer {
    /// Replaces the gradients by the directions of the step, then updates the parameters. If the optimizer is
    /// partitioned, one collective over the shard group runs in between.
    pub(super) fn update_by_tensor(&self, config: &OptimizerConfig, step: Step) -> Result<(), ZeroError> {
        let mut norms = Vec::new();
        self.each_trained_flat(|flat| {
            let update = self.update_tensors(flat)?;
            norms.push(find_directions(flat, &update, config, step)?);
            self.put_back_state(flat, update)
        })?;
        let norms = self.sum_over_partitions(norms)?;
        for (flat, norms) in self.trained_flats().zip(&norms) {
            let update = self.update_tensors_without_state(flat)?;
            apply_directions(flat, &update, norms, config, step)?;
            self.put_back(flat, update)?;
        }
        Ok(())
    }

    /// The norms of whole tensors, from those of this rank's partitions.
    fn sum_over_partitions(&self, own: Vec<FlatNorms>) -> Result<Vec<FlatNorms>, ZeroError> {
        let mut norms = match self.stage.partitions_optimizer() {
            true => add_up(&own, &**self.groups.shard())?,
            false => own,
        };
        let Some(tensor) = &self.groups.tensor else { return Ok(norms) };
        let whole = add_up(&norms, &*tensor.tp)?;
        for (flat, (norms, whole)) in self.trained_flats().zip(norms.iter_mut().zip(whole)) {
            if flat.layout.division().over_tp {
                *norms = whole;
            }
        }
        Ok(norms)
    }
}

/// Adds up the norms of a group's ranks, in their order.
fn add_up(own: &[FlatNorms], group: &dyn ProcessGroup) -> Result<Vec<FlatNorms>, ZeroError> {
    let values: Vec<f64> = own.iter().flatten().flat_map(|norms| [norms.param, norms.direction]).collect();
    let mut sums: Vec<FlatNorms> =
        own.iter().map(|of_flat| vec![SquaredNorms::default(); of_flat.len()]).collect();
    let gathered = group.all_gather_values(&values)?;
    for of_rank in gathered.chunks_exact(values.len().max(1)) {
        let parts = of_rank.as_chunks::<2>().0.iter();
        for (sum, &[param, direction]) in sums.iter_mut().flatten().zip(parts) {
            *sum += SquaredNorms { param, direction };
        }
    }
    Ok(sums)
}

/// This rank's part of the norms of each parameter of the flat unit.
fn find_directions(
    flat: &FlatUnit,
    update: &UpdateTensors,
    config: &OptimizerConfig,
    step: Step,
) -> Result<FlatNorms, ZeroError> {
    let mut norms = vec![SquaredNorms::default(); flat.layout.parameters().len()];
    for (range, tensors) in group_ranges(flat) {
        let UpdateTensors { parameters, gradients, state } = update.narrow(&range.elements)?;
        let rule = range.settings.rule(config, step).by_tensor();
        let of_parts = rule.find_directions(&parameters, &gradients, &state, &tensors.segments)?;
        for (&parameter, of_part) in tensors.parameters.iter().zip(of_parts) {
            norms[parameter] += of_part;
        }
    }
    Ok(norms)
}

fn apply_directions(
    flat: &FlatUnit,
    update: &UpdateTensors,
    norms: &[SquaredNorms],
    config: &OptimizerConfig,
    step: Step,
) -> Result<(), ZeroError> {
    for (range, tensors) in group_ranges(flat) {
        let UpdateTensors { parameters, gradients, .. } = update.narrow(&range.elements)?;
        let norms: Vec<_> = tensors.parameters.iter().map(|&parameter| norms[parameter]).collect();
        let rule = range.settings.rule(config, step).by_tensor();
        rule.apply_directions(&parameters, &gradients, &tensors.segments, &norms)?;
    }
    Ok(())
}

fn group_ranges(flat: &FlatUnit) -> impl Iterator<Item = (&ParamGroupRange, &Tensors)> {
    flat.param_group_ranges.iter().filter_map(|range| Some((range, range.tensors.as_ref()?)))
}
