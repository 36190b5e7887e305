//! The child process: it trains a small model, saves every other step, and fails.

use crate::storage::{Fault, FaultyStorage};
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::sync::Arc;
use ulysses::checkpoint::{CheckpointError, DataCursor, SaveOptions, SavedCheckpoint, Saver, newest};
use ulysses::comm::{LaunchOptions, MeshGroups, launch};
use ulysses::config::Config;
use ulysses::data::{Corpus, DataLoader, DataRank, LoaderOptions, PackedSequences};
use ulysses::engine::{EngineError, RunRecord, initialize};
use ulysses::mesh::DeviceMesh;
use ulysses::model::{Model, ModelConfig, RandomWeights, family};

pub(crate) const STEPS: u64 = 4;
const STEPS_PER_SAVE: u64 = 2;
const SEED: u64 = 5;

/// Options of a child: its command-line arguments after the directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) fault: Fault,
    pub(crate) at: usize,
    pub(crate) background: bool,
    /// Whether to continue training after a failed save.
    pub(crate) goes_on: bool,
}

impl Run {
    pub(crate) fn without_fault() -> Self {
        Self { fault: Fault::None, at: 0, background: false, goes_on: false }
    }

    pub(crate) fn words(&self) -> [String; 4] {
        let (name, _) = Fault::ALL.into_iter().find(|(_, fault)| *fault == self.fault).unwrap();
        [name.into(), self.at.to_string(), self.background.to_string(), self.goes_on.to_string()]
    }

    pub(crate) fn parse(words: &[String]) -> Result<Self> {
        let [fault, at, background, goes_on] = words else { bail!("four words, not {words:?}") };
        let (_, fault) = Fault::ALL.into_iter().find(|(name, _)| name == fault).context("a fault")?;
        let (background, goes_on) = (background.parse()?, goes_on.parse()?);
        Ok(Self { fault, at: at.parse()?, background, goes_on })
    }
}

/// Trains from the newest checkpoint of `dir` to the last step. Rank 0 prints `resumed N`,
/// `step N LOSS NORM` (as bits), `saved N`, `not saved`, and the names of the operations.
pub(crate) fn train(dir: &Path, run: Run) -> Result<()> {
    let json = r#"{
        "train_batch_size": 2, "mesh_param": [2, 2], "zero_optimization": { "stage": 2 },
        "optimizer": { "type": "SGD", "params": { "lr": 0.1, "momentum": 0.9 } }
    }"#;
    let config = Config::from_json_str(json, "child.json")?;
    let mesh = DeviceMesh::dp_sp(config.mesh.dp_size, config.mesh.sp_size)?;
    let tokens = (0..400_u32).map(|i| i * i % 31);
    let rows = Arc::new(PackedSequences::new(Corpus::from_documents([tokens.collect()])?, 16)?);
    let storage = FaultyStorage::new(run.fault, run.at);
    let failure = launch(mesh.world_size(), &LaunchOptions::default(), |rank| {
        let groups = MeshGroups::new(&mesh, rank.group.clone())?;
        train_rank(dir, run, &storage, &config, &groups, rows.clone())
    });
    println!("operations {}", storage.operations().join(" "));
    failure?;
    Ok(())
}

fn train_rank(
    dir: &Path,
    run: Run,
    storage: &FaultyStorage,
    config: &Config,
    groups: &MeshGroups,
    rows: Arc<PackedSequences>,
) -> Result<()> {
    let all = groups.whole()?;
    let say = |line: String| {
        if all.rank() == 0 {
            println!("{line}");
        }
    };
    let mut engine = initialize(Model::new(&model())?, &RandomWeights { seed: SEED }, config, groups)?;
    let rank = DataRank::on_mesh(groups.mesh(), all.global_ranks()[all.rank()])?;
    let options = LoaderOptions { seed: SEED, micro_batch: 1, accumulation: 1, rank };
    let mut loader = DataLoader::new(rows.clone(), options)?;
    if let Some(checkpoint) = newest(dir, &*all)?.checkpoint {
        engine.load_checkpoint(&checkpoint)?;
        loader.set_samples_consumed(checkpoint.manifest().progress.data.samples_consumed);
    }
    say(format!("resumed {}", engine.attempted_steps()));
    let options = SaveOptions { keep_last: Some(1), background: run.background };
    let part = engine.groups().part_replica();
    let mut saver = Saver::new(all.clone(), Arc::new(storage.clone()), dir, part, options)?;
    let settle = |outcome: Result<Option<SavedCheckpoint>, EngineError>| match outcome {
        Ok(None) => Ok(()),
        Ok(Some(saved)) => {
            say(format!("saved {}", saved.step));
            Ok(())
        }
        Err(EngineError::Checkpoint(error))
            if run.goes_on && matches!(*error, CheckpointError::NotSaved { .. }) =>
        {
            say("not saved".into());
            Ok(())
        }
        Err(error) => Err(error),
    };
    while engine.attempted_steps() < STEPS {
        let report = engine.train_batch(|| loader.next_micro_batch())?;
        let [loss, norm] = [report.loss, report.grad_norm].map(f64::to_bits);
        say(format!("step {} {loss:x} {norm:x}", report.step));
        settle(saver.poll().map_err(EngineError::from))?;
        if report.step % STEPS_PER_SAVE == 0 {
            // A failure of the previous save must not prevent this one.
            settle(saver.finish().map_err(EngineError::from))?;
            let (num_sequences, seq_len) = (rows.num_sequences(), rows.seq_len());
            let samples_consumed = loader.samples_consumed();
            let data = DataCursor { samples_consumed, seed: SEED, seq_len, num_sequences, data_hash: None };
            let record = RunRecord {
                run_id: "child".into(),
                model: model().to_hf_json(),
                source: None,
                data,
                evaluations: Default::default(),
            };
            settle(engine.save_checkpoint(&mut saver, record))?;
            if !run.background {
                settle(saver.finish().map_err(EngineError::from))?;
            }
        }
    }
    settle(saver.finish().map_err(EngineError::from))?;
    Ok(())
}

fn model() -> ModelConfig {
    let llama = family("llama").expect("it is registered");
    let sizes = ModelConfig::with_sizes(llama, [8, 1, 2, 1, 12]);
    ModelConfig { vocab_size: 31, rms_norm_eps: 1e-6, ..sizes }
}
