//! `tensor_parallel.partition_config`: plans of tensor parallelism, compared with how layers divide themselves.

use super::EngineError;
use super::parameter_groups::similar_names;
use crate::config::{LayerSpec, MatchedSpec, PartitionType};
use crate::model::{Model, UnitSpec};
use crate::nn::{ParallelStyle, ParameterSpec, TensorRank};

/// Keeps the part of a model that one rank of tp has. A plan divides layers of the user's own; the layers of families divide
/// themselves.
///
/// # Errors
/// A pattern that matches no weight, a weight that its layer divides in another way, and layers that cannot be divided over so many
/// ranks.
pub fn divide_model(mut model: Model, plan: &[LayerSpec], tp: TensorRank) -> Result<Model, EngineError> {
    check_patterns(plan, &model.units())?;
    if tp.size == 1 {
        return Ok(model);
    }
    let style_of =
        |name: &str| LayerSpec::matching(plan, name).and_then(|matched| style(matched.spec.partition_type));
    model.layers.iter_mut().for_each(|layer| layer.apply_plan(&style_of));
    let divided = model.tensor_parallel(tp)?;
    check_styles(plan, &divided.units())?;
    Ok(divided)
}

fn style(partition_type: PartitionType) -> Option<ParallelStyle> {
    match partition_type {
        PartitionType::Column => Some(ParallelStyle::Colwise),
        PartitionType::Row => Some(ParallelStyle::Rowwise),
        PartitionType::Skip => None,
    }
}

/// The parameters that a plan can divide.
fn weights(units: &[UnitSpec]) -> impl Iterator<Item = &ParameterSpec> {
    units.iter().flat_map(|unit| &unit.parameters).filter(|spec| spec.shape.len() == 2)
}

fn check_patterns(plan: &[LayerSpec], units: &[UnitSpec]) -> Result<(), EngineError> {
    for (index, spec) in plan.iter().enumerate() {
        let names = || weights(units).map(|spec| spec.name.as_str());
        let unmatched = spec.patterns.iter().find(|pattern| !names().any(|name| pattern.matches(name)));
        if let Some(pattern) = unmatched {
            let similar = similar_names(pattern.as_str(), names());
            return Err(EngineError::UnmatchedLayerSpec {
                index,
                pattern: pattern.as_str().to_owned(),
                similar,
            });
        }
    }
    Ok(())
}

fn check_styles(plan: &[LayerSpec], units: &[UnitSpec]) -> Result<(), EngineError> {
    for weight in weights(units) {
        let Some(MatchedSpec { index, pattern, spec }) = LayerSpec::matching(plan, &weight.name) else {
            continue;
        };
        if style(spec.partition_type) != weight.style {
            let actual = match weight.style {
                Some(ParallelStyle::Colwise) => PartitionType::Column,
                Some(ParallelStyle::Rowwise) => PartitionType::Row,
                None => PartitionType::Skip,
            };
            return Err(EngineError::PartitionType {
                index,
                pattern: pattern.as_str().to_owned(),
                parameter: weight.name.clone(),
                planned: spec.partition_type,
                actual,
            });
        }
    }
    Ok(())
}
