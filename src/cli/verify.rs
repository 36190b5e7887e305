//! `ulysses verify`: one batch on a mesh, against a single rank or written to a file.

use super::{Failure, OrFail, dp_sp, model, settings};
use anyhow::{Context, bail, ensure};
use candle_core::{DType, Device, Tensor};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use ulysses::comm::MeshGroups;
use ulysses::comm::thread::{LaunchOptions, launch};
use ulysses::config::{Config, Overrides, RawConfig, ZeroStage};
use ulysses::data::GlobalBatch;
use ulysses::engine::{BatchOutcome, initialize};
use ulysses::mesh::DeviceMesh;
use ulysses::model::{LlamaConfig, Model};

#[derive(clap::Args)]
pub(super) struct VerifyArgs {
    /// Directory with config.json and model.safetensors.
    #[arg(long)]
    model: String,
    /// Safetensors file: input_ids [b, s] i64, optional position_ids and shift_labels
    /// (already shifted, -100 ignored).
    #[arg(long)]
    batch: PathBuf,
    /// Ranks: `DPxSP` or `dp=2,sp=2`.
    #[arg(long)]
    mesh: String,
    /// What ZeRO partitions, 0 to 3; the config file's without it.
    #[arg(long, value_parser = clap::value_parser!(u64).range(0..=3))]
    zero_stage: Option<u64>,
    /// Optimizer steps on the batch.
    #[arg(long, default_value_t = 0)]
    steps: usize,
    /// DeepSpeed-style JSON config for the optimizer and clipping.
    #[arg(long)]
    config: Option<PathBuf>,
    /// Writes loss, logits, gradients and parameters to this safetensors file.
    #[arg(long)]
    output: Option<PathBuf>,
    /// Largest relative error that passes.
    #[arg(long, default_value_t = 2e-5)]
    tolerance: f64,
    /// Prints the comparison as one JSON object.
    #[arg(long)]
    json: bool,
}

/// A model and a batch, to be run on any mesh.
struct Check {
    source: model::ModelSource,
    batch: GlobalBatch,
    steps: usize,
    config_text: String,
    config_name: String,
}

pub(super) fn run(args: VerifyArgs) -> Result<(), Failure> {
    let (dp, sp) = dp_sp(&args.mesh)?;
    let check = Check::read(&args)?;
    let rows = check.batch.batch();
    let on_mesh = check.run(dp, sp, args.zero_stage)?;
    if let Some(path) = &args.output {
        return write(&on_mesh, rows, path).or_run();
    }
    let single = check.run(1, 1, Some(0))?;
    let errors = compare(&on_mesh, &single, rows).or_run()?;
    let worst = errors.iter().map(|(_, error)| *error).fold(0.0, f64::max);
    report(&errors, &args, worst);
    if worst <= args.tolerance {
        return Ok(());
    }
    let message = "the mesh changes the result: largest relative error";
    Err(Failure::Run(anyhow::anyhow!("{message} {worst:.2e} > tolerance {:.2e}", args.tolerance)))
}

impl Check {
    fn read(args: &VerifyArgs) -> Result<Self, Failure> {
        let source = model::open(&args.model, 0, 256)?;
        let batch = read_batch(&args.batch).or_usage()?;
        batch.check_vocab(source.config.vocab_size).or_usage()?;
        let (config_text, config_name) = match &args.config {
            Some(path) => {
                let text = std::fs::read_to_string(path).with_context(|| path.display().to_string());
                (text.or_usage()?, path.display().to_string())
            }
            None => ("{}".to_owned(), "(no config file)".to_owned()),
        };
        Ok(Self { source, batch, steps: args.steps, config_text, config_name })
    }

    /// The batch, padded to what dp divides, on a mesh of its own.
    fn run(&self, dp: usize, sp: usize, stage: Option<u64>) -> Result<BatchOutcome, Failure> {
        let mut batch = self.batch.clone();
        batch.pad_rows(dp).or_usage()?;
        let config = self.config(dp, sp, stage, batch.batch())?;
        let mesh = DeviceMesh::dp_sp(dp, sp).or_usage()?;
        let world_size = mesh.world_size();
        let LlamaConfig { num_heads, .. } = self.source.config;
        if num_heads < sp || batch.seq_len() < sp {
            let largest = num_heads.min(batch.seq_len());
            let (heads, tokens) = (num_heads, batch.seq_len());
            return Err(Failure::Usage(anyhow::anyhow!(
                "sp = {sp}: the model has {heads} attention heads and the batch rows of {tokens} tokens, \
                 so the largest valid sp is {largest}"
            )));
        }
        let threads_per_rank = settings::threads_per_rank(config.threads_per_rank, world_size);
        let options = LaunchOptions { threads_per_rank, ..LaunchOptions::default() };
        let outcomes = launch(world_size, &options, |rank| {
            let groups = MeshGroups::new(&mesh, rank.group.clone())?;
            let model = Model::llama(&self.source.config);
            let mut engine = initialize(model, &*self.source.weights, &config, &groups)?;
            let outcome = engine.run_global_batch(&batch, self.steps)?;
            engine.check_replicas()?;
            anyhow::Ok(outcome)
        });
        outcomes.or_run()?.into_iter().next().context("a mesh has a rank").or_run()
    }

    /// The file's optimizer, schedule and clipping; batch sizes and mesh are this run's.
    fn config(&self, dp: usize, sp: usize, stage: Option<u64>, rows: usize) -> Result<Config, Failure> {
        let raw = RawConfig::from_json_str(&self.config_text, &self.config_name).or_usage()?;
        let overrides = Overrides { mesh: Some((dp, sp)), ..Overrides::default() };
        let mut config = raw.for_batch(rows).resolve(&overrides).or_usage()?;
        if let Some(stage) = stage.and_then(ZeroStage::from_number) {
            config.zero_stage = stage;
        }
        Ok(config)
    }
}

fn read_batch(path: &Path) -> anyhow::Result<GlobalBatch> {
    let origin = || path.display().to_string();
    let tensors = candle_core::safetensors::load(path, &Device::Cpu).with_context(origin)?;
    let ids = tensors.get("input_ids").with_context(|| format!("{}: no tensor input_ids", path.display()))?;
    let [rows, seq_len] = *ids.dims() else {
        bail!("{}: input_ids has shape {:?}, expected [batch, seq]", path.display(), ids.dims())
    };
    let values = |name: &str| -> anyhow::Result<Option<Vec<i64>>> {
        let Some(tensor) = tensors.get(name) else { return Ok(None) };
        ensure!(
            tensor.dims() == [rows, seq_len],
            "{}: {name} has shape {:?}, input_ids has {:?}",
            path.display(),
            tensor.dims(),
            ids.dims()
        );
        Ok(Some(tensor.flatten_all()?.to_dtype(DType::I64)?.to_vec1()?))
    };
    let unsigned = |name: &str| -> anyhow::Result<Option<Vec<u32>>> {
        let Some(values) = values(name)? else { return Ok(None) };
        let convert = |(index, value): (usize, i64)| {
            let (row, column) = (index / seq_len, index % seq_len);
            u32::try_from(value)
                .with_context(|| format!("{}: {name}[{row}, {column}] is {value}", path.display()))
        };
        values.into_iter().enumerate().map(convert).collect::<anyhow::Result<_>>().map(Some)
    };
    let ids = unsigned("input_ids")?.unwrap_or_default();
    let batch = GlobalBatch::new(rows, seq_len, ids, unsigned("position_ids")?, values("shift_labels")?);
    batch.with_context(origin)
}

/// Every result by its name in the output file; rows that were only padding are left out.
fn named(outcome: &BatchOutcome, rows: usize) -> anyhow::Result<Vec<(String, Tensor)>> {
    let loss = Tensor::from_slice(&[outcome.loss as f32], 1, &Device::Cpu)?;
    let mut all = vec![("loss".to_owned(), loss), ("logits".to_owned(), outcome.logits.narrow(0, 0, rows)?)];
    let prefixed =
        |prefix: &str, (name, tensor): &(String, Tensor)| (format!("{prefix}.{name}"), tensor.clone());
    all.extend(outcome.gradients.iter().map(|gradient| prefixed("grad", gradient)));
    if !outcome.reports.is_empty() {
        all.extend(outcome.parameters.iter().map(|parameter| prefixed("param", parameter)));
    }
    Ok(all)
}

fn write(outcome: &BatchOutcome, rows: usize, path: &Path) -> anyhow::Result<()> {
    let tensors: HashMap<String, Tensor> = named(outcome, rows)?
        .into_iter()
        .map(|(name, tensor)| Ok((name, tensor.contiguous()?)))
        .collect::<anyhow::Result<_>>()?;
    candle_core::safetensors::save(&tensors, path).with_context(|| path.display().to_string())?;
    println!("loss {:.6}; {} tensors written to {}", outcome.loss, tensors.len(), path.display());
    Ok(())
}

/// The largest error of every tensor, relative to its largest entry, largest first.
fn compare(
    outcome: &BatchOutcome,
    expected: &BatchOutcome,
    rows: usize,
) -> anyhow::Result<Vec<(String, f64)>> {
    let mut errors = Vec::new();
    for ((name, actual), (_, expected)) in named(outcome, rows)?.into_iter().zip(named(expected, rows)?) {
        let (actual, expected): (Vec<f32>, Vec<f32>) =
            (actual.flatten_all()?.to_vec1()?, expected.flatten_all()?.to_vec1()?);
        let largest = expected.iter().fold(0.0_f64, |max, value| max.max(f64::from(value.abs())));
        let worst = actual.iter().zip(&expected).fold(0.0_f64, |max, (a, e)| {
            let error = f64::from((a - e).abs());
            // A NaN on either side must not pass as zero.
            if error.is_finite() { max.max(error) } else { f64::INFINITY }
        });
        errors.push((name, if largest > 0.0 { worst / largest } else { worst }));
    }
    errors.sort_by(|a, b| b.1.total_cmp(&a.1));
    Ok(errors)
}

fn report(errors: &[(String, f64)], args: &VerifyArgs, worst: f64) {
    let passed = worst <= args.tolerance;
    if args.json {
        let errors: serde_json::Map<_, _> =
            errors.iter().map(|(name, error)| (name.clone(), serde_json::json!(error))).collect();
        let all = serde_json::json!({
            "mesh": args.mesh, "tolerance": args.tolerance, "largest_relative_error": worst,
            "passed": passed, "relative_errors": errors,
        });
        println!("{all}");
        return;
    }
    println!("mesh {} against a single rank, error relative to each tensor's largest entry:", args.mesh);
    for (name, error) in errors.iter().take(10) {
        println!("  {error:.2e}  {name}");
    }
    if errors.len() > 10 {
        println!("  … and {} tensors with smaller errors", errors.len() - 10);
    }
    let verdict = if passed { "within" } else { "PAST" };
    println!("largest {worst:.2e}, {verdict} the tolerance of {:.2e}", args.tolerance);
}
