//! `ulysses verify`: compares one batch on a mesh with a single rank, or writes its results to a file.

mod batch;
mod results;

use super::config_flags::SetFlags;
use super::placement::Placement;
use super::process::Process;
use super::ranks::{BackendArgs, Ranks};
use super::{DeviceArg, Failure, OrFail, model, print, settings, unreplicated};
use serde_json::json;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use ulysses::comm::MeshGroups;
use ulysses::config::{Config, Overrides, RawConfig, ZeroStage};
use ulysses::data::GlobalBatch;
use ulysses::engine::{BatchOutcome, initialize};
use ulysses::mesh::{DeviceMesh, TrainingShape};
use ulysses::model::Model;

#[derive(clap::Args)]
pub(super) struct VerifyArgs {
    /// Model directory (config.json, model.safetensors), or preset (nano, tiny, small, base).
    #[arg(long)]
    model: String,
    /// Safetensors file with input_ids [batch, seq_len] i64, optional position_ids and shift_labels (already shifted,
    /// -100 is ignored).
    #[arg(long)]
    batch: PathBuf,
    /// Mesh: `DPxSP`, `dp=2,sp=2` or `dp=2,ring=2,ulysses=2`.
    #[arg(long, allow_hyphen_values = true)]
    mesh: String,
    /// ZeRO stage (0 to 3) [default: the config's].
    #[arg(long, value_parser = clap::value_parser!(u64).range(0..=3))]
    zero_stage: Option<u64>,
    /// Number of optimizer steps on the batch.
    #[arg(long, default_value_t = 0)]
    steps: usize,
    /// DeepSpeed-style JSON config for the optimizer and clipping.
    #[arg(long)]
    config: Option<PathBuf>,
    #[command(flatten)]
    set: SetFlags,
    /// Write loss, logits, gradients and parameters to this safetensors file instead of comparing them.
    #[arg(long)]
    output: Option<PathBuf>,
    /// Maximum relative error.
    ///
    /// The default suits losses and gradients in f32. 16-bit dtypes need about 1e-2. Parameters after Adam steps need more
    /// too, because Adam divides gradients by their magnitude.
    #[arg(long, default_value_t = 2e-5, value_parser = parse_tolerance)]
    tolerance: f64,
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
    source: model::ModelSource,
    batch: GlobalBatch,
    steps: usize,
    raw: RawConfig,
}

pub(super) fn run(args: VerifyArgs, process: &mut Option<Process>) -> Result<(), Failure> {
    let shape = unreplicated(&args.mesh)?;
    if let Some(path) = &args.output {
        results::check_output(path).or_usage()?;
    }
    let mut ranks = args.backend.join(process)?.place(args.device, shape.dp * shape.sp)?;
    let check = Check::read(&args)?;
    let batch_size = check.batch.batch_size();
    let on_mesh = check.run(&mut ranks, shape, args.zero_stage)?;
    if !ranks.is_first() {
        return Ok(());
    }
    if let Some(path) = &args.output {
        let tensors = results::write(&on_mesh, batch_size, path).or_run()?;
        return print(written(on_mesh.loss, tensors, path, args.json));
    }
    let alone = TrainingShape { dp: 1, sp: 1, ring_size: Some(1), shard_size: None };
    let single = check.run(&mut Ranks::threads(Placement::cpu()), alone, Some(0))?;
    let errors = results::compare(&on_mesh, &single, batch_size).or_run()?;
    let worst = errors.iter().map(|(_, error)| *error).fold(0.0, f64::max);
    print(if args.json { as_json(&errors, &args, worst) } else { as_text(&errors, &args, worst) })?;
    if let Some(report) = on_mesh.reports.iter().find(|report| report.overflow) {
        let (step, scale) = (report.step, report.loss_scale);
        return Err(Failure::Run(anyhow::anyhow!("step {step} overflowed at loss scale {scale}")));
    }
    if worst <= args.tolerance {
        return Ok(());
    }
    let message = "the mesh changes the result: maximum relative error";
    Err(Failure::Run(anyhow::anyhow!("{message} {worst:.2e} > tolerance {:.2e}", args.tolerance)))
}

impl Check {
    fn read(args: &VerifyArgs) -> Result<Self, Failure> {
        let raw = match &args.config {
            Some(path) => RawConfig::from_file_with(path, &args.set.settings()),
            None => RawConfig::from_json_str_with("{}", "no config file", &args.set.settings()),
        };
        let raw = raw.or_usage()?;
        let source = model::open(&args.model, 0, 256)?;
        let batch = batch::read(&args.batch, source.config.vocab_size).or_usage()?;
        Ok(Self { source, batch, steps: args.steps, raw })
    }

    /// Runs the batch, padded to a multiple of dp, on a mesh.
    fn run(
        &self,
        ranks: &mut Ranks<'_>,
        shape: TrainingShape,
        stage: Option<u64>,
    ) -> Result<BatchOutcome, Failure> {
        let mesh = DeviceMesh::dp_sp(shape.dp, shape.sp).or_usage()?;
        let mut batch = self.batch.clone();
        let (batch_size, seq_len) = (batch.batch_size(), batch.seq_len());
        batch.pad_to_multiple(shape.dp).or_usage()?;
        let mut config = self.config(shape, stage, batch.batch_size())?;
        crate::model::resolve_ring(&self.source.config, &mut config, mesh.world_size());
        self.source.check_config(&config)?;
        self.source.check_exchange(batch_size, seq_len, &config)?;
        let world_size = mesh.world_size();
        let options = settings::launch_options(config.ulysses.threads_per_rank, ranks.local(world_size))?;
        ranks.run(world_size, &options, |rank, device| {
            let groups = MeshGroups::new(&mesh, rank.group.clone())?.on(device);
            let model = Model::llama(&self.source.config)?;
            let mut engine = initialize(model, &*self.source.weights, &config, &groups)?;
            let outcome = engine.run_global_batch(&batch, self.steps)?;
            engine.check_replicas()?;
            Ok(outcome)
        })
    }

    /// Returns a config with the file's optimizer, schedule and clipping, and with this run's batch size and mesh.
    fn config(
        &self,
        TrainingShape { dp, sp, ring_size, .. }: TrainingShape,
        stage: Option<u64>,
        batch_size: usize,
    ) -> Result<Config, Failure> {
        let overrides = Overrides { mesh: Some((dp, sp)), ring_size, ..Overrides::default() };
        let mut config = self.raw.clone().for_batch(batch_size).resolve(&overrides).or_usage()?;
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

fn as_json(errors: &[(String, f64)], args: &VerifyArgs, worst: f64) -> String {
    let errors: serde_json::Map<_, _> =
        errors.iter().map(|(name, error)| (name.clone(), json!(error))).collect();
    let all = json!({
        "mesh": args.mesh, "tolerance": args.tolerance, "largest_relative_error": worst,
        "passed": worst <= args.tolerance, "relative_errors": errors,
    });
    format!("{all}\n")
}

fn as_text(errors: &[(String, f64)], args: &VerifyArgs, worst: f64) -> String {
    const LISTED: usize = 10;
    let mut text = format!(
        "mesh {} compared with a single rank; error relative to each tensor's largest entry\n",
        args.mesh
    );
    for (name, error) in errors.iter().take(LISTED) {
        let _ = writeln!(text, "  {error:.2e}  {name}");
    }
    if errors.len() > LISTED {
        let _ = writeln!(text, "  … and {} tensors with smaller errors", errors.len() - LISTED);
    }
    let verdict = if worst <= args.tolerance { "within" } else { "EXCEEDS" };
    let _ = writeln!(text, "maximum {worst:.2e}, {verdict} tolerance {:.2e}", args.tolerance);
    text
}
