//! A checked config file: [`RawConfig`].

use super::batch::BATCH_KEYS;
use super::config::{Config, LossNormalization, root};
use super::error::ConfigError;
use super::mesh_shape::{SizeOrigin, StatedSize, StatedSizes};
use super::overlay::merge_rule;
use super::sections::checkpoint::CheckpointConfig;
use super::sections::mesh::stated_sizes;
use super::sections::parameter_groups::ParameterGroup;
use super::sections::precision::Precision;
use super::sections::ulysses::Backend;
use super::sections::zero::{ZeroStage, stated_shard_sizes};
use super::settings::Settings;
use crate::config_file::ConfigFileError;
use crate::config_file::define::Keys;
use crate::config_file::reader::{
    Place, Position, Remarks, Report, Section, check, parse_file, read, without_comments,
};
use crate::mesh::MeshShape;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

/// The key whose `"auto"` depends on the steps of the run, which follow from the data if it has epochs.
pub(super) const TOTAL_NUM_STEPS: &str = "scheduler.params.total_num_steps";

/// A valid config file, before [`RawConfig::resolve`] adds the command line and computes mesh
/// and batch sizes.
#[derive(Clone, Debug)]
pub struct RawConfig {
    pub(super) file: String,
    /// The keys of the file, except the batch and mesh sizes, which are the other fields.
    pub(super) config: Config,
    pub(super) train_batch_size: Option<usize>,
    pub(super) micro_batch_size: Option<usize>,
    pub(super) gradient_accumulation_steps: Option<usize>,
    /// The position of the flag that sets one of the three, or of the first one in the file.
    pub(super) batch_place: Option<Place>,
    /// The mesh sizes, where the file states them.
    pub(super) sizes: StatedSizes,
    /// ZeRO's shard sizes, where the file states them.
    pub(super) shard_sizes: Vec<StatedSize>,
    names_backend: bool,
    pub(super) names_partition_axes: bool,
    /// The position of `ulysses.mesh`.
    mesh_position: Option<Position>,
    /// The config with the keys of each rule of `ulysses.mesh_rules` that has some, by the rule's index.
    pub(super) of_rules: BTreeMap<usize, Self>,
    pub(super) remarks: Remarks,
}

impl RawConfig {
    /// Returns `ulysses.backend`, if the file sets it.
    pub fn backend(&self) -> Option<Backend> {
        self.names_backend.then_some(self.config.ulysses.backend)
    }

    /// Returns the timeout of collectives, `ulysses.comm.timeout_seconds`.
    pub fn comm_timeout(&self) -> Duration {
        self.config.ulysses.comm.timeout()
    }

    /// Reads and checks a file of at most 16 MiB.
    ///
    /// # Errors
    /// When the file cannot be read, is too large, or is invalid.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        Self::from_file_with(path, &Settings::default())
    }

    /// Reads and checks a file with command-line settings applied.
    ///
    /// # Errors
    /// As [`from_file`](Self::from_file), or when a setting is invalid.
    pub fn from_file_with(path: impl AsRef<Path>, settings: &Settings) -> Result<Self, ConfigError> {
        let path = path.as_ref();
        let text = read("config file", path)?;
        Self::from_json_str_with(&text, &path.display().to_string(), settings)
    }

    /// Checks the text of a config file; error messages call it `file`.
    ///
    /// # Errors
    /// When the text is too large or invalid; the error lists all errors of the file.
    pub fn from_json_str(text: &str, file: &str) -> Result<Self, ConfigError> {
        Self::from_json_str_with(text, file, &Settings::default())
    }

    /// Checks the text of a config file with command-line settings applied.
    ///
    /// # Errors
    /// As [`from_json_str`](Self::from_json_str), or when a setting is invalid.
    pub fn from_json_str_with(text: &str, file: &str, settings: &Settings) -> Result<Self, ConfigError> {
        let text = &without_comments(text);
        let raw = Self::read_text(text, file, settings, None)?;
        let rules = raw.config.ulysses.mesh_rules.iter().enumerate();
        let with_keys = rules.filter(|(_, rule)| !rule.keys.is_null()).map(|(index, _)| {
            let of_rule = Self::read_text(text, file, settings, Some(index));
            of_rule.map(|raw| (index, raw)).map_err(|source| match source {
                ConfigError::File(ConfigFileError::Invalid { .. }) => {
                    ConfigError::RuleKeys { index, source: Box::new(source) }
                }
                other => other,
            })
        });
        Ok(Self { of_rules: with_keys.collect::<Result<_, _>>()?, ..raw })
    }

    /// Checks a file with command-line settings, and with the keys of a rule.
    fn read_text(
        text: &str,
        file: &str,
        settings: &Settings,
        rule: Option<usize>,
    ) -> Result<Self, ConfigError> {
        let documents = settings.documents(text.len());
        let mut tree = parse_file(text, file)?;
        if let Some(index) = rule {
            // A flag may give the rules, too.
            let mut of_rule = parse_file(text, file)?;
            settings.apply(&documents, &mut of_rule)?;
            merge_rule(index, of_rule, &mut tree);
        }
        settings.apply(&documents, &mut tree)?;
        let flags = documents.iter().map(|document| document.origin.clone());
        let report = Report::new(text, root()).with_flags(flags.collect());
        check(&report, &tree, root());
        let raw = Self::read(&Section::root(&report, &tree, root()), file, &report);
        let remarks = report.finish(file)?;
        if let (Some(lr), Some(scheduler)) = (settings.lr, &raw.config.scheduler) {
            scheduler.check_lr(lr)?;
        }
        Ok(Self { remarks, ..raw })
    }

    /// Returns whether the file has `ulysses.mesh_rules`.
    pub fn has_mesh_rules(&self) -> bool {
        !self.config.ulysses.mesh_rules.is_empty()
    }

    /// Returns whether the learning-rate decay ends with the run.
    pub(super) fn decays_to_last_step(&self) -> bool {
        self.remarks.autos.iter().any(|auto| auto.path == TOTAL_NUM_STEPS)
    }

    /// Returns `seed`.
    pub fn seed(&self) -> u64 {
        self.config.seed
    }

    /// Returns `gradient_accumulation_steps`, if the file sets it.
    pub fn gradient_accumulation_steps(&self) -> Option<usize> {
        self.gradient_accumulation_steps
    }

    /// Returns the sizes of pp and tp that the file states first, or 1. Searches of a mesh keep them: they divide the model.
    pub fn divided_model(&self) -> MeshShape {
        let shape = self.config.ulysses.mesh.as_ref().and_then(|mesh| mesh.training_shape().ok());
        let of_mesh = shape.map_or(MeshShape::ONE_RANK, |shape| shape.sizes);
        let sizes = self
            .sizes
            .clone()
            .zip_with(of_mesh, |_, stated, of_mesh| stated.first().map_or(of_mesh, |stated| stated.size));
        MeshShape { dp: 1, sp: 1, ..sizes }
    }

    /// Returns a note on each size of the file that `mesh`, of the flag `--mesh`, replaces.
    pub fn replaced_sizes(&self, mesh: MeshShape) -> Vec<String> {
        let mut sizes = self.sizes.clone();
        if let Some(shape) = self.config.ulysses.mesh.as_ref().and_then(|spec| spec.training_shape().ok()) {
            sizes.add(shape.sizes, self.origin_of_mesh());
        }
        let replaced = sizes.zip_with(mesh, |axis, sizes, flag| {
            let differing = sizes.into_iter().filter(move |stated| stated.size != flag);
            differing.map(move |stated| format!("--mesh sets {axis} {flag} instead of {stated}"))
        });
        replaced.into_array().into_iter().flatten().collect()
    }

    /// Returns the origin of the sizes in `ulysses.mesh`.
    pub(super) fn origin_of_mesh(&self) -> SizeOrigin {
        let of_key = |position| SizeOrigin::Key { key: "ulysses.mesh", position };
        self.mesh_position.map_or(SizeOrigin::Rule, of_key)
    }

    /// Returns the config for one batch of `batch_size` sequences, in `accumulation` forward passes on any mesh: the batch
    /// and mesh sizes of the file are dropped.
    #[must_use]
    pub fn for_batch(self, batch_size: usize, accumulation: usize) -> Self {
        let raw = self.without_mesh();
        Self {
            train_batch_size: Some(batch_size),
            micro_batch_size: None,
            gradient_accumulation_steps: Some(accumulation),
            batch_place: None,
            sizes: StatedSizes::default(),
            ..raw
        }
    }

    fn without_mesh(mut self) -> Self {
        self.config.ulysses.mesh = None;
        self
    }

    /// Returns the config without sp and ZeRO's shard size, for a mesh that is not known yet.
    #[must_use]
    pub fn without_replicas(self) -> Self {
        let MeshShape { pp, tp, .. } = self.divided_model();
        let stated = |size| vec![StatedSize { size, origin: self.origin_of_mesh() }];
        let (pp, tp) = (stated(pp), stated(tp));
        let mut raw = Self { shard_sizes: Vec::new(), ..self.without_mesh() };
        raw.sizes = StatedSizes { pp, sp: Vec::new(), tp, ..raw.sizes };
        raw
    }

    fn read(root: &Section<'_>, file: &str, report: &Report<'_>) -> Self {
        let stated = BATCH_KEYS.iter().filter(|key| !root.is_auto(key)).filter_map(|key| root.range(key));
        // A flag is more likely to be wrong than the file that it changes.
        let batch_range = stated.min_by_key(|range| (!report.is_of_flag(range.start), range.start));
        let ulysses = root.section("ulysses");
        Self {
            file: file.to_owned(),
            config: read_config(root),
            train_batch_size: root.get(BATCH_KEYS[0]),
            micro_batch_size: root.get(BATCH_KEYS[1]).or(micro_batch_of_trainer(root)),
            gradient_accumulation_steps: root.get(BATCH_KEYS[2]),
            batch_place: batch_range.map(|range| report.place(range)),
            sizes: stated_sizes(root),
            shard_sizes: stated_shard_sizes(&root.section("zero_optimization")),
            names_partition_axes: ulysses.states("zero_partition_axes"),
            names_backend: ulysses.states("backend"),
            mesh_position: ulysses.position("mesh", &[]),
            of_rules: BTreeMap::new(),
            remarks: Remarks::default(),
        }
    }
}

/// All sections, checked for what contradicts each other.
fn read_config(root: &Section<'_>) -> Config {
    let mut config = Config::from_section(root);
    let base_lr = config.optimizer.lr();
    if let Some(scheduler) = &mut config.scheduler {
        scheduler.set_base_lr(&root.section("scheduler"), base_lr);
    }
    config.optimizer.check(&root.section("optimizer"));
    if root.get("zero_optimization") == Some(true) {
        config.zero.stage = ZeroStage::OptimizerStates; // the old form
    }
    config.zero.check(&root.section("zero_optimization"));
    let is_f32 = config.precision == Precision::F32;
    let averages_micro_batches = config.loss_normalization == LossNormalization::MicroBatch;
    config.ulysses.check(&root.section("ulysses"), is_f32, averages_micro_batches);
    ParameterGroup::check_all(&root.section("ulysses"), base_lr);
    let recomputes = config.ulysses.activation_checkpointing;
    config.activation_checkpointing.check(&root.section("activation_checkpointing"), recomputes);
    config.monitoring.comms_logger.check(&root.section("comms_logger"));
    Precision::check(root);
    let checkpoint = root.section("checkpoint");
    config.checkpoint = config.checkpoint.filter(|_| CheckpointConfig::is_enabled(&checkpoint));
    if !root.names("gradient_clipping") {
        root.warn("`gradient_clipping` is not set: gradients are not clipped (DeepSpeed 0.19 clips at 1.0)");
    }
    config
}

/// Returns the Trainer's value of `"auto"` if no other key determines it: its argument
/// `per_device_train_batch_size` is 8 by default.
fn micro_batch_of_trainer(root: &Section<'_>) -> Option<usize> {
    let is_open = root.is_auto(BATCH_KEYS[1]) && root.json(BATCH_KEYS[0]).is_none();
    is_open.then_some(8)
}
