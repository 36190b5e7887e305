//! `ulysses verify`: compares one batch on a mesh with a single rank, or writes its results to a file.

mod batch;
mod packing;
mod results;

use super::DeviceArg;
use super::config_flags::SetFlags;
use super::ranks::BackendArgs;
use crate::failure::{Failure, OrFail};
use crate::mesh_flag::unreplicated;
use crate::output::{LOG, print};
use anyhow::{anyhow, bail, ensure};
use results::ErrorRule;
use serde_json::json;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use ulysses::comm::MeshGroups;
use ulysses::config::{Config, Overrides, RawConfig, ZeroStage};
use ulysses::data::GlobalBatch;
use ulysses::engine::BatchOutcome;
use ulysses::mesh::TrainingShape;
use ulysses::trainer::job::{JobRanks, ModelSource, config_launch_options, fit_model};

#[derive(clap::Args)]
pub(super) struct VerifyArgs {
    /// Model directory (config.json, model.safetensors), or preset (nano, tiny, small, base).
    #[arg(long)]
    model: String,
    /// Safetensors file with input_ids [batch, seq_len] i64, optional position_ids and shift_labels (already shifted,
    /// -100 is ignored).
    #[arg(long)]
    batch: PathBuf,
    /// Mesh: `DPxSP`, `DPxSPxTP`, `pp=2,dp=2,sp=2,tp=2` or `dp=2,ring=2,ulysses=2`.
    #[arg(long, allow_hyphen_values = true)]
    mesh: String,
    /// ZeRO stage (0 to 3) [default: the config's].
    #[arg(long, value_parser = clap::value_parser!(u64).range(0..=3))]
    zero_stage: Option<u64>,
    /// Number of optimizer steps on the batch.
    #[arg(long, default_value_t = 0)]
    steps: usize,
    /// DeepSpeed-style JSON config: everything that decides how a step is computed.
    #[arg(long)]
    config: Option<PathBuf>,
    #[command(flatten)]
    set: SetFlags,
    /// Compare with every document alone in a sequence of its own: neighbors in a packed sequence must not change the
    /// results.
    #[arg(long, conflicts_with = "output")]
    packing: bool,
    /// Write loss, logits, gradients and parameters to this safetensors file instead of comparing them.
    #[arg(long)]
    output: Option<PathBuf>,
    /// Maximum relative error [default: 2e-5 in f32, 2e-2 with 16-bit numbers].
    #[arg(long, value_parser = parse_tolerance)]
    tolerance: Option<f64>,
    /// Device of the mesh's tensors. The single rank always runs on the CPU.
    #[arg(long, default_value = "auto")]
    device: DeviceArg,
    #[command(flatten)]
    backend: BackendArgs,
    /// Print the comparison as one JSON object.
    #[arg(long)]
    json: bool,
}

fn parse_tolerance(text: &str) -> Result<f64, String> {
    let tolerance = text.parse().ok().filter(|tolerance: &f64| tolerance.is_finite() && *tolerance >= 0.0);
    tolerance.ok_or_else(|| "expected a number of at least 0, such as 2e-5".to_owned())
}

/// A model and a batch to run on a mesh.
struct Check {
    source: ModelSource,
    batch: GlobalBatch,
    /// Micro batches of a dp rank.
    accumulation: usize,
    steps: usize,
    raw: RawConfig,
}

pub(super) fn run(args: VerifyArgs, ranks: &mut JobRanks) -> Result<(), Failure> {
    let shape = unreplicated(&args.mesh)?;
    if let Some(path) = &args.output {
        results::check_output(path).or_usage()?;
    }
    let raw = read_config(&args)?;
    args.backend.join(raw.backend(), ranks)?;
    ranks.place(args.device.kind(), shape.sizes.num_ranks())?;
    let mut check = Check::read(&args, raw)?;
    let batch_size = check.batch.batch_size();
    let mesh_config = check.config(check.raw.clone(), shape, check.accumulation, args.zero_stage)?;
    let unpacked = args.packing.then(|| packing::unpacked(&check.batch, &mesh_config)).transpose()?;
    let on_mesh = check.run(ranks, &mesh_config)?;
    if !ranks.is_first() {
        return Ok(());
    }
    if let Some(path) = &args.output {
        let tensors = results::write(&on_mesh, batch_size, path).or_run()?;
        return print(written(on_mesh.loss, tensors, path, args.json));
    }
    let packed = unpacked.map(|alone| std::mem::replace(&mut check.batch, alone));
    let micro_batches = match packed {
        None => check.accumulation * shape.sizes.dp,
        // The documents have different lengths: one after another.
        Some(_) => check.batch.batch_size(),
    };
    let alone = TrainingShape::ONE_RANK;
    let config = check.config(check.raw.clone().without_replicas(), alone, micro_batches, Some(0))?;
    let mut single = check.run(&mut JobRanks::default(), &config)?;
    if let Some(packed) = packed {
        single.logits = packing::packed_as(&packed, &single.logits).or_run()?;
    }
    let tolerance = args.tolerance.unwrap_or_else(|| results::default_tolerance(&mesh_config));
    let errors = ErrorRule { tolerance, config: &config }.compare(&on_mesh, &single, batch_size).or_run()?;
    let comparison = Comparison { args: &args, errors, tolerance };
    if args.json {
        print(comparison.json())?;
    } else {
        check.raw.replaced_sizes(shape.sizes).iter().try_for_each(|note| print(format_args!("{note}\n")))?;
        print(comparison.text())?;
    }
    comparison.judge(&on_mesh).map_err(Failure::Run)
}

fn read_config(args: &VerifyArgs) -> Result<RawConfig, Failure> {
    match &args.config {
        Some(path) => RawConfig::from_file_with(path, &args.set.settings()),
        None => RawConfig::from_json_str_with("{}", "no config file", &args.set.settings()),
    }
    .or_usage()
}

impl Check {
    fn read(args: &VerifyArgs, raw: RawConfig) -> Result<Self, Failure> {
        let source = ModelSource::open(&args.model, raw.seed(), 256, LOG.line)?;
        let batch = batch::read(&args.batch, source.config.vocab_size).or_usage()?;
        let accumulation = raw.gradient_accumulation_steps().unwrap_or(1);
        if accumulation > batch.batch_size() {
            return Err(Failure::Usage(anyhow!(
                "`gradient_accumulation_steps` is {accumulation}, but the batch has {} sequences: expected at most as many \
                 steps",
                batch.batch_size()
            )));
        }
        Ok(Self { source, batch, accumulation, steps: args.steps, raw })
    }

    /// Runs the batch, padded to the batch size of the config.
    fn run(&self, ranks: &mut JobRanks, config: &Config) -> Result<BatchOutcome, Failure> {
        let mesh = config.mesh.shape().row_major().or_usage()?;
        let (mut batch, mut config) = (self.batch.clone(), config.clone());
        batch.pad_to_multiple(config.train_batch_size).or_usage()?;
        let (world_size, local_ranks) = (mesh.world_size(), ranks.local_ranks(mesh.world_size()));
        fit_model(&self.source.config, &mut config, batch.seq_len())?;
        let options = config_launch_options(&config, local_ranks)?;
        let outcome = ranks.run(world_size, &options, |rank, device| {
            let groups = MeshGroups::new(&mesh, rank.group.clone())?.on(device);
            let mut engine = self.source.engine(&config, &groups)?;
            let outcome = engine.run_global_batch(&batch, self.steps)?;
            engine.check_replicas()?;
            anyhow::Ok(outcome)
        });
        Ok(outcome?)
    }

    /// Returns the file's config with this run's batch, in `accumulation` micro batches per dp rank, and mesh.
    fn config(
        &self,
        raw: RawConfig,
        shape: TrainingShape,
        accumulation: usize,
        stage: Option<u64>,
    ) -> Result<Config, Failure> {
        let seq_len = Some(self.batch.seq_len());
        let (mesh, ring_size) = (Some(shape.sizes), shape.ring_size);
        let overrides = Overrides { mesh, ring_size, seq_len, ..Overrides::default() };
        let batch_size = self.batch.batch_size().next_multiple_of(shape.sizes.dp * accumulation);
        let mut config = raw.for_batch(batch_size, accumulation).resolve(&overrides).or_usage()?;
        if config.ulysses.flexible_sp {
            return Err(Failure::Usage(anyhow!(
                "`ulysses.flexible_sp` is not supported by `verify`, which shards each sequence over all sp ranks: set it to \
                 false (--set ulysses.flexible_sp=false)"
            )));
        }
        if let Some(stage) = stage.and_then(ZeroStage::from_number) {
            config.zero.set_stage(stage);
        }
        Ok(config)
    }
}

fn written(loss: f64, tensors: usize, path: &Path, as_json: bool) -> String {
    if as_json {
        return format!(
            "{}\n",
            json!({ "loss": loss, "tensors": tensors, "output": path.display().to_string() })
        );
    }
    format!("loss {loss:.6}; {tensors} tensors written to {}\n", path.display())
}

/// The results on a mesh, compared with those of a single rank.
struct Comparison<'a> {
    args: &'a VerifyArgs,
    /// The maximum error of every tensor, in descending order.
    errors: Vec<(String, f64)>,
    tolerance: f64,
}

impl Comparison<'_> {
    fn worst(&self) -> f64 {
        self.errors.first().map_or(f64::INFINITY, |(_, error)| *error)
    }

    /// Fails unless the results agree and are finite.
    fn judge(&self, on_mesh: &BatchOutcome) -> anyhow::Result<()> {
        if let Some(report) = on_mesh.reports.iter().find(|report| report.overflow) {
            bail!("step {} overflowed at loss scale {}", report.step, report.loss_scale);
        }
        let scale = match on_mesh.loss_scale {
            1.0 => String::new(),
            scale => {
                format!("; the loss scale is {scale}, of `fp16`: training skips such steps and lowers it")
            }
        };
        let (worst, tolerance) = (self.worst(), self.tolerance);
        ensure!(worst.is_finite(), "results are not finite, so they cannot be compared{scale}");
        let cause = if self.args.packing { "the mesh or the packing" } else { "the mesh" };
        let message = format!("{cause} changes the result: maximum relative error");
        ensure!(worst <= tolerance, "{message} {worst:.2e} > tolerance {tolerance:.2e}");
        Ok(())
    }

    fn json(&self) -> String {
        let Self { args, tolerance, .. } = self;
        let errors: serde_json::Map<_, _> =
            self.errors.iter().map(|(name, error)| (name.clone(), json!(error))).collect();
        let all = json!({
            "mesh": args.mesh, "packing": args.packing, "tolerance": tolerance,
            "largest_relative_error": self.worst(), "passed": self.worst() <= *tolerance, "relative_errors": errors,
        });
        format!("{all}\n")
    }

    fn text(&self) -> String {
        const LISTED: usize = 10;
        let Self { args, errors, tolerance } = self;
        let alone = if args.packing { ", every document alone" } else { "" };
        let mut text = format!(
            "mesh {} compared with a single rank{alone}; error relative to each tensor's largest entry\n",
            args.mesh
        );
        for (name, error) in errors.iter().take(LISTED) {
            let _ = writeln!(text, "  {error:.2e}  {name}");
        }
        if errors.len() > LISTED {
            let _ = writeln!(text, "  … and {} tensors with smaller errors", errors.len() - LISTED);
        }
        let verdict = if self.worst() <= *tolerance { "within" } else { "EXCEEDS" };
        let _ = writeln!(text, "maximum {:.2e}, {verdict} tolerance {tolerance:.2e}", self.worst());
        text
    }
}
