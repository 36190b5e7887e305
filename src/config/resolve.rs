//! Resolves a file and flags into a [`Config`].

use super::auto::resolve_autos;
use super::batch::BatchSizes;
use super::config::Config;
use super::error::ConfigError;
use super::mesh_shape::{MeshShapeError, SizeOrigin, StatedSize, StatedSizes, shard_size};
use super::overrides::Overrides;
use super::raw::{RawConfig, TOTAL_NUM_STEPS};
use super::sections::mesh_rules::MeshRule;
use super::sections::mesh_spec::StatedMesh;
use super::sections::pipeline::{PipelineConfig, PipelineSchedule};
use super::sections::zero::PartitionAxes;
use crate::config_file::reader::Note;
use crate::mesh::{MeshError, MeshShape, MeshSpec, PP_AXIS, TP_AXIS};
use std::path::Path;

impl Config {
    /// Reads, checks and resolves a file, without command-line flags.
    ///
    /// # Errors
    /// When the file cannot be read or is invalid.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        RawConfig::from_file(path)?.resolve(&Overrides::default())
    }

    /// Checks and resolves the text of a config file, without command-line flags; error messages call it `file`.
    ///
    /// # Errors
    /// When the config is invalid.
    pub fn from_json_str(text: &str, file: &str) -> Result<Self, ConfigError> {
        RawConfig::from_json_str(text, file)?.resolve(&Overrides::default())
    }
}

impl RawConfig {
    /// Applies flags and defaults, and computes mesh and batch sizes.
    ///
    /// # Errors
    /// When mesh or batch sizes contradict each other, or a flag is out of range.
    pub fn resolve(&self, overrides: &Overrides) -> Result<Config, ConfigError> {
        overrides.check()?;
        let rules = &self.config.ulysses.mesh_rules;
        let rule = overrides.selector().and_then(|selector| MeshRule::select(rules, selector));
        let raw = rule.and_then(|index| self.of_rules.get(&index)).unwrap_or(self);
        let spec = match rule {
            Some(index) => &rules[index].mesh,
            None => &self.config.ulysses.mesh,
        };
        let invalid = |spec: &MeshSpec, source: MeshError| {
            let origin = match overrides.selector().filter(|_| rule.is_some()) {
                Some(selector) => format!("`ulysses.mesh_rules` for `{selector}`"),
                None => "`ulysses.mesh`".to_owned(),
            };
            let (file, mesh, source) = (self.file.clone(), spec.to_string(), Box::new(source));
            ConfigError::StatedMesh { file, origin, mesh, source }
        };
        let stated = spec
            .as_ref()
            .map(|spec| StatedMesh::new(spec, overrides.cluster()).map_err(|source| invalid(spec, source)));
        // `--mesh` replaces sizes of the file; an equal mesh of the file keeps its order of ranks.
        let is_kept = |stated: &StatedMesh| overrides.mesh.is_none_or(|flag| flag == stated.shape.sizes);
        let stated = stated.transpose()?.filter(is_kept);
        Resolution { raw, overrides, is_of_rule: rule.is_some(), stated }.config()
    }
}

/// A file with the flags that override it.
struct Resolution<'a> {
    /// The file, with the keys of the rule of `ulysses.mesh_rules` that applies.
    raw: &'a RawConfig,
    overrides: &'a Overrides,
    /// Whether a rule applies.
    is_of_rule: bool,
    /// The mesh of the rule, which replaces that of the file, or `ulysses.mesh`.
    stated: Option<StatedMesh>,
}

impl Resolution<'_> {
    fn config(&self) -> Result<Config, ConfigError> {
        let Self { raw, overrides, stated, .. } = self;
        let mesh = self.mesh()?;
        self.check_preset()?;
        let mut config = raw.config.clone();
        config.mesh = mesh.into();
        config.zero.mics_shard_size = self.shard_size(mesh.dp)?;
        let batch = self.batch(mesh)?;
        config.train_batch_size = batch.train;
        config.micro_batch_size = batch.micro;
        config.gradient_accumulation_steps = batch.accumulation;
        let ring_size =
            overrides.ring_size.or_else(|| stated.as_ref().and_then(|stated| stated.shape.ring_size));
        config.notes.extend(self.ring_note(ring_size).map(Note::warning));
        config.ulysses.ring_size = ring_size.unwrap_or(config.ulysses.ring_size);
        config.seed = overrides.seed.unwrap_or(config.seed);
        overrides.apply(&mut config.ulysses);
        let replaced = overrides.mesh.map_or_else(Vec::new, |mesh| raw.replaced_sizes(mesh));
        config.notes.extend(replaced.into_iter().map(Note::warning));
        config.ulysses.mesh =
            overrides.layout.clone().or_else(|| stated.as_ref().map(|stated| stated.spec.clone()));
        if !mesh.divides_model() && self.has_deepspeeds_axes() {
            config.ulysses.zero_partition_axes = PartitionAxes::DpSp;
            config.notes.push(Note::info(
                "the file sets `sequence_parallel_size`, but neither `mesh_param` nor `data_parallel_size`: ZeRO partitions \
                 over dp × sp, as in DeepSpeed; `ulysses.zero_partition_axes` selects other axes",
            ));
        }
        [check_ring, check_divided_model, check_stages]
            .iter()
            .try_for_each(|check| check(&config))
            .map_err(|reason| self.mesh_error(reason))?;
        config.notes.extend(config.ulysses.pipeline.notes(mesh.pp).map(Note::warning));
        config.notes.extend(config.communication_note().map(Note::warning));
        self.set_last_step(&mut config)?;
        config.notes.extend(raw.remarks.notes.iter().cloned());
        let of_scheduler = config.scheduler.as_ref().and_then(|scheduler| scheduler.note(&config.optimizer));
        config.notes.extend(of_scheduler.into_iter().chain(self.rules_note()).map(Note::warning));
        config.autos = resolve_autos(raw, &config);
        if ring_size.is_some() {
            config.set_ring();
        }
        Ok(config)
    }

    fn mesh(&self) -> Result<MeshShape, ConfigError> {
        let Self { raw, overrides, .. } = self;
        let is_replaced = self.is_of_rule || overrides.mesh.is_some();
        let mut sizes = if is_replaced { StatedSizes::default() } else { raw.sizes.clone() };
        if let Some(stated) = &self.stated {
            sizes.add(stated.shape.sizes, self.origin_of_stated());
        }
        if let Some(flag) = overrides.mesh {
            sizes.add(flag, SizeOrigin::Flag);
        }
        sizes.resolve(overrides.world_size).map_err(|reason| self.mesh_error(reason))
    }

    fn shard_size(&self, dp: usize) -> Result<Option<usize>, ConfigError> {
        let stated = self.stated.as_ref().and_then(|stated| stated.shape.shard_size);
        let stated = stated.map(|size| StatedSize { size, origin: self.origin_of_stated() });
        let flag = self.overrides.shard_size.map(|size| StatedSize { size, origin: SizeOrigin::Flag });
        let stated: Vec<StatedSize> =
            self.raw.shard_sizes.iter().copied().chain(stated).chain(flag).collect();
        shard_size(&stated, dp).map_err(|reason| self.mesh_error(reason))
    }

    fn batch(&self, mesh: MeshShape) -> Result<BatchSizes, ConfigError> {
        let Self { raw, overrides, stated, .. } = self;
        let is_dp_set = stated.is_some()
            || overrides.mesh.is_some()
            || overrides.world_size.is_some()
            || !raw.sizes.dp.is_empty();
        let (train, micro) = (raw.train_batch_size, raw.micro_batch_size);
        BatchSizes::resolve(train, micro, raw.gradient_accumulation_steps, mesh.dp).map_err(|reason| {
            ConfigError::Batch {
                file: raw.file.clone(),
                place: raw.batch_place.clone().map(Box::new),
                reason: Box::new(if is_dp_set { reason } else { reason.with_unset_dp(mesh) }),
            }
        })
    }

    fn set_last_step(&self, config: &mut Config) -> Result<(), ConfigError> {
        let Some(scheduler) = config.scheduler.as_mut().filter(|_| self.raw.decays_to_last_step()) else {
            return Ok(());
        };
        // The data decides how many steps an epoch has: `Config::resolve_steps`.
        let steps = config.ulysses.steps.or(config.ulysses.epochs.and(Some(u64::MAX)));
        let steps = steps.ok_or_else(|| ConfigError::AutoWithoutSource {
            file: self.raw.file.clone(),
            key: TOTAL_NUM_STEPS,
            source_of_value: "the number of steps, `ulysses.steps` (--steps of `train`, else --set ulysses.steps=N)",
        })?;
        scheduler.end_at(steps);
        Ok(())
    }

    /// Returns whether the file states the mesh as DeepSpeed's Arctic long-sequence training does, which partitions over
    /// dp and sp: by the size of sp alone. DeepSpeed's shard sizes count ranks of both axes, so one excludes it.
    fn has_deepspeeds_axes(&self) -> bool {
        let RawConfig { config, sizes, shard_sizes, names_partition_axes, .. } = self.raw;
        let is_sp_alone = matches!(sizes.sp[..], [sp] if sp.size > 1) && sizes.dp.is_empty();
        config.zero.stage.partitions_optimizer()
            && is_sp_alone
            && shard_sizes.is_empty()
            && !self.is_of_rule
            && config.ulysses.mesh.is_none()
            && !names_partition_axes
    }

    /// Checks that the ZeRO stage is the one that the preset implies.
    fn check_preset(&self) -> Result<(), ConfigError> {
        let of_flag = self.overrides.preset;
        let preset = of_flag.or_else(|| self.stated.as_ref().and_then(|stated| stated.preset));
        let Some(preset) = preset else { return Ok(()) };
        let stage = u8::from(self.raw.config.zero.stage);
        let Some(wanted) = preset.zero_stage().filter(|wanted| *wanted != stage) else { return Ok(()) };
        let name = preset.name();
        let source_of_mesh = match self.overrides.selector().filter(|_| self.is_of_rule) {
            _ if of_flag.is_some() => format!("--mesh {name}"),
            Some(selector) => format!("the mesh `{name}` of `ulysses.mesh_rules` for `{selector}`"),
            None => format!("`ulysses.mesh` \"{name}\""),
        };
        Err(ConfigError::PresetStage { file: self.raw.file.clone(), source_of_mesh, wanted, stage })
    }

    /// Returns a note on `ulysses.ring_size`, if the mesh has another ring.
    fn ring_note(&self, of_mesh: Option<usize>) -> Option<String> {
        let of_key = self.raw.config.ulysses.ring_size;
        let ring_size = of_mesh.filter(|ring_size| of_key != 1 && of_key != *ring_size)?;
        Some(format!("`ulysses.ring_size` {of_key} has no effect: the mesh has a ring of {ring_size}"))
    }

    /// Returns a note if there are rules, but none matches this machine.
    fn rules_note(&self) -> Option<String> {
        let selector = self.overrides.selector()?;
        (!self.is_of_rule && self.raw.has_mesh_rules()).then(|| {
            format!("no rule of `ulysses.mesh_rules` matches `{selector}`: the mesh sizes of the file apply")
        })
    }

    fn origin_of_stated(&self) -> SizeOrigin {
        if self.is_of_rule { SizeOrigin::Rule } else { self.raw.origin_of_mesh() }
    }

    fn mesh_error(&self, reason: MeshShapeError) -> ConfigError {
        ConfigError::Mesh { file: self.raw.file.clone(), reason: Box::new(reason) }
    }
}

fn check_ring(config: &Config) -> Result<(), MeshShapeError> {
    let (ring_size, sp) = (config.ulysses.ring_size, config.mesh.sp_size);
    if !sp.is_multiple_of(ring_size) {
        return Err(MeshShapeError::RingSize { ring_size, sp });
    }
    if config.ulysses.flexible_sp && ring_size > 1 {
        return Err(MeshShapeError::FlexibleRing { ring_size });
    }
    Ok(())
}

/// Refuses what supports neither pipeline nor tensor parallelism.
fn check_divided_model(config: &Config) -> Result<(), MeshShapeError> {
    const SHARD_SIZE: &str = "zero_optimization.mics_shard_size";
    let MeshShape { pp, tp, .. } = config.mesh.shape();
    let axes = [(PP_AXIS, pp, "pipeline"), (TP_AXIS, tp, "tensor")];
    let Some((axis, size, parallelism)) = axes.into_iter().find(|(_, size, _)| *size > 1) else {
        return Ok(());
    };
    let copies = config.checkpoint.as_ref().and_then(|checkpoint| checkpoint.memory_interval);
    let spans_sp = config.zero_axes() == PartitionAxes::DpSp;
    let shard_size = config.zero_shard_size();
    let features = [
        ("ulysses.flexible_sp", config.ulysses.flexible_sp, "set it to false"),
        ("ulysses.zero_partition_axes", spans_sp, "set it to [\"dp\"]"),
        (SHARD_SIZE, shard_size.is_some(), "remove it, so that ZeRO partitions over dp"),
        ("checkpoint.memory_interval", copies.is_some(), "remove it"),
    ];
    let Some((key, _, remedy)) = features.into_iter().find(|(_, is_set, _)| *is_set) else { return Ok(()) };
    let feature = match shard_size {
        Some(size) if key == SHARD_SIZE => format!("ZeRO's shard size, {size},"),
        _ => format!("`{key}`"),
    };
    Err(MeshShapeError::Unsupported { axis, size, parallelism, feature, remedy })
}

/// Checks that the stages of a pipeline can be scheduled, and that `layers_per_stage` has an entry for each.
fn check_stages(config: &Config) -> Result<(), MeshShapeError> {
    let (pp, accumulation) = (config.mesh.pp_size, config.gradient_accumulation_steps);
    if pp == 1 {
        return Ok(());
    }
    let PipelineConfig { schedule, virtual_stages, ref layers_per_stage } = config.ulysses.pipeline;
    if virtual_stages > 1 && schedule != PipelineSchedule::OneForwardOneBackward {
        return Err(MeshShapeError::OneStageSchedule { virtual_stages, schedule });
    }
    if virtual_stages > 1 && !accumulation.is_multiple_of(pp) {
        return Err(MeshShapeError::InterleavedMicroBatches { pp, accumulation });
    }
    let num_stages = pp.saturating_mul(virtual_stages);
    if let Some(entries) = layers_per_stage.as_ref().map(Vec::len).filter(|entries| *entries != num_stages) {
        return Err(MeshShapeError::LayersPerStage { pp, virtual_stages, entries });
    }
    Ok(())
}
