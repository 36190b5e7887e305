//! The arguments of `ulysses train`.

use crate::arguments::at_least_1;
use crate::config_flags::ConfigFlags;
use crate::process::WorldArgs;
use crate::{DeviceArg, data};
use clap::ValueEnum;
use std::path::{Path, PathBuf};
use ulysses::checkpoint::read_pointer;
use ulysses::config::{Backend, Packing};
use ulysses::device::DeviceKind;
use ulysses::monitor::Tracer;

#[derive(clap::Args, Clone)]
#[command(override_usage = "ulysses train [OPTIONS] <CONFIG>")]
pub(crate) struct TrainArgs {
    /// DeepSpeed-style JSON config. Flags override what it says.
    #[arg(required_unless_present = "resume")]
    config: Option<PathBuf>,
    #[command(flatten)]
    pub(super) flags: ConfigFlags,
    /// Preset (nano, tiny, small, base), or directory with config.json and model.safetensors.
    /// A directory named like a preset is `./NAME`.
    #[arg(long)]
    pub(super) model: Option<String>,
    /// A file of text, JSONL or tokens, a directory, or a pattern. Given several times, they are read one after
    /// the other.
    #[arg(long, value_name = "PATH")]
    pub(super) data: Vec<String>,
    /// Documents in rows: `greedy`, `cut` or `concat`.
    #[arg(long, value_parser = data::parse_packing)]
    pub(super) packing: Option<Packing>,
    /// Hugging Face tokenizer.json; without it the one in the model's directory, or bytes.
    #[arg(long)]
    pub(super) tokenizer: Option<String>,
    /// Ranks: `DPxSP`, `dp=2,sp=2`, `dp_replicate=2,dp_shard=2,sp=2`, or a preset (ddp, fsdp, hsdp, ulysses,
    /// ulysses_hsdp), by itself for the processes of a job or as `ulysses=NODESxRANKS`. Comes before `mesh_rules`, and
    /// must not contradict the sizes of the config.
    #[arg(long, allow_hyphen_values = true)]
    pub(super) mesh: Option<String>,
    /// What the patterns of the config's `mesh_rules` are matched with; without it `HOST/cpu`, or `HOST/` and the name
    /// of the GPU. --mesh comes before any rule.
    #[arg(long, value_name = "TEXT")]
    pub(super) mesh_selector: Option<String>,
    /// Tokens in a row, over all sp ranks.
    #[arg(long)]
    pub(super) seq_len: Option<usize>,
    /// Optimizer steps.
    #[arg(long)]
    pub(super) steps: Option<u64>,
    /// Times that the data is gone through, instead of --steps.
    #[arg(long)]
    pub(super) epochs: Option<u64>,
    /// CPU threads of each rank; a fair share of the cores without it.
    #[arg(long)]
    pub(super) threads_per_rank: Option<usize>,
    /// Where the ranks' tensors are: each rank has a GPU, or shares one.
    #[arg(long, default_value = "cpu")]
    pub(super) device: DeviceArg,
    /// What carries the communication; without it, the config's, or what connects the processes that a launcher has
    /// started, or threads.
    #[arg(long)]
    pub(super) backend: Option<BackendArg>,
    #[command(flatten)]
    pub(super) world: WorldArgs,
    /// Directory for metrics.jsonl and the resolved config; `runs/NAME-N` without it.
    #[arg(long)]
    pub(super) output: Option<String>,
    /// Go on from the newest valid checkpoint of the output directory, or of the run in DIR, or from the checkpoint
    /// DIR.
    #[arg(long, value_name = "DIR", num_args = 0..=1)]
    pub(super) resume: Option<Option<PathBuf>>,
    /// Go on with other data than the checkpoint's, from its beginning: step, schedule, parameters and optimizer state
    /// stay. Data that has not changed goes on where it was.
    #[arg(long, requires = "resume")]
    pub(super) reset_data: bool,
    /// Seed of the initial weights and of the order of the data.
    #[arg(long)]
    pub(super) seed: Option<u64>,
    /// Print tables at the end: what every rank sent, stored and held at its peak, and the wait for data.
    #[arg(long)]
    pub(super) verbose: bool,
    /// Write what all ranks do in the first steps as one timeline, for ui.perfetto.dev or chrome://tracing.
    #[arg(long, value_name = "FILE")]
    pub(super) trace: Option<PathBuf>,
    /// Steps that are traced.
    #[arg(long, value_name = "N", default_value_t = 5, requires = "trace", value_parser = at_least_1::<u64>)]
    pub(super) trace_steps: u64,
}

impl TrainArgs {
    /// Takes the file behind a bare `--resume` for the config, as in `--resume config.json`: a run is resumed from a
    /// directory.
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
        Err(format!(
            "--resume{resume}: the config is missing: `ulysses train CONFIG.json --resume{resume}`\n"
        ))
    }

    /// The config file; never empty once the arguments are [settled](Self::settle).
    pub(super) fn config(&self) -> &Path {
        self.config.as_deref().unwrap_or(Path::new(""))
    }

    /// What `--trace` asks for.
    pub(crate) fn tracer(&self) -> Option<Tracer> {
        self.trace.as_ref().map(|_| Tracer::new(self.trace_steps))
    }

    /// Where the ranks' tensors will be.
    pub(super) fn rank_device(&self, backend: Option<Backend>) -> DeviceKind {
        if backend == Some(Backend::Nccl) { DeviceKind::Cuda } else { self.device.into() }
    }

    /// Whether the run goes on from a checkpoint.
    #[cfg(unix)]
    pub(crate) fn resumes(&self) -> bool {
        self.resume.is_some()
    }
}

#[derive(Clone, Copy, ValueEnum)]
pub(super) enum BackendArg {
    /// Ranks are threads of this process.
    Thread,
    /// The same, each with a GPU of its own and NCCL between them (feature `nccl`).
    Nccl,
    /// Ranks are processes that `mpirun` has started (feature `mpi`).
    Mpi,
}

impl From<BackendArg> for Backend {
    fn from(backend: BackendArg) -> Self {
        match backend {
            BackendArg::Thread => Self::Thread,
            BackendArg::Nccl => Self::Nccl,
            BackendArg::Mpi => Self::Mpi,
        }
    }
}
