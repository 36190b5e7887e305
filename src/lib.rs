//! Trains transformers on sequences too long for one device.
//!
//! A two-dimensional mesh `(dp_size, sp_size)` organises `dp_size · sp_size` ranks. The `sp`
//! axis cuts every sequence (Ulysses: an all-to-all around attention trades tokens for heads
//! and back), the `dp` axis partitions optimizer state, gradients and parameters (ZeRO). The
//! mesh never changes the maths: loss, gradients and updates are the same for every
//! (dp, sp, ZeRO stage, accumulation) that describes the same batch.
//!
//! # The path of a training step
//!
//! Reading the modules in this order follows a batch through the code:
//!
//! 1. [`config`]: a DeepSpeed-style JSON file becomes a [`Config`].
//! 2. [`mesh`]: [`DeviceMesh`] says which ranks form which groups.
//! 3. [`comm`]: [`ProcessGroup`](comm::ProcessGroup) is what a backend offers; ranks as
//!    threads in [`comm::thread`].
//! 4. [`data`]: [`DataLoader`](data::DataLoader) cuts one global order of rows over dp and sp.
//! 5. [`engine`]: [`initialize`], then `forward`, `backward` and `step`:
//!    - for each layer, [`zero`] gathers its parameters, [`model`] computes it from [`kernels`],
//!      and [`sequence_parallel`] exchanges tokens for heads around attention;
//!    - the loss, in tiles of tokens;
//!    - for each layer, backwards: gather, compute, reduce over dp, then over sp;
//!    - normalise, clip, update the own partition.
//! 6. [`checkpoint`]: the state that outlives the run, for any other mesh to go on from.
//! 7. [`monitor`]: what the user sees of it.
//! 8. [`trainer`]: the loop around the engine, with evaluations, checkpoints and observers.
//! 9. [`estimate`]: the same engine run dry, for what a step will need on machines that are not at hand.
//!
//! [`tensor`] (candle tensors as slices) and [`memory`] (bytes held per thread) serve all of them.
//!
//! # Example
//!
//! Four ranks, ZeRO stage 3 over two, sequences cut in two:
//!
//! ```
//! use std::sync::Arc;
//! use ulysses::comm::{LaunchOptions, MeshGroups, launch};
//! use ulysses::config::Config;
//! use ulysses::data::{Corpus, PackedRows};
//! use ulysses::mesh::DeviceMesh;
//! use ulysses::model::{Model, RandomWeights, preset};
//!
//! let json = r#"{ "train_batch_size": 2, "mesh_param": [2, 2], "zero_optimization": { "stage": 3 } }"#;
//! let config = Config::from_json_str(json, "config.json")?;
//! let text = b"the quick brown fox jumps over the lazy dog. ".repeat(20);
//! let corpus = Corpus::from_documents([text.into_iter().map(u32::from).collect()])?;
//! let rows = Arc::new(PackedRows::new(corpus, 64)?);
//! let mesh = DeviceMesh::dp_sp(config.mesh.dp_size, config.mesh.sp_size)?;
//!
//! let losses = launch(mesh.world_size(), &LaunchOptions::default(), |rank| {
//!     let groups = MeshGroups::new(&mesh, rank.group.clone())?;
//!     let model = Model::llama(&preset("nano")?)?;
//!     let mut engine = ulysses::engine::initialize(model, &RandomWeights { seed: 1 }, &config, &groups)?;
//!     let mut loader = engine.data_loader(rows.clone())?;
//!     let report = engine.train_batch(|| loader.next_micro_batch())?;
//!     Ok::<_, anyhow::Error>(report.loss)
//! })?;
//! assert!(losses.iter().all(|loss| *loss == losses[0]));
//! # Ok::<(), anyhow::Error>(())
//! ```
//!
//! # Conventions
//!
//! Shapes: `B` batch rows, `S` tokens of a row, `H` query heads, `H_kv` KV heads, `D` head
//! dimension. Unsuffixed names are global, `_local` is this rank's part. `rank` is relative
//! to a named group, `global_rank` to the world. A *shard* is a rank's piece of a logical
//! tensor, a *partition* ZeRO's range of a flat buffer.
//!
//! candle runs elementwise ops on more than 64 K elements on a pool that all ranks share.
//! The library's own ops do not use it, but programs that run candle ops in their layers set
//! `CANDLE_NUM_THREADS=1` before the first one; the library never changes the environment.

pub mod checkpoint;
pub mod comm;
pub mod config;
pub mod data;
pub mod engine;
pub mod estimate;
mod fnv1a;
pub mod mesh;
pub mod model;
pub mod monitor;
pub mod regular_file;
mod safetensors_file;
pub mod sequence_parallel;
pub mod trainer;
pub mod zero;

pub use candle_core as candle;
pub use ulysses_kernels as kernels;
pub use ulysses_kernels::{device, memory, offload, tensor};

pub use comm::launch;
pub use config::Config;
pub use engine::{Engine, initialize};
pub use mesh::DeviceMesh;
pub use trainer::Trainer;

/// What a training program needs: `use ulysses::prelude::*;`.
pub mod prelude {
    pub use crate::candle::{Device, Tensor};
    pub use crate::checkpoint::SavedCheckpoint;
    pub use crate::comm::{LaunchOptions, MeshGroups, ProcessGroup, RankContext, launch};
    pub use crate::config::Config;
    pub use crate::data::{Corpus, Dataset, Documents, GlobalBatch, MicroBatch, PackedRows, Tokenizer};
    pub use crate::engine::{Engine, initialize};
    pub use crate::mesh::DeviceMesh;
    pub use crate::model::{
        AutogradLayer, BlockContext, Embedding, HfModel, Init, Layer, LlamaConfig, LossHead, Model,
        ParameterSpec, RandomWeights, WeightSource, preset,
    };
    pub use crate::monitor::{EvalMetrics, Metrics, Progress, RunTotals};
    pub use crate::trainer::{
        Observer, ObserverError, Resume, StepEnd, TrainReport, Trainer, TrainerOptions, TrainingData,
    };
}

/// Runs the example of the front page.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
