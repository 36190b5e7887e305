//! Fine-tunes a Hugging Face model, and exports one that transformers can load.
//!
//! ```text
//! cargo run --release --example 06_fine_tune_hugging_face [-- MODEL_DIR TEXT_FILE OUTPUT_DIR]
//! ```
//!
//! `MODEL_DIR` contains `config.json`, `model.safetensors` (or shards) and `tokenizer.json` of a
//! Llama, Mistral, Qwen2 or Qwen3. Without arguments, a tiny model is pretrained on one text,
//! exported, and fine-tuned on another one, in a temporary directory.

use anyhow::{Result, ensure};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use ulysses::checkpoint::{Checkpoint, ExportDtype, ExportOptions, LocalStorage, SaveOptions, export};
use ulysses::comm::{LaunchOptions, MeshGroups, RankContext, launch};
use ulysses::config::Config;
use ulysses::data::{Corpus, PackedSequences, Tokenizer};
use ulysses::engine::{RunRecord, initialize};
use ulysses::mesh::DeviceMesh;
use ulysses::model::{HfModel, HfSource, Model, ModelConfig, RandomWeights, WeightSource, preset};

/// Each sequence is sharded over two ranks; low learning rate, frozen embedding.
const FINE_TUNE: &str = r#"{
    "train_batch_size": 2, "mesh_param": [1, 2], "gradient_clipping": 1.0,
    "optimizer": { "type": "AdamW", "params": { "lr": 5e-4 } },
    "ulysses": { "parameter_groups": [{ "match": "embed_tokens", "frozen": true }] }
}"#;
const PRETRAIN: &str = r#"{
    "train_batch_size": 4, "mesh_param": [2, 1],
    "optimizer": { "type": "AdamW", "params": { "lr": 3e-3 } }
}"#;

fn main() -> Result<()> {
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let scratch = tempfile::tempdir()?;
    let at = |name: &str| scratch.path().join(name);
    let [model, text, output] = match <[PathBuf; 3]>::try_from(arguments) {
        Ok(given) => given,
        Err(given) => {
            ensure!(given.is_empty(), "either MODEL_DIR TEXT_FILE OUTPUT_DIR, or nothing");
            let (model, first, second) = (at("pretrained"), at("first.txt"), at("second.txt"));
            std::fs::write(&first, "the quick brown fox jumps over the lazy dog. ".repeat(100))?;
            std::fs::write(&second, "a lazy cat sleeps under the quick brown table. ".repeat(100))?;
            println!("pretraining a tiny model:");
            let nano = preset("nano")?;
            let start = Start { llama: &nano, weights: &RandomWeights { seed: 1 }, source: None };
            train(PRETRAIN, start, &Tokenizer::bytes(), &first, &model)?;
            [model, second, at("fine-tuned")]
        }
    };

    // A model directory contains shape, weights and tokenizer. Weights are read by range: a rank
    // reads only its partition of a large model.
    let HfModel { config: llama, weights, notes, source } = HfModel::open(&model)?;
    notes.iter().for_each(|note| println!("note: {note}"));
    let tokenizer = match model.join("tokenizer.json") {
        file if file.exists() => Tokenizer::from_file(&file)?,
        _ => Tokenizer::bytes(),
    };
    println!("fine-tuning {:.2} M parameters:", llama.num_parameters() as f64 / 1e6);
    let start = Start { llama: &llama, weights: &weights, source: Some(source) };
    train(FINE_TUNE, start, &tokenizer, &text, &output)?;
    println!("{} contains a model that transformers can load", output.display());
    if output.starts_with(scratch.path()) {
        println!("(it is removed now, because it is in a temporary directory)");
    }
    Ok(())
}

/// The model that a training starts from.
struct Start<'a> {
    llama: &'a ModelConfig,
    weights: &'a dyn WeightSource,
    /// The files to copy into exports: token ids, generation settings, lengths.
    source: Option<HfSource>,
}

/// Trains 40 steps on a text and exports the result to `output`.
fn train(config: &str, start: Start<'_>, tokenizer: &Tokenizer, text: &Path, output: &Path) -> Result<()> {
    let config = Config::from_json_str(config, "the example's config")?;
    let sequences = Arc::new(PackedSequences::new(Corpus::load(text, tokenizer)?, 128)?);
    let mesh = DeviceMesh::dp_sp(config.mesh.dp_size, config.mesh.sp_size)?;
    let checkpoints = tempfile::tempdir()?;
    let saved = launch(mesh.world_size(), &LaunchOptions::default(), |rank: RankContext| -> Result<_> {
        let groups = MeshGroups::new(&mesh, rank.group.clone())?;
        let mut engine = initialize(Model::new(start.llama)?, start.weights, &config, &groups)?;
        let mut loader = engine.data_loader(sequences.clone())?;
        for _ in 0..40 {
            let report = engine.train_batch(|| loader.next_micro_batch())?;
            if rank.rank == 0 && (report.step == 1 || report.step % 20 == 0) {
                println!("  step {:3}  loss {:.4}", report.step, report.loss);
            }
        }
        // A checkpoint contains each partition of the state once.
        let mut saver = engine.saver(groups.whole()?, checkpoints.path(), SaveOptions::default())?;
        let record = RunRecord::new("example", start.llama.to_hf_json(), &loader)?;
        engine.save_checkpoint(&mut saver, RunRecord { source: start.source.clone(), ..record })?;
        Ok(saver.finish()?.map(|saved| saved.path))
    })?;
    let checkpoint = Checkpoint::open(&saved.into_iter().flatten().next().unwrap_or_default())?;
    let options = ExportOptions { max_file_bytes: 5_000_000_000, ..ExportOptions::new(ExportDtype::Bf16) };
    export(&checkpoint, output, options, &LocalStorage)?;
    Ok(())
}
