//! What a rank does in a step, without doing it.
//!
//! [`schedule`] goes through a training step as [`Engine`](crate::engine::Engine) does and tells every
//! collective with its bytes, the arithmetic, and every buffer that is taken or freed. It holds no tensor and
//! knows no other rank, so the steps of a world of thousands cost a loop. Its files follow the code that they
//! mirror: `forward` and `backward` are the engine's passes over the layers, `loss_head` what is between them, `units` is
//! ZeRO's order of gathers and reductions, `layer` the decoder layer with its halves `heads` and `mlp`, `attention` the
//! exchange with the attention, `checkpoints` what layers leave for their backward pass, `ledger` the workspace, and `kernels`
//! has what the ops take beside their operands. `steady` counts micro batches that repeat, for sums over a step.
//! `tests/memory/schedule.rs` compares it event for event with what real ranks do, `tests/memory/plan.rs` its memory with the
//! allocator's count.
//!
//! A change of what the engine allocates or communicates is made here as well; the tests say where.

mod attention;
mod backward;
mod checkpoints;
mod dims;
mod event;
mod forward;
mod heads;
mod kernels;
mod layer;
mod ledger;
mod loss_head;
mod mlp;
mod steady;
mod units;

pub(super) use dims::chunk_plans;
pub use event::{Axis, Event, Moment, Pass, Piece, Purpose, Transfer, Work};
pub use ulysses_kernels::memory::Category;

use super::EngineError;
use crate::config::{Config, LossNormalization, ParameterGroup};
use crate::mesh::DeviceMesh;
use crate::model::{Layer, LlamaConfig, Model, ModelError, Weights};
use attention::SequenceParallel;
use checkpoints::{CheckpointStore, LayerTape};
use dims::{Dims, Places};
use kernels::Kernels;
use layer::LayerPass;
use ledger::{Away, Buffer, Ledger};
use std::iter::FusedIterator;
use steady::SteadyState;
use ulysses_kernels::device::DeviceKind;
use units::Units;

/// The events of one rank, in its order: first what it holds throughout, then a step.
///
/// A group of one rank moves nothing, so nothing is told of it. What happens in few steps only (the comparison
/// of replicas, checkpoints) is not told either.
///
/// # Errors
/// A config without `seq_len`, a model or a mesh that it does not fit, or a rank outside the mesh.
pub fn schedule(
    config: &Config,
    model: &LlamaConfig,
    mesh: &DeviceMesh,
    rank: usize,
) -> Result<Schedule, EngineError> {
    Schedule::new(config, model, mesh, rank, None)
}

/// The iterator of [`schedule`].
#[derive(Debug)]
pub struct Schedule {
    dims: Dims,
    ledger: Ledger,
    units: Units,
    attention: SequenceParallel,
    checkpoint_store: CheckpointStore,
    /// Which parameters of each layer are trained.
    trained: Vec<Weights<bool>>,
    trained_outside: TrainedOutside,
    num_layers: usize,
    is_tied: bool,
    /// Of so many layers one is recomputed.
    checkpointing_interval: Option<usize>,
    accumulation: usize,
    normalises_micro_batches: bool,
    next: Phase,
    steps_left: usize,
    micro_step: usize,
    /// Whether micro batches that repeat are counted instead of listed.
    is_counted: bool,
    /// The state in which the previous micro batch of the step began.
    before: Option<SteadyState>,
    tape: Tape,
}

/// Which of the matrices outside of the layers are trained.
#[derive(Debug, Clone, Copy)]
struct TrainedOutside {
    embedding: bool,
    projection: bool,
}

/// What comes next.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Phase {
    Begin,
    Forward { layer: usize },
    Head,
    Backward { layer: usize },
    Embedding,
    Step,
    End,
}

/// What the forward pass leaves for the backward pass.
#[derive(Debug, Default)]
struct Tape {
    /// Output of the last layer that was computed.
    hidden: Option<Buffer>,
    layers: Vec<LayerTape>,
    /// Gradient of the layer that comes next.
    gradient: Option<Buffer>,
    table_bytes: usize,
}

impl Schedule {
    /// As [`schedule`], of rows that are packed with documents of `document_len` tokens.
    ///
    /// # Errors
    /// As [`schedule`].
    pub fn new(
        config: &Config,
        model: &LlamaConfig,
        mesh: &DeviceMesh,
        rank: usize,
        document_len: Option<usize>,
    ) -> Result<Self, EngineError> {
        Self::on(DeviceKind::Cpu, config, model, mesh, rank, document_len)
    }

    /// As [`new`](Self::new), of ranks on such a device: what they offload waits elsewhere, their kernels need other memory,
    /// and GPUs exchange by way of packed copies.
    ///
    /// # Errors
    /// As [`schedule`].
    pub fn on(
        device: DeviceKind,
        config: &Config,
        model: &LlamaConfig,
        mesh: &DeviceMesh,
        rank: usize,
        document_len: Option<usize>,
    ) -> Result<Self, EngineError> {
        let places = Places::of(config, mesh, rank)?;
        let Places { dp, sp, .. } = places;
        for (axis, configured, actual) in
            [("dp", config.mesh.dp_size, dp.ranks), ("sp", config.mesh.sp_size, sp.ranks)]
        {
            if configured != actual {
                return Err(EngineError::MeshMismatch { axis, configured, actual });
            }
        }
        if !is_countable(config, model)? {
            return Err(EngineError::step_too_large(config));
        }
        let layers = Model::llama(model)?;
        let (dims, plans) = Dims::new(config, model, document_len, sp)?;
        let (dtype, threads) = (config.precision.dtype(), config.ulysses.threads_per_rank.unwrap_or(1));
        let kernels = Kernels { device, dtype, threads };
        let mut ledger = Ledger::new(dtype.size_in_bytes());
        ledger.hold(Category::Other, kernels.product_scratch_bytes() as i64);
        let is_trained = |name: &str| !ParameterGroup::is_frozen(&config.ulysses.parameter_groups, name);
        let (embedding, projection) = (layers.embedding.parameter(), layers.head.projection());
        let trained_outside = TrainedOutside {
            embedding: is_trained(&embedding.name),
            projection: is_trained(&projection.name),
        };
        let recompute = config.ulysses.activation_checkpointing;
        Ok(Self {
            units: Units::new((config, device), &layers, places, &mut ledger),
            attention: SequenceParallel::new(&plans, kernels),
            checkpoint_store: CheckpointStore::new(
                config.activation_checkpointing.cpu_checkpointing.then(|| Away::from(device)),
                &mut ledger,
            ),
            trained: trained_of_layers(&layers, model, is_trained)?,
            trained_outside,
            dims,
            ledger,
            num_layers: model.num_layers,
            is_tied: model.tie_word_embeddings,
            checkpointing_interval: recompute.then_some(config.ulysses.activation_checkpointing_interval),
            accumulation: config.gradient_accumulation_steps,
            normalises_micro_batches: config.loss_normalization == LossNormalization::MicroBatch,
            next: Phase::Begin,
            steps_left: 1,
            micro_step: 0,
            is_counted: false,
            before: None,
            tape: Tape::default(),
        })
    }

    /// Several steps instead of one: from the second on the workspace is warm.
    #[must_use]
    pub fn steps(mut self, steps: usize) -> Self {
        self.steps_left = steps;
        self
    }

    /// Lists each micro batch that repeats the one before it once, after an [`Event::MicroBatches`] with their number: a step of
    /// a billion micro batches takes a few times as many events as one.
    #[must_use]
    pub fn counted(mut self) -> Self {
        self.is_counted = true;
        self
    }

    fn head_unit(&self) -> usize {
        if self.is_tied { 0 } else { self.num_layers + 1 }
    }

    fn layer_pass(&mut self) -> LayerPass<'_> {
        LayerPass::new(&self.dims, &mut self.attention, &mut self.ledger)
    }

    /// Whether the gradients of this micro step are the last before an update.
    fn is_boundary(&self) -> bool {
        self.micro_step + 1 == self.accumulation
    }

    /// Tells the events of the next phase.
    fn advance(&mut self) {
        self.next = match self.next {
            Phase::Begin if self.steps_left == 0 => Phase::End,
            Phase::Begin => {
                self.count_micro_batch();
                self.begin_micro_batch()
            }
            Phase::Forward { layer } if layer == self.num_layers => Phase::Head,
            Phase::Forward { layer } => self.forward(layer),
            Phase::Head => self.head(),
            Phase::Backward { layer: 0 } => Phase::Embedding,
            Phase::Backward { layer } => self.backward(layer - 1),
            Phase::Embedding => self.embedding_backward(),
            Phase::Step => {
                self.ledger.push(Event::Begin(Moment::Update));
                self.units.step(&mut self.ledger);
                self.steps_left -= 1;
                Phase::Begin
            }
            Phase::End => Phase::End,
        };
    }
}

/// Whether 64 bits suffice for the tokens of a step, and for the bytes of a micro batch on one rank.
fn is_countable(config: &Config, model: &LlamaConfig) -> Result<bool, EngineError> {
    /// Tensors of each width that a layer has at once, at most, by the bytes of an element.
    const BYTES: f64 = 64.0;
    let seq_len = config.require_seq_len()?;
    let LlamaConfig { hidden_size, intermediate_size, vocab_size, num_heads, head_dim, num_layers, .. } =
        *model;
    let widths = [hidden_size, intermediate_size, vocab_size, num_heads * head_dim];
    let of_token = widths.into_iter().map(|width| width as f64).sum::<f64>() * (num_layers + 1) as f64;
    let bytes = BYTES * config.micro_batch_size as f64 * seq_len as f64 * of_token;
    Ok(config.train_batch_size.checked_mul(seq_len).is_some() && bytes < i64::MAX as f64)
}

/// For each layer, whether each of its parameters is trained.
fn trained_of_layers(
    model: &Model,
    config: &LlamaConfig,
    is_trained: impl Fn(&str) -> bool,
) -> Result<Vec<Weights<bool>>, ModelError> {
    let of_layer = |layer: &dyn Layer| {
        let views: Vec<bool> = layer.parameters().iter().map(|spec| is_trained(&spec.name)).collect();
        Weights::of(&views, config, layer.name(), views.len())
    };
    model.layers.iter().map(|layer| of_layer(&**layer)).collect()
}

impl Iterator for Schedule {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.ledger.next_event() {
                return Some(event);
            }
            if self.next == Phase::End {
                return None;
            }
            self.advance();
        }
    }
}

impl FusedIterator for Schedule {}
