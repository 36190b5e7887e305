//! Resolves a file and flags into a [`Config`].

use super::auto::resolve_autos;
use super::batch::BatchSizes;
use super::config::Config;
use super::error::ConfigError;
use super::mesh_shape::{MeshShapeError, SizeOrigin, StatedSize, StatedSizes, shard_size};
use super::overrides::Overrides;
use super::raw::RawConfig;
use super::sections::mesh_rules::AppliedRule;
use super::sections::mesh_spec::StatedMesh;
use super::sections::pipeline::PipelineSchedule;
use super::sections::scheduler::SchedulerConfig;
use super::sections::ulysses::UlyssesConfig;
use super::sections::zero::PartitionAxes;
use crate::config_file::reader::Note;
use crate::mesh::{MeshShape, PP_AXIS, TP_AXIS};

impl RawConfig {
    /// Applies flags and defaults, and computes mesh and batch sizes.
    ///
    /// # Errors
    /// When mesh or batch sizes contradict each other, or a flag is out of range.
    pub fn resolve(&self, overrides: &Overrides) -> Result<Config, ConfigError> {
        overrides.check()?;
        let applied_rule = self.applied_rule(overrides)?;
        let index = applied_rule.as_ref().map(|rule| rule.index);
        let with_keys = self.of_rules.iter().find(|(of_rule, _)| Some(*of_rule) == index);
        with_keys.map_or(self, |(_, raw)| raw).resolve_with(applied_rule, overrides)
    }

    fn resolve_with(
        &self,
        applied_rule: Option<AppliedRule>,
        overrides: &Overrides,
    ) -> Result<Config, ConfigError> {
        let mut stated = match &applied_rule {
            Some(rule) => rule.mesh.clone(),
            None => self.stated_mesh(overrides)?,
        };
        // `--mesh` replaces sizes of the file; an equal mesh of the file keeps its order of ranks.
        let replaced = overrides.mesh.map_or_else(Vec::new, |mesh| self.replaced_sizes(mesh));
        if let Some(flag) = overrides.mesh {
            stated = stated.filter(|stated| stated.shape.sizes == flag);
        }
        let is_of_rule = applied_rule.is_some();
        let mesh = self.resolve_mesh(stated.as_ref(), is_of_rule, overrides)?;
        self.check_preset(stated.as_ref(), is_of_rule, overrides)?;
        let mut config = self.config.clone();
        config.mesh = mesh.into();
        config.zero.mics_shard_size =
            self.stated_shard_size(mesh.dp, stated.as_ref(), is_of_rule, overrides)?;
        let is_dp_set = stated.is_some()
            || overrides.mesh.is_some()
            || overrides.world_size.is_some()
            || !self.sizes.dp.is_empty();
        let batch = self.resolve_batch(mesh, is_dp_set)?;
        config.train_batch_size = batch.train;
        config.micro_batch_size = batch.micro;
        config.gradient_accumulation_steps = batch.accumulation;
        let stated_ring = stated.as_ref().and_then(|stated| stated.shape.ring_size);
        let ring_size = overrides.ring_size.or(stated_ring);
        config.notes.extend(self.ring_note(ring_size).map(Note::warning));
        config.ulysses.ring_size = ring_size.unwrap_or(config.ulysses.ring_size);
        self.check_ring(mesh.sp, &config.ulysses)?;
        config.seed = overrides.seed.unwrap_or(config.seed);
        overrides.apply(&mut config.ulysses);
        config.notes.extend(replaced.into_iter().map(Note::warning));
        config.ulysses.mesh = overrides.layout.clone().or(stated.map(|stated| stated.spec));
        if !mesh.divides_model() && self.has_deepspeeds_axes(applied_rule.as_ref()) {
            config.ulysses.zero_partition_axes = PartitionAxes::DpSp;
            config.notes.push(Note::info(
                "the file sets `sequence_parallel_size`, but neither `mesh_param` nor `data_parallel_size`: ZeRO partitions \
                 over dp × sp, as in DeepSpeed; `ulysses.zero_partition_axes` selects other axes",
            ));
        }
        self.check_divided_model(&config)?;
        self.check_stages(&mut config)?;
        config.notes.extend(config.communication_note().map(Note::warning));
        config.scheduler = self.resolve_scheduler(&config.ulysses)?;
        config.notes.extend(self.resolved_notes(config.scheduler.as_ref()));
        config.notes.extend(self.note_on_rules(applied_rule.as_ref(), overrides).map(Note::warning));
        config.autos = resolve_autos(self, &config);
        if ring_size.is_some() {
            config.set_ring();
        }
        Ok(config)
    }

    /// Returns whether the file states the mesh as DeepSpeed's Arctic long-sequence training does, which partitions over
    /// dp and sp: by the size of sp alone. DeepSpeed's shard sizes count ranks of both axes, so one excludes it.
    fn has_deepspeeds_axes(&self, applied_rule: Option<&AppliedRule>) -> bool {
        let is_partitioned = self.config.zero.stage.partitions_optimizer();
        let is_sp_alone = matches!(self.sizes.sp[..], [sp] if sp.size > 1) && self.sizes.dp.is_empty();
        is_partitioned
            && is_sp_alone
            && self.shard_sizes.is_empty()
            && applied_rule.is_none()
            && self.config.ulysses.mesh.is_none()
            && !self.names_partition_axes
    }

    fn resolve_batch(&self, mesh: MeshShape, is_dp_set: bool) -> Result<BatchSizes, ConfigError> {
        let (train, micro) = (self.train_batch_size, self.micro_batch_size);
        BatchSizes::resolve(train, micro, self.gradient_accumulation_steps, mesh.dp).map_err(|reason| {
            ConfigError::Batch {
                file: self.file.clone(),
                place: self.batch_place.clone().map(Box::new),
                reason: Box::new(if is_dp_set { reason } else { reason.with_unset_dp(mesh) }),
            }
        })
    }

    fn resolve_scheduler(&self, ulysses: &UlyssesConfig) -> Result<Option<SchedulerConfig>, ConfigError> {
        let scheduler = self.config.scheduler.clone();
        if !self.decays_to_last_step {
            return Ok(scheduler);
        }
        // The data decides how many steps an epoch has: `Config::resolve_steps`.
        let steps = ulysses.steps.or(ulysses.epochs.and(Some(u64::MAX)));
        let steps = steps.ok_or_else(|| ConfigError::AutoWithoutSource {
            file: self.file.clone(),
            key: "scheduler.params.total_num_steps",
            source_of_value: "the number of steps, `ulysses.steps` (--steps of `train`, else --set ulysses.steps=N)",
        })?;
        Ok(scheduler.map(|scheduler| scheduler.ending_at(steps)))
    }

    /// Returns a note on each size of the file that `mesh`, of the flag `--mesh`, replaces.
    pub fn replaced_sizes(&self, mesh: MeshShape) -> Vec<String> {
        let mut sizes = self.sizes.clone();
        if let Some(shape) = self.config.ulysses.mesh.as_ref().and_then(|spec| spec.training_shape().ok()) {
            sizes.add(shape.sizes, self.origin_of_stated(false));
        }
        let replaced = sizes.zip(mesh).map(|axis, (sizes, flag)| {
            let differing = sizes.into_iter().filter(move |stated| stated.size != flag);
            differing.map(move |stated| format!("--mesh sets {axis} {flag} instead of {stated}"))
        });
        replaced.into_array().into_iter().flatten().collect()
    }

    /// Returns `ulysses.mesh`, resolved for the job.
    fn stated_mesh(&self, overrides: &Overrides) -> Result<Option<StatedMesh>, ConfigError> {
        let Some(mesh) = &self.config.ulysses.mesh else { return Ok(None) };
        StatedMesh::new(mesh, overrides.cluster()).map(Some).map_err(|source| ConfigError::UlyssesMesh {
            file: self.file.clone(),
            mesh: mesh.to_string(),
            source: Box::new(source),
        })
    }

    /// The origin of the sizes in `ulysses.mesh`, or in a rule.
    pub(super) fn origin_of_stated(&self, is_of_rule: bool) -> SizeOrigin {
        match (is_of_rule, self.mesh_position) {
            (false, Some(position)) => SizeOrigin::Key { key: "ulysses.mesh", position },
            _ => SizeOrigin::Rule,
        }
    }

    fn resolve_mesh(
        &self,
        stated: Option<&StatedMesh>,
        is_of_rule: bool,
        overrides: &Overrides,
    ) -> Result<MeshShape, ConfigError> {
        let is_replaced = is_of_rule || overrides.mesh.is_some();
        let mut sizes = if is_replaced { StatedSizes::default() } else { self.sizes.clone() };
        if let Some(stated) = stated {
            sizes.add(stated.shape.sizes, self.origin_of_stated(is_of_rule));
        }
        if let Some(flag) = overrides.mesh {
            sizes.add(flag, SizeOrigin::Flag);
        }
        sizes.resolve(overrides.world_size).map_err(|reason| self.mesh_error(reason))
    }

    fn mesh_error(&self, reason: MeshShapeError) -> ConfigError {
        ConfigError::Mesh { file: self.file.clone(), reason: Box::new(reason) }
    }

    /// Refuses what supports neither pipeline nor tensor parallelism.
    fn check_divided_model(&self, config: &Config) -> Result<(), ConfigError> {
        let MeshShape { pp, tp, .. } = config.mesh.shape();
        let axes = [(PP_AXIS, pp, "pipeline"), (TP_AXIS, tp, "tensor")];
        let Some((axis, size, parallelism)) = axes.into_iter().find(|(_, size, _)| *size > 1) else {
            return Ok(());
        };
        let key = |key: &str, is_set: bool| is_set.then(|| format!("`{key}`"));
        let copies = config.checkpoint.as_ref().and_then(|checkpoint| checkpoint.memory_interval);
        let shard_size = config.zero_shard_size().map(|size| format!("ZeRO's shard size, {size},"));
        let spans_sp = config.zero_axes() == PartitionAxes::DpSp;
        let features = [
            (key("ulysses.flexible_sp", config.ulysses.flexible_sp), "set it to false"),
            (key("ulysses.zero_partition_axes", spans_sp), "set it to [\"dp\"]"),
            (shard_size, "remove it, so that ZeRO partitions over dp"),
            (key("checkpoint.memory_interval", copies.is_some()), "remove it"),
        ];
        let refused = features.into_iter().find_map(|(feature, remedy)| Some((feature?, remedy)));
        refused.map_or(Ok(()), |(feature, remedy)| {
            let reason = MeshShapeError::Unsupported { axis, size, parallelism, feature, remedy };
            Err(self.mesh_error(reason))
        })
    }

    /// Checks that the stages of a pipeline can be scheduled, and that `layers_per_stage` has an entry for each; with one stage
    /// neither it nor `virtual_stages` has an effect.
    fn check_stages(&self, config: &mut Config) -> Result<(), ConfigError> {
        let (pp, accumulation) = (config.mesh.pp_size, config.gradient_accumulation_steps);
        let pipeline = &config.ulysses.pipeline;
        let (virtual_stages, entries) =
            (pipeline.virtual_stages, pipeline.layers_per_stage.as_ref().map(Vec::len));
        if pp == 1 {
            let keys = [("layers_per_stage", entries.is_some()), ("virtual_stages", virtual_stages > 1)];
            let without_effect = keys
                .into_iter()
                .filter(|(_, is_set)| *is_set)
                .map(|(key, _)| Note::warning(format!("`ulysses.pipeline.{key}` has no effect: pp is 1")));
            config.notes.extend(without_effect);
            return Ok(());
        }
        let reason = if virtual_stages > 1 && pipeline.schedule != PipelineSchedule::OneForwardOneBackward {
            MeshShapeError::OneStageSchedule { virtual_stages, schedule: pipeline.schedule.name() }
        } else if virtual_stages > 1 && !accumulation.is_multiple_of(pp) {
            MeshShapeError::InterleavedMicroBatches { pp, accumulation }
        } else if let Some(entries) = entries.filter(|entries| *entries != pp.saturating_mul(virtual_stages))
        {
            MeshShapeError::LayersPerStage { pp, virtual_stages, entries }
        } else {
            return Ok(());
        };
        Err(self.mesh_error(reason))
    }

    fn check_ring(&self, sp: usize, ulysses: &UlyssesConfig) -> Result<(), ConfigError> {
        let ring_size = ulysses.ring_size;
        let reason = match sp.is_multiple_of(ring_size) {
            false => MeshShapeError::RingSize { ring_size, sp },
            true if ulysses.flexible_sp && ring_size > 1 => MeshShapeError::FlexibleRing { ring_size },
            true => return Ok(()),
        };
        Err(self.mesh_error(reason))
    }

    /// Returns a note on `ulysses.ring_size`, if the mesh has another ring.
    fn ring_note(&self, of_mesh: Option<usize>) -> Option<String> {
        let of_key = self.config.ulysses.ring_size;
        let ring_size = of_mesh.filter(|ring_size| of_key != 1 && of_key != *ring_size)?;
        Some(format!("`ulysses.ring_size` {of_key} has no effect: the mesh has a ring of {ring_size}"))
    }

    fn stated_shard_size(
        &self,
        dp: usize,
        stated: Option<&StatedMesh>,
        is_of_rule: bool,
        overrides: &Overrides,
    ) -> Result<Option<usize>, ConfigError> {
        let stated = stated.and_then(|stated| stated.shape.shard_size);
        let stated = stated.map(|size| StatedSize { size, origin: self.origin_of_stated(is_of_rule) });
        let flag = overrides.shard_size.map(|size| StatedSize { size, origin: SizeOrigin::Flag });
        let stated: Vec<StatedSize> = self.shard_sizes.iter().copied().chain(stated).chain(flag).collect();
        shard_size(&stated, dp).map_err(|reason| self.mesh_error(reason))
    }

    fn resolved_notes(&self, scheduler: Option<&SchedulerConfig>) -> Vec<Note> {
        let mut notes = self.remarks.notes.clone();
        if !self.names_gradient_clipping {
            let text =
                "`gradient_clipping` is not set: gradients are not clipped (DeepSpeed 0.19 clips at 1.0)";
            notes.push(Note::warning(text));
        }
        let of_scheduler =
            scheduler.into_iter().flat_map(|scheduler| scheduler.notes(&self.config.optimizer));
        notes.extend(of_scheduler.map(Note::warning));
        notes
    }
}
