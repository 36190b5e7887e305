//! The arguments of `ulysses train`.

use crate::arguments::at_least_1;
use crate::config_flags::ConfigFlags;
use crate::ranks::{BackendArg, ProcessArgs};
use crate::{DeviceArg, sources};
use std::path::{Path, PathBuf};
use ulysses::checkpoint::read_pointer;
use ulysses::config::Packing;
use ulysses::monitor::Tracer;

#[derive(clap::Args, Clone)]
#[command(override_usage = "ulysses train [OPTIONS] <CONFIG>")]
pub(crate) struct TrainArgs {
    /// DeepSpeed-style JSON config. Flags override its keys.
    #[arg(required_unless_present = "resume")]
    config: Option<PathBuf>,
    #[command(flatten)]
    pub(super) flags: ConfigFlags,
    /// Model directory (config.json, model.safetensors), or preset (nano, tiny, small, base).
    ///
    /// Write a directory with the name of a preset as `./NAME`.
    #[arg(long)]
    pub(super) model: Option<String>,
    /// Text, JSONL or token file, directory, or glob pattern. Repeatable.
    #[arg(long, value_name = "PATH")]
    pub(super) data: Vec<String>,
    /// Packing of documents into sequences: `greedy`, `cut` or `concat`.
    #[arg(long, value_parser = |name: &str| sources::parse_choice(Packing::CHOICES, name))]
    pub(super) packing: Option<Packing>,
    /// Hugging Face tokenizer.json [default: the model's own, else bytes].
    #[arg(long)]
    pub(super) tokenizer: Option<String>,
    /// Mesh: `DPxSP`, `DPxSPxTP`, `pp=2,dp=2,sp=2,tp=2`, `dp_replicate=2,dp_shard=2,sp=2`, or a preset (ddp, fsdp, hsdp, ulysses, ulysses_hsdp).
    ///
    /// `intra:sp=8/inter:dp=2` gives sizes within a node and between nodes, `dp=2,sp=2@0,2,1,3` the rank at each coordinate.
    /// A preset stands alone for the processes of a job, or as `ulysses=NODESxRANKS`. Overrides `mesh_rules`, and
    /// replaces mesh sizes of the config with a warning.
    #[arg(long, allow_hyphen_values = true)]
    pub(super) mesh: Option<String>,
    /// Text to match with the patterns of `mesh_rules` [default: `HOST/cpu` or `HOST/GPU_NAME`].
    ///
    /// --mesh overrides all rules.
    #[arg(long, value_name = "TEXT")]
    pub(super) mesh_selector: Option<String>,
    /// Tokens per sequence, over all sp ranks.
    #[arg(long, value_parser = at_least_1::<usize>)]
    pub(super) seq_len: Option<usize>,
    /// Number of optimizer steps.
    #[arg(long)]
    pub(super) steps: Option<u64>,
    /// Number of epochs, instead of --steps.
    #[arg(long)]
    pub(super) epochs: Option<u64>,
    /// CPU threads per rank [default: an equal share of the cores].
    #[arg(long)]
    pub(super) threads_per_rank: Option<usize>,
    /// Device of the ranks' tensors.
    #[arg(long, default_value = "auto")]
    pub(super) device: DeviceArg,
    /// Communication backend [default: the config's, else the launcher's, else nccl for several ranks on several GPUs, else
    /// thread].
    #[arg(long)]
    pub(super) backend: Option<BackendArg>,
    #[command(flatten)]
    pub(super) process: ProcessArgs,
    /// Output directory for metrics, checkpoints and the resolved config [default: `runs/NAME-N`].
    #[arg(long)]
    pub(super) output: Option<String>,
    /// Resume from the newest valid checkpoint in the output directory, or from DIR (an output directory or a checkpoint).
    #[arg(long, value_name = "DIR", num_args = 0..=1)]
    pub(super) resume: Option<Option<PathBuf>>,
    /// Resume with different data, from its first sequence.
    ///
    /// Step, schedule, parameters and optimizer state continue. Unchanged data continues where the checkpoint stopped.
    #[arg(long, requires = "resume")]
    pub(super) reset_data: bool,
    /// Random seed of initial weights and data order.
    #[arg(long)]
    pub(super) seed: Option<u64>,
    /// Print tables at the end: per rank, bytes sent, stored state and peak memory; and the time spent waiting for data.
    #[arg(long)]
    pub(super) verbose: bool,
    /// Write a timeline of all ranks in the first steps, for ui.perfetto.dev or chrome://tracing.
    #[arg(long, value_name = "FILE")]
    pub(super) trace: Option<PathBuf>,
    /// Number of steps to trace.
    #[arg(long, value_name = "N", default_value_t = 5, requires = "trace", value_parser = at_least_1::<u64>)]
    pub(super) trace_steps: u64,
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

    /// Returns whether the run resumes from a checkpoint.
    #[cfg(unix)]
    pub(crate) fn resumes(&self) -> bool {
        self.resume.is_some()
    }

    /// Returns whether `--resume` names a directory.
    #[cfg(unix)]
    pub(crate) fn resumes_from_dir(&self) -> bool {
        matches!(self.resume, Some(Some(_)))
    }
}
