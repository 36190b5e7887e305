//! The config and the model of a plan.

use super::PlanArgs;
use super::assumed::{ASSUMED, AssumedBatch, assumed_config};
use crate::failure::{Failure, OrFail};
use crate::mesh_flag::mesh_overrides;
use crate::model::describe;
use crate::sources::tokenizer_file;
use anyhow::anyhow;
use std::path::Path;
use ulysses::config::{Config, ConfigError, MeshShape, Overrides, RawConfig, Settings};
use ulysses::model::{ModelConfig, PRESETS, shape};
use ulysses::trainer::job::{check_exchange, check_layers};

/// Reads a config file, or without one the assumed config.
fn raw_config(file: Option<&Path>, assumed: &str, settings: &Settings) -> Result<RawConfig, Failure> {
    match file {
        Some(path) => RawConfig::from_file_with(path, settings).or_usage(),
        None => RawConfig::from_json_str_with(assumed, ASSUMED, settings).or_usage(),
    }
}

/// Resolves the config file, or the assumed config.
pub(super) fn resolve(args: &PlanArgs) -> Result<Config, Failure> {
    if args.ranks.is_some() && !args.fit {
        let message = "--ranks needs --fit; without --fit give the mesh, such as --mesh 1x8";
        return Err(Failure::Usage(anyhow!(message)));
    }
    let overrides = Overrides {
        world_size: args.ranks,
        seq_len: args.seq_len,
        model: args.model.clone(),
        ..mesh_overrides(args.mesh.as_deref())?
    };
    let mesh = overrides.mesh.unwrap_or(MeshShape::dp_sp(args.ranks.unwrap_or(1), 1));
    let batch = if args.fit {
        AssumedBatch::Global(mesh.dp.saturating_mul(mesh.sp))
    } else {
        AssumedBatch::OnePerRank
    };
    let assumed = assumed_config(batch, mesh.sp > 1 && mesh == MeshShape::dp_sp(1, mesh.sp));
    let raw = raw_config(args.config.as_deref(), &assumed, &args.flags.settings())?;
    let config = raw.resolve(&overrides).or_else(|error| match args.ranks {
        // A plan does not depend on the steps of the schedule.
        _ if matches!(error, ConfigError::AutoWithoutSource { .. }) && !args.fit => {
            raw.resolve(&Overrides { steps: Some(1), ..overrides })
        }
        // The search chooses the mesh, but for tp: the batch need not be divisible by all ranks.
        Some(ranks) => {
            let divided = raw.divided_model();
            if !ranks.is_multiple_of(divided.num_ranks()) {
                return Err(error);
            }
            let alone = MeshShape { sp: ranks / divided.num_ranks(), ..divided };
            raw.resolve(&Overrides { mesh: Some(alone), world_size: None, ..overrides }).map_err(|_| error)
        }
        None => Err(error),
    });
    let config = config.or_usage()?;
    match config.longest_seq_len().filter(|&seq_len| u32::try_from(seq_len).is_err()) {
        Some(seq_len) => Err(Failure::Usage(anyhow!(
            "`ulysses.seq_len` (--seq-len): expected at most {} tokens, found {seq_len}",
            u32::MAX
        ))),
        None => Ok(config),
    }
}

/// Checks that the config fits the model, as training does.
pub(super) fn check_model(model: &ModelConfig, config: &Config) -> Result<(), Failure> {
    check_layers(model, config)?;
    let seq_len = config.ulysses.seq_len.unwrap_or(config.mesh.ranks_per_sequence());
    Ok(check_exchange(model, config.micro_batch_size, seq_len, config)?)
}

/// Returns the model's shape. Presets use the vocabulary of the config's tokenizer, as in training.
pub(crate) fn model(config: &Config) -> Result<ModelConfig, Failure> {
    let name = config.require_model().or_usage()?;
    if is_on_disk(name) {
        return describe(Path::new(name));
    }
    let model = shape(name).or_usage()?;
    let Some(tokenizer) = config.ulysses.tokenizer.as_deref().filter(|_| PRESETS.contains(&name)) else {
        return Ok(model);
    };
    let tokenizer = tokenizer_file(Some(Path::new(tokenizer)), config.ulysses.chat_date)?;
    Ok(ModelConfig { vocab_size: tokenizer.vocab_size(), ..model })
}

/// Returns whether a model is a file or a directory; a preset comes before a directory of its name.
fn is_on_disk(name: &str) -> bool {
    let path = Path::new(name);
    path.is_file() || path.is_dir() && !PRESETS.contains(&name)
}
