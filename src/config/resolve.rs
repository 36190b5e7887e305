//! Resolves a file and flags into a [`Config`].

use super::auto::resolve_autos;
use super::batch::BatchSizes;
use super::config::Config;
use super::error::ConfigError;
use super::mesh_shape::{MeshShape, MeshShapeError, SizeOrigin, StatedSize};
use super::overrides::Overrides;
use super::raw::RawConfig;
use super::reader::Note;
use super::sections::mesh::MeshConfig;
use super::sections::mesh_rules::AppliedRule;
use super::sections::scheduler::SchedulerConfig;
use super::sections::zero::PartitionAxes;

impl RawConfig {
    /// Applies flags and defaults, and computes mesh and batch sizes.
    ///
    /// # Errors
    /// When mesh or batch sizes contradict each other, or a flag is out of range.
    pub fn resolve(&self, overrides: &Overrides) -> Result<Config, ConfigError> {
        overrides.check()?;
        let applied_rule = self.applied_rule(overrides)?;
        let mesh = self.resolve_mesh(applied_rule.as_ref(), overrides)?;
        self.check_preset(applied_rule.as_ref(), overrides)?;
        let mut config = self.config.clone();
        config.mesh = MeshConfig { dp_size: mesh.dp, sp_size: mesh.sp };
        config.zero.mics_shard_size = self.stated_shard_size(mesh.dp, applied_rule.as_ref(), overrides)?;
        let batch = self.resolve_batch(mesh.dp)?;
        config.train_batch_size = batch.train;
        config.micro_batch_size = batch.micro;
        config.gradient_accumulation_steps = batch.accumulation;
        let ring_of_rule = applied_rule.as_ref().and_then(|rule| rule.shape?.ring_size);
        if let Some(ring_size) = overrides.ring_size.or(ring_of_rule) {
            config.ulysses.ring_size = ring_size;
        }
        self.check_ring(mesh.sp, config.ulysses.ring_size)?;
        config.seed = overrides.seed.unwrap_or(config.seed);
        overrides.apply(&mut config.ulysses);
        if self.has_deepspeeds_axes(applied_rule.as_ref()) {
            config.ulysses.zero_partition_axes = PartitionAxes::DpSp;
            config.notes.push(Note::info(
                "the file sets `sequence_parallel_size`, but neither `mesh_param` nor `data_parallel_size`: ZeRO partitions \
                 over dp × sp, as in DeepSpeed; `ulysses.zero_partition_axes` selects other axes",
            ));
        }
        config.notes.extend(config.communication_note().map(Note::warning));
        config.scheduler = self.resolve_scheduler(config.ulysses.steps)?;
        config.notes.extend(self.resolved_notes(config.scheduler.as_ref()));
        config.notes.extend(self.note_on_rules(applied_rule.as_ref(), overrides).map(Note::warning));
        config.autos = resolve_autos(&self.remarks.autos, &config);
        Ok(config)
    }

    /// Returns whether the file states the mesh as DeepSpeed's Arctic long-sequence training does, which partitions over
    /// dp and sp: by the size of sp alone. DeepSpeed's shard sizes count ranks of both axes, so one excludes it.
    fn has_deepspeeds_axes(&self, applied_rule: Option<&AppliedRule>) -> bool {
        let is_partitioned = self.config.zero.stage.partitions_optimizer();
        let is_sp_alone = matches!(self.sp_sizes[..], [sp] if sp.size > 1) && self.dp_sizes.is_empty();
        is_partitioned
            && is_sp_alone
            && self.shard_sizes.is_empty()
            && applied_rule.is_none()
            && !self.names_partition_axes
    }

    fn resolve_batch(&self, dp: usize) -> Result<BatchSizes, ConfigError> {
        let (train, micro) = (self.train_batch_size, self.micro_batch_size);
        BatchSizes::resolve(train, micro, self.gradient_accumulation_steps, dp).map_err(|reason| {
            ConfigError::Batch {
                file: self.file.clone(),
                place: self.batch_place.clone().map(Box::new),
                reason: Box::new(reason),
            }
        })
    }

    fn resolve_scheduler(&self, steps: Option<u64>) -> Result<Option<SchedulerConfig>, ConfigError> {
        let scheduler = self.config.scheduler.clone();
        if !self.decays_to_last_step {
            return Ok(scheduler);
        }
        let steps = steps.ok_or_else(|| ConfigError::AutoWithoutSource {
            file: self.file.clone(),
            key: "scheduler.params.total_num_steps",
            source_of_value: "the number of steps, `ulysses.steps` or --steps",
        })?;
        Ok(scheduler.map(|scheduler| scheduler.ending_at(steps)))
    }

    fn resolve_mesh(
        &self,
        applied_rule: Option<&AppliedRule>,
        overrides: &Overrides,
    ) -> Result<MeshShape, ConfigError> {
        let flag = |size| StatedSize { size, origin: SizeOrigin::Flag };
        let with_flag = |file: &[StatedSize], size: Option<usize>| -> Vec<_> {
            file.iter().copied().chain(size.map(flag)).collect()
        };
        let (dp_sizes, sp_sizes) = match applied_rule {
            None => (self.dp_sizes.clone(), self.sp_sizes.clone()),
            Some(applied_rule) => applied_rule.shape.map_or_else(Default::default, |shape| {
                let of_rule = |size| vec![StatedSize { size, origin: SizeOrigin::Rule }];
                (of_rule(shape.dp), of_rule(shape.sp))
            }),
        };
        let dp = with_flag(&dp_sizes, overrides.mesh.map(|(dp, _)| dp));
        let sp = with_flag(&sp_sizes, overrides.mesh.map(|(_, sp)| sp));
        MeshShape::resolve(&dp, &sp, overrides.world_size)
            .map_err(|reason| ConfigError::Mesh { file: self.file.clone(), reason: Box::new(reason) })
    }

    fn check_ring(&self, sp: usize, ring_size: usize) -> Result<(), ConfigError> {
        if sp.is_multiple_of(ring_size) {
            return Ok(());
        }
        let reason = Box::new(MeshShapeError::RingSize { ring_size, sp });
        Err(ConfigError::Mesh { file: self.file.clone(), reason })
    }

    fn stated_shard_size(
        &self,
        dp: usize,
        applied_rule: Option<&AppliedRule>,
        overrides: &Overrides,
    ) -> Result<Option<usize>, ConfigError> {
        let applied_rule = applied_rule.and_then(|applied_rule| applied_rule.shape?.shard_size);
        let applied_rule = applied_rule.map(|size| StatedSize { size, origin: SizeOrigin::Rule });
        let flag = overrides.shard_size.map(|size| StatedSize { size, origin: SizeOrigin::Flag });
        let stated: Vec<StatedSize> =
            self.shard_sizes.iter().copied().chain(applied_rule).chain(flag).collect();
        MeshShape::shard_size(&stated, dp)
            .map_err(|reason| ConfigError::Mesh { file: self.file.clone(), reason: Box::new(reason) })
    }

    fn resolved_notes(&self, scheduler: Option<&SchedulerConfig>) -> Vec<Note> {
        let mut notes = self.remarks.notes.clone();
        if !self.names_gradient_clipping {
            let text =
                "`gradient_clipping` is not set: gradients are not clipped (DeepSpeed 0.19 clips at 1.0)";
            notes.push(Note::warning(text));
        }
        if std::env::var_os("ULYSSES_BF16_PRODUCTS").is_some() {
            let text =
                "the environment variable `ULYSSES_BF16_PRODUCTS` is deprecated: use `ULYSSES_BF16_GEMM`";
            notes.push(Note::info(text));
        }
        let of_scheduler =
            scheduler.into_iter().flat_map(|scheduler| scheduler.notes(&self.config.optimizer));
        notes.extend(of_scheduler.map(Note::warning));
        notes
    }
}
