//! A run that all processes can start.

use super::args::TrainArgs;
use super::overrides::overrides;
use super::{mesh_order, signals};
use crate::failure::{Failure, OrFail};
use crate::launch::MEMORY_DIR_VARIABLE;
use crate::output::LOG;
use crate::sources::tokenizer_file;
use anyhow::Context;
use serde_json::Value;
use std::fmt::{self, Display, Formatter};
use std::path::PathBuf;
use ulysses::config::ParameterGroup;
use ulysses::model::ModelConfig;
use ulysses::monitor::{Tracer, counted};
use ulysses::trainer::job::{JobOptions, JobRanks, PreparedJob};

/// The state that all ranks share.
pub(super) struct Run {
    pub(super) job: PreparedJob,
    pub(super) output: PathBuf,
    pub(super) tracer: Option<Tracer>,
    /// The content of `run.json` before the run starts.
    pub(super) record: Value,
}

impl Run {
    /// Reads and checks everything before ranks start. Nothing is written, and the output directory is not known yet.
    pub(super) fn prepare(
        args: TrainArgs,
        tracer: Option<Tracer>,
        ranks: &mut JobRanks,
    ) -> Result<Self, Failure> {
        let path = args.config().to_owned();
        let options = options(&args);
        let mut job = PreparedJob::new(ranks, &path, options, |raw, cluster| overrides(args, raw, cluster))?;
        let message = match job.config.checkpoint {
            Some(_) => "signal received: saving and stopping after this step; a second signal stops at once",
            None => {
                "signal received: stopping after this step without saving (the config has no `checkpoint` section); a \
                 second signal stops at once"
            }
        };
        let message = ranks.is_first().then_some(message);
        job.stop = signals::watch(message).context("cannot handle signals").or_run()?;
        mesh_order::log(&job, ranks.rank_hosts());
        Ok(Self { job, output: PathBuf::new(), tracer, record: Value::Null })
    }
}

/// Returns the flags that are not config keys.
fn options(args: &TrainArgs) -> JobOptions {
    JobOptions {
        settings: args.flags.settings(),
        device: args.device.kind(),
        backend: args.backend.map(Into::into),
        process: args.process.flags(),
        resume: args.resume.clone(),
        reset_data: args.reset_data,
        memory_dir: std::env::var_os(MEMORY_DIR_VARIABLE).map(PathBuf::from),
        open_tokenizer: tokenizer_file,
        log: LOG,
    }
}

impl Display for Run {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let PreparedJob { config, model, data, launch, .. } = &self.job;
        let (model, data): (&ModelConfig, _) = (&model.config, &data.phases()[0].data);
        let partitions = config.zero_world_size();
        let replicas = config.zero_shard_size().map_or_else(String::new, |size| {
            format!(
                " ({} of {})",
                counted(config.mesh.dp_size / size, "replica"),
                counted(partitions, "partition")
            )
        });
        let is_frozen = |name: &str| ParameterGroup::is_frozen(&config.ulysses.parameter_groups, name);
        let frozen = match model.num_parameters_where(is_frozen) {
            0 => String::new(),
            frozen => format!(" ({:.2} M frozen)", frozen as f64 / 1e6),
        };
        write!(
            f,
            "mesh {}, ZeRO stage {}{replicas}, {:.2} M parameters{frozen}, {} of {} tokens, \
             {} per rank",
            config.training_shape(),
            config.zero_axes().with_stage(config.zero.stage),
            model.num_parameters() as f64 / 1e6,
            counted(data.num_sequences(), "sequence"),
            data.seq_len(),
            counted(launch.threads_per_rank, "thread"),
        )
    }
}
