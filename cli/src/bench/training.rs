//! An engine with synthetic data, for benchmarks that train.

use super::{DeviceArg, DtypeArg, Failure, Joined, OrFail, Ranks, settings};
use crate::config_flags::SetFlags;
use crate::model::{self, ModelSource};
use crate::unreplicated;
use anyhow::{Context, Result, anyhow};
use candle_core::Device;
use serde_json::json;
use std::sync::Arc;
use ulysses::comm::{LaunchOptions, MeshGroups, RankContext};
use ulysses::config::{Config, Overrides, RawConfig, Setting, Settings};
use ulysses::data::{Corpus, DataLoader, PackedSequences};
use ulysses::engine::{Engine, initialize};
use ulysses::mesh::{DeviceMesh, TrainingShape};
use ulysses::model::Model;

const SEED: u64 = 1;

/// Flags that select model, mesh and device.
#[derive(clap::Args)]
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
    /// Mesh: `DPxSP`, `dp=2,sp=2` or, with a ring, `dp=2,ring=2,ulysses=2`.
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
    #[arg(long, default_value = "f32")]
    dtype: DtypeArg,
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

impl TrainingArgs {
    /// A small run on one rank, to test a device.
    pub(crate) fn small() -> Self {
        Self {
            model: "nano".to_owned(),
            num_layers: None,
            vocab_size: None,
            mesh: "1x1".to_owned(),
            zero_stage: None,
            set: SetFlags::default(),
            threads_per_rank: None,
            dtype: DtypeArg::F32,
            device: DeviceArg::Auto,
        }
    }

    /// Prepares steps of one sequence of `seq_len` tokens per dp rank.
    pub(crate) fn prepare(&self, seq_len: usize) -> Result<Training, Failure> {
        let shape = unreplicated(&self.mesh)?;
        let launch = settings::launch_options(self.threads_per_rank, shape.dp * shape.sp)?;
        self.prepare_on(shape, launch, seq_len, None)
    }

    /// Prepares the same batch on a single rank with the same total number of threads.
    pub(super) fn prepare_single(&self, on_mesh: &Training, seq_len: usize) -> Result<Training, Failure> {
        let threads_per_rank = on_mesh.launch.threads_per_rank * on_mesh.mesh.world_size();
        let launch = LaunchOptions { threads_per_rank, ..on_mesh.launch.clone() };
        let single = TrainingShape { dp: 1, sp: 1, ring_size: Some(1), shard_size: None };
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
        let TrainingShape { dp, sp, ring_size, .. } = shape;
        let mesh = DeviceMesh::dp_sp(dp, sp).or_usage()?;
        let config = json!({
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "mesh_param": [dp, sp],
            "seed": SEED,
            "optimizer": { "type": "AdamW", "params": { "lr": 1e-3 } },
            "gradient_clipping": 1.0,
            "bf16": { "enabled": self.dtype == DtypeArg::Bf16 },
            // A fixed loss scale, so that no step overflows and is skipped.
            "fp16": { "enabled": self.dtype == DtypeArg::Fp16, "loss_scale": 1024 },
        });
        let mut settings = Settings { zero_stage: self.zero_stage, ..self.set.settings() };
        settings.set.extend(accumulation.map(|passes| Setting::new("gradient_accumulation_steps", passes)));
        let raw = RawConfig::from_json_str_with(&config.to_string(), "bench", &settings).or_usage()?;
        let overrides = Overrides { seq_len: Some(seq_len), ring_size, ..Overrides::default() };
        let mut config = raw.resolve(&overrides).or_usage()?;
        let source = self.source()?;
        model::resolve_ring(&source.config, &mut config, mesh.world_size());
        source.check_exchange(config.micro_batch_size, seq_len, &config)?;
        settings::check_memory(&config, &source.config, seq_len, config.world_size())?;
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
    pub(super) fn place<'a>(&self, joined: Joined<'a>, training: &Training) -> Result<Ranks<'a>, Failure> {
        joined.place(self.device, training.mesh.world_size())
    }

    fn source(&self) -> Result<ModelSource, Failure> {
        let Some(mut config) = model::named_shape(&self.model)? else {
            if self.num_layers.or(self.vocab_size).is_some() {
                let message =
                    format!("{}: --num-layers and --vocab-size need a preset or a shape", self.model);
                return Err(Failure::Usage(anyhow!(message)));
            }
            return model::open(&self.model, SEED, 256);
        };
        config.vocab_size = self.vocab_size.map_or(config.vocab_size, |size| size as usize);
        config.num_layers = self.num_layers.map_or(config.num_layers, |layers| layers as usize);
        Ok(ModelSource::random(config, SEED))
    }

    /// Returns the settings for reports.
    pub(super) fn settings(&self, training: &Training) -> serde_json::Value {
        let Self { model, mesh, .. } = self;
        let stage = u8::from(training.config.zero.stage);
        let dtype = DtypeArg::of(training.config.precision.dtype()).name();
        let shape = &training.source.config;
        json!({
            "model": model, "num_layers": shape.num_layers, "vocab_size": shape.vocab_size, "mesh": mesh,
            "zero_stage": stage, "dtype": dtype,
        })
    }
}

impl Training {
    /// Returns one rank's engine and data.
    pub(crate) fn start(&self, rank: &RankContext, device: &Device) -> Result<(Engine, DataLoader)> {
        let groups = MeshGroups::new(&self.mesh, rank.group.clone())?.on(device.clone());
        let model = Model::llama(&self.source.config)?;
        let engine = initialize(model, &*self.source.weights, &self.config, &groups)?;
        let loader = engine.data_loader(self.sequences.clone())?;
        Ok((engine, loader))
    }
}
