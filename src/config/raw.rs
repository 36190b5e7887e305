//! What one config file says: the vocabulary, key by key.

use super::check::check;
use super::checkpoint::CheckpointConfig;
use super::data::{DataSource, Packing, SeqLenChange, ValidationConfig};
use super::diagnostic::{Excerpt, Position};
use super::document;
use super::error::ConfigError;
use super::memory::MemoryConfig;
use super::mesh_rules::MeshRule;
use super::mesh_shape::{SizeOrigin, StatedSize};
use super::monitoring::MonitoringConfig;
use super::optimizer::OptimizerConfig;
use super::parameter_groups::ParameterGroup;
use super::precision::Precision;
use super::reader::Section;
use super::report::{Remarks, Report};
use super::resolved::{Backend, LossNormalization};
use super::schedule::SchedulerConfig;
use super::settings::Settings;
use super::vocabulary::ROOT;
use super::zero_stage::ZeroStage;
use std::path::Path;
use std::time::Duration;

/// A config file that has no faults by itself. The command line, the mesh and the batch
/// arithmetic are still to come: [`RawConfig::resolve`].
#[derive(Clone, Debug)]
pub struct RawConfig {
    pub(super) file: String,
    pub(super) train_batch_size: Option<usize>,
    pub(super) micro_batch_size: Option<usize>,
    pub(super) gradient_accumulation_steps: Option<usize>,
    /// Where the first of the three stands.
    pub(super) batch_place: Option<(Position, Excerpt)>,
    pub(super) dp_sizes: Vec<StatedSize>,
    pub(super) sp_sizes: Vec<StatedSize>,
    /// Ranks that share ZeRO's partitions, where that is not all of dp.
    pub(super) shard_sizes: Vec<StatedSize>,
    pub(super) optimizer: OptimizerConfig,
    pub(super) scheduler: Option<SchedulerConfig>,
    /// Whether the schedule ends with the run.
    pub(super) decays_to_last_step: bool,
    pub(super) gradient_clipping: f64,
    pub(super) names_gradient_clipping: bool,
    pub(super) precision: Precision,
    pub(super) zero_stage: ZeroStage,
    pub(super) steps_per_print: u64,
    pub(super) seed: u64,
    pub(super) loss_normalization: LossNormalization,
    pub(super) checkpoint: Option<CheckpointConfig>,
    pub(super) memory: MemoryConfig,
    pub(super) monitoring: MonitoringConfig,
    pub(super) ulysses: UlyssesSection,
    pub(super) remarks: Remarks,
}

/// The `ulysses` section: what DeepSpeed leaves to the training script.
#[derive(Clone, Debug)]
pub(super) struct UlyssesSection {
    pub(super) model: Option<String>,
    pub(super) data: Vec<DataSource>,
    pub(super) text_field: String,
    pub(super) end_of_document: Option<u32>,
    pub(super) tokenizer: Option<String>,
    pub(super) output: Option<String>,
    pub(super) seq_len: Option<usize>,
    pub(super) steps: Option<u64>,
    pub(super) epochs: Option<u64>,
    pub(super) seq_len_schedule: Vec<SeqLenChange>,
    pub(super) packing: Packing,
    pub(super) validation: Option<ValidationConfig>,
    pub(super) threads_per_rank: Option<usize>,
    pub(super) backend: Option<Backend>,
    pub(super) mesh_rules: Vec<MeshRule>,
    pub(super) comm_check: bool,
    pub(super) comm_timeout_seconds: u64,
    pub(super) activation_checkpointing: bool,
    pub(super) loss_tile_tokens: usize,
    pub(super) parameter_groups: Vec<ParameterGroup>,
}

impl RawConfig {
    /// `ulysses.backend`, if the file says what carries the communication.
    pub fn backend(&self) -> Option<Backend> {
        self.ulysses.backend
    }

    /// `ulysses.comm.timeout_seconds`: how long a rank waits for the others.
    pub fn comm_timeout(&self) -> Duration {
        Duration::from_secs(self.ulysses.comm_timeout_seconds)
    }

    /// Reads and checks a file of at most 16 MiB.
    ///
    /// # Errors
    /// When the file cannot be read, is too large, or has faults.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        Self::from_file_with(path, &Settings::default())
    }

    /// The same, changed by what the command line sets.
    ///
    /// # Errors
    /// The same, and where a setting is no valid one.
    pub fn from_file_with(path: impl AsRef<Path>, settings: &Settings) -> Result<Self, ConfigError> {
        let path = path.as_ref();
        let text = document::read("config file", path)?;
        Self::from_json_str_with(&text, &path.display().to_string(), settings)
    }

    /// Checks the text of a config file; `file` is what error messages call it.
    ///
    /// # Errors
    /// When the text is too large or has faults; all of them are in the one error.
    pub fn from_json_str(text: &str, file: &str) -> Result<Self, ConfigError> {
        Self::from_json_str_with(text, file, &Settings::default())
    }

    /// The same, changed by what the command line sets.
    ///
    /// # Errors
    /// The same, and where a setting is no valid one.
    pub fn from_json_str_with(text: &str, file: &str, settings: &Settings) -> Result<Self, ConfigError> {
        let documents = settings.documents(text.len());
        let mut root = document::parse_file(text, file)?;
        settings.apply(&documents, &mut root)?;
        let flags = documents.iter().map(|document| (document.start, document.flag.clone()));
        let report = Report::new(text, ROOT).with_flags(flags.collect());
        check(&report, &root, ROOT);
        let config = Self::read(&Section::root(&report, &root, ROOT), file, &report);
        let remarks = report.finish(file)?;
        if let (Some(lr), Some(scheduler)) = (settings.lr, &config.scheduler) {
            scheduler.check_lr(lr)?;
        }
        Ok(Self { remarks, ..config })
    }

    /// The same settings for one batch of `rows` on whatever mesh is asked for: the file's
    /// batch sizes and mesh are dropped.
    #[must_use]
    pub fn for_batch(self, rows: usize) -> Self {
        Self {
            train_batch_size: Some(rows),
            micro_batch_size: None,
            gradient_accumulation_steps: None,
            batch_place: None,
            dp_sizes: Vec::new(),
            sp_sizes: Vec::new(),
            shard_sizes: Vec::new(),
            ..self
        }
    }

    /// The same settings with ZeRO's partitions over all of dp, for a mesh that is still to be found.
    #[must_use]
    pub fn without_replicas(self) -> Self {
        Self { shard_sizes: Vec::new(), ..self }
    }

    fn read(root: &Section<'_>, file: &str, report: &Report<'_>) -> Self {
        let (dp_sizes, sp_sizes) = read_mesh(root);
        let batch = ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"];
        let batch_range = batch.iter().filter_map(|key| root.range(key)).min_by_key(|range| range.start);
        let optimizer = OptimizerConfig::read(&root.section("optimizer"));
        let scheduler = root.section("scheduler");
        Self {
            file: file.to_owned(),
            train_batch_size: root.count(batch[0]),
            micro_batch_size: root.count(batch[1]).or(micro_batch_of_trainer(root)),
            gradient_accumulation_steps: root.count(batch[2]),
            batch_place: batch_range.map(|range| report.place(range)),
            dp_sizes,
            sp_sizes,
            shard_sizes: read_shard_sizes(&root.section("zero_optimization")),
            scheduler: SchedulerConfig::read(&scheduler, optimizer.lr()),
            decays_to_last_step: scheduler.section("params").is_auto("total_num_steps"),
            ulysses: UlyssesSection::read(&root.section("ulysses"), optimizer.lr()),
            optimizer,
            gradient_clipping: root.number("gradient_clipping").unwrap_or_default(),
            names_gradient_clipping: root.names("gradient_clipping"),
            precision: Precision::read(root),
            zero_stage: read_zero(root),
            steps_per_print: root.integer("steps_per_print").unwrap_or(1),
            seed: root.integer("seed").unwrap_or_default(),
            loss_normalization: root
                .choice("loss_normalization", LossNormalization::CHOICES)
                .unwrap_or_default(),
            checkpoint: CheckpointConfig::read(&root.section("checkpoint")),
            memory: MemoryConfig::read(root),
            monitoring: MonitoringConfig::read(root),
            remarks: Remarks::default(),
        }
    }
}

impl UlyssesSection {
    fn read(section: &Section<'_>, optimizer_lr: f64) -> Self {
        if section.integer("steps").is_some() && section.integer("epochs").is_some() {
            section.contradiction("epochs", "no such key beside `steps`: give one of them");
        }
        Self {
            model: section.text("model"),
            data: DataSource::read_all(section),
            text_field: section.text("text_field").unwrap_or_default(),
            end_of_document: section.integer("end_of_document").and_then(|token| token.try_into().ok()),
            tokenizer: section.text("tokenizer"),
            output: section.text("output"),
            seq_len: section.count("seq_len"),
            steps: section.integer("steps"),
            epochs: section.integer("epochs"),
            seq_len_schedule: SeqLenChange::read_all(section),
            packing: section.choice("packing", Packing::CHOICES).unwrap_or_default(),
            validation: ValidationConfig::read(section),
            threads_per_rank: section.count("threads_per_rank"),
            backend: section.choice("backend", Backend::CHOICES),
            mesh_rules: MeshRule::read_all(section),
            comm_check: section
                .section("comm")
                .choice("check", &[("off", false), ("on", true)])
                .unwrap_or_default(),
            comm_timeout_seconds: section.section("comm").integer("timeout_seconds").unwrap_or_default(),
            activation_checkpointing: section.boolean("activation_checkpointing"),
            loss_tile_tokens: section.count("loss_tile_tokens").unwrap_or(1),
            parameter_groups: ParameterGroup::read_all(section, optimizer_lr),
        }
    }
}

/// What the Trainer fills in for `"auto"` where no other key tells: its argument
/// `per_device_train_batch_size` is 8 by default.
fn micro_batch_of_trainer(root: &Section<'_>) -> Option<usize> {
    let is_open = root.is_auto("train_micro_batch_size_per_gpu") && root.count("train_batch_size").is_none();
    is_open.then_some(8)
}

/// The sizes of the two axes, as often as the file states them.
fn read_mesh(root: &Section<'_>) -> (Vec<StatedSize>, Vec<StatedSize>) {
    let stated = |key, size, position| StatedSize { size, origin: SizeOrigin::Key { key, position } };
    let axis = |key| Some(stated(key, root.count(key)?, root.position(root.range(key)?)));
    let mesh_sizes = root.two_counts("mesh_param");
    let mesh_sizes = mesh_sizes.map(|pair| pair.map(|(size, position)| stated("mesh_param", size, position)));
    let [mesh_dp, mesh_sp] = mesh_sizes.map_or([None, None], |sizes| sizes.map(Some));
    let sizes = |mesh_size: Option<_>, key| mesh_size.into_iter().chain(axis(key)).collect();
    (sizes(mesh_dp, "data_parallel_size"), sizes(mesh_sp, "sequence_parallel_size"))
}

/// The sizes of ZeRO's partitions, as often as the file states them. MiCS is off below 1, ZeRO++'s second partition,
/// which is 1 by default, at 1.
fn read_shard_sizes(zero: &Section<'_>) -> Vec<StatedSize> {
    let stated = |key, least| {
        let size = zero.count(key).filter(|&size| size >= least)?;
        let origin = SizeOrigin::Key { key, position: zero.position(zero.range(key)?) };
        Some(StatedSize { size, origin })
    };
    let sizes = [stated("mics_shard_size", 1), stated("zero_hpz_partition_size", 2)];
    sizes.into_iter().flatten().collect()
}

fn read_zero(root: &Section<'_>) -> ZeroStage {
    let zero = root.section("zero_optimization");
    let number = match root.boolean("zero_optimization") {
        true => 1, // the old form
        false => zero.integer("stage").unwrap_or_default(),
    };
    let needs = |section: &'static str, stages: &str, is_enough: bool| {
        let offload = zero.section(section);
        if offload.text("device").is_some_and(|device| !device.eq_ignore_ascii_case("none")) && !is_enough {
            zero.contradiction("stage", &format!("{stages}, as `{section}.device` asks for offload"));
            if !zero.names("stage") {
                offload.contradiction("device", &format!("none, unless `stage` is {stages}"));
            }
        }
    };
    needs("offload_param", "3", number == 3);
    needs("offload_optimizer", "1, 2 or 3", number > 0);
    ZeroStage::from_number(number).unwrap_or_default()
}
