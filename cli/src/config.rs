//! `ulysses config`.

use super::config_flags::ConfigFlags;
use crate::failure::{Failure, OrFail};
use crate::mesh_flag::mesh_overrides;
use crate::output::{log_line, print};
use std::path::PathBuf;
use ulysses::config::{
    Config, Overrides, PartiallyResolved, RawConfig, UnresolvedValue, explain, json_schema,
    reference_markdown,
};
use ulysses::kernels::linear::bf16_gemm_deprecation;

#[derive(clap::Subcommand)]
pub(super) enum ConfigCommand {
    /// Explain a key: effect, valid values, default, and the meaning of "auto".
    Explain {
        /// Path of the key, such as `zero_optimization.stage`, or its last part.
        key: String,
    },
    /// Print the resolved config: defaults, batch sizes and the value of every "auto".
    ///
    /// Notes, and values that depend on a missing flag, go to standard error.
    Resolve {
        /// DeepSpeed-style JSON config.
        config: PathBuf,
        /// Mesh: `DPxSP`, `DPxSPxTP`, `pp=2,dp=2,sp=2,tp=2` or `dp_replicate=2,dp_shard=2,sp=2`. Replaces sizes of the config.
        #[arg(long, allow_hyphen_values = true)]
        mesh: Option<String>,
        /// Number of optimizer steps, for schedules that decay over the whole run.
        #[arg(long)]
        steps: Option<u64>,
        #[command(flatten)]
        flags: ConfigFlags,
    },
    /// Print the reference of all keys as Markdown.
    Reference,
    /// Print the JSON Schema of the config file, for editors.
    Schema,
}

pub(super) fn run(command: ConfigCommand) -> Result<(), Failure> {
    match command {
        ConfigCommand::Explain { key } => print(explain(&key).or_usage()?),
        ConfigCommand::Resolve { config, mesh, steps, flags } => {
            let raw = RawConfig::from_file_with(config, &flags.settings()).or_usage()?;
            let overrides = Overrides { steps, ..mesh_overrides(mesh.as_deref())? };
            let PartiallyResolved { config, written, open } = raw.resolve_partially(&overrides).or_usage()?;
            print_notes(&config);
            for UnresolvedValue { key, needs } in open {
                log_line(format_args!("unset: `{key}` needs {needs}"));
            }
            print_json(&written)
        }
        ConfigCommand::Reference => print(reference_markdown()),
        ConfigCommand::Schema => print_json(&json_schema()),
    }
}

fn print_json(value: &serde_json::Value) -> Result<(), Failure> {
    print(format_args!("{value:#}\n"))
}

/// Prints all notes and `"auto"` values of a config to standard error.
fn print_notes(config: &Config) {
    config.notes.iter().for_each(log_line);
    bf16_gemm_deprecation().iter().for_each(log_warning);
    config.zero_partition_note().iter().for_each(log_warning);
    for auto in &config.autos {
        match &auto.value {
            Some(value) => log_line(format_args!("auto: `{}` = {value} ({})", auto.key, auto.source)),
            None => log_line(format_args!("auto: `{}` ({})", auto.key, auto.source)),
        }
    }
}

fn log_warning(text: &String) {
    log_line(format_args!("warning: {text}"));
}
