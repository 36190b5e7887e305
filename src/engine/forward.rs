//! The forward pass.

use super::blocks::SharedAttention;
use super::engine::layer_unit;
use super::local_tokens::{LocalTokens, tokens_of_rows};
use super::offload::OffloadedTensor;
use super::step_part::StepPart;
use super::{Engine, EngineError};
use crate::config::UlyssesConfig;
use crate::data::{FlexibleStep, MicroBatch};
use crate::mesh::{TokenRanges, shard_range};
use crate::nn::{LayerContext, LocalBatch, Saved, Tiling, TokenLayout};
use candle_core::Tensor;
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use ulysses_kernels::device::dry;
use ulysses_kernels::lm_head_loss::{LossSum, Losses};

/// The loss of a micro batch on this rank, with the saved state for its backward pass.
#[must_use]
pub struct Loss {
    pub(super) local: Losses,
    /// The tapes of the chunks of layers, the first one first.
    pub(super) tapes: Vec<Tape>,
}

/// Tensors that the forward pass saves for the backward pass.
pub(super) struct Tape {
    /// The chunk of layers.
    pub(super) chunk: usize,
    pub(super) ctx: LayerContext,
    /// Steps done before it, which tells which parameters it used.
    pub(super) step: u64,
    pub(super) batch_hash: u64,
    /// Tokens of the micro batch, over the sp group.
    pub(super) tokens: u64,
    pub(super) flexible: Option<FlexibleStep>,
    pub(super) input: Saved,
    /// One tape per layer.
    pub(super) layers: Vec<LayerTape>,
    /// Output of the last layer.
    pub(super) hidden: Tensor,
    pub(super) objective: Saved,
}

/// Tensors that the forward pass of a layer saves.
pub(super) enum LayerTape {
    /// The layer's saved state, and its input, which may be part of it.
    State(Tensor, Saved),
    /// Tensors from which the layer is recomputed.
    Checkpoint(Vec<Tensor>),
    /// A checkpoint that is offloaded.
    Offloaded(Vec<OffloadedTensor>),
}

impl LayerTape {
    fn bytes(&self) -> usize {
        match self {
            Self::State(_, saved) => saved.bytes(),
            Self::Checkpoint(tensors) => tensors.iter().map(ulysses_kernels::tensor::bytes).sum(),
            Self::Offloaded(_) => 0,
        }
    }
}

impl Loss {
    /// Sum of the losses of this rank's tokens. Synchronizes with a GPU.
    ///
    /// # Errors
    /// A GPU that failed.
    pub fn sum(&self) -> Result<f64, EngineError> {
        Ok(self.local.sum()?.sum)
    }

    /// Number of this rank's tokens that have a label.
    pub fn valid_tokens(&self) -> u64 {
        self.local.valid_tokens()
    }

    /// Bytes of the tensors saved for the backward pass; a tensor saved twice counts twice.
    pub fn saved_bytes(&self) -> usize {
        let of_layers = |tape: &Tape| tape.layers.iter().map(LayerTape::bytes).sum::<usize>();
        self.tapes.iter().map(|tape| of_layers(tape) + tape.objective.bytes()).sum()
    }
}

impl Engine {
    /// Runs the model on this rank's shard of a micro batch. Collective.
    ///
    /// # Errors
    /// A batch that does not fit the config, a token or label outside the vocabulary, or failed
    /// communication.
    pub fn forward(&mut self, batch: &MicroBatch) -> Result<Loss, EngineError> {
        let mut loss = self.forward_chunk(batch, 0)?;
        for chunk in 1..self.num_chunks() {
            let Loss { local, tapes } = self.forward_chunk(batch, chunk)?;
            loss.local = local;
            loss.tapes.extend(tapes);
        }
        Ok(loss)
    }

    /// Runs a chunk of layers: a stage of the pipeline.
    pub(crate) fn forward_chunk(&mut self, batch: &MicroBatch, chunk: usize) -> Result<Loss, EngineError> {
        self.check_usable()?;
        self.begin_part(StepPart::Embedding);
        // A loss that was dropped without a backward pass leaves its head gathered.
        self.zero.release_all();
        self.check_batch(batch)?;
        let ctx = self.context(batch)?.with_saved_attention_output(self.config.saves_attention_output());
        let mut layers = Vec::with_capacity(self.layers_of(chunk).len());
        let local = self.local(batch);
        let local = local.view();
        let (hidden, input) = self.run_layers(chunk, &local, &ctx, |engine, index, params, x| {
            let layer = &engine.model.layers[index];
            let (y, left) = if engine.is_recomputed(index) {
                let (y, checkpoint) = layer.forward_checkpointed(params, x, &ctx)?;
                (y, engine.keep(checkpoint)?)
            } else {
                let (y, saved) = layer.forward(params, &x, &ctx)?;
                (y, LayerTape::State(x, saved))
            };
            layers.push(left);
            Ok(y)
        })?;
        self.begin_part(StepPart::Head);
        let _head = tracing::trace_span!("head").entered();
        if self.activation_offload.is_some() {
            // Free the layers' working memory, which the head cannot use.
            self.workspace.trim();
        }
        let params = self.objective_parameters(chunk)?;
        let own = ctx.of_own_tokens();
        let (losses, objective) = self.objective_of(chunk).0.forward(&params, &hidden, &local, &own)?;
        self.flush_messages()?;
        let (step, batch_hash, flexible) = (self.attempted_steps, batch.batch_hash, batch.flexible);
        let tokens = (batch.batch_size * batch.seq_len) as u64;
        Ok(Loss {
            local: losses,
            tapes: vec![Tape {
                chunk,
                ctx,
                step,
                batch_hash,
                tokens,
                flexible,
                input,
                layers,
                hidden,
                objective,
            }],
        })
    }

    /// The parameters of a chunk's objective. They stay gathered until the release of their unit.
    fn objective_parameters(&mut self, chunk: usize) -> Result<Vec<Tensor>, EngineError> {
        let Some(unit) = self.objective_of(chunk).1 else { return Ok(Vec::new()) };
        let params = self.zero.parameters(unit)?;
        Ok(self.model.objective_views(params))
    }

    /// Checks the size of a micro batch. With flexible sequence parallelism, it is one row; all ranks must agree on the step
    /// before its first micro batch, or they would wait for each other in different groups.
    fn check_batch(&mut self, batch: &MicroBatch) -> Result<(), EngineError> {
        let (got, mut expected) = (batch.batch_size, self.config.micro_batch_size);
        let mut what = "its number of sequences (train_micro_batch_size_per_gpu)";
        if let Some(step) = batch.flexible {
            (what, expected) = ("its number of rows (ulysses.flexible_sp)", 1);
            if self.accumulation.is_new() {
                let numbers = [
                    ("the assignment of documents to ranks (ulysses.flexible_sp)", batch.batch_hash),
                    ("the number of micro steps", step.micro_steps as u64),
                ];
                self.check_agreement(&numbers)?;
            }
            // Rows have many lengths: cached tensors of other lengths would add up.
            self.workspace.clear();
        }
        if got == expected { Ok(()) } else { Err(EngineError::MicroBatch { what, got, expected }) }
    }

    /// Returns the summed token losses and the number of valid tokens of a held-out batch, over the whole
    /// mesh and without gradients; their quotient is the loss. Collective. Each dp rank passes sequences of
    /// its own, any number of them.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn evaluate(&mut self, batch: &MicroBatch) -> Result<LossSum, EngineError> {
        self.check_usable()?;
        let sent = self.bytes_sent();
        self.check_sequences(batch.batch_hash)?;
        let ctx = self.context(batch)?;
        let tokens = self.local(batch);
        let tokens = tokens.view();
        let mut losses = Losses::default();
        for chunk in 0..self.num_chunks() {
            let hidden = self.run_without_tape(chunk, &tokens, &ctx)?;
            let params = self.objective_parameters(chunk)?;
            losses = self.objective_of(chunk).0.evaluate(&params, hidden, &tokens, &ctx.of_own_tokens())?;
            self.flush_messages()?;
        }
        self.zero.release(self.objective_unit());
        let local = losses.sum()?;
        let [sum, valid_tokens] = self.sum_over_mesh([local.sum, local.valid_tokens as f64])?;
        self.settle_all_messages()?;
        // The bytes sent by an evaluation do not count toward a step's metrics.
        self.reported_bytes += self.bytes_sent() - sent;
        Ok(LossSum { sum, valid_tokens: valid_tokens as u64 })
    }

    /// Returns the model's output for this rank's tokens, for checks: the logits of a language model, `[batch, seq_local,
    /// vocab]`, of which training never holds all. Collective.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn logits(&mut self, batch: &MicroBatch) -> Result<Tensor, EngineError> {
        self.check_usable()?;
        let ctx = self.context(batch)?;
        let (mut last, local) = (None, self.local(batch));
        for chunk in 0..self.num_chunks() {
            let hidden = self.run_without_tape(chunk, &local.view(), &ctx)?;
            let params = self.objective_parameters(chunk)?;
            let output = self.objective_of(chunk).0.output(&params, &hidden, &ctx.of_own_tokens())?;
            self.flush_messages()?;
            last = Some((output, hidden));
        }
        let Some((logits, hidden)) = last else { unreachable!("a rank has a stage") };
        self.zero.release(self.objective_unit());
        let logits = self.broadcast_last_stage(logits)?;
        self.settle_all_messages()?;
        // Recycled once; another stage's message is, when it has been received.
        self.workspace.recycle(hidden);
        Ok(logits)
    }

    /// Stores a layer's checkpoint in memory, or offloads it.
    fn keep(&self, checkpoint: Vec<Tensor>) -> Result<LayerTape, EngineError> {
        let Some(store) = &self.activation_offload else { return Ok(LayerTape::Checkpoint(checkpoint)) };
        let stored = checkpoint.into_iter().map(|tensor| store.store(tensor));
        Ok(LayerTape::Offloaded(stored.collect::<Result<_, _>>()?))
    }

    /// Runs the layers without saving anything for a backward pass.
    fn run_without_tape(
        &mut self,
        chunk: usize,
        batch: &LocalBatch<'_>,
        ctx: &LayerContext,
    ) -> Result<Tensor, EngineError> {
        let (hidden, _) = self.run_layers(chunk, batch, ctx, |engine, index, params, x| {
            let (y, checkpoint) = engine.model.layers[index].forward_checkpointed(params, x, ctx)?;
            checkpoint.into_iter().for_each(|tensor| engine.workspace.recycle(tensor));
            Ok(y)
        })?;
        Ok(hidden)
    }

    /// Returns whether layer `index` of this rank saves only a checkpoint. The interval begins anew in each stage of a pipeline, as in
    /// DeepSpeed's.
    pub(super) fn is_recomputed(&self, index: usize) -> bool {
        self.config.ulysses.activation_checkpointing
            && index.is_multiple_of(self.config.ulysses.activation_checkpointing_interval)
    }

    /// Runs input and layers of a chunk; `run` gets each layer's index, parameters and input. A layer's
    /// parameters are gathered before it and released after it, while the gather of the next layer runs.
    fn run_layers(
        &mut self,
        chunk: usize,
        batch: &LocalBatch<'_>,
        ctx: &LayerContext,
        mut run: impl FnMut(&mut Self, usize, &[Tensor], Tensor) -> Result<Tensor, EngineError>,
    ) -> Result<(Tensor, Saved), EngineError> {
        let (mut x, input) = self.run_input(chunk, batch, ctx)?;
        let layers = self.layers_of(chunk);
        for index in layers.clone() {
            self.begin_part(StepPart::Forward { layer: self.layer_number(index) });
            let _layer = tracing::trace_span!("layer", layer = index).entered();
            let params = self.zero.parameters(layer_unit(index))?;
            let next = self.unit_after(chunk, index);
            next.map_or(Ok(()), |next| self.zero.prefetch(next))?;
            if index + 1 < layers.end {
                let after = self.unit_after(chunk, index + 1);
                after.map_or(Ok(()), |after| self.zero.read_ahead(after))?;
            }
            x = run(self, index, &params, x)?;
            self.zero.release(layer_unit(index));
        }
        Ok((x, input))
    }

    /// Runs the input of a chunk. The views are dropped here, or they would keep its gathered parameters alive after their
    /// release.
    fn run_input(
        &mut self,
        chunk: usize,
        batch: &LocalBatch<'_>,
        ctx: &LayerContext,
    ) -> Result<(Tensor, Saved), EngineError> {
        let _embedding = tracing::trace_span!("embedding").entered();
        let unit = self.input_of(chunk).1;
        let params = unit.map_or(Ok(Vec::new()), |unit| self.zero.parameters(unit))?;
        let layers = self.layers_of(chunk);
        let next =
            if layers.is_empty() { self.objective_of(chunk).1 } else { Some(layer_unit(layers.start)) };
        next.map_or(Ok(()), |next| self.zero.prefetch(next))?;
        if !layers.is_empty() {
            let after = self.unit_after(chunk, layers.start);
            after.map_or(Ok(()), |after| self.zero.read_ahead(after))?;
        }
        let (input, _) = self.input_of(chunk);
        let (x, saved) = input.forward(&params[..input.parameters().len()], batch, &ctx.of_own_tokens())?;
        unit.into_iter().for_each(|unit| self.zero.release(unit));
        Ok((x, saved))
    }

    fn context(&mut self, batch: &MicroBatch) -> Result<LayerContext, EngineError> {
        let SharedAttention { attention, heads, chain, sharding, rank } = self.attention.of(batch)?.clone();
        let shard = sharding.tokens(batch.seq_len, rank);
        if batch.shard != shard {
            return Err(EngineError::Shard { got: batch.shard.clone(), expected: shard });
        }
        if let Some(groups) = &self.groups.tensor {
            // Of all sp ranks, so that none waits for one that fails.
            let shards = (0..sharding.sp_size()).map(|rank| sharding.tokens(batch.seq_len, rank).len());
            let (tokens, tp_size) = (shards.min().unwrap_or(0), groups.tp.world_size());
            if tokens < tp_size {
                return Err(EngineError::TooFewTokens { tokens, tp_size });
            }
        }
        let tokens = batch.batch_size * shard.len();
        let last_boundary =
            batch.cu_seqlens.first().and_then(|boundaries| boundaries.last()).map_or(0, |&end| end as usize);
        let sizes = [
            ("the number of sequences in its cu_seqlens", batch.cu_seqlens.len(), batch.batch_size),
            ("the last document boundary of its first sequence", last_boundary, batch.seq_len),
            ("the number of its local tokens", batch.input_ids.len(), tokens),
            ("the number of its local labels", batch.labels.len(), tokens),
            ("the number of its local position ids", batch.position_ids.len(), tokens),
        ];
        let differs = sizes.into_iter().find(|(_, got, expected)| got != expected);
        // A dry batch has no tokens.
        if let Some((what, got, expected)) = differs.filter(|_| !dry::is_dry()) {
            return Err(EngineError::MicroBatch { what, got, expected });
        }
        for (name, values) in &batch.values {
            if values.is_empty() || !values.len().is_multiple_of(tokens) {
                return Err(EngineError::MicroBatchValues { name: name.clone(), got: values.len(), tokens });
            }
        }
        let MicroBatch { shard, position_ids, cu_seqlens, .. } = batch;
        let known = self.token_layout.take();
        let tokens = token_layout(known, shard, Cow::Borrowed(position_ids), cu_seqlens)?;
        self.token_layout = Some(tokens.clone());
        let ctx = LayerContext::new(tokens, attention, self.workspace.clone());
        let UlyssesConfig { tile_tokens, head_chunks, loss_tile_tokens, .. } = self.config.ulysses;
        let ctx = ctx.with_tiling(Tiling { tile_tokens, head_chunks, loss_tile_tokens });
        let ctx = ctx.with_overlapped_exchange(self.config.overlaps_exchange());
        let ctx = match heads {
            Some(heads) => ctx.with_head_exchange(heads),
            None => ctx,
        };
        let ctx = match chain {
            Some(chain) => ctx.with_shard_chain(chain),
            None => ctx,
        };
        let Some(exchange) = self.token_exchange.clone() else { return Ok(ctx) };
        let (own, known) = (self.own_tokens(shard.len()), self.own_token_layout.take());
        let own_positions = Cow::Owned(tokens_of_rows(position_ids, shard.len(), &own, 1));
        let own = token_layout(known, &shard.slice(&own), own_positions, cu_seqlens)?;
        self.own_token_layout = Some(own.clone());
        Ok(ctx.with_token_exchange(exchange, own))
    }

    /// The tokens of an sp rank's shard that this rank has between modules.
    fn own_tokens(&self, shard: usize) -> Range<usize> {
        let tp = self.groups.tensor.as_ref().map(|groups| &groups.tp);
        tp.map_or(0..shard, |tp| shard_range(shard, tp.world_size(), tp.rank()))
    }

    /// The tokens that input and objective read.
    fn local<'a>(&self, batch: &'a MicroBatch) -> LocalTokens<'a> {
        LocalTokens::new(batch, self.own_tokens(batch.seq_len_local()))
    }
}

/// The layout of a micro batch's tokens; the known one with its tables, already on the device, if the positions are the same.
fn token_layout(
    known: Option<Arc<TokenLayout>>,
    shard: &TokenRanges,
    position_ids: Cow<'_, [u32]>,
    cu_seqlens: &Arc<Vec<Vec<u32>>>,
) -> Result<Arc<TokenLayout>, EngineError> {
    match known.filter(|last| last.is_of(shard.ranges(), &position_ids, cu_seqlens)) {
        Some(layout) => Ok(layout),
        None => {
            Ok(Arc::new(TokenLayout::new(shard.ranges(), position_ids.into_owned(), cu_seqlens.clone())?))
        }
    }
}
