//! [`PreparedJob`]: everything that is read and checked before ranks start.

use super::checks::{check_candidate, check_memory, check_output, config_launch_options, open_resume};
use super::devices::DevicePlacement;
use super::model_source::{ModelSource, check_exchange, check_layers, resolve_ring};
use super::options::{JobError, JobOptions, OrJobError};
use super::out_of_memory::explain;
use super::planned_memory::{PlannedMemory, Sharing};
use super::ranks::JobRanks;
use super::sources::{Sources, open_tokenizer};
use crate::comm::{LaunchOptions, MeshGroups, RankContext};
use crate::config::{Config, SeqLenChange, Severity};
use crate::data::Tokenizer;
use crate::engine::{Engine, EngineError, check_offload, set_stages};
use crate::estimate::Workload;
use crate::kernels::device::DeviceKind;
use crate::kernels::linear::bf16_gemm_deprecation;
use crate::mesh::{DeviceMesh, RankHosts, SpGroups};
use crate::model::Model;
use crate::monitor::{Tracer, counted};
use crate::trainer::{Phase, Trainer, TrainerError, TrainerOptions, TrainingData, check_config};
use candle_core::Device;
use std::path::{Path, PathBuf};

/// A checked job. Nothing has been written for it yet.
pub struct PreparedJob {
    /// The resolved config.
    pub config: Config,
    /// The mesh.
    pub mesh: DeviceMesh,
    /// The nodes that an sp group spans.
    pub sp_groups: SpGroups,
    /// The hosts of all ranks, if they are several.
    pub hosts: Option<RankHosts>,
    /// Threads and timeout of the ranks.
    pub launch: LaunchOptions,
    /// The devices of the ranks.
    pub placement: DevicePlacement,
    /// The model and its weights.
    pub model: ModelSource,
    /// Training and held-out data.
    pub data: TrainingData,
    /// The memory that it is planned to need, if the model can be planned.
    pub planned: Option<PlannedMemory>,
    /// The options of each rank's trainer. The output directory is known before [`Job::train`](super::Job::train) if the
    /// config has one.
    pub options: TrainerOptions,
    /// The config file.
    pub(super) file: PathBuf,
    pub(super) writes_event_files: bool,
    pub(super) tracer: Option<Tracer>,
}

impl PreparedJob {
    /// Joins the job of `ranks`, and reads and checks what it needs.
    ///
    /// The other processes wait in [`JobRanks::agree`], also after an error of this one.
    ///
    /// # Errors
    /// Whatever is wrong with the config, the model, the data or the machine.
    pub(super) fn new(ranks: &mut JobRanks, file: &Path, options: JobOptions) -> Result<Self, JobError> {
        let mut config = ranks.join_and_resolve(file, &options)?;
        let placement = ranks.placement().clone();
        let log = ranks.log();
        let resume = options.resume.map(open_resume).transpose()?;
        config_warnings(&config, file, placement.device()).iter().for_each(|line| log(line));
        config.zero_partition_note().iter().for_each(|note| log(&format!("warning: {note}")));
        check_config(&config).or_usage()?;
        let seq_lens = seq_lens(&config)?;
        config.require_data().or_usage()?;
        check_output(&config, resume.as_ref())?;
        let placed = config.placed_mesh(ranks.rank_hosts()).or_usage()?;
        let launch = config_launch_options(&config, ranks.local_ranks(config.world_size()))?;
        let tokenizer = open_tokenizer(&mut config.ulysses, options.open_tokenizer, log)?;
        let vocab_size = tokenizer.vocab_size();
        let mut model = ModelSource::open(config.require_model().or_usage()?, config.seed, vocab_size, log)?;
        check_model(&mut config, &model, &seq_lens, ranks)?;
        let data = read_data(&config, &seq_lens, &tokenizer, &mut model, log)?;
        if let Some(steps) = data.steps_of_epochs(&config) {
            config.resolve_steps(steps);
        }
        check_candidate(resume.as_ref().filter(|_| !options.reset_data), &config, &data)?;
        check_offload(&config, placement.device()).or_usage()?;
        let trainer_options = TrainerOptions {
            output: config.ulysses.output.as_ref().map(PathBuf::from),
            resume,
            memory_dir: options.memory_dir,
            reset_data: options.reset_data,
            model: model.config.to_hf_json(),
            source: model.hf_source.clone(),
            log,
            ..TrainerOptions::default()
        };
        let mut job = Self {
            config,
            mesh: placed.mesh,
            sp_groups: placed.sp_groups,
            hosts: ranks.rank_hosts().filter(|hosts| hosts.num_nodes() > 1).cloned(),
            launch,
            placement,
            model,
            data,
            planned: None,
            options: trainer_options,
            file: file.to_owned(),
            writes_event_files: options.writes_event_files,
            tracer: options.tracer,
        };
        job.planned = job.plan_memory(ranks).or_usage()?;
        Ok(job)
    }

    /// Plans the longest sequences.
    fn plan_memory(&self, ranks: &JobRanks) -> Result<Option<PlannedMemory>, EngineError> {
        // The value that the ranks are started with.
        let mut config = self.config.clone();
        config.ulysses.threads_per_rank = Some(self.launch.threads_per_rank);
        config.ulysses.seq_len = config.longest_seq_len();
        let ranks_per_node = ranks.local_ranks(self.mesh.world_size());
        let (model, device) = (self.model.config.clone(), self.placement.device());
        PlannedMemory::new(Workload { config, model, document_len: None, ranks_per_node, device })
    }

    fn sharing(&self, ranks: &JobRanks) -> Sharing {
        let world_size = self.mesh.world_size();
        let process = ranks.ranks_in_process(world_size);
        Sharing {
            machine: ranks.local_ranks(world_size),
            process,
            gpu: self.placement.ranks_per_gpu(process),
        }
    }

    /// Decides `ulysses.save_attention_output` if the config leaves it open: on if the planned memory fits on all
    /// machines. Collective.
    ///
    /// # Errors
    /// When the processes cannot communicate.
    pub(super) fn decide_attention_output(&mut self, ranks: &mut JobRanks) -> Result<(), JobError> {
        if !self.config.saves_attention_output_if_it_fits() {
            return Ok(());
        }
        let sharing = self.sharing(ranks);
        let fits = ranks.all(self.planned.as_ref().is_none_or(|planned| planned.fits(sharing)))?;
        self.config.ulysses.save_attention_output = Some(fits);
        if fits {
            return Ok(());
        }
        let recomputed = self.plan_memory(ranks).or_usage()?;
        if let Some(planned) = std::mem::replace(&mut self.planned, recomputed) {
            (self.options.log)(&planned.recomputed_attention());
        }
        Ok(())
    }

    /// Logs the planned memory next to the available memory, with a warning if it exceeds it.
    pub(super) fn log_planned_memory(&self, ranks: &JobRanks) {
        let lines = self.planned.iter().flat_map(|planned| planned.lines(self.sharing(ranks)));
        lines.for_each(|line| (self.options.log)(&line));
    }

    /// Explains an out-of-memory error of a rank, with the state of its engine if there is one.
    pub(super) fn explain(&self, error: TrainerError, engine: Option<&Engine>) -> TrainerError {
        explain(error, &self.config, engine, self.planned.as_ref().map(PlannedMemory::clause))
    }

    /// Returns the trainer of a rank, which resumes the checkpoint of the job, if it has one. Collective.
    ///
    /// # Errors
    /// As for [`ModelSource::engine`] and [`Trainer::new`].
    pub(super) fn trainer<'a>(
        &self,
        rank: &RankContext,
        device: Device,
    ) -> Result<Trainer<'a>, TrainerError> {
        let groups = MeshGroups::new(&self.mesh, rank.group.clone())?.on(device);
        let engine = self.model.engine(&self.config, &groups)?;
        Trainer::new(engine, &groups, self.data.clone(), self.options.clone())
    }
}

/// Returns the config's warnings: settings whose effect differs from the file at `path`. Other notes and `"auto"` values
/// are counted in one line.
pub fn config_warnings(config: &Config, path: &Path, device: DeviceKind) -> Vec<String> {
    let (warnings, others): (Vec<_>, Vec<_>) =
        config.notes.iter().partition(|note| note.severity == Severity::Warning);
    let mut lines: Vec<String> = warnings.iter().map(ToString::to_string).collect();
    let more = [bf16_gemm_deprecation(), config.offload_note(device)];
    lines.extend(more.into_iter().flatten().map(|text| format!("warning: {text}")));
    let autos = config.autos.iter().filter(|auto| auto.value.is_some()).count();
    let counts = [
        (others.len(), counted(others.len(), "note")),
        (autos, format!("{} set by \"auto\"", counted(autos, "value"))),
    ];
    let more: Vec<String> =
        counts.into_iter().filter(|(count, _)| *count > 0).map(|(_, text)| text).collect();
    if !more.is_empty() {
        let (more, path) = (more.join(", "), path.display());
        lines.push(format!("config: {more}; list them with `ulysses config resolve {path}`"));
    }
    lines
}

/// Returns every sequence length of the job.
fn seq_lens(config: &Config) -> Result<Vec<SeqLenChange>, JobError> {
    let first = SeqLenChange { step: 0, seq_len: config.require_seq_len().or_usage()? };
    Ok(std::iter::once(first).chain(config.ulysses.seq_len_schedule.iter().copied()).collect())
}

/// Checks that the model fits the config and the machine, and resolves what depends on the model.
fn check_model(
    config: &mut Config,
    model: &ModelSource,
    seq_lens: &[SeqLenChange],
    ranks: &JobRanks,
) -> Result<(), JobError> {
    check_layers(&model.config, config)?;
    let world_size = config.world_size();
    let cluster = ranks.rank_hosts().and_then(|hosts| hosts.cluster().ok());
    let ranks_per_node = cluster.map_or(world_size, |cluster| cluster.ranks_per_node);
    resolve_ring(&model.config, config, ranks_per_node);
    set_stages(&Model::new(&model.config).or_usage()?, config).or_usage()?;
    model.warn_of_length(config.longest_seq_len().unwrap_or_default(), ranks.log());
    for SeqLenChange { seq_len, .. } in seq_lens {
        check_exchange(&model.config, config.micro_batch_size, *seq_len, config)?;
        check_memory(config, &model.config, *seq_len, ranks.local_ranks(world_size))?;
    }
    Ok(())
}

/// Reads the data and packs it for every sequence length. An exported model ends its answers as the data does.
fn read_data(
    config: &Config,
    seq_lens: &[SeqLenChange],
    tokenizer: &Tokenizer,
    model: &mut ModelSource,
    log: fn(&str),
) -> Result<TrainingData, JobError> {
    let sources = Sources::read(config, tokenizer, model.config.vocab_size, log)?;
    if let (Some(end), Some(source)) = (sources.end_of_turn(tokenizer), &mut model.hf_source)
        && source.stop_at(end)
    {
        let text = tokenizer.decode(&[end], Path::new("end of turn"))?;
        log(&format!(
            "note: generation with an exported model also stops at the end of a turn, {text} ({end}): it is added to `eos_token_id`"
        ));
    }
    let phase = |SeqLenChange { step, seq_len }: &SeqLenChange| -> Result<Phase, JobError> {
        Ok(Phase::new(*step, sources.training(*seq_len)?, sources.held_out(*seq_len)?)?)
    };
    let phases = seq_lens.iter().map(phase).collect::<Result<Vec<_>, _>>()?;
    TrainingData::by_phase(phases, config).or_run()
}
