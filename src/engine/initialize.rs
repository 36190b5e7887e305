//! The parts of an engine that its config decides, with their checks.

use super::EngineError;
use super::parameter_groups::check_parameter_groups;
use crate::comm::{ProcessGroup, TrainingGroups};
use crate::config::{AttentionChoice, Config};
use crate::mesh::{PP_AXIS, RING_AXIS, SHARD_AXIS, TP_AXIS};
use crate::model::{Model, WeightSource};
use crate::zero::{FlatLayout, Storage, ZeroOptimizer};
use candle_core::Device;
use std::collections::HashSet;
use ulysses_kernels::attention::{AttentionKernels, FlashAttention};

/// The attention of a config on a device.
pub(crate) fn attention(config: &Config, device: &Device) -> Result<FlashAttention, EngineError> {
    let kernels = match config.ulysses.attention {
        None => AttentionKernels::Auto,
        Some(AttentionChoice::Fused) => AttentionKernels::Fused,
        Some(AttentionChoice::Tiled) => AttentionKernels::Tiled,
    };
    let kernels = kernels.on(device, config.precision.dtype())?;
    Ok(FlashAttention::new(kernels))
}

/// Checks the parameters of a whole model.
pub(super) fn check_parameters(model: &Model, config: &Config) -> Result<(), EngineError> {
    let units = model.units();
    let mut names = HashSet::new();
    let parameters = units.iter().flat_map(|unit| &unit.parameters);
    if let Some(duplicate) = parameters.map(|spec| &spec.name).find(|name| !names.insert(*name)) {
        return Err(EngineError::DuplicateParameter { name: duplicate.clone() });
    }
    check_tied_shapes(model)?;
    check_parameter_groups(&config.ulysses.parameter_groups, &units)
}

/// Creates the partitioned optimizer of a model, whose parameters are read from `weights`. The `tied` ones are also those of
/// another stage of the pipeline.
pub(super) fn zero_optimizer(
    model: &Model,
    tied: &[String],
    weights: &dyn WeightSource,
    config: &Config,
    groups: TrainingGroups,
    storage: Storage,
) -> Result<ZeroOptimizer, EngineError> {
    let units = model.units();
    let layout = |unit: &crate::model::UnitSpec| {
        let parameters = unit.parameters.iter().map(|spec| (spec.name.clone(), spec.shape.clone()));
        FlatLayout::new(unit.name.clone(), parameters, config.zero_world_size())
            .with_shards(unit.parameters.iter().map(|spec| spec.shard.as_deref().cloned()))
            .with_tied(|name| tied.iter().any(|tied| tied == name))
            .with_frozen(|name| unit.parameters.iter().any(|spec| spec.is_constant && spec.name == name))
    };
    let layouts = units.iter().map(layout).collect();
    let fill = |(unit, parameter): (usize, usize), elements, out: &mut [f32]| {
        Ok(weights.read_shard(&units[unit].parameters[parameter], elements, out)?)
    };
    ZeroOptimizer::new::<EngineError>(
        layouts,
        config.zero.stage,
        config.optimizer.clone(),
        &config.ulysses.parameter_groups,
        groups,
        storage,
        &fill,
    )
}

/// Warns about candle's own thread pool. The library's ops do not use it, but layers written with candle
/// ops do, and all ranks of a process would queue for it. Only the program may change the environment.
pub(super) fn warn_about_candle_threads() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        if std::env::var("CANDLE_NUM_THREADS").as_deref() != Ok("1") {
            tracing::info!(
                "CANDLE_NUM_THREADS is not 1: candle ops on more than 64 K elements share one pool among all ranks"
            );
        }
    });
}

/// Checks that the groups have the sizes of the config's axes.
pub(super) fn check_mesh(config: &Config, groups: &TrainingGroups) -> Result<(), EngineError> {
    check_axis("dp", config.mesh.dp_size, &*groups.dp)?;
    check_axis("sp", config.mesh.sp_size, &*groups.sp)?;
    if groups.tensor.is_some() && groups.sharding.is_some() {
        return Err(EngineError::ShardsWithTensorParallelism);
    }
    let unsupported = [
        (groups.sharding.is_some(), "ZeRO's partitions over other ranks than those of dp"),
        (!groups.sp_blocks.is_empty() || config.ulysses.flexible_sp, "`ulysses.flexible_sp`"),
    ];
    if let Some((_, feature)) =
        unsupported.into_iter().find(|(is_used, _)| *is_used && groups.pipeline.is_some())
    {
        return Err(EngineError::WithPipeline { feature });
    }
    let sizes =
        [(TP_AXIS, config.mesh.tp_size, groups.tp_size()), (PP_AXIS, config.mesh.pp_size, groups.pp_size())];
    if let Some((axis, configured, actual)) =
        sizes.into_iter().find(|(_, configured, actual)| configured != actual)
    {
        return Err(EngineError::MeshMismatch { axis, configured, actual });
    }
    let ring_size = groups.ring.as_ref().map_or(1, |groups| groups.ring.world_size());
    if ring_size != config.seq_sharding().ring_size {
        let (axis, configured) = (RING_AXIS, config.seq_sharding().ring_size);
        return Err(EngineError::MeshMismatch { axis, configured, actual: ring_size });
    }
    check_axis(SHARD_AXIS, config.zero_world_size(), &**groups.shard())
}

fn check_axis(axis: &'static str, configured: usize, group: &dyn ProcessGroup) -> Result<(), EngineError> {
    let actual = group.world_size();
    if configured == actual { Ok(()) } else { Err(EngineError::MeshMismatch { axis, configured, actual }) }
}

/// Checks that a parameter that input and objective share has the same shape in both.
fn check_tied_shapes(model: &Model) -> Result<(), EngineError> {
    for parameter in model.objective.parameters() {
        let shared = model.input.parameters().iter().find(|of_input| of_input.name == parameter.name);
        if let Some(of_input) = shared.filter(|of_input| of_input.shape != parameter.shape) {
            let (of_input, of_objective) = (of_input.shape.clone(), parameter.shape.clone());
            return Err(EngineError::TiedShapes { name: parameter.name.clone(), of_input, of_objective });
        }
    }
    Ok(())
}
