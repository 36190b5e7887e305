//! `ulysses checkpoint`.

use super::arguments::at_least_1;
use super::sources::tokenizer_file;
use crate::failure::{Failure, OrFail};
use crate::output::{LOG, log_line, print};
use anyhow::{Context, anyhow};
use clap::{Subcommand, ValueEnum};
use serde_json::Value;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use ulysses::checkpoint::{
    Checkpoint, Comparison, Difference, ExportDtype, ExportOptions, ExportedModel, InitialWeights,
    LocalStorage, MANIFEST, Manifest, diff, export, read_pointer, step_directories,
};
use ulysses::config::ChatDate;
use ulysses::model::{HfSource, HfWeights, Model, PRESETS};
use ulysses::monitor::{counted, format_bytes};
use ulysses::trainer::job::ModelSource;

#[derive(clap::Args)]
pub(super) struct CheckpointArgs {
    #[command(subcommand)]
    action: Action,
}

/// DIR is a checkpoint (`out/step_00000100`), a file that names one (`out/best`, `out/latest`), or an output directory,
/// then its newest checkpoint.
#[derive(Subcommand)]
enum Action {
    /// Verify size, header and BLAKE3 hash of every file. Exit code 1 for a damaged checkpoint.
    Verify {
        /// Checkpoint, or output directory for its newest checkpoint.
        dir: PathBuf,
    },
    /// Print step, mesh, state and parameters of a checkpoint.
    Inspect {
        /// Checkpoint, or output directory for its newest checkpoint.
        dir: PathBuf,
    },
    /// Compare two checkpoints element by element, across meshes. Exit code 1 if they differ.
    Diff {
        /// Checkpoint, or output directory for its newest checkpoint.
        first: PathBuf,
        /// Checkpoint, or output directory for its newest checkpoint.
        second: PathBuf,
        /// Largest absolute difference of two elements that counts as equal [default: bit-identical].
        #[arg(long, value_parser = tolerance)]
        tolerance: Option<f64>,
    },
    /// Export the parameters as a Hugging Face model directory.
    Export(ExportArgs),
}

#[derive(clap::Args)]
struct ExportArgs {
    /// Checkpoint, or output directory for its newest checkpoint.
    dir: PathBuf,
    /// Output directory; must not exist.
    #[arg(long)]
    output: PathBuf,
    /// Dtype of the weights [default: dtype of the initial model, f32 for presets].
    #[arg(long)]
    dtype: Option<DtypeArg>,
    /// Maximum size of a weight file in MB (10^6 bytes).
    #[arg(long, default_value_t = 5000, value_parser = at_least_1::<u64>)]
    max_file_mb: u64,
    /// tokenizer.json to copy [default: the run's].
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
            print(format_args!("{dir}: valid, {files} files, {bytes} bytes\n"))
        }
        Action::Inspect { dir } => {
            let checkpoint = open(&dir)?;
            print(description(&checkpoint))
        }
        Action::Diff { first, second, tolerance } => compare(&open(&first)?, &open(&second)?, tolerance),
        Action::Export(args) => run_export(args),
    }
}

/// Opens the checkpoint that an argument names.
fn open(dir: &Path) -> Result<Checkpoint, Failure> {
    let pointed = read_pointer(dir);
    let dir = pointed.as_deref().unwrap_or(dir);
    if dir.join(MANIFEST).exists() {
        return Checkpoint::open(dir).or_run();
    }
    let newest = step_directories(dir).or_run()?.into_iter().next();
    let found = if dir.exists() { "neither" } else { "nothing" };
    let none = || {
        anyhow!("{}: expected a checkpoint, or a directory with checkpoints, found {found}", dir.display())
    };
    Checkpoint::open(&dir.join(newest.ok_or_else(none).or_usage()?.name)).or_run()
}

fn open_verified(dir: &Path) -> Result<Checkpoint, Failure> {
    let checkpoint = open(dir)?;
    checkpoint.verify().or_run()?;
    Ok(checkpoint)
}

/// Formats the manifest as text.
fn description(checkpoint: &Checkpoint) -> String {
    let manifest = checkpoint.manifest();
    let Manifest { run_id, mesh, zero_stage, num_partitions, progress, .. } = manifest;
    let data = progress.data;
    let facts = [
        ("checkpoint", checkpoint.dir().display().to_string()),
        ("run", run_id.clone()),
        (
            "saved on",
            format!(
                "mesh {mesh}, ZeRO stage {zero_stage}; model state in {}",
                counted(*num_partitions, "partition")
            ),
        ),
        ("step", format!("{} ({} optimizer updates)", progress.step, progress.optimizer_step)),
        (
            "data",
            format!(
                "{} sequences of {} tokens consumed, seed {}",
                data.samples_consumed, data.seq_len, data.seed
            ),
        ),
        ("precision", progress.precision.clone().unwrap_or_else(|| "f32".into())),
        ("state", manifest.kinds.join(", ")),
        (
            "size",
            format!(
                "{} in {}",
                format_bytes(manifest.total_bytes() as f64),
                counted(manifest.files.len(), "file")
            ),
        ),
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

fn tolerance(text: &str) -> Result<f64, String> {
    let value = text.parse().ok().filter(|value: &f64| value.is_finite() && *value >= 0.0);
    value.ok_or_else(|| "expected a number of at least 0".to_owned())
}

fn compare(first: &Checkpoint, second: &Checkpoint, tolerance: Option<f64>) -> Result<(), Failure> {
    let comparisons = diff(first, second).or_run()?;
    let mut text = String::new();
    let (mut differing, mut is_equal, mut maximum) = (0, true, 0.0_f64);
    for ((kind, parameter), comparison) in &comparisons {
        let what = match comparison {
            Comparison::Equal => continue,
            Comparison::Differs(Difference { elements, largest, .. }) => {
                is_equal &= tolerance.is_some_and(|tolerance| *largest <= tolerance);
                maximum = maximum.max(*largest);
                format!("{elements} elements differ, by at most {largest:.3e} (absolute)")
            }
            Comparison::Shapes(first, second) => format!("shapes {first:?} and {second:?}"),
            Comparison::OnlyFirst => "only in the first".to_owned(),
            Comparison::OnlySecond => "only in the second".to_owned(),
        };
        is_equal &= matches!(comparison, Comparison::Differs(_));
        differing += 1;
        let _ = writeln!(text, "{kind:<12} {parameter}: {what}");
    }
    let steps = [first, second].map(|checkpoint| checkpoint.manifest().progress.step);
    let (all, [first, second]) = (comparisons.len(), steps);
    let largest =
        if differing > 0 { format!("; largest absolute difference {maximum:.3e}") } else { String::new() };
    let identical = all - differing;
    print(format_args!(
        "{text}steps {first} and {second}: {identical} of {all} tensors are bit-identical{largest}\n"
    ))?;
    let by = tolerance.map_or_else(String::new, |tolerance| format!(" by more than {tolerance:e}"));
    if is_equal { Ok(()) } else { Err(Failure::Run(anyhow!("the checkpoints differ{by}"))) }
}

/// Adds the files of the initial model directory to a checkpoint of an earlier version, which lacks them.
fn find_source(checkpoint: Checkpoint) -> Checkpoint {
    let manifest = checkpoint.manifest();
    let model = manifest.config.pointer("/ulysses/model").and_then(Value::as_str);
    let Some(dir) = model.filter(|model| manifest.source.is_none() && !PRESETS.contains(model)) else {
        return checkpoint;
    };
    let dir = Path::new(dir);
    match HfSource::read(dir).ok().filter(|source| source.describes(&manifest.model)) {
        Some(source) => {
            log_line(format_args!(
                "note: the checkpoint lacks the config.json of its initial model: using that of {}, which describes the \
                 same model",
                dir.display()
            ));
            checkpoint.with_source(source)
        }
        None => {
            log_line(format_args!(
                "note: the checkpoint lacks the config.json of its initial model, and {} now describes another model. Not \
                 exported: `bos_token_id`, `eos_token_id`, `pad_token_id`, generation_config.json and other fields that \
                 do not affect the shape. `max_position_embeddings` is {} unless RoPE scaling states it. Add them to the \
                 export by hand",
                dir.display(),
                manifest.progress.data.seq_len
            ));
            checkpoint
        }
    }
}

/// Opens the model that a run in 16 bits with frozen parameters started from, if it is still there.
fn initial_model(manifest: &Manifest) -> Option<ModelSource> {
    manifest.progress.precision.as_ref().filter(|_| manifest.units.iter().any(|unit| unit.frozen))?;
    let config = &manifest.config;
    let vocab_size = usize::try_from(manifest.model["vocab_size"].as_u64()?).ok()?;
    let name = config["ulysses"]["model"].as_str()?;
    ModelSource::open(name, config["seed"].as_u64()?, vocab_size, LOG.line).ok()
}

/// The weights of a larger model whose language model was trained: an export has its other tensors.
fn larger_model(manifest: &Manifest) -> Result<Option<HfWeights>, Failure> {
    if !manifest.source.as_ref().is_some_and(HfSource::is_larger_model) {
        return Ok(None);
    }
    let dir =
        Path::new(manifest.config.pointer("/ulysses/model").and_then(Value::as_str).unwrap_or_default());
    let needed = "the export needs the other tensors of the initial model";
    let source = HfSource::read(dir).context(needed).or_usage()?;
    if !source.describes(&manifest.model) {
        return Err(Failure::Usage(anyhow!("{needed}, but {} has another model now", dir.display())));
    }
    HfWeights::open(dir).map(Some).context(needed).or_usage()
}

fn run_export(args: ExportArgs) -> Result<(), Failure> {
    if args.output.symlink_metadata().is_ok() {
        let message = "exists already; an export needs a new directory";
        return Err(Failure::Usage(anyhow!("--output {}: {message}", args.output.display())));
    }
    let checkpoint = find_source(open_verified(&args.dir)?);
    let of_run = || checkpoint.manifest().config.pointer("/ulysses/tokenizer")?.as_str().map(PathBuf::from);
    let tokenizer = args.tokenizer.or_else(of_run);
    match &tokenizer {
        None => log_line("no tokenizer to copy: the tokens of this run are bytes"),
        Some(path) if !path.is_file() => {
            let message = format!("{}: no such tokenizer; give one with --tokenizer", path.display());
            return Err(Failure::Usage(anyhow!(message)));
        }
        Some(path) => {
            tokenizer_file(Some(path), ChatDate::default())
                .context("the export would have no tokenizer")
                .or_usage()?;
        }
    }
    let of_source = || ExportDtype::from_hf_name(checkpoint.manifest().source.as_ref()?.dtype.as_deref()?);
    let dtype = args.dtype.map(ExportDtype::from).or_else(of_source).unwrap_or(ExportDtype::F32);
    if args.dtype.is_none() && dtype != ExportDtype::F32 {
        log_line(
            "note: the export rounds parameters to the dtype of the initial model; --dtype f32 keeps every bit",
        );
    }
    let manifest = checkpoint.manifest();
    let precision = manifest.progress.precision.as_deref();
    let source = initial_model(manifest);
    let model = source.as_ref().and_then(|source| Model::new(&source.config).ok());
    let initial = model.as_ref().zip(source.as_ref());
    let initial = initial.map(|(model, source)| InitialWeights::new(model, &*source.weights));
    let larger_model = larger_model(manifest)?;
    let options = ExportOptions {
        dtype,
        larger_model: larger_model.as_ref(),
        max_file_bytes: args.max_file_mb.saturating_mul(1_000_000),
        tokenizer: tokenizer.as_deref(),
        initial: initial.as_ref(),
    };
    let exported = export(&checkpoint, &args.output, options, &LocalStorage);
    let ExportedModel { files, bytes, rounded } = exported.context("the export failed").or_run()?;
    let is_own_dtype =
        matches!((dtype, precision), (ExportDtype::Bf16, Some("bf16")) | (ExportDtype::F16, Some("fp16")));
    if rounded > 0 && !is_own_dtype {
        log_line(format_args!(
            "note: exported in the 16 bits of the run: {}; the initial model cannot be read, or has other values now",
            counted(rounded, "frozen parameter")
        ));
    }
    let size = format_bytes(bytes as f64);
    print(format_args!("{}: {}, {size}\n", args.output.display(), counted(files.len(), "weight file")))
}
