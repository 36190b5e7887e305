//! `ulysses bench train`, and an engine with synthetic data for other benchmarks.

use super::case::{Case, Figure};
use super::gemm::{SQUARE, square_gemm};
use super::report::{FLOPS, Report};
use super::{
    BackendArgs, BenchRank, BenchRanks, Benchmark, DeviceArg, Failure, JobRanks, OrFail, dtype_name,
    dtype_parser,
};
use crate::config_flags::SetFlags;
use crate::mesh_flag::unreplicated;
use crate::output::LOG;
use anyhow::{Context, Result, anyhow};
use candle_core::{DType, Device};
use clap::Parser;
use serde_json::json;
use std::sync::Arc;
use ulysses::comm::{LaunchOptions, MeshGroups, RankContext};
use ulysses::config::{Config, Overrides, RawConfig, Setting, Settings};
use ulysses::data::{Corpus, DataLoader, PackedSequences};
use ulysses::engine::{Engine, EngineError, StepReport};
use ulysses::estimate::model_flops;
use ulysses::mesh::{DeviceMesh, TrainingShape};
use ulysses::trainer::job::{ModelSource, check_memory, fit_model, launch_options, named_shape};

const SEED: u64 = 1;

/// Maximum number of alternations between mesh and single rank.
const ROUNDS: u32 = 3;

/// Name of the step on a single rank in reports.
const SINGLE: &str = "single_rank_step";

/// Flags that select model, mesh and device.
#[derive(clap::Parser)]
pub(crate) struct TrainingArgs {
    /// Model directory (config.json, model.safetensors), preset (nano, tiny, small, base), or shape of a published model,
    /// such as llama3-8b.
    ///
    /// Presets and shapes have random weights.
    #[arg(long, default_value = "base")]
    model: String,
    /// Number of layers, instead of the preset's or shape's.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    num_layers: Option<u32>,
    /// Vocabulary size, instead of the preset's (256) or shape's.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    vocab_size: Option<u32>,
    /// Mesh: `DPxSP`, `DPxSPxTP`, `pp=2,dp=2,sp=2,tp=2` or, with a ring, `dp=2,ring=2,ulysses=2`.
    #[arg(long, default_value = "1x1", allow_hyphen_values = true)]
    mesh: String,
    /// ZeRO stage (0 to 3) [default: 0].
    #[arg(long, value_parser = clap::value_parser!(u8).range(0..=3))]
    zero_stage: Option<u8>,
    #[command(flatten)]
    set: SetFlags,
    /// CPU threads per rank [default: an equal share of the cores].
    #[arg(long)]
    threads_per_rank: Option<usize>,
    /// Dtype of parameters and activations.
    #[arg(long, default_value = "f32", value_parser = dtype_parser())]
    dtype: DType,
    /// Device of the ranks' tensors.
    #[arg(long, default_value = "auto")]
    device: DeviceArg,
}

/// A prepared training run.
pub(crate) struct Training {
    pub(super) mesh: DeviceMesh,
    pub(super) launch: LaunchOptions,
    pub(super) source: ModelSource,
    pub(super) config: Config,
    sequences: Arc<PackedSequences>,
}

/// The engine and the data of a rank.
pub(crate) struct TrainingRank {
    pub(super) engine: Engine,
    pub(super) loader: DataLoader,
}

impl TrainingArgs {
    /// A small run on one rank, to test a device.
    pub(crate) fn small() -> Self {
        Self::parse_from(["", "--model", "nano"])
    }

    /// Prepares steps of one sequence of `seq_len` tokens per dp rank.
    pub(crate) fn prepare(&self, seq_len: usize) -> Result<Training, Failure> {
        let shape = unreplicated(&self.mesh)?;
        let launch = launch_options(self.threads_per_rank, shape.sizes.num_ranks())?;
        self.prepare_on(shape, launch, seq_len, None)
    }

    /// Prepares the same batch on a single rank with the same total number of threads.
    pub(super) fn prepare_single(&self, on_mesh: &Training, seq_len: usize) -> Result<Training, Failure> {
        let threads_per_rank = on_mesh.launch.threads_per_rank * on_mesh.mesh.world_size();
        let launch = LaunchOptions { threads_per_rank, ..on_mesh.launch.clone() };
        let single = TrainingShape::ONE_RANK;
        let accumulation = on_mesh.config.gradient_accumulation_steps * on_mesh.config.mesh.dp_size;
        self.prepare_on(single, launch, seq_len, Some(accumulation))
    }

    fn prepare_on(
        &self,
        shape: TrainingShape,
        launch: LaunchOptions,
        seq_len: usize,
        accumulation: Option<usize>,
    ) -> Result<Training, Failure> {
        let TrainingShape { sizes, ring_size, .. } = shape;
        let mesh = sizes.row_major().or_usage()?;
        let config = json!({
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "seed": SEED,
            "optimizer": { "type": "AdamW", "params": { "lr": 1e-3 } },
            "gradient_clipping": 1.0,
            "bf16": { "enabled": self.dtype == DType::BF16 },
            // A fixed loss scale, so that no step overflows and is skipped.
            "fp16": { "enabled": self.dtype == DType::F16, "loss_scale": 1024 },
        });
        let mut settings = Settings { zero_stage: self.zero_stage, ..self.set.settings() };
        settings.set.extend(accumulation.map(|passes| Setting::new("gradient_accumulation_steps", passes)));
        let raw = RawConfig::from_json_str_with(&config.to_string(), "bench", &settings).or_usage()?;
        let overrides =
            Overrides { mesh: Some(sizes), seq_len: Some(seq_len), ring_size, ..Overrides::default() };
        let mut config = raw.resolve(&overrides).or_usage()?;
        let source = self.source()?;
        fit_model(&source.config, &mut config, seq_len)?;
        check_memory(&config, &source.config, seq_len, config.world_size())?;
        let vocab_size = u32::try_from(source.config.vocab_size).unwrap_or(u32::MAX);
        let num_tokens =
            config.train_batch_size.checked_mul(seq_len).and_then(|tokens| u32::try_from(tokens).ok());
        let too_large = "a step has more than 2^32 tokens: choose a smaller `train_batch_size` or --seq-len";
        let num_tokens = num_tokens.and_then(|tokens| tokens.checked_add(1)).context(too_large).or_usage()?;
        let tokens = (0..num_tokens).map(|i| i.wrapping_mul(2_654_435_761) % vocab_size).collect();
        let corpus = Corpus::from_documents([tokens]).or_run()?;
        let sequences = Arc::new(PackedSequences::new(corpus, seq_len).or_run()?);
        Ok(Training { mesh, launch, source, config, sequences })
    }

    /// Chooses the device and the backend of the mesh's ranks.
    pub(super) fn place<'a>(
        &self,
        on: &'a mut JobRanks,
        training: &Training,
    ) -> Result<BenchRanks<'a>, Failure> {
        let count = training.mesh.world_size();
        on.place(self.device.kind(), count)?;
        Ok(BenchRanks { on, count, options: training.launch.clone() })
    }

    fn source(&self) -> Result<ModelSource, Failure> {
        let Some(mut config) = named_shape(&self.model)? else {
            if self.num_layers.or(self.vocab_size).is_some() {
                let message =
                    format!("{}: --num-layers and --vocab-size need a preset or a shape", self.model);
                return Err(Failure::Usage(anyhow!(message)));
            }
            return Ok(ModelSource::open(&self.model, SEED, 256, LOG.line)?);
        };
        config.vocab_size = self.vocab_size.map_or(config.vocab_size, |size| size as usize);
        let num_layers = self.num_layers.map_or(config.num_layers(), |layers| layers as usize);
        Ok(ModelSource::random(config.with_num_layers(num_layers), SEED))
    }

    /// Returns the settings for reports.
    pub(super) fn settings(&self, training: &Training) -> serde_json::Value {
        let Self { model, mesh, .. } = self;
        let stage = u8::from(training.config.zero.stage);
        let dtype = dtype_name(training.config.precision.dtype());
        let shape = &training.source.config;
        json!({
            "model": model, "num_layers": shape.num_layers(), "vocab_size": shape.vocab_size, "mesh": mesh,
            "zero_stage": stage, "dtype": dtype,
        })
    }
}

impl Training {
    /// Starts one rank.
    pub(crate) fn start(&self, rank: &RankContext, device: &Device) -> Result<TrainingRank> {
        let groups = MeshGroups::new(&self.mesh, rank.group.clone())?.on(device.clone());
        let engine = self.source.engine(&self.config, &groups)?;
        let loader = engine.data_loader(self.sequences.clone())?;
        Ok(TrainingRank { engine, loader })
    }

    /// Measures square GEMMs of all ranks, and steps.
    fn measure(&self, bench: &BenchRank<'_>, name: &str, flops: f64) -> Result<Vec<Figure>> {
        let mut rank = self.start(bench.rank, &bench.device)?;
        let square = square_gemm(self.config.precision.dtype(), &bench.device)?;
        let step = Case::new(name, flops, || rank.step().map(drop));
        bench.take_turns(vec![square.times(bench.rank.world_size as f64), step])
    }
}

impl TrainingRank {
    /// Trains a step.
    pub(crate) fn step(&mut self) -> Result<StepReport, EngineError> {
        self.engine.train_batch(|| self.loader.next_micro_batch())
    }
}

#[derive(clap::Args)]
pub(super) struct Steps {
    #[command(flatten)]
    training: TrainingArgs,
    /// Tokens per sequence, over all sp ranks.
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    seq_len: u32,
    /// Compare with the same batch on a single rank with the same total number of threads.
    #[arg(long)]
    against_single: bool,
    #[command(flatten)]
    backend: BackendArgs,
}

impl Benchmark for Steps {
    fn report<'a>(&self, repeats: u32, ranks: &'a mut JobRanks) -> Result<Report<'a>, Failure> {
        let seq_len = self.seq_len as usize;
        self.backend.join(None, ranks)?;
        if self.against_single && ranks.num_processes().is_some() {
            return Err(Failure::Usage(anyhow!(
                "--against-single needs ranks that are threads: run the single rank as a command of its own"
            )));
        }
        let on_mesh = self.training.prepare(seq_len)?;
        let mut ranks = self.training.place(ranks, &on_mesh)?;
        let single =
            self.against_single.then(|| self.training.prepare_single(&on_mesh, seq_len)).transpose()?;
        let flops =
            model_flops(&on_mesh.config, &on_mesh.source.config, &on_mesh.mesh).or_run()?.with_labels(1.0);
        let rounds = if single.is_some() { ROUNDS.min(repeats) } else { 1 };
        let mut figures = Vec::new();
        for round in 0..rounds {
            // The first rounds take the remainder.
            let repeats = repeats / rounds + u32::from(round < repeats % rounds);
            let measured = ranks.run(repeats, |bench| on_mesh.measure(bench, "train_step", flops))?;
            append(&mut figures, measured);
            if let Some(single) = &single {
                let on = &mut JobRanks::threads(ranks.on.placement().alone());
                let mut alone = BenchRanks { on, count: 1, options: single.launch.clone() };
                let mut measured = alone.run(repeats, |bench| single.measure(bench, SINGLE, flops))?;
                append(&mut figures, measured.split_off(1));
            }
        }
        let rows = on_mesh.config.train_batch_size;
        for step in &mut figures[1..] {
            step.values.push(("tokens_per_second", (rows * seq_len) as f64 / step.seconds()));
        }
        figures[1].baselines = vec![SQUARE.to_owned(), SINGLE.to_owned()];
        // The mesh after its baselines.
        figures[1..].reverse();
        let mut settings = self.training.settings(&on_mesh);
        settings["seq_len"] = json!(seq_len);
        settings["rows_per_step"] = json!(rows);
        Ok(Report {
            bench: "train",
            settings,
            method: "whole steps with AdamW and clipping, alternating with one square GEMM on all ranks at once; model \
                     FLOPs: forward and backward, visible pairs only, no recomputation; slowest rank, median"
                .to_owned(),
            unit: FLOPS,
            figures,
            ranks,
        })
    }
}

/// Adds the repetitions of a round to those before it.
fn append(figures: &mut Vec<Figure>, round: Vec<Figure>) {
    for figure in round {
        match figures.iter_mut().find(|earlier| earlier.name == figure.name) {
            Some(earlier) => earlier.seconds.extend(figure.seconds),
            None => figures.push(figure),
        }
    }
}
