//! `ulysses config`.

use super::config_flags::ConfigFlags;
use super::{Failure, OrFail, note, print, training_shape};
use std::path::{Path, PathBuf};
use ulysses::config::{
    Config, Overrides, PartiallyResolved, RawConfig, Severity, UnresolvedValue, explain, json_schema,
    reference_markdown,
};

#[derive(clap::Subcommand)]
pub(super) enum ConfigCommand {
    /// Say what a key does: its values, its default, what "auto" stands for, and whether it is honoured.
    Explain {
        /// The path of the key, as in `zero_optimization.stage`, or its last name.
        key: String,
    },
    /// Print a file complete: with defaults, batch sizes and what every "auto" became. Notes, and which values wait for
    /// a flag, go to standard error.
    Resolve {
        /// DeepSpeed-style JSON config.
        config: PathBuf,
        /// Ranks: `DPxSP`, `dp=2,sp=2` or `dp_replicate=2,dp_shard=2,sp=2`. Must not contradict the config.
        #[arg(long, allow_hyphen_values = true)]
        mesh: Option<String>,
        /// Optimizer steps, to which a schedule may be left to decay.
        #[arg(long)]
        steps: Option<u64>,
        #[command(flatten)]
        flags: ConfigFlags,
    },
    /// Print the reference of all keys in Markdown.
    Reference,
    /// Print the JSON Schema of the file, for editors.
    Schema,
}

pub(super) fn run(command: ConfigCommand) -> Result<(), Failure> {
    match command {
        ConfigCommand::Explain { key } => print(explain(&key).or_usage()?),
        ConfigCommand::Resolve { config, mesh, steps, flags } => {
            let raw = RawConfig::from_file_with(config, &flags.settings()).or_usage()?;
            let shape = mesh.as_deref().map(training_shape).transpose()?;
            let mesh = shape.map(|shape| (shape.dp, shape.sp));
            let shard_size = shape.and_then(|shape| shape.shard_size);
            let overrides = Overrides { mesh, shard_size, steps, ..Overrides::default() };
            let PartiallyResolved { config, written, open } = raw.resolve_partially(&overrides).or_usage()?;
            print_notes(&config);
            for UnresolvedValue { key, needs } in open {
                note(format_args!("open: `{key}` waits for {needs}"));
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

/// Writes all that the user of a config should know to standard error.
fn print_notes(config: &Config) {
    config.notes.iter().for_each(note);
    print_partition_note(config);
    for auto in &config.autos {
        match &auto.value {
            Some(value) => note(format_args!("auto: `{}` = {value} ({})", auto.key, auto.source)),
            None => note(format_args!("auto: `{}` ({})", auto.key, auto.source)),
        }
    }
}

/// Writes what the user of a run should know of its config to standard error: where results, memory or files differ
/// from what the file at `path` asks for, and in one line how much more there is.
pub(super) fn print_warnings(config: &Config, path: &Path) {
    let (warnings, others): (Vec<_>, Vec<_>) =
        config.notes.iter().partition(|note| note.severity == Severity::Warning);
    warnings.iter().for_each(note);
    print_partition_note(config);
    let autos = config.autos.iter().filter(|auto| auto.value.is_some()).count();
    let plural = |count: usize| if count == 1 { "" } else { "s" };
    let counts = [
        (others.len(), format!("{} note{}", others.len(), plural(others.len()))),
        (autos, format!("{autos} value{} set by \"auto\"", plural(autos))),
    ];
    let more: Vec<String> =
        counts.into_iter().filter(|(count, _)| *count > 0).map(|(_, text)| text).collect();
    if !more.is_empty() {
        let (more, path) = (more.join(", "), path.display());
        note(format_args!("config: {more}: `ulysses config resolve {path}` lists them"));
    }
}

fn print_partition_note(config: &Config) {
    config.zero_partition_note().iter().for_each(|text| note(format_args!("warning: {text}")));
}
