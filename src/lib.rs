//! Trains transformers on sequences that are too long for one device.
//!
//! A mesh of ranks shares the work. The `sp` axis shards every sequence (DeepSpeed-Ulysses: an all-to-all around attention
//! trades tokens for heads and back). The `dp` axis takes different sequences, and ZeRO partitions optimizer state,
//! gradients and parameters over it. A `tp` axis divides the weights of every layer, a `pp` axis the layers. The mesh never
//! changes the math: loss, gradients and updates are the same for every mesh, ZeRO stage and accumulation that describe
//! the same batch.
//!
//! # A program
//!
//! Four ranks train as threads: ZeRO stage 3 over two of them, each sequence in two shards.
//!
//! ```
//! use std::sync::Arc;
//! use ulysses::prelude::*;
//!
//! let json = r#"{ "train_batch_size": 2, "mesh_param": [2, 2], "zero_optimization": { "stage": 3 } }"#;
//! let config = Config::from_json_str(json, "config.json")?;
//! let text = b"the quick brown fox jumps over the lazy dog. ".repeat(20);
//! let corpus = Corpus::from_documents([text.into_iter().map(u32::from).collect()])?;
//! let data = Arc::new(PackedSequences::new(corpus, 64)?); // sequences of 64 tokens
//! let mesh = DeviceMesh::dp_sp(config.mesh.dp_size, config.mesh.sp_size)?;
//!
//! let losses = launch(mesh.world_size(), &LaunchOptions::default(), |rank| {
//!     let groups = MeshGroups::new(&mesh, rank.group.clone())?;
//!     let model = Model::new(&preset("nano")?)?;
//!     let mut engine = initialize(model, &RandomWeights { seed: 1 }, &config, &groups)?;
//!     let mut loader = engine.data_loader(data.clone())?;
//!     let report = engine.train_batch(|| loader.next_micro_batch())?;
//!     Ok::<_, anyhow::Error>(report.loss)
//! })?;
//! assert!(losses.iter().all(|loss| *loss == losses[0])); // every rank has the loss of the global batch
//! # Ok::<(), anyhow::Error>(())
//! ```
//!
//! [`Trainer`] is the whole loop, with evaluations, checkpoints and observers.
//!
//! # Where to begin
//!
//! | to | use |
//! |---|---|
//! | read a config | [`Config`] |
//! | arrange ranks | [`DeviceMesh`], [`comm::MeshGroups`], [`launch()`], [`comm::ProcessGroup`] |
//! | shard tensors over ranks | [`placement::ShardedTensor`] |
//! | load data | [`data::Corpus`], [`data::Documents`], [`data::PackedSequences`], [`data::DataLoader`], [`data::Tokenizer`] |
//! | build a model | [`model::Model`], [`model::preset()`], [`model::HfModel`], [`nn::AutogradLayer`], [`objective::AutogradObjective`] |
//! | train | [`initialize`], [`Engine`], [`Trainer`], [`trainer::Observer`] |
//! | train a config file | [`trainer::Job`] |
//! | save and load | [`checkpoint::Checkpoint`], [`checkpoint::export()`], [`trainer::Resume`] |
//! | predict memory and time | [`estimate`] |
//!
//! # The path of a training step
//!
//! In this order, the modules follow a batch through the code:
//!
//! 1. [`config`]: a DeepSpeed-style JSON file becomes a [`Config`].
//! 2. [`mesh`]: [`DeviceMesh`] defines which ranks form which groups.
//! 3. [`comm`]: [`ProcessGroup`](comm::ProcessGroup) is the contract of a backend; [`comm::thread`] runs ranks as threads.
//! 4. [`data`]: [`DataLoader`](data::DataLoader) shards one global order of sequences over dp and sp.
//! 5. [`engine`]: [`initialize`], then `forward`, `backward` and `step`:
//!    - for each layer, [`zero`] gathers its parameters, a block of `families` composes it of modules of [`nn`], which compute
//!      with [`kernels`], and [`sequence_parallel`] exchanges tokens for heads around attention (with a ring, keys and values also travel
//!      during attention);
//!    - the [`objective`]: the loss, in tiles of tokens;
//!    - for each layer in reverse: gather, compute, reduce over dp, then over sp;
//!    - normalize, clip, update the own partition.
//!
//!    The stages of a [`pipeline`] have some of the layers each, and pass hidden states and gradients on.
//! 6. [`checkpoint`]: the state that outlives the run, for any other mesh.
//! 7. [`monitor`]: metrics, progress, traces.
//! 8. [`trainer`]: the loop around the engine, with evaluations, checkpoints and observers.
//! 9. [`estimate`]: the same engine run dry, to predict a step on machines that are not at hand.
//!
//! [`placement`] (where a tensor lies on the mesh, and what moves it elsewhere), [`tensor`] (candle tensors as slices) and
//! [`memory`] (bytes per thread and category) serve all of them.
//!
//! # Conventions
//!
//! Shapes: `B` sequences of a batch, `S` tokens of a sequence, `H` query heads, `H_kv` KV heads, `D` head dimension.
//! Unsuffixed names are global, `_local` is this rank's part. `rank` is relative to a named group, `global_rank` to the
//! world. A *shard* is a rank's piece of a logical tensor, a *partition* ZeRO's range of a flat buffer.
//!
//! candle runs element-wise ops on more than 64 K elements on a pool that all ranks share. The library's own ops do not
//! use it. Programs with candle ops in their layers should set `CANDLE_NUM_THREADS=1` before the first op; the library
//! never changes the environment.

pub mod checkpoint;
pub mod comm;
pub mod config;
mod config_file;
pub mod data;
pub mod engine;
pub mod estimate;
mod families;
mod fnv1a;
pub mod mesh;
pub mod model;
pub mod monitor;
pub mod nn;
pub mod objective;
mod optim;
pub mod pipeline;
pub mod placement;
pub mod regular_file;
mod safetensors_file;
pub mod sequence_parallel;
pub mod tensor_parallel;
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

/// The types of a training program: `use ulysses::prelude::*;`.
pub mod prelude {
    pub use crate::candle::{Device, Tensor};
    pub use crate::checkpoint::SavedCheckpoint;
    pub use crate::comm::{
        LaunchOptions, MeshGroups, ProcessGroup, ProcessGroupExt, RankContext, ReduceOp, launch,
    };
    pub use crate::config::Config;
    pub use crate::data::{Corpus, Dataset, Documents, GlobalBatch, MicroBatch, PackedSequences, Tokenizer};
    pub use crate::engine::{Engine, initialize};
    pub use crate::mesh::DeviceMesh;
    pub use crate::model::{HfModel, Model, ModelConfig, RandomWeights, WeightSource, preset};
    pub use crate::monitor::{EvalMetrics, Metrics, Progress, RunTotals};
    pub use crate::nn::{
        AutogradLayer, BlockContext, Embedding, Features, Init, Layer, LocalBatch, ParameterSpec,
    };
    pub use crate::objective::{AutogradObjective, CausalLm, LossTerms, Objective};
    pub use crate::trainer::{
        Job, Observer, ObserverError, Resume, StepEnd, TrainReport, Trainer, TrainerOptions, TrainingData,
    };
}

/// Runs the program of README.md as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
