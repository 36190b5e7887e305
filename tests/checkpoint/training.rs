//! Training of a small model on any mesh, shared by the other files.

use crate::support::sample::axes;
use anyhow::Result;
use serde_json::json;
use std::path::Path;
use std::sync::Arc;
use ulysses::checkpoint::{
    Checkpoint, DataCursor, LocalStorage, SaveOptions, SavedCheckpoint, Saver, Storage,
};
use ulysses::comm::{LaunchOptions, MeshGroups, ProcessGroup, launch};
use ulysses::config::Config;
use ulysses::data::{Corpus, DataLoader, LoaderOptions, PackedSequences};
use ulysses::engine::{Engine, RunRecord, StepReport, initialize};
use ulysses::model::{Model, ModelConfig, RandomWeights, family};

/// A multiple of every tested dp size.
const ROWS_PER_STEP: usize = 60;
pub(crate) const SEED: u64 = 3;

/// A mesh, ZeRO stage and optimizer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setup {
    pub(crate) dp: usize,
    pub(crate) sp: usize,
    pub(crate) stage: u8,
    pub(crate) accumulation: usize,
    pub(crate) optimizer: &'static str,
    /// Additional config keys, as a JSON object.
    pub(crate) extra: &'static str,
}

impl Setup {
    /// Its values on the axes of a test matrix.
    pub(crate) fn axes(&self) -> Vec<String> {
        let Self { dp, sp, stage, accumulation, optimizer, extra } = self;
        axes![dp, sp, stage, accumulation, optimizer, extra]
    }
}

pub(crate) const ADAM: &str = r#"{ "type": "AdamW", "params": { "lr": 1e-2 } }"#;
pub(crate) const MOMENTUM: &str = r#"{ "type": "SGD", "params": { "lr": 0.1, "momentum": 0.9 } }"#;
pub(crate) const SGD: &str = r#"{ "type": "SGD", "params": { "lr": 0.1 } }"#;
pub(crate) const ADAGRAD: &str =
    r#"{ "type": "Adagrad", "params": { "lr": 1e-2, "initial_accumulator_value": 0.01 } }"#;
pub(crate) const LAMB: &str = r#"{ "type": "Lamb", "params": { "lr": 1e-2 } }"#;
pub(crate) const LION: &str = r#"{ "type": "Lion", "params": { "lr": 1e-3 } }"#;

pub(crate) const fn setup(dp: usize, sp: usize, stage: u8) -> Setup {
    Setup { dp, sp, stage, accumulation: 1, optimizer: ADAM, extra: "{}" }
}

/// One training rank.
pub(crate) struct Trainee {
    pub(crate) engine: Engine,
    pub(crate) loader: DataLoader,
    pub(crate) all: Arc<dyn ProcessGroup>,
}

impl Trainee {
    pub(crate) fn train(&mut self, steps: usize) -> Result<Vec<StepReport>> {
        (0..steps).map(|_| Ok(self.engine.train_batch(|| self.loader.next_micro_batch())?)).collect()
    }

    pub(crate) fn saver(
        &self,
        dir: &Path,
        keep_last: Option<usize>,
        storage: Arc<dyn Storage>,
    ) -> Result<Saver> {
        let part = self.engine.groups().part_replica();
        let options = SaveOptions { keep_last, background: false };
        Ok(Saver::new(self.all.clone(), storage, dir, part, options)?)
    }

    pub(crate) fn save_with(&mut self, saver: &mut Saver) -> Result<SavedCheckpoint> {
        self.engine.save_checkpoint(saver, self.record())?;
        Ok(saver.finish()?.unwrap())
    }

    pub(crate) fn record(&self) -> RunRecord {
        let data = DataCursor {
            samples_consumed: self.loader.samples_consumed(),
            seed: SEED,
            seq_len: 8,
            num_sequences: 70,
            data_hash: None,
        };
        RunRecord {
            run_id: "a-run".into(),
            model: model().to_hf_json(),
            source: None,
            data,
            evaluations: Default::default(),
        }
    }

    pub(crate) fn save(&mut self, dir: &Path) -> Result<SavedCheckpoint> {
        let mut saver = self.saver(dir, None, Arc::new(LocalStorage))?;
        self.save_with(&mut saver)
    }

    /// Resumes from the newest checkpoint of a directory.
    pub(crate) fn resume(&mut self, dir: &Path) -> Result<()> {
        let checkpoint = ulysses::checkpoint::newest(dir, &*self.all)?.checkpoint.unwrap();
        self.load(&checkpoint)
    }

    pub(crate) fn load(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        self.engine.load_checkpoint(checkpoint)?;
        self.loader.set_samples_consumed(checkpoint.manifest().progress.data.samples_consumed);
        Ok(())
    }
}

/// Returns the config of a setup.
pub(crate) fn config(setup: Setup) -> Config {
    let Setup { dp, sp, stage, accumulation, optimizer, extra } = setup;
    let mut config = json!({
        "train_batch_size": ROWS_PER_STEP,
        "gradient_accumulation_steps": accumulation,
        "mesh_param": [dp, sp],
        "zero_optimization": { "stage": stage },
        "optimizer": serde_json::from_str::<serde_json::Value>(optimizer).unwrap(),
        "gradient_clipping": 0.5,
        "scheduler": { "type": "WarmupLR", "params": { "warmup_max_lr": 0.01, "warmup_num_steps": 5 } },
    });
    let extra: serde_json::Map<String, serde_json::Value> = serde_json::from_str(extra).unwrap();
    config.as_object_mut().unwrap().extend(extra);
    Config::from_json_str(&config.to_string(), "test.json").unwrap()
}

/// Runs `work` on every rank, and returns the results in rank order.
pub(crate) fn on_mesh<T: Send>(setup: Setup, work: impl Fn(&mut Trainee) -> Result<T> + Sync) -> Vec<T> {
    let (accumulation, config) = (setup.accumulation, config(setup));
    let tokens = (0..8 * 70_u32).map(|i| i * i % 29);
    let corpus = Corpus::from_documents([tokens.collect()]).unwrap();
    let rows = Arc::new(PackedSequences::new(corpus, 8).unwrap());
    let mesh = config.placed_mesh(None).unwrap().mesh;
    let run = |rank: ulysses::comm::RankContext| {
        let groups = MeshGroups::new(&mesh, rank.group.clone())?;
        let weights = RandomWeights { seed: SEED };
        let engine = initialize(Model::new(&model())?, &weights, &config, &groups)?;
        let (micro_batch, rank) = (config.micro_batch_size, engine.data_rank());
        let loader =
            DataLoader::new(rows.clone(), LoaderOptions { seed: SEED, micro_batch, accumulation, rank })?;
        // A separate group, so that steps do not count the traffic of checkpoints.
        let whole = groups.whole()?;
        let all = whole.split("checkpoint", Some(0), whole.rank())?.unwrap();
        work(&mut Trainee { engine, loader, all })
    };
    launch(mesh.world_size(), &LaunchOptions::default(), run).unwrap()
}

/// Returns a model whose unit sizes no tested dp size divides.
pub(crate) fn model() -> ModelConfig {
    let sizes = ModelConfig::with_sizes(family("llama").unwrap(), [11, 2, 4, 2, 13]);
    ModelConfig { vocab_size: 29, rms_norm_eps: 1e-6, ..sizes }
}
