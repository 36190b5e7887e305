//! The arguments of `ulysses train`, and the options of the job that they are.

use crate::arguments::at_least_1;
use crate::config_flags::ConfigFlags;
use crate::failure::{Failure, OrFail};
use crate::launch::MEMORY_DIR_VARIABLE;
use crate::output::LOG;
use crate::ranks::{BackendArg, ProcessArgs};
use crate::{DeviceArg, sources};
use std::path::{Path, PathBuf};
use ulysses::checkpoint::read_pointer;
use ulysses::config::{Backend, Config, RawConfig};
use ulysses::config::{DataSource, Overrides, Packing};
use ulysses::mesh::Cluster;
use ulysses::monitor::Tracer;
use ulysses::trainer::JobOptions;

#[derive(clap::Args, Clone)]
#[command(override_usage = "ulysses train [OPTIONS] <CONFIG>")]
pub(crate) struct TrainArgs {
    /// DeepSpeed-style JSON config. Flags override its keys.
    #[arg(required_unless_present = "resume")]
    config: Option<PathBuf>,
    #[command(flatten)]
    flags: ConfigFlags,
    /// Model directory (config.json, model.safetensors), or preset (nano, tiny, small, base).
    ///
    /// Write a directory with the name of a preset as `./NAME`.
    #[arg(long)]
    model: Option<String>,
    /// Text, JSONL or token file, directory, or glob pattern. Repeatable.
    #[arg(long, value_name = "PATH")]
    data: Vec<String>,
    /// Packing of documents into sequences: `greedy`, `cut` or `concat`.
    #[arg(long, value_parser = |name: &str| sources::parse_choice(Packing::CHOICES, name))]
    packing: Option<Packing>,
    /// Hugging Face tokenizer.json [default: the model's own, else bytes].
    #[arg(long)]
    tokenizer: Option<String>,
    /// Mesh: `DPxSP`, `DPxSPxTP`, `pp=2,dp=2,sp=2,tp=2`, `dp_replicate=2,dp_shard=2,sp=2`, or a preset (ddp, fsdp, hsdp, ulysses, ulysses_hsdp).
    ///
    /// `intra:sp=8/inter:dp=2` gives sizes within a node and between nodes, `dp=2,sp=2@0,2,1,3` the rank at each coordinate.
    /// A preset stands alone for the processes of a job, or as `ulysses=NODESxRANKS`. Overrides `mesh_rules`, and
    /// replaces mesh sizes of the config with a warning.
    #[arg(long, allow_hyphen_values = true)]
    mesh: Option<String>,
    /// Text to match with the patterns of `mesh_rules` [default: `HOST/cpu` or `HOST/GPU_NAME`].
    ///
    /// --mesh overrides all rules.
    #[arg(long, value_name = "TEXT")]
    mesh_selector: Option<String>,
    /// Tokens per sequence, over all sp ranks.
    #[arg(long, value_parser = at_least_1::<usize>)]
    seq_len: Option<usize>,
    /// Number of optimizer steps.
    #[arg(long)]
    steps: Option<u64>,
    /// Number of epochs, instead of --steps.
    #[arg(long)]
    epochs: Option<u64>,
    /// CPU threads per rank [default: an equal share of the cores].
    #[arg(long)]
    threads_per_rank: Option<usize>,
    /// Device of the ranks' tensors.
    #[arg(long, default_value = "auto")]
    device: DeviceArg,
    /// Communication backend [default: the config's, else the launcher's, else nccl for several ranks on several GPUs, else
    /// thread].
    #[arg(long)]
    backend: Option<BackendArg>,
    #[command(flatten)]
    process: ProcessArgs,
    /// Output directory for metrics, checkpoints and the resolved config [default: `runs/NAME-N`].
    #[arg(long)]
    output: Option<String>,
    /// Resume from the newest valid checkpoint in the output directory, or from DIR (an output directory or a checkpoint).
    #[arg(long, value_name = "DIR", num_args = 0..=1)]
    resume: Option<Option<PathBuf>>,
    /// Resume with different data, from its first sequence.
    ///
    /// Step, schedule, parameters and optimizer state continue. Unchanged data continues where the checkpoint stopped.
    #[arg(long, requires = "resume")]
    reset_data: bool,
    /// Random seed of initial weights and data order.
    #[arg(long)]
    seed: Option<u64>,
    /// Print tables at the end: per rank, bytes sent, stored state and peak memory; and the time spent waiting for data.
    #[arg(long)]
    pub(super) verbose: bool,
    /// Write a timeline of all ranks in the first steps, for ui.perfetto.dev or chrome://tracing.
    #[arg(long, value_name = "FILE")]
    pub(super) trace: Option<PathBuf>,
    /// Number of steps to trace.
    #[arg(long, value_name = "N", default_value_t = 5, requires = "trace", value_parser = at_least_1::<u64>)]
    trace_steps: u64,
}

impl TrainArgs {
    /// Treats a file after `--resume` as the config, as in `--resume config.json`: runs resume from directories.
    ///
    /// # Errors
    /// No config is given.
    pub(crate) fn settle(&mut self) -> Result<(), String> {
        let (None, Some(resume)) = (&self.config, &mut self.resume) else { return Ok(()) };
        let is_config = |path: &mut PathBuf| {
            path.extension().is_some_and(|end| end == "json")
                || (path.is_file() && read_pointer(path).is_none())
        };
        if let Some(config) = resume.take_if(is_config) {
            self.config = Some(config);
            return Ok(());
        }
        let resume = resume.as_ref().map_or_else(String::new, |dir| format!(" {}", dir.display()));
        Err(format!("--resume{resume}: missing config: use `ulysses train CONFIG.json --resume{resume}`\n"))
    }

    /// Returns the path of the config; not empty after [`settle`](Self::settle).
    pub(crate) fn config(&self) -> &Path {
        self.config.as_deref().unwrap_or(Path::new(""))
    }

    /// Returns a tracer if `--trace` is given.
    pub(crate) fn tracer(&self) -> Option<Tracer> {
        self.trace.as_ref().map(|_| Tracer::new(self.trace_steps))
    }

    /// Returns the options of the job, whose timeline `tracer` records.
    pub(super) fn options(&self, tracer: Option<Tracer>) -> JobOptions {
        let Self { mesh, mesh_selector, model, tokenizer, output, resume, .. } = self.clone();
        let Self { seq_len, steps, epochs, seed, threads_per_rank, packing, reset_data, .. } = *self;
        let data = self.data.iter().map(DataSource::from).collect();
        JobOptions {
            settings: self.flags.settings(),
            overrides: Overrides {
                mesh_selector,
                seq_len,
                steps,
                epochs,
                seed,
                threads_per_rank,
                model,
                data,
                packing,
                tokenizer,
                output,
                ..Overrides::default()
            },
            mesh,
            device: self.device.kind(),
            backend: self.backend.map(Into::into),
            process: self.process.flags(),
            resume,
            reset_data,
            memory_dir: std::env::var_os(MEMORY_DIR_VARIABLE).map(PathBuf::from),
            // `MetricsFiles` writes them.
            writes_event_files: false,
            tracer,
            open_tokenizer: sources::tokenizer_file,
            log: LOG,
        }
    }

    /// Returns the config as a process of a job on `cluster` will resolve it, and the backend that file or flag gives.
    pub(crate) fn for_launch(&self, cluster: Cluster) -> Result<(Config, Option<Backend>), Failure> {
        let options = self.options(None);
        let raw = RawConfig::from_file_with(self.config(), &options.settings).or_usage()?;
        let backend = options.backend.or(raw.backend());
        Ok((options.resolve(self.config(), &raw, Some(cluster), backend)?, backend))
    }

    /// Returns whether the run resumes from a checkpoint.
    pub(crate) fn resumes(&self) -> bool {
        self.resume.is_some()
    }

    /// Returns whether `--resume` names a directory.
    pub(crate) fn resumes_from_dir(&self) -> bool {
        matches!(self.resume, Some(Some(_)))
    }
}
