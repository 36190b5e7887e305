//! `ulysses checkpoint`.

use super::arguments::at_least_1;
use super::{Failure, OrFail, note, print};
use anyhow::{Context, anyhow};
use clap::{Subcommand, ValueEnum};
use serde_json::Value;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use ulysses::checkpoint::{
    Checkpoint, Comparison, ExportDtype, ExportOptions, ExportedModel, LocalStorage, MANIFEST, Manifest,
    diff, export, read_pointer, step_directories,
};
use ulysses::data::Tokenizer;
use ulysses::model::{HfSource, PRESETS};

#[derive(clap::Args)]
pub(super) struct CheckpointArgs {
    #[command(subcommand)]
    action: Action,
}

/// DIR is a checkpoint (`out/step_00000100`), a file that names one (`out/best`, `out/latest`), or a run's output directory, of which the newest
/// checkpoint is meant.
#[derive(Subcommand)]
enum Action {
    /// Compare size, header and BLAKE3 of every file with the manifest. Exit code 1 for damage.
    Verify {
        /// Checkpoint or output directory.
        dir: PathBuf,
    },
    /// Print what a checkpoint holds.
    Inspect {
        /// Checkpoint or output directory.
        dir: PathBuf,
    },
    /// Compare two checkpoints element by element, whatever meshes saved them. Exit code 1 when
    /// they differ.
    Diff {
        /// Checkpoint or output directory.
        first: PathBuf,
        /// Checkpoint or output directory.
        second: PathBuf,
    },
    /// Write the parameters in Hugging Face's layout.
    Export(ExportArgs),
}

#[derive(clap::Args)]
struct ExportArgs {
    /// Checkpoint or output directory.
    dir: PathBuf,
    /// Directory to write, which must not exist.
    #[arg(long)]
    output: PathBuf,
    /// Dtype of the export. Without it, that of the model that the run started from; f32 for a preset.
    #[arg(long)]
    dtype: Option<DtypeArg>,
    /// Most megabytes (10^6 bytes) of tensors in a file.
    #[arg(long, default_value_t = 5000, value_parser = at_least_1::<u64>)]
    max_file_mb: u64,
    /// tokenizer.json to copy; the one that the run was given, without it.
    #[arg(long)]
    tokenizer: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum DtypeArg {
    F32,
    Bf16,
    Fp16,
}

impl From<DtypeArg> for ExportDtype {
    fn from(dtype: DtypeArg) -> Self {
        match dtype {
            DtypeArg::F32 => Self::F32,
            DtypeArg::Bf16 => Self::Bf16,
            DtypeArg::Fp16 => Self::F16,
        }
    }
}

pub(super) fn run(args: CheckpointArgs) -> Result<(), Failure> {
    match args.action {
        Action::Verify { dir } => {
            let checkpoint = open_verified(&dir)?;
            let manifest = checkpoint.manifest();
            let (dir, files, bytes) =
                (checkpoint.dir().display(), manifest.files.len(), manifest.total_bytes());
            print(format_args!("{dir}: sound, {files} files, {bytes} bytes\n"))
        }
        Action::Inspect { dir } => {
            let checkpoint = open(&dir)?;
            print(description(&checkpoint))
        }
        Action::Diff { first, second } => compare(&open(&first)?, &open(&second)?),
        Action::Export(args) => run_export(args),
    }
}

/// The checkpoint that an argument means.
fn open(dir: &Path) -> Result<Checkpoint, Failure> {
    let pointed = read_pointer(dir);
    let dir = pointed.as_deref().unwrap_or(dir);
    if dir.join(MANIFEST).exists() {
        return Checkpoint::open(dir).or_run();
    }
    let newest = step_directories(dir).or_run()?.into_iter().next();
    let none = || anyhow!("{}: neither a checkpoint nor a directory that holds one", dir.display());
    Checkpoint::open(&dir.join(newest.ok_or_else(none).or_usage()?.name)).or_run()
}

fn open_verified(dir: &Path) -> Result<Checkpoint, Failure> {
    let checkpoint = open(dir)?;
    checkpoint.verify().or_run()?;
    Ok(checkpoint)
}

/// What the manifest says, for people.
fn description(checkpoint: &Checkpoint) -> String {
    let manifest = checkpoint.manifest();
    let Manifest { run_id, mesh, zero_stage, progress, .. } = manifest;
    let data = progress.data;
    let facts = [
        ("checkpoint", checkpoint.dir().display().to_string()),
        ("run", run_id.clone()),
        ("saved by", format!("mesh dp {} × sp {}, ZeRO stage {zero_stage}", mesh.dp, mesh.sp)),
        ("step", format!("{} ({} updates)", progress.step, progress.optimizer_step)),
        ("data", format!("{} samples of {} tokens, seed {}", data.samples_consumed, data.seq_len, data.seed)),
        ("precision", progress.precision.clone().unwrap_or_else(|| "f32".into())),
        ("state", format!("{} × {} partition(s)", manifest.kinds.join(", "), manifest.num_partitions)),
        ("size", format!("{} bytes in {} files", manifest.total_bytes(), manifest.files.len())),
    ];
    let mut text = String::new();
    for (name, value) in facts {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{name:<11} {value}");
    }
    let _ = writeln!(text, "\n{:>12}  {:<20} parameter", "elements", "shape");
    for parameter in checkpoint.layouts().iter().flat_map(|layout| layout.parameters()) {
        let shape = format!("{:?}", parameter.shape);
        let _ = writeln!(text, "{:>12}  {shape:<20} {}", parameter.numel(), parameter.name);
    }
    text
}

fn compare(first: &Checkpoint, second: &Checkpoint) -> Result<(), Failure> {
    let comparisons = diff(first, second).or_run()?;
    let mut text = String::new();
    let mut differing = 0;
    for ((kind, parameter), comparison) in &comparisons {
        let what = match comparison {
            Comparison::Equal => continue,
            Comparison::Differs { elements, largest } => {
                format!("{elements} elements differ, by at most {largest:.3e}")
            }
            Comparison::Shapes(first, second) => format!("shapes {first:?} and {second:?}"),
            Comparison::OnlyFirst => "only in the first".to_owned(),
            Comparison::OnlySecond => "only in the second".to_owned(),
        };
        differing += 1;
        let _ = writeln!(text, "{kind:<12} {parameter}: {what}");
    }
    let steps = [first, second].map(|checkpoint| checkpoint.manifest().progress.step);
    let all = comparisons.len();
    print(format_args!(
        "{text}steps {} and {}: {} of {all} tensors are equal to the bit\n",
        steps[0],
        steps[1],
        all - differing
    ))?;
    if differing == 0 { Ok(()) } else { Err(Failure::Run(anyhow!("the checkpoints differ"))) }
}

/// Adds the files of the run's model directory to a checkpoint of an earlier version, which lacks them.
fn find_source(checkpoint: Checkpoint) -> Checkpoint {
    let manifest = checkpoint.manifest();
    let model = manifest.config.pointer("/ulysses/model").and_then(Value::as_str);
    let Some(dir) = model.filter(|model| manifest.source.is_none() && !PRESETS.contains(model)) else {
        return checkpoint;
    };
    let dir = Path::new(dir);
    match HfSource::read(dir).ok().filter(|source| source.describes(&manifest.model)) {
        Some(source) => {
            note(format_args!(
                "note: the checkpoint lacks the config.json that its run started from: that of {} is taken, which \
                 describes the same model",
                dir.display()
            ));
            checkpoint.with_source(source)
        }
        None => {
            note(format_args!(
                "note: the checkpoint lacks the config.json that its run started from, and {} describes no such model \
                 now: `bos_token_id`, `eos_token_id`, `pad_token_id`, the other fields that do not shape the model and \
                 generation_config.json are not exported, and `max_position_embeddings` is {} unless RoPE scaling states \
                 it; add them to the export by hand",
                dir.display(),
                manifest.progress.data.seq_len
            ));
            checkpoint
        }
    }
}

fn run_export(args: ExportArgs) -> Result<(), Failure> {
    if args.output.symlink_metadata().is_ok() {
        let message = "there is something of this name already; an export is a new directory";
        return Err(Failure::Usage(anyhow!("--output {}: {message}", args.output.display())));
    }
    let checkpoint = find_source(open_verified(&args.dir)?);
    let of_run = || checkpoint.manifest().config.pointer("/ulysses/tokenizer")?.as_str().map(PathBuf::from);
    let tokenizer = args.tokenizer.or_else(of_run);
    match &tokenizer {
        None => note("the run took bytes for tokens: there is no tokenizer to copy"),
        Some(path) if !path.is_file() => {
            let message = format!("{}: no such tokenizer; give it as --tokenizer", path.display());
            return Err(Failure::Usage(anyhow!(message)));
        }
        Some(path) => {
            Tokenizer::from_file(path).context("the export would have no tokenizer").or_usage()?;
        }
    }
    let of_source = || ExportDtype::from_hf_name(checkpoint.manifest().source.as_ref()?.dtype.as_deref()?);
    let dtype = args.dtype.map(ExportDtype::from).or_else(of_source).unwrap_or(ExportDtype::F32);
    if args.dtype.is_none() && dtype != ExportDtype::F32 {
        note(
            "note: parameters are rounded to the dtype of the model that the run started from; --dtype f32 keeps \
             every bit",
        );
    }
    let options = ExportOptions {
        dtype,
        max_file_bytes: args.max_file_mb.saturating_mul(1_000_000),
        tokenizer: tokenizer.as_deref(),
    };
    let exported = export(&checkpoint, &args.output, options, &LocalStorage);
    let ExportedModel { files, bytes } = exported.context("the export failed").or_run()?;
    print(format_args!("{}: {} weight file(s), {bytes} bytes\n", args.output.display(), files.len()))
}
