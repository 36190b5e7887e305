//! What a rank does in a step, without doing it.
//!
//! [`schedule`] goes through a training step as [`Engine`](crate::engine::Engine) does and tells every
//! collective with its bytes, the arithmetic, and every buffer that is taken or freed. It holds no tensor and
//! knows no other rank, so the steps of a world of thousands cost a loop. Its files follow the code that they
//! mirror: `units` is ZeRO's order of gathers and reductions, `layer` the decoder layer with its halves `heads` and
//! `mlp`, `attention` the exchange with the attention, `checkpoints` what layers leave for their backward pass,
//! `ledger` the workspace. `tests/schedule.rs` compares it event for event with
//! what real ranks do, `tests/plan_memory.rs` its memory with the allocator's count.
//!
//! A change of what the engine allocates or communicates is made here as well; the tests say where.

mod attention;
mod checkpoints;
mod dims;
mod event;
mod heads;
mod layer;
mod ledger;
mod mlp;
mod units;

pub use crate::memory::Category;
pub(super) use dims::chunk_plans;
pub use event::{Axis, Event, Moment, Pass, Piece, Purpose, Transfer, Work};

use super::EngineError;
use crate::comm::CollectiveOp;
use crate::config::{Config, LossNormalization, ParameterGroup};
use crate::device::DeviceKind;
use crate::mesh::DeviceMesh;
use crate::model::{Layer, LlamaConfig, Model, ModelError, Weights};
use attention::SequenceParallel;
use checkpoints::{CheckpointStore, LayerTape};
use dims::{Dims, Places};
use layer::LayerPass;
use ledger::{Away, Buffer, ElementType, Ledger};
use std::iter::FusedIterator;
use units::Units;

/// Working memory that the matrix product keeps for each thread: as much as a core's second-level cache.
const PRODUCT_SCRATCH_BYTES: usize = 2 << 20;

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

    /// As [`new`](Self::new), of ranks on such a device: what they offload waits elsewhere.
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
        for (axis, configured, actual) in [("dp", config.dp_size, dp.ranks), ("sp", config.sp_size, sp.ranks)]
        {
            if configured != actual {
                return Err(EngineError::MeshMismatch { axis, configured, actual });
            }
        }
        let layers = Model::llama(model)?;
        let (dims, plans) = Dims::new(config, model, document_len, sp)?;
        let dtype = config.precision.dtype();
        let element_bytes = dtype.size_in_bytes();
        let threads = config.threads_per_rank.unwrap_or(1);
        let mut ledger = Ledger::new(element_bytes);
        ledger.hold(Category::Other, (threads * PRODUCT_SCRATCH_BYTES) as i64);
        let is_trained = |name: &str| !ParameterGroup::is_frozen(&config.parameter_groups, name);
        let (embedding, projection) = (layers.embedding.parameter(), layers.head.projection());
        let trained_outside = TrainedOutside {
            embedding: is_trained(&embedding.name),
            projection: is_trained(&projection.name),
        };
        let recompute = config.activation_checkpointing;
        Ok(Self {
            units: Units::new((config, device), &layers, places, &mut ledger),
            attention: SequenceParallel::new(&plans, dtype, threads),
            checkpoint_store: CheckpointStore::new(
                config.memory.offload_checkpoints.then(|| Away::from(device)),
                &mut ledger,
            ),
            trained: trained_of_layers(&layers, model, is_trained)?,
            trained_outside,
            dims,
            ledger,
            num_layers: model.num_layers,
            is_tied: model.tie_word_embeddings,
            checkpointing_interval: recompute.then_some(config.memory.checkpointing_interval),
            accumulation: config.gradient_accumulation_steps,
            normalises_micro_batches: config.loss_normalization == LossNormalization::MicroBatch,
            next: Phase::Begin,
            steps_left: 1,
            micro_step: 0,
            tape: Tape::default(),
        })
    }

    /// Several steps instead of one: from the second on the workspace is warm.
    #[must_use]
    pub fn steps(mut self, steps: usize) -> Self {
        self.steps_left = steps;
        self
    }

    fn head_unit(&self) -> usize {
        if self.is_tied { 0 } else { self.num_layers + 1 }
    }

    /// The unit that the forward pass needs after that of `layer`.
    fn unit_after(&self, layer: usize) -> usize {
        if layer + 1 < self.num_layers { layer + 2 } else { self.head_unit() }
    }

    fn layer_pass(&mut self) -> LayerPass<'_> {
        LayerPass::new(&self.dims, &mut self.attention, &mut self.ledger)
    }

    /// Whether a layer keeps a checkpoint only.
    fn is_recomputed(&self, layer: usize) -> bool {
        self.checkpointing_interval.is_some_and(|interval| layer.is_multiple_of(interval))
    }

    /// Tells the events of the next phase.
    fn advance(&mut self) {
        self.next = match self.next {
            Phase::Begin if self.steps_left == 0 => Phase::End,
            Phase::Begin => self.begin_micro_batch(),
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

    /// Tokens, their tables, and the embedding.
    fn begin_micro_batch(&mut self) -> Phase {
        self.ledger.push(Event::Begin(Moment::Embedding));
        let Dims { hidden, head_dim, .. } = self.dims;
        let tokens = self.dims.tokens();
        // The batch: ids, labels and positions. The context: positions and the rotary tables.
        let batch = tokens * (size_of::<u32>() + size_of::<i64>() + size_of::<u32>());
        let rope = tokens * head_dim * size_of::<f32>();
        let tables = batch + tokens * size_of::<u32>() + self.dims.geometry_bytes() + rope;
        self.ledger.hold(Category::Other, tables as i64);
        self.tape.table_bytes = tables;
        self.attention.begin_micro_batch();
        self.units.gather(0, &mut self.ledger);
        let next = if self.num_layers == 0 { self.head_unit() } else { 1 };
        self.units.prefetch(next, &mut self.ledger);
        if next == 1 {
            self.units.read_ahead(self.unit_after(0), &mut self.ledger);
        }
        let x = self.layer_pass().take(tokens * hidden);
        self.ledger.touch(2 * tokens * hidden * self.ledger.bytes_of(ElementType::Stored));
        self.units.release(0, &mut self.ledger);
        self.tape.hidden = Some(x);
        Phase::Forward { layer: 0 }
    }

    fn forward(&mut self, layer: usize) -> Phase {
        self.ledger.push(Event::Begin(Moment::Forward { layer }));
        self.units.gather(layer + 1, &mut self.ledger);
        self.units.prefetch(self.unit_after(layer), &mut self.ledger);
        if layer + 1 < self.num_layers {
            self.units.read_ahead(self.unit_after(layer + 1), &mut self.ledger);
        }
        let x =
            self.tape.hidden.take().unwrap_or_else(|| unreachable!("the embedding or a layer was before"));
        let (y, left) = if self.is_recomputed(layer) {
            let (y, checkpoint) = self.layer_pass().forward_checkpointed(x);
            (y, self.checkpoint_store.keep(checkpoint, &mut self.ledger))
        } else {
            let (y, saved) = self.layer_pass().forward();
            (y, LayerTape::State(x, saved))
        };
        self.units.release(layer + 1, &mut self.ledger);
        self.tape.hidden = Some(y);
        self.tape.layers.push(left);
        Phase::Forward { layer: layer + 1 }
    }

    /// The head's forward, the loss, and the head's backward.
    fn head(&mut self) -> Phase {
        self.ledger.push(Event::Begin(Moment::Head));
        if self.checkpoint_store.is_used() {
            self.ledger.trim();
        }
        let Dims { hidden, vocab, loss_tile, .. } = self.dims;
        let (unit, tokens) = (self.head_unit(), self.dims.tokens());
        let (x, weight, tile) = (tokens * hidden, vocab * hidden, loss_tile * vocab);
        // Softmax and its gradient read and write them.
        let logits_bytes = 2 * tokens * vocab * size_of::<f32>();
        self.units.gather(unit, &mut self.ledger);
        let mut pass = self.layer_pass();
        let (normed, rstd) = (pass.normalise(pass.dims.all()), pass.take_f32(tokens));
        let lse = pass.take_f32(tokens);
        let logits = pass.take_f32(tile);
        let wide_x = pass.take_if_narrow(loss_tile * hidden);
        pass.ledger.operate(&[weight], 0);
        pass.ledger.touch(logits_bytes);
        pass.give_all([Some(logits), wide_x]);
        pass.count(pass.dims.all(), hidden, vocab);
        pass.compute(Piece::Head, Pass::Forward);
        pass.ledger.give(normed);

        let ids_and_labels = tokens * (size_of::<u32>() + size_of::<i64>());
        self.tape.table_bytes += ids_and_labels;
        self.ledger.hold(Category::Other, ids_and_labels as i64);
        if self.normalises_micro_batches {
            let agree = (CollectiveOp::AllReduce, Axis::Sp, Purpose::Agree);
            self.units.transfer(&mut self.ledger, agree, (1, size_of::<f64>()));
        }
        self.checkpoint_store.read_ahead(self.tape.layers.last(), &mut self.ledger);
        self.units.gradients(unit, &mut self.ledger);
        if self.num_layers > 0 {
            self.units.prefetch(self.num_layers, &mut self.ledger);
        }
        if self.num_layers > 1 {
            self.units.read_ahead(self.num_layers - 1, &mut self.ledger);
        }
        let is_trained = self.trained_outside.projection;
        let mut pass = self.layer_pass();
        let (gradient, rstd_again) = (pass.normalise(pass.dims.all()), pass.take_f32(tokens));
        let dnormed = pass.take(x);
        let packed = if is_trained { loss_tile.min(512) * vocab * size_of::<f32>() } else { 0 };
        let logits = pass.take_f32(tile);
        let [wide_x, wide_dx] = [(); 2].map(|()| pass.take_if_narrow(loss_tile * hidden));
        pass.ledger.operate(&[weight], packed);
        pass.ledger.touch(logits_bytes);
        pass.give_all([Some(logits), wide_x, wide_dx]);
        pass.backward_norm(pass.dims.all());
        (0..1 + usize::from(is_trained)).for_each(|_| pass.count(pass.dims.all(), hidden, vocab));
        pass.compute(Piece::Head, Pass::Backward);
        [rstd, rstd_again, lse, dnormed].into_iter().for_each(|buffer| pass.ledger.give(buffer));
        self.units.release(unit, &mut self.ledger);
        if !self.is_tied {
            self.units.reduce(unit, self.is_boundary(), &mut self.ledger);
        }
        self.tape.hidden.take().into_iter().for_each(|hidden| self.ledger.give(hidden));
        self.tape.gradient = Some(gradient);
        Phase::Backward { layer: self.num_layers }
    }

    fn backward(&mut self, layer: usize) -> Phase {
        self.ledger.push(Event::Begin(Moment::Backward { layer }));
        let unit = layer + 1;
        let left = self.tape.layers.pop();
        self.checkpoint_store.read_ahead(self.tape.layers.last(), &mut self.ledger);
        self.units.gather(unit, &mut self.ledger);
        self.units.gradients(unit, &mut self.ledger);
        if layer > 0 {
            self.units.prefetch(unit - 1, &mut self.ledger);
        }
        if layer > 1 {
            self.units.read_ahead(unit - 2, &mut self.ledger);
        }
        let trained = self.trained[layer];
        match left {
            None => unreachable!("every layer's forward leaves something"),
            Some(LayerTape::State(x, saved)) => {
                self.layer_pass().backward(saved, &trained);
                self.ledger.give(x);
            }
            Some(LayerTape::Checkpoint(checkpoint)) => {
                self.layer_pass().backward_checkpointed(checkpoint, &trained);
            }
            Some(LayerTape::Offloaded(stored)) => {
                let checkpoint = self.checkpoint_store.load(stored, &mut self.ledger);
                self.layer_pass().backward_checkpointed(checkpoint, &trained);
            }
        }
        self.units.release(unit, &mut self.ledger);
        self.units.reduce(unit, self.is_boundary(), &mut self.ledger);
        Phase::Backward { layer }
    }

    fn embedding_backward(&mut self) -> Phase {
        self.ledger.push(Event::Begin(Moment::EmbeddingBackward));
        self.units.gradients(0, &mut self.ledger);
        if self.trained_outside.embedding {
            let x = self.dims.tokens() * self.dims.hidden;
            // Read, and added to rows of the f32 gradient.
            self.ledger.touch(x * (self.ledger.bytes_of(ElementType::Stored) + 2 * size_of::<f32>()));
        }
        self.tape.gradient.take().into_iter().for_each(|gradient| self.ledger.give(gradient));
        self.units.reduce(0, self.is_boundary(), &mut self.ledger);
        self.units.finish_reductions(&mut self.ledger);
        let retained = self.attention.retained_bytes(&self.dims);
        let freed = std::mem::take(&mut self.tape.table_bytes) - retained;
        self.ledger.hold(Category::Other, -(freed as i64));
        self.micro_step += 1;
        if self.micro_step < self.accumulation {
            return Phase::Begin;
        }
        self.micro_step = 0;
        Phase::Step
    }

    /// Whether the gradients of this micro step are the last before an update.
    fn is_boundary(&self) -> bool {
        self.micro_step + 1 == self.accumulation
    }
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
