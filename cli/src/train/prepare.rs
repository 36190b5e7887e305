//! Reads and checks everything before ranks start.

use super::args::TrainArgs;
use super::host::Host;
use super::mesh_order;
use super::overrides::overrides;
use super::planned_memory::PlannedMemory;
use super::resume::{check_candidate, check_output, open_resume};
use super::signals;
use crate::config::{print_partition_note, print_warnings};
use crate::failure::{Failure, OrFail};
use crate::model::{self, ModelSource};
use crate::output::log_line;
use crate::placement::{Placement, likely_device};
use crate::settings;
use crate::sources::{Sources, open_tokenizer};
use anyhow::Context;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use ulysses::comm::LaunchOptions;
use ulysses::config::{Config, RawConfig};
use ulysses::engine::check_offload;
use ulysses::mesh::{DeviceMesh, RankHosts};
use ulysses::trainer::{Phase, Resume, TrainingData, check_config};

/// A checked run. Nothing has been written for it yet.
pub(super) struct Prepared {
    pub(super) config: Config,
    pub(super) mesh: DeviceMesh,
    /// The hosts of all ranks, if they are several.
    pub(super) hosts: Option<RankHosts>,
    pub(super) launch: LaunchOptions,
    pub(super) placement: Placement,
    pub(super) model: ModelSource,
    pub(super) data: TrainingData,
    pub(super) resume: Option<Resume>,
    /// Whether data other than the checkpoint's starts from its beginning.
    pub(super) reset_data: bool,
    /// Set by a signal: save and stop.
    pub(super) stop: Arc<AtomicBool>,
    /// The memory plan, if the model can be planned.
    pub(super) planned: Option<PlannedMemory>,
}

impl Prepared {
    /// Returns how many ranks share this machine, this process and a GPU.
    pub(super) fn ranks_together(&self, host: &Host<'_>) -> [usize; 3] {
        let world_size = self.mesh.world_size();
        let in_process = host.ranks_in_process(world_size);
        [host.local_ranks(world_size), in_process, self.placement.ranks_per_gpu(in_process)]
    }

    /// Decides `ulysses.save_attention_output` if the config leaves it open: on if the planned memory fits on all
    /// machines. Collective.
    pub(super) fn decide(&mut self, host: &mut Host<'_>) -> Result<(), Failure> {
        if !self.config.saves_attention_output_if_it_fits() {
            return Ok(());
        }
        let ranks = self.ranks_together(host);
        let fits = host.all(self.planned.as_ref().is_none_or(|planned| planned.fits(ranks)))?;
        self.config.ulysses.save_attention_output = Some(fits);
        if fits {
            return Ok(());
        }
        let threads_per_rank = self.launch.threads_per_rank;
        let planned = PlannedMemory::of(
            &self.config,
            &self.model.config,
            self.placement.device,
            threads_per_rank,
            ranks[0],
        );
        if let Some(planned) = std::mem::replace(&mut self.planned, planned.or_usage()?) {
            planned.log_recomputed_attention();
        }
        Ok(())
    }
}

pub(super) fn prepare(args: TrainArgs, host: &mut Host<'_>) -> Result<Prepared, Failure> {
    let (path, device_arg, resume, process) =
        (args.config().to_owned(), args.device, args.resume.clone(), args.process);
    let (settings, reset_data) = (args.flags.settings(), args.reset_data);
    let by_flag = args.backend.map(Into::into);
    let (mut config, placement) = host.join_and_resolve(
        process,
        (device_arg, by_flag),
        || RawConfig::from_file_with(&path, &settings),
        |raw, cluster, backend| overrides(args, raw, cluster, likely_device(device_arg, backend)),
    )?;
    let device = placement.device;
    let resume = resume.map(open_resume).transpose()?;
    print_warnings(&config, &path, device);
    print_partition_note(&config);
    check_config(&config).or_usage()?;
    let seq_lens = seq_lens(&config).or_usage()?;
    config.require_data().or_usage()?;
    check_output(&config, resume.as_ref())?;
    let placed = config.placed_mesh(host.rank_hosts()).or_usage()?;
    let local_ranks = host.local_ranks(config.world_size());
    let launch = settings::launch_options(config.ulysses.threads_per_rank, local_ranks)?;
    let timeout = Duration::from_secs(config.ulysses.comm.timeout_seconds);
    let launch = LaunchOptions { check: config.ulysses.comm.is_checked(), timeout, ..launch };
    let tokenizer = open_tokenizer(&mut config.ulysses)?;
    let mut model = model::open(config.require_model().or_usage()?, config.seed, tokenizer.vocab_size())?;
    model.check_config(&config)?;
    let cluster = host.rank_hosts().and_then(|hosts| hosts.cluster().ok());
    let ranks_per_node = cluster.map_or_else(|| config.world_size(), |cluster| cluster.ranks_per_node);
    model::resolve_ring(&model.config, &mut config, ranks_per_node);
    model.warn_of_length(seq_lens.iter().map(|(_, seq_len)| *seq_len).max().unwrap_or_default());
    for (_, seq_len) in &seq_lens {
        model.check_exchange(config.micro_batch_size, *seq_len, &config)?;
        settings::check_memory(&config, &model.config, *seq_len, local_ranks)?;
    }
    let sources = Sources::read(&config, &tokenizer, model.config.vocab_size).or_run()?;
    if let (Some(end), Some(source)) = (sources.end_of_turn(&tokenizer), &mut model.hf_source)
        && source.stop_at(end)
    {
        let text = tokenizer.decode(&[end], Path::new("end of turn")).or_run()?;
        log_line(format_args!(
            "note: generation with an exported model also stops at the end of a turn, {text} ({end}): it is added to `eos_token_id`"
        ));
    }
    let phases = seq_lens.into_iter().map(|(first_step, seq_len)| phase(&sources, first_step, seq_len));
    let phases = phases.collect::<anyhow::Result<Vec<_>>>().or_run()?;
    let data = TrainingData::by_phase(phases, &config).or_run()?;
    if let Some(steps) = data.steps_of_epochs(&config) {
        config.resolve_steps(steps);
    }
    check_candidate(resume.as_ref().filter(|_| !reset_data), &config, &data)?;
    check_offload(&config, device).or_usage()?;
    let message = match config.checkpoint {
        Some(_) => "signal received: saving and stopping after this step; a second signal stops at once",
        None => {
            "signal received: stopping after this step without saving (the config has no `checkpoint` section); a \
             second signal stops at once"
        }
    };
    let stop =
        signals::watch(host.is_first().then_some(message)).context("cannot handle signals").or_run()?;
    let planned = PlannedMemory::of(&config, &model.config, device, launch.threads_per_rank, local_ranks);
    let planned = planned.or_usage()?;
    mesh_order::log(&config, &model.config, host.rank_hosts(), &placed);
    let mesh = placed.mesh;
    let hosts = host.rank_hosts().filter(|hosts| hosts.num_nodes() > 1).cloned();
    Ok(Prepared { config, mesh, hosts, launch, placement, model, data, resume, reset_data, stop, planned })
}

/// Returns every sequence length of the run, with the number of steps before it.
fn seq_lens(config: &Config) -> anyhow::Result<Vec<(u64, usize)>> {
    let first = (0, config.require_seq_len()?);
    let later = config.ulysses.seq_len_schedule.iter().map(|change| (change.step, change.seq_len));
    Ok(std::iter::once(first).chain(later).collect())
}

fn phase(sources: &Sources, first_step: u64, seq_len: usize) -> anyhow::Result<Phase> {
    Ok(Phase::new(first_step, sources.training(seq_len)?, sources.held_out(seq_len)?)?)
}
