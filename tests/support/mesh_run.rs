//! Runs of the library on a mesh, with the weights and batches of the reference.

use super::compare::{assert_all_close, assert_scalar_close};
use super::reference::{
    Adagrad, AdagradConfig, AdamW, AdamWConfig, Batch, Lamb, LambConfig, Lion, LionConfig, Optimizer,
    ReferenceConfig, Sgd, Tensors, Training, Weights, train,
};
pub use super::reference_model::llama_config;
use super::sample::axes;
use anyhow::{Context, Result};
use candle_core::{DType, Tensor};
use serde_json::json;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use ulysses::comm::TrainingGroups;
use ulysses::comm::thread::{LaunchError, LaunchOptions};
use ulysses::config::Config;
use ulysses::data::{GlobalBatch, MicroBatch};
use ulysses::engine::{BatchOutcome, Engine};
use ulysses::kernels::attention::{AttentionCompute, AttentionKernels, FlashAttention};
use ulysses::model::{DecoderLayer, Model, ModelConfig, ModelError, WeightSource};
use ulysses::nn::{Layer, ParameterSpec};

/// One way to distribute a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    pub dp: usize,
    pub sp: usize,
    pub stage: u8,
    pub accumulation: usize,
    /// Number of dp ranks that ZeRO partitions over, if not all (HSDP).
    pub shard_size: Option<usize>,
    /// Whether ZeRO partitions over sp too.
    pub spans_sp: bool,
    /// Ranks of the ring within sp.
    pub ring: usize,
    /// Tensor-parallel ranks.
    pub tp: usize,
    /// Stages of the pipeline.
    pub pp: usize,
}

impl Layout {
    /// Its values on the axes of a test matrix.
    pub fn axes(&self) -> Vec<String> {
        let Self { dp, sp, stage, accumulation, shard_size, spans_sp, ring, tp, pp } = self;
        axes![dp, sp, stage, accumulation, shard_size, spans_sp, ring, tp, pp]
    }
}

/// Returns a dp × sp layout at a ZeRO stage, without accumulation.
pub const fn layout(dp: usize, sp: usize, stage: u8) -> Layout {
    Layout { dp, sp, stage, accumulation: 1, shard_size: None, spans_sp: false, ring: 1, tp: 1, pp: 1 }
}

/// An optimizer that both reference and library implement.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rule {
    Sgd { lr: f64 },
    AdamW(AdamWConfig),
    Lion(LionConfig),
    Adagrad(AdagradConfig),
    Lamb(LambConfig),
}

impl Rule {
    /// Returns the reference's optimizer.
    pub fn reference(self) -> Box<dyn Optimizer> {
        match self {
            Self::Sgd { lr } => Box::new(Sgd::new(lr, 0.0, 0.0)),
            Self::AdamW(config) => Box::new(AdamW::new(config)),
            Self::Lion(config) => Box::new(Lion::new(config)),
            Self::Adagrad(config) => Box::new(Adagrad::new(config)),
            Self::Lamb(config) => Box::new(Lamb::new(config)),
        }
    }

    /// Returns the `optimizer` section of a config.
    fn json(self) -> serde_json::Value {
        match self {
            Self::Sgd { lr } => json!({ "type": "SGD", "params": { "lr": lr } }),
            Self::AdamW(AdamWConfig { lr, betas, eps, weight_decay }) => {
                let params = json!({ "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay });
                json!({ "type": "AdamW", "params": params })
            }
            Self::Lion(LionConfig { lr, betas, weight_decay }) => {
                json!({ "type": "Lion", "params": { "lr": lr, "betas": betas, "weight_decay": weight_decay } })
            }
            Self::Adagrad(AdagradConfig { lr, lr_decay, eps, weight_decay, initial_accumulator_value }) => {
                let params = json!({
                    "lr": lr, "lr_decay": lr_decay, "eps": eps, "weight_decay": weight_decay,
                    "initial_accumulator_value": initial_accumulator_value,
                });
                json!({ "type": "Adagrad", "params": params })
            }
            Self::Lamb(LambConfig { lr, betas, eps, weight_decay, coefficients: (min, max) }) => {
                let params = json!({
                    "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                    "min_coeff": min, "max_coeff": max,
                });
                json!({ "type": "Lamb", "params": params })
            }
        }
    }
}

/// A model, a batch, and training options.
#[derive(Clone)]
pub struct Problem {
    pub config: ReferenceConfig,
    pub weights: Weights,
    pub batch: Batch,
    pub rule: Rule,
    pub clip: Option<f64>,
    pub steps: usize,
    /// Additional keys for the JSON config.
    pub extra: serde_json::Value,
    /// Creates the model: [`llama`], unless a test uses its own layers.
    pub model: fn(&ModelConfig) -> Model,
    pub threads_per_rank: usize,
}

/// Faulty replacements of parts of the library, which the suite must detect.
pub struct Doubles {
    pub groups: fn(TrainingGroups) -> TrainingGroups,
    pub attention: Arc<dyn AttentionCompute>,
    pub batch: fn(Batch, Layout) -> Batch,
}

impl Default for Doubles {
    fn default() -> Self {
        Self {
            groups: |groups| groups,
            attention: Arc::new(FlashAttention::new(AttentionKernels::Auto)),
            batch: |batch, _| batch,
        }
    }
}

impl Problem {
    pub fn new(config: ReferenceConfig, weights: Weights, batch: Batch) -> Self {
        let rule = Rule::Sgd { lr: 0.1 };
        let (clip, steps, extra) = (None, 3, json!({}));
        let model = llama;
        Self { config, weights, batch, rule, clip, steps, extra, model, threads_per_rank: 1 }
    }

    /// Returns the outcome of the independent reference.
    pub fn reference(&self) -> Result<Training> {
        self.reference_with(&mut *self.rule.reference())
    }

    /// Returns the outcome of the reference with another optimizer.
    pub fn reference_with(&self, optimizer: &mut dyn Optimizer) -> Result<Training> {
        let batches = vec![self.batch.clone(); self.steps];
        train(&self.config, &self.weights, &batches, optimizer, self.clip, self.steps)
    }

    /// Returns the outcome of the library, which must be the same on every rank.
    pub fn run(&self, layout: Layout) -> Result<BatchOutcome> {
        let mut outcomes = self.run_on_all_ranks(layout, &Doubles::default(), true)?.into_iter();
        let first = outcomes.next().context("a mesh has a rank")?;
        for other in outcomes {
            anyhow::ensure!(bits(&first)? == bits(&other)?, "ranks disagree on {layout:?}");
        }
        Ok(first)
    }

    /// Returns rank 0's outcome with faulty parts. Ranks are not compared, so only the values can reveal the fault.
    pub fn run_with(&self, layout: Layout, doubles: &Doubles) -> Result<BatchOutcome> {
        self.run_on_all_ranks(layout, doubles, false)?.into_iter().next().context("a mesh has a rank")
    }

    fn run_on_all_ranks(
        &self,
        layout: Layout,
        doubles: &Doubles,
        compare_replicas: bool,
    ) -> Result<Vec<BatchOutcome>> {
        let batch = (doubles.batch)(self.batch.clone(), layout);
        let mut global = global_batch(&batch)?;
        global.pad_to_multiple(layout.dp * layout.accumulation)?;
        let config = self.json_config(layout, global.batch_size())?;
        Ok(on_mesh(&config, &self.launch_options(), |_, groups| {
            let groups = (doubles.groups)(groups);
            let mut engine = self.engine(&config, groups, doubles.attention.clone())?;
            let outcome = engine.run_global_batch(&global, self.steps)?;
            if compare_replicas {
                engine.check_replicas()?;
            }
            Ok(outcome)
        })?)
    }

    /// Creates one rank's engine with the reference's weights.
    pub fn engine(
        &self,
        config: &Config,
        groups: TrainingGroups,
        attention: Arc<dyn AttentionCompute>,
    ) -> Result<Engine> {
        let model = (self.model)(&llama_config(&self.config));
        Ok(Engine::with_attention(
            model,
            &ReferenceWeights(&self.weights),
            config,
            groups,
            attention,
            &super::device::test_device(),
        )?)
    }

    fn launch_options(&self) -> LaunchOptions {
        LaunchOptions { threads_per_rank: self.threads_per_rank, ..LaunchOptions::default() }
    }

    pub fn json_config(&self, layout: Layout, rows: usize) -> Result<Config> {
        let Layout { dp, sp, stage, accumulation, shard_size, spans_sp, ring, tp, pp } = layout;
        let mut value = json!({
            "train_batch_size": rows,
            "gradient_accumulation_steps": accumulation,
            "mesh_param": [dp, sp],
            "tensor_parallel_size": tp,
            "pipeline_parallel_size": pp,
            "zero_optimization": { "stage": stage, "mics_shard_size": shard_size.map_or(-1, |size| size as i64) },
            "optimizer": self.rule.json(),
            "gradient_clipping": self.clip.unwrap_or(0.0),
        });
        for (key, extra) in self.extra.as_object().context("extra keys are an object")? {
            value[key] = extra.clone();
        }
        if ring > 1 {
            value["ulysses"]["ring_size"] = json!(ring);
        }
        if spans_sp {
            value["ulysses"]["zero_partition_axes"] = json!(["dp", "sp"]);
        }
        Ok(Config::from_json_str(&value.to_string(), "test.json")?)
    }
}

/// Runs `work` on every rank of the config's mesh, and returns the results in rank order.
pub fn on_mesh<T: Send>(
    config: &Config,
    options: &LaunchOptions,
    work: impl Fn(usize, TrainingGroups) -> Result<T> + Sync,
) -> Result<Vec<T>, LaunchError> {
    let mesh = config.placed_mesh(None).expect("the mesh of a config").mesh;
    super::device::launch(&mesh, options, |rank, groups| {
        let zero_groups = TrainingGroups::new(&groups, config.zero_shards())?;
        work(rank, zero_groups.with_ring(&groups, config.seq_sharding().ring_size)?)
    })
}

/// Returns a rank's shards: micro step `a` of dp rank `d` starts at sequence `(a·dp + d)·micro_batch`.
pub fn micro_batches(global: &GlobalBatch, engine: &Engine) -> Result<Vec<MicroBatch>> {
    let (config, dp, sp) = (engine.config(), engine.dp_group(), engine.sp_group());
    let rows = config.micro_batch_size;
    let shard = |step: usize| {
        let first = (step * config.mesh.dp_size + dp.rank()) * rows;
        Ok(global.micro_batch(first..first + rows, config.seq_sharding(), sp.rank())?)
    };
    (0..config.gradient_accumulation_steps).map(shard).collect()
}

/// Asserts that loss, norms, gradients and final parameters match the reference.
#[track_caller]
pub fn assert_matches(outcome: &BatchOutcome, expected: &Training, tolerance: f64, label: &str) {
    let first = &expected.steps[0];
    assert_scalar_close(&format!("{label}: loss"), outcome.loss, first.loss, tolerance);
    let gradients = by_name(&outcome.gradients);
    assert_all_close(&format!("{label}: gradient"), &gradients, &first.grads, tolerance);
    for (index, (report, step)) in outcome.reports.iter().zip(&expected.steps).enumerate() {
        let label = format!("{label}: step {index}");
        assert_scalar_close(&format!("{label}: loss"), report.loss, step.loss, tolerance);
        assert_scalar_close(&format!("{label}: norm"), report.grad_norm, step.grad_norm, tolerance);
    }
    assert_eq!(outcome.reports.len(), expected.steps.len(), "{label}: steps");
    let parameters = by_name(&outcome.parameters);
    let expected: Tensors = super::reference::as_tensors(&expected.weights);
    assert_all_close(&format!("{label}: parameter"), &parameters, &expected, tolerance);
}

/// Returns whether [`assert_matches`] would pass.
pub fn matches(outcome: &BatchOutcome, expected: &Training, tolerance: f64) -> bool {
    let check = || assert_matches(outcome, expected, tolerance, "double");
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(check)).is_ok()
}

pub fn by_name(tensors: &[(String, Tensor)]) -> BTreeMap<String, Tensor> {
    tensors.iter().cloned().collect()
}

/// Returns the bits of every value of an outcome.
pub fn bits(outcome: &BatchOutcome) -> Result<Vec<u64>> {
    let reported = outcome.reports.iter().flat_map(|report| [report.loss, report.grad_norm]);
    let mut bits: Vec<u64> = std::iter::once(outcome.loss).chain(reported).map(f64::to_bits).collect();
    let tensors = outcome.gradients.iter().chain(&outcome.parameters).map(|(_, tensor)| tensor);
    for tensor in std::iter::once(&outcome.logits).chain(tensors) {
        let values: Vec<f32> = tensor.flatten_all()?.to_vec1()?;
        bits.extend(values.into_iter().map(|value| u64::from(value.to_bits())));
    }
    Ok(bits)
}

pub fn global_batch(batch: &Batch) -> Result<GlobalBatch> {
    let (rows, seq_len) = (batch.num_rows(), batch.input_ids[0].len());
    Ok(GlobalBatch::new(
        rows,
        seq_len,
        batch.input_ids.concat(),
        Some(batch.position_ids.concat()),
        Some(batch.labels.concat()),
    )?)
}

/// Creates the library's model.
pub fn llama(config: &ModelConfig) -> Model {
    // No family of dense models has sinks: they are an option of the module.
    let plain = config.clone().with_attention(|layer| layer.sinks = false);
    let mut model = Model::new(&plain).expect("a valid description");
    if plain != *config {
        let layer = |index| -> Box<dyn Layer> { Box::new(DecoderLayer::new(config, index)) };
        model.layers = (0..config.num_layers()).map(layer).collect();
    }
    model
}

/// A weight source with the reference's weights, which are f32 values.
pub struct ReferenceWeights<'a>(pub &'a Weights);

impl WeightSource for ReferenceWeights<'_> {
    fn read(&self, spec: &ParameterSpec, range: Range<usize>, out: &mut [f32]) -> Result<(), ModelError> {
        let weight = self.0.get(&spec.name).expect("library and reference agree on names");
        assert_eq!(weight.dims(), spec.shape, "{}", spec.name);
        let values: Vec<f32> = weight.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?;
        out.copy_from_slice(&values[range]);
        Ok(())
    }
}
